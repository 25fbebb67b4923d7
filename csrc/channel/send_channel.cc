#include "channel/send_channel.h"

#include <bit>
#include <utility>

#include "channel/heard_abort.h"

namespace pipedream {

SendChannel::SendChannel(ChannelOptions options, Transport& transport, Wakeup& wakeup, Device& device,
                         SlotGroup* staging, SlotGroup* residual, SlotGroup* encoded)
    : options_(std::move(options)),
      layout_(options_.item, options_.codec),
      transport_(transport),
      wakeup_(wakeup),
      queue_(options_.num_items_max + kNumSpareItems, layout_),
      record_(options_.num_transfers_kept),
      started_(options_.num_items_max + kNumSpareItems),
      copier_(layout_, device, staging, residual, encoded, [this] { schedule_pump(); }) {
  PD_CHECK(options_.chunk_bytes <= kChunkBytesMax, options_.chunk_bytes);
  PD_CHECK(options_.num_items_max > 0, options_.name);
}

// Waits for copies of items that were never sent, because these copies read the items' memory and call this
// object.
SendChannel::~SendChannel() { finish_copies(); }

void SendChannel::place_into(std::unique_ptr<SharedMemory> memory) {
  memory->claim();
  place(std::move(memory), /*are_posted=*/false);
}

void SendChannel::place_where_posted(std::unique_ptr<SharedMemory> memory) {
  place(std::move(memory), /*are_posted=*/true);
}

void SendChannel::place(std::unique_ptr<SharedMemory> memory, bool are_posted) {
  PD_CHECK(link_.load() == nullptr, options_.name << ": the link is there already");
  copier_.place_into(std::move(memory), are_posted);
  places_ = true;
}

// The transport has stopped, so no more copies will be enqueued.
void SendChannel::end_placing() {
  finish_copies();
  copier_.end_placing();
}

// ---- Compute thread ----

void SendChannel::send(MinibatchId minibatch, MicrobatchIndex microbatch, const ItemFields& fields,
                       const std::vector<TensorView>& tensors, std::unique_ptr<Event> ready,
                       std::shared_ptr<void> keep_alive) {
  const std::size_t num_wire_bytes = check_and_count_bytes(minibatch, tensors);
  SendItem* const free_item = queue_.take_free();
  if (free_item == nullptr) return wakeup_.fail(starved());
  SendItem& item = *free_item;
  item.is_end = false;
  item.minibatch = minibatch;
  item.microbatch = microbatch;
  item.fields = fields;
  item.tensors.assign(tensors.begin(), tensors.end());
  item.ready = std::move(ready);
  item.keep_alive = std::move(keep_alive);
  item.num_wire_bytes = num_wire_bytes;
  item.is_placed = copier_.places();
  item.chunk_bytes = chunk_bytes(item.is_placed);
  record_.begin(item);
  item.cut();
  enqueue(item);
}

void SendChannel::send_end(std::int64_t num_minibatches, std::uint8_t boundary_events) {
  SendItem* const free_item = queue_.take_free();
  if (free_item == nullptr) return wakeup_.fail(starved());
  SendItem& item = *free_item;
  item.is_end = true;
  item.minibatch = MinibatchId(num_minibatches);
  item.fields = {};
  item.fields.boundary_events = boundary_events;
  item.tensors.clear();
  item.cut();
  enqueue(item);
}

// Returns the number of bytes that the tensors have on the wire. Throws UserError when they do not fit the
// plan.
std::size_t SendChannel::check_and_count_bytes(MinibatchId minibatch,
                                               const std::vector<TensorView>& tensors) const {
  const auto refuse = [&](const std::string& why) {
    throw UserError(options_.name + ", minibatch " + std::to_string(minibatch.value()) + ": " + why);
  };
  if (tensors.size() != options_.item.num_tensors()) {
    refuse(std::to_string(tensors.size()) + " tensors, planned " +
           std::to_string(options_.item.num_tensors()));
  }
  std::size_t num_wire_bytes = 0;
  for (std::size_t tensor_index = 0; tensor_index < tensors.size(); ++tensor_index) {
    const TensorView& tensor = tensors[tensor_index];
    const std::size_t num_bytes = tensor.size_bytes();
    if (auto why = options_.item.mismatch(tensor_index, tensor.dtype, tensor.num_dims, num_bytes)) {
      refuse(*why + " (" + to_string(tensor) + "); sizes are planned from the first minibatch");
    }
    num_wire_bytes += layout_.wire_bytes(tensor_index, num_bytes);
  }
  return num_wire_bytes;
}

bool SendChannel::wait_for_room(Deadline deadline) {
  return wait_until_fewer(options_.num_items_max, deadline);
}

bool SendChannel::wait_until_sent(Deadline deadline) { return wait_until_fewer(1, deadline); }

bool SendChannel::wait_until_fewer(std::size_t num_items, Deadline deadline) {
  waiting_for_release_.store(true);  // set before looking, so that a later release wakes this thread
  const bool fewer = wakeup_.wait_until(deadline, [&] { return num_unreleased() < num_items; });
  waiting_for_release_.store(false);
  return fewer;
}

// The schedule lets a stage send an item only after the receiver has computed with earlier items and sent
// back results, such as gradients. So if no SendItem is free, the receiver has used items without giving back
// their slots.
Failure SendChannel::starved() const {
  return broken("holds back the slots for " + std::to_string(options_.num_items_max) +
                " items and goes on without them");
}

void SendChannel::enqueue(SendItem& item) {
  queue_.push(&item);
  if (!pump_scheduled_.exchange(true)) transport_.post_and_drive([this] { pump(); });
}

// For callbacks, whose threads may not be able to drive.
void SendChannel::schedule_pump() {
  if (!pump_scheduled_.exchange(true)) transport_.post([this] { pump(); });
}

// ---- The thread that drives: everything strictly in order ----

// Starts the items that have a slot, copies the started ones, and sends frames for the copied chunks.
void SendChannel::pump() {
  pump_scheduled_.store(false);  // cleared before looking at the queue: later items schedule pump() again
  if (failed_) return fail_queued();
  if (peer_left_ && has_unsent_tensors()) return on_closed(*link_.load());
  const bool works = wakeup_.try_on_device(options_.name, [this] {
    start_queued();
    copy_started();
    frame_copied();
  });
  if (!works) give_up();
  if (refused_ && !failed_) return on_failed(*link_.load(), broken(*refused_));
  if (Link* link = link_.load()) link->let_wait(patience());
}

// Credits can wait unless a queued item needs one.
Patience SendChannel::patience() {
  return queue_.next() == nullptr ? Patience::kUntilOneDrives : Patience::kNone;
}

void SendChannel::start_queued() {
  while (SendItem* item = queue_.next()) {
    if (!start(*item)) return;
    static_cast<void>(queue_.take_next());
    started_.push_back(item);
  }
}

// Begins the item. False when the item must wait for a slot of the receiver or for a staging buffer, and when
// the posted place is wrong (refused_).
bool SendChannel::start(SendItem& item) {
  if (item.is_end) return true;
  record_.note_credit_wait(granted_.empty());
  if (granted_.empty() || !copier_.reserve(item)) return false;
  item.started_ns = now_ns();
  item.slot = granted_.take();
  item.posted = granted_.range_of(item.slot);
  if (item.posted.num_bytes != 0 && item.posted.num_bytes != item.num_wire_bytes) {
    refused_ = "posted " + std::to_string(item.posted.num_bytes) + " bytes for an item of " +
               std::to_string(item.num_wire_bytes);
    return false;
  }
  copier_.start(item);
  return true;
}

void SendChannel::copy_started() {
  for (std::size_t index = 0; index < started_.size(); ++index) {
    SendItem& item = *started_[index];
    if (!item.is_end && !copier_.copy(item)) return;
  }
}

void SendChannel::frame_copied() {
  while (!started_.empty()) {
    SendItem& item = *started_.front();
    if (item.is_end) {
      started_.pop_front();
      frame_end(item);
      release(item);
      continue;
    }
    const std::size_t num_chunks_copied = item.num_chunks_copied.load();
    const bool complete = num_chunks_copied == item.num_chunks;
    std::size_t num_chunks = num_chunks_copied - item.framed.num_passed;
    if (complete) started_.pop_front();  // after its last chunk is sent the object may hold another item
    for (; num_chunks > 0; --num_chunks) frame_chunk(item);
    if (!complete) return;
  }
}

void SendChannel::frame_end(const SendItem& item) {
  OutgoingFrame frame;
  frame.header.kind = FrameKind::kEnd;
  frame.header.minibatch = item.minibatch;
  frame.header.fields = item.fields;
  link_.load()->send(std::move(frame));
}

void SendChannel::frame_chunk(SendItem& item) {
  const auto [tensor_index, offset, num_passed] = item.framed;
  const TensorView& tensor = item.tensors[tensor_index];
  const std::size_t chunk_bytes = item.bytes_of_chunk(item.framed);
  OutgoingFrame frame;
  FrameHeader& header = frame.header;
  header.kind = FrameKind::kTensor;
  header.minibatch = item.minibatch;
  header.microbatch = item.microbatch;
  header.fields = item.fields;
  header.slot = item.slot;
  header.has_last_slot = granted_.empty();
  header.tensor_index = static_cast<std::uint16_t>(tensor_index);
  header.num_tensors = static_cast<std::uint16_t>(item.tensors.size());
  header.dtype = tensor.dtype;
  header.num_dims = tensor.num_dims;
  header.shape = tensor.shape;
  header.codec = layout_.codec(tensor_index).kind;
  header.tensor_bytes = item.wire_bytes(tensor_index);
  header.chunk_offset = offset;
  if (item.is_placed) {
    header.placed_bytes = chunk_bytes;
  } else {
    header.payload_bytes = chunk_bytes;
    const std::byte* const source =
        item.copy != nullptr ? item.copy + layout_.offset_bytes(tensor_index) : tensor.data;
    frame.payload = std::span<const std::byte>(source + offset, chunk_bytes);
  }
  frame.on_sent = [this, &item] { chunk_sent(item); };
  record_.note_framed(item);
  item.pass_chunk(item.framed);
  link_.load()->send(std::move(frame));  // the item may be gone when this returns
}

// Any thread.
void SendChannel::chunk_sent(SendItem& item) {
  if (item.num_chunks_left.fetch_sub(1) == 1) release(item);
}

void SendChannel::release(SendItem& item) {
  const bool staged = item.staging.valid();
  item.staging.release();
  if (!item.is_end) record_.end(item, now_ns());
  queue_.release(item);
  if (waiting_for_release_.load()) wakeup_.update([] {});
  if (staged) schedule_pump();  // the staging slot is free for the next item
}

ChannelStats SendChannel::stats() const {
  ChannelStats stats = record_.stats();
  stats.chunk_bytes = chunk_bytes(/*is_placed=*/false);
  if (const Link* link = link_.load()) stats.link = link->counters();
  return stats;
}

// ---- The link ----

void SendChannel::on_open(Link& link) {
  attach(link);
  link.let_wait(patience());
  wakeup_.update([&] { open_.store(true); });
}

Failure SendChannel::broken(const std::string& what) const {
  return {FailureKind::kCorruptFrame, options_.name + ": the receiver " + what};
}

std::optional<Failure> SendChannel::on_frame(Link& link, const FrameHeader& header,
                                             std::span<const std::byte> payload) {
  switch (header.kind) {
    case FrameKind::kCredit: {
      if (auto what = add_grants(header)) return broken(*what);
      pump();
      return std::nullopt;
    }
    case FrameKind::kAbort:
      return heard_abort(link, payload);
    default:
      return broken("sent a " + std::string(frame_kind_name(header.kind)) +
                    " frame that is not allowed here");
  }
}

// Adds the slots of a CREDIT frame. Returns an error message if a grant is wrong.
std::optional<std::string> SendChannel::add_grants(const FrameHeader& credit) {
  const PostedRange posted{credit.chunk_offset, credit.tensor_bytes};
  std::uint64_t slots_left = credit.further_slots;
  for (std::uint16_t slot = credit.slot;;) {
    const auto granted = [slot](const std::string& how) {
      return "granted slot " + std::to_string(slot) + how;
    };
    if (!copier_.can_reach(slot, posted)) return granted(", which is not in the memory that it shares");
    if (!granted_.add(slot, posted)) {
      return granted(" twice, or more than " + std::to_string(kNumGrantsMax) + " slots");
    }
    if (slots_left == 0) return std::nullopt;
    slot = static_cast<std::uint16_t>(credit.slot + 1 + std::countr_zero(slots_left));
    slots_left &= slots_left - 1;
  }
}

void SendChannel::on_failed(Link& /*link*/, const Failure& failure) {
  give_up();
  wakeup_.fail(failure);
}

// Stops sending but leaves the link open, so that the peer can be told why.
void SendChannel::give_up() {
  failed_ = true;
  record_.note_credit_wait(false);
  finish_copies();  // they still read the items' memory
  fail_queued();
}

// Waits for all copies. After an error of the device no copy is under way, but the wait may throw the error
// once more.
void SendChannel::finish_copies() {
  static_cast<void>(wakeup_.try_on_device(options_.name, [this] { copier_.synchronize(); }));
}

// A receiver may close before it has got the end item, but it must have all tensors.
void SendChannel::on_closed(Link& link) {
  peer_left_ = true;
  if (has_unsent_tensors()) {
    on_failed(link, Failure{FailureKind::kPeerLost, link.options().peer + " closed " + options_.name +
                                                        " before it had received everything"});
  }
}

bool SendChannel::has_unsent_tensors() {
  for (std::size_t index = 0; index < started_.size(); ++index) {
    if (!started_[index]->is_end) return true;
  }
  return queue_.has_tensors();
}

// Releases the items of which the link was given no frame. An item of which some frames were given loses its
// other chunks, and is released once the link has let go of those frames. The caller has ended all copies,
// because they read the items' memory.
void SendChannel::fail_queued() {
  while (SendItem* item = queue_.take_next()) release(*item);
  while (!started_.empty()) {
    SendItem& item = *started_.take_front();
    if (item.is_end) {
      release(item);
      continue;
    }
    const std::size_t num_never_framed = item.num_chunks - item.framed.num_passed;
    if (num_never_framed == 0) continue;
    item.framed.num_passed = item.num_chunks;
    if (item.num_chunks_left.fetch_sub(num_never_framed) == num_never_framed) release(item);
  }
}

}  // namespace pipedream
