#include "channel/send_channel.h"

#include <algorithm>
#include <cstring>
#include <sstream>
#include <tuple>
#include <utility>

namespace pipedream {

SendChannel::SendChannel(ChannelOptions options, Transport& transport, Wakeup& wakeup, Device& device,
                         SlotGroup* staging, SlotGroup* residual)
    : options_(std::move(options)),
      layout_(options_.spec, options_.codec),
      transport_(transport),
      wakeup_(wakeup),
      device_(device),
      staging_(staging),
      residual_(residual != nullptr ? residual->lease() : Lease()),
      stream_codec_(layout_.encodes() ? make_stream_codec(device, layout_.num_elements_max()) : nullptr),
      copy_stream_(staging != nullptr ? device.make_stream() : nullptr),
      queued_(options_.num_items_max + kNumSpareItems),
      tuner_(options_.chunk_bytes),
      transfers_(options_.num_transfers_kept),
      started_(options_.num_items_max + kNumSpareItems) {
  PD_CHECK(options_.chunk_bytes <= kChunkBytesMax, options_.chunk_bytes);
  PD_CHECK(options_.num_items_max > 0, options_.name);
  PD_CHECK(!layout_.encodes() || staging != nullptr, options_.name);  // what is encoded lies somewhere
  PD_CHECK(layout_.residual_bytes() <= residual_.size_bytes(), options_.name);
  const std::size_t num_items = options_.num_items_max + kNumSpareItems;
  for (std::size_t item_index = 0; item_index < num_items; ++item_index) {
    auto item = std::make_unique<Item>();
    item->channel = this;
    item->tensors.reserve(options_.spec.num_tensors());
    free_items_.push_back(item.get());
    items_.push_back(std::move(item));
  }
  released_.reserve(num_items);
  collected_.reserve(num_items);
}

// Copies of items that never left may still be enqueued: they read the items' memory and call back.
SendChannel::~SendChannel() { finish_copies(); }

void SendChannel::place_into(std::unique_ptr<SharedMemory> memory) {
  PD_CHECK(link_.load() == nullptr, options_.name << ": the link is there already");
  placed_slots_ = std::make_unique<PlacedSlots>(std::move(memory), device_, layout_.slot_bytes());
  places_ = true;
  if (!copy_stream_) copy_stream_ = device_.make_stream();
}

// What has not been copied by now never will be.
void SendChannel::end_placing() {
  if (!placed_slots_) return;
  finish_copies();
  placed_slots_.reset();
}

// ---- Compute thread ----

void SendChannel::send(MinibatchId minibatch, MicrobatchIndex microbatch, const ItemFields& fields,
                       const std::vector<TensorView>& tensors, std::unique_ptr<Event> ready,
                       std::shared_ptr<void> keep_alive) {
  const std::size_t num_wire_bytes = check_and_count_bytes(minibatch, tensors);
  Item* item = take_free_item();
  item->is_end = false;
  item->minibatch = minibatch;
  item->microbatch = microbatch;
  item->fields = fields;
  item->tensors.assign(tensors.begin(), tensors.end());
  item->ready = std::move(ready);
  item->keep_alive = std::move(keep_alive);
  item->num_wire_bytes = num_wire_bytes;
  cut(*item);
  item->copied = {};
  item->framed = {};
  item->started_ns = item->copied_ns = item->framed_ns = 0;
  item->num_chunks_copied = 0;
  item->num_chunks_left = item->num_chunks;
  enqueue(item);
}

// Decides how it travels, and in how large chunks.
void SendChannel::cut(Item& item) {
  const bool on_device = placed_slots_ && placed_slots_->on_device();
  item.is_placed = placed_slots_ && (on_device || item.num_wire_bytes >= options_.placed_bytes_min);
  {
    const std::lock_guard lock(mutex_);
    item.is_timed = !item.is_placed && num_under_way_ == 0 && tuner_.wants(item.num_wire_bytes);
    item.chunk_bytes = item.is_timed ? tuner_.chunk_bytes() : tuner_.untimed_chunk_bytes();
  }
  if (item.is_placed && options_.chunk_bytes == 0) item.chunk_bytes = kPlacedChunkBytes;
  item.num_chunks = 0;
  for (std::size_t tensor_index = 0; tensor_index < item.tensors.size(); ++tensor_index) {
    item.num_chunks += num_chunks_of(wire_bytes(item, tensor_index), item.chunk_bytes);
  }
}

// Throws what is wrong with the tensors; else how many bytes travel.
std::size_t SendChannel::check_and_count_bytes(MinibatchId minibatch,
                                               const std::vector<TensorView>& tensors) const {
  const auto refuse = [&](const std::string& why) {
    throw UserError(options_.name + ", minibatch " + std::to_string(minibatch.value()) + ": " + why);
  };
  if (tensors.size() != options_.spec.num_tensors()) {
    refuse(std::to_string(tensors.size()) + " tensors, planned " +
           std::to_string(options_.spec.num_tensors()));
  }
  std::size_t num_wire_bytes = 0;
  for (std::size_t tensor_index = 0; tensor_index < tensors.size(); ++tensor_index) {
    const TensorView& tensor = tensors[tensor_index];
    const std::size_t num_bytes = tensor.size_bytes();
    if (auto why = options_.spec.mismatch(tensor_index, tensor.dtype, tensor.num_dims, num_bytes)) {
      refuse(*why + " (" + to_string(tensor) + "); sizes are planned from the first minibatch");
    }
    num_wire_bytes += layout_.wire_bytes(tensor_index, num_bytes);
  }
  return num_wire_bytes;
}

std::size_t SendChannel::wire_bytes(const Item& item, std::size_t tensor_index) const {
  return layout_.wire_bytes(tensor_index, item.tensors[tensor_index].size_bytes());
}

std::size_t SendChannel::num_chunks_of(std::size_t num_bytes, std::size_t chunk_bytes) {
  const std::size_t num_chunks = (num_bytes + chunk_bytes - 1) / chunk_bytes;
  return std::max<std::size_t>(1, num_chunks);  // an empty tensor is one frame
}

void SendChannel::send_end(std::int64_t num_minibatches) {
  Item* item = take_free_item();
  item->is_end = true;
  item->is_timed = false;
  item->minibatch = MinibatchId(num_minibatches);
  item->tensors.clear();
  item->num_chunks = 0;
  item->copied = {};
  item->framed = {};
  enqueue(item);
}

void SendChannel::collect_released() {
  {
    const std::lock_guard lock(mutex_);
    collected_.swap(released_);
  }
  collected_.clear();
}

bool SendChannel::wait_for_room(Deadline deadline) {
  return wait_until_fewer(options_.num_items_max, deadline);
}

bool SendChannel::wait_until_sent(Deadline deadline) { return wait_until_fewer(1, deadline); }

bool SendChannel::wait_until_fewer(std::size_t num_items, Deadline deadline) {
  waiting_for_release_.store(true);  // before looking, so that a release from now on wakes us
  const bool fewer = wakeup_.wait_until(deadline, [&] { return num_unreleased_.load() < num_items; });
  waiting_for_release_.store(false);
  return fewer;
}

SendChannel::Item* SendChannel::take_free_item() {
  const std::lock_guard lock(mutex_);
  PD_CHECK(!free_items_.empty(),
           options_.name << ": more than " << options_.num_items_max << " items in flight");
  Item* item = free_items_.back();
  free_items_.pop_back();
  num_unreleased_.fetch_add(1);
  return item;
}

void SendChannel::enqueue(Item* item) {
  item->queued_ns = now_ns();
  {
    const std::lock_guard lock(mutex_);
    queued_.push_back(item);
    if (!item->is_end) {
      item->send_index = num_sent_++;
      if (num_under_way_++ == 0) under_way_since_ns_ = item->queued_ns;
    }
  }
  if (!pump_scheduled_.exchange(true)) transport_.post_and_drive([this] { pump(); });
}

// From callbacks, whose threads do not drive.
void SendChannel::schedule_pump() {
  if (!pump_scheduled_.exchange(true)) transport_.post([this] { pump(); });
}

// ---- Who drives: everything strictly in order ----

// Starts what has a slot, copies what has been started, and frames what has been copied.
void SendChannel::pump() {
  pump_scheduled_.store(false);  // before looking: what comes from now on schedules anew
  if (failed_) return fail_queued();
  if (peer_left_ && has_unsent_tensors()) return on_closed(*link_.load());
  const bool works = wakeup_.try_on_device(options_.name, [this] {
    start_queued();
    enqueue_copies();
    frame_copied();
  });
  if (!works) give_up();
}

void SendChannel::start_queued() {
  while (Item* item = first_queued()) {
    if (!start(*item)) return;
    static_cast<void>(take_queued());
    started_.push_back(item);
  }
}

// False when the item must wait.
bool SendChannel::start(Item& item) {
  if (item.is_end) return true;
  note_credit_wait(granted_.empty());
  if (granted_.empty()) return false;
  item.copy = nullptr;
  if (!item.is_placed && staging_ != nullptr) {
    auto lease = staging_->try_lease();
    if (!lease) return false;
    item.staging = std::move(*lease);
    item.copy = item.staging.data();
  }
  item.started_ns = now_ns();
  item.slot = granted_.take();
  if (item.is_placed) item.copy = placed_slots_->slot_data(item.slot);
  if (item.copy == nullptr) {
    item.num_chunks_copied = item.num_chunks;
  } else if (item.ready) {
    copy_stream_->wait(*item.ready);
  }
  return true;
}

void SendChannel::enqueue_copies() {
  for (std::size_t index = 0; index < started_.size(); ++index) {
    Item& item = *started_[index];
    if (item.copy != nullptr && !item.is_end && !enqueue_copies_of(item)) return;
  }
}

// False when no more copies may be enqueued now: the one that is done next schedules the pump.
bool SendChannel::enqueue_copies_of(Item& item) {
  while (item.copied.num_passed < item.num_chunks) {
    if (is_copied_here(item)) {
      copy_here(item);
      continue;
    }
    if (num_copies_.load() >= kNumCopiesMax) return false;
    num_copies_.fetch_add(1);
    const std::size_t tensor_index = item.copied.tensor_index;
    const bool encoded = layout_.codec(tensor_index).kind != CodecKind::kNone;
    if (encoded && wire_bytes(item, tensor_index) > 0) {
      enqueue_encoding(item);
    } else {
      enqueue_copy(item);
    }
  }
  return true;
}

bool SendChannel::is_copied_here(const Item& item) const {
  return item.is_placed && item.num_wire_bytes <= kCopiedHereBytesMax && !item.ready && !layout_.encodes() &&
         !placed_slots_->on_device() && device_.type() == DeviceType::kHost;
}

void SendChannel::copy_here(Item& item) {
  const CopyRange range = next_copy(item);
  if (range.num_bytes > 0) std::memcpy(range.to, range.from, range.num_bytes);
  advance(item.copied, item);
  if (item.copied.num_passed == item.num_chunks) item.copied_ns = now_ns();
  item.num_chunks_copied.fetch_add(1);
}

SendChannel::CopyRange SendChannel::next_copy(const Item& item) const {
  const auto [tensor_index, offset, num_passed] = item.copied;
  const std::size_t num_bytes = std::min(item.chunk_bytes, wire_bytes(item, tensor_index) - offset);
  return {item.copy + layout_.offset_bytes(tensor_index) + offset, item.tensors[tensor_index].data + offset,
          num_bytes};
}

void SendChannel::enqueue_copy(Item& item) {
  const CopyRange range = next_copy(item);
  if (range.num_bytes > 0) copy_stream_->copy(range.to, range.from, range.num_bytes);
  advance(item.copied, item);
  copy_stream_->call([&item] { item.channel->note_copied(item, 1); });
}

// All of the tensor at once; its chunks can leave when it is done.
void SendChannel::enqueue_encoding(Item& item) {
  const std::size_t tensor_index = item.copied.tensor_index;
  const TensorView& tensor = item.tensors[tensor_index];
  CodecWork work;
  work.codec = layout_.codec(tensor_index);
  work.dtype = tensor.dtype;
  work.num_elements = tensor.size_bytes() / dtype_bytes(tensor.dtype);
  work.values = tensor.data;
  work.encoded = item.copy + layout_.offset_bytes(tensor_index);
  if (layout_.has_residual(tensor_index)) {
    work.residual = residual_.data() + layout_.residual_offset_bytes(tensor_index);
  }
  stream_codec_->encode(*copy_stream_, work);
  const std::size_t num_chunks = num_chunks_of(wire_bytes(item, tensor_index), item.chunk_bytes);
  for (std::size_t chunk = 0; chunk < num_chunks; ++chunk) advance(item.copied, item);
  copy_stream_->call([&item, num_chunks] { item.channel->note_copied(item, num_chunks); });
}

// Copy stream.
void SendChannel::note_copied(Item& item, std::size_t num_chunks) {
  num_copies_.fetch_sub(1);
  // Before the count: after it the item may be gone.
  if (item.num_chunks_copied.load() + num_chunks == item.num_chunks) item.copied_ns = now_ns();
  item.num_chunks_copied.fetch_add(num_chunks);
  schedule_pump();
}

void SendChannel::advance(ChunkCursor& cursor, const Item& item) const {
  ++cursor.num_passed;
  cursor.offset += item.chunk_bytes;
  if (cursor.offset < wire_bytes(item, cursor.tensor_index)) return;
  cursor.offset = 0;
  ++cursor.tensor_index;
}

void SendChannel::frame_copied() {
  while (!started_.empty()) {
    Item& item = *started_.front();
    if (item.is_end) {
      started_.pop_front();
      frame_end(item);
      release(item);
      continue;
    }
    const std::size_t num_chunks_copied = item.num_chunks_copied.load();
    const bool complete = num_chunks_copied == item.num_chunks;
    std::size_t num_chunks = num_chunks_copied - item.framed.num_passed;
    if (complete) started_.pop_front();  // once its last chunk has left it may be another item
    for (; num_chunks > 0; --num_chunks) frame_chunk(item);
    if (!complete) return;
  }
}

void SendChannel::frame_end(const Item& item) {
  OutgoingFrame frame;
  frame.header.kind = FrameKind::kEnd;
  frame.header.minibatch = item.minibatch;
  link_.load()->send(std::move(frame));
}

void SendChannel::frame_chunk(Item& item) {
  const auto [tensor_index, offset, num_passed] = item.framed;
  const TensorView& tensor = item.tensors[tensor_index];
  const std::size_t num_bytes = wire_bytes(item, tensor_index);
  const std::size_t chunk_bytes = std::min(item.chunk_bytes, num_bytes - offset);
  OutgoingFrame frame;
  FrameHeader& header = frame.header;
  header.kind = FrameKind::kTensor;
  header.minibatch = item.minibatch;
  header.microbatch = item.microbatch;
  header.fields = item.fields;
  header.slot = item.slot;
  header.tensor_index = static_cast<std::uint16_t>(tensor_index);
  header.num_tensors = static_cast<std::uint16_t>(item.tensors.size());
  header.dtype = tensor.dtype;
  header.num_dims = tensor.num_dims;
  header.shape = tensor.shape;
  header.codec = layout_.codec(tensor_index).kind;
  header.tensor_bytes = num_bytes;
  header.chunk_offset = offset;
  if (item.is_placed) {
    header.placed_bytes = chunk_bytes;
    num_placed_bytes_.fetch_add(chunk_bytes, std::memory_order_relaxed);
  } else {
    header.payload_bytes = chunk_bytes;
    const std::byte* const source =
        item.copy != nullptr ? item.copy + layout_.offset_bytes(tensor_index) : tensor.data;
    frame.payload = std::span<const std::byte>(source + offset, chunk_bytes);
  }
  frame.on_sent = [&item] { item.channel->chunk_sent(item); };
  if (num_passed == 0) item.framed_ns = now_ns();
  if (offset == 0) num_tensor_bytes_.fetch_add(tensor.size_bytes(), std::memory_order_relaxed);
  advance(item.framed, item);
  num_chunks_framed_.fetch_add(1, std::memory_order_relaxed);
  if (item.framed.num_passed == item.num_chunks) num_items_sent_.fetch_add(1, std::memory_order_relaxed);
  link_.load()->send(std::move(frame));  // the item may be gone when this returns
}

// Any thread.
void SendChannel::chunk_sent(Item& item) {
  if (item.num_chunks_left.fetch_sub(1) == 1) release(item);
}

void SendChannel::release(Item& item) {
  const bool staged = item.staging.valid();
  item.staging.release();
  const std::int64_t released_ns = now_ns();
  {
    const std::lock_guard lock(mutex_);
    released_.push_back(std::move(item.keep_alive));
    item.keep_alive = nullptr;
    free_items_.push_back(&item);
    if (item.is_timed) time(item, released_ns);
    if (!item.is_end) note_left(item, released_ns);
  }
  num_unreleased_.fetch_sub(1);
  if (waiting_for_release_.load()) wakeup_.update([] {});
  if (staged) schedule_pump();  // the staging slot is free for the next item
}

// Under the mutex. Of a failed run, what never left is not kept.
void SendChannel::note_left(const Item& item, std::int64_t released_ns) {
  if (--num_under_way_ == 0) transfer_ns_ += released_ns - under_way_since_ns_;
  if (item.framed_ns == 0) return;
  transfers_.add({item.minibatch, item.microbatch, item.num_wire_bytes, item.queued_ns, item.started_ns,
                  item.copied_ns, item.framed_ns, released_ns});
}

// Under the mutex. An item that another one followed, or that never started, says nothing.
void SendChannel::time(const Item& item, std::int64_t released_ns) {
  if (item.started_ns == 0 || item.send_index + 1 != num_sent_ || !tuner_.wants(item.num_wire_bytes)) return;
  tuner_.record(item.num_wire_bytes, std::max<std::int64_t>(1, released_ns - item.started_ns));
}

// ---- Figures ----

ChannelStats SendChannel::stats() const {
  ChannelStats stats;
  if (const Link* link = link_.load()) stats.link = link->counters();
  stats.num_items = num_items_sent_.load(std::memory_order_relaxed);
  stats.num_chunks = num_chunks_framed_.load(std::memory_order_relaxed);
  stats.tensor_bytes = num_tensor_bytes_.load(std::memory_order_relaxed);
  stats.placed_bytes = num_placed_bytes_.load(std::memory_order_relaxed);
  stats.credit_wait_ns = credit_wait_ns_.load();
  const std::int64_t credit_wait_began_ns = credit_wait_began_ns_.load();
  if (credit_wait_began_ns != 0) stats.credit_wait_ns += now_ns() - credit_wait_began_ns;
  const std::lock_guard lock(mutex_);
  stats.chunk_bytes = tuner_.untimed_chunk_bytes();
  stats.transfer_ns = transfer_ns_ + (num_under_way_ > 0 ? now_ns() - under_way_since_ns_ : 0);
  return stats;
}

// Kept in the order of their releases, which come from several threads.
std::vector<SentTransfer> SendChannel::transfers() const {
  std::vector<SentTransfer> in_order;
  {
    const std::lock_guard lock(mutex_);
    in_order = transfers_.items();
  }
  std::sort(in_order.begin(), in_order.end(), [](const SentTransfer& one, const SentTransfer& other) {
    return std::tie(one.minibatch, one.microbatch) < std::tie(other.minibatch, other.microbatch);
  });
  return in_order;
}

void SendChannel::note_credit_wait(bool waits) {
  const std::int64_t began_ns = credit_wait_began_ns_.load();
  if (waits == (began_ns != 0)) return;
  credit_wait_began_ns_.store(waits ? now_ns() : 0);
  if (!waits) credit_wait_ns_.fetch_add(now_ns() - began_ns);
}

// ---- The link ----

void SendChannel::on_open(Link& link) {
  attach(link);
  wakeup_.update([&] { open_.store(true); });
}

std::optional<Failure> SendChannel::on_frame(Link& /*link*/, const FrameHeader& header,
                                             std::span<const std::byte> payload) {
  const auto broken = [&](const std::string& what) {
    return Failure{FailureKind::kCorruptFrame, options_.name + ": the receiver " + what};
  };
  switch (header.kind) {
    case FrameKind::kCredit: {
      const std::string slot = "slot " + std::to_string(header.slot);
      if (placed_slots_ && !placed_slots_->contains(header.slot)) {
        return broken("granted " + slot + ", which is not in the memory that it shares");
      }
      if (!granted_.add(header.slot)) {
        return broken("granted " + slot + " twice, or more than " + std::to_string(kNumGrantsMax) + " slots");
      }
      pump();
      return std::nullopt;
    }
    case FrameKind::kAbort:
      return Failure{FailureKind::kAborted,
                     std::string(reinterpret_cast<const char*>(payload.data()), payload.size())};
    default:
      return broken("sent a " + std::string(frame_kind_name(header.kind)) +
                    " frame that is not allowed here");
  }
}

void SendChannel::on_failed(Link& /*link*/, const Failure& failure) {
  give_up();
  wakeup_.fail(failure);
}

// The link may live on: by it the peer learns why.
void SendChannel::give_up() {
  failed_ = true;
  note_credit_wait(false);
  finish_copies();  // they still read the items' memory
  fail_queued();
}

// After an error of the device nothing is under way any more, though it may say so by another error.
void SendChannel::finish_copies() {
  if (copy_stream_) {
    static_cast<void>(wakeup_.try_on_device(options_.name, [this] { copy_stream_->synchronize(); }));
  }
}

// A receiver leaves first only when it has all it needs; it may do without the end.
void SendChannel::on_closed(Link& link) {
  peer_left_ = true;
  if (has_unsent_tensors()) {
    on_failed(link, Failure{FailureKind::kPeerLost, link.options().peer + " closed " + options_.name +
                                                        " before it had received everything"});
  }
}

bool SendChannel::has_unsent_tensors() {
  const std::lock_guard lock(mutex_);
  return has_tensors(started_) || has_tensors(queued_);
}

bool SendChannel::has_tensors(RingBuffer<Item*>& items) {
  for (std::size_t index = 0; index < items.size(); ++index) {
    if (!items[index]->is_end) return true;
  }
  return false;
}

SendChannel::Item* SendChannel::first_queued() {
  const std::lock_guard lock(mutex_);
  return queued_.empty() ? nullptr : queued_.front();
}

SendChannel::Item* SendChannel::take_queued() {
  const std::lock_guard lock(mutex_);
  return queued_.empty() ? nullptr : queued_.take_front();
}

// Frames that were handed to the link are released by it; the rest here. No copy is under way.
void SendChannel::fail_queued() {
  while (Item* item = take_queued()) release(*item);
  while (!started_.empty()) {
    Item& item = *started_.take_front();
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
