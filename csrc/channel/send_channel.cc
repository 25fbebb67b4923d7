#include "channel/send_channel.h"

#include <algorithm>
#include <sstream>
#include <utility>

namespace pipedream {

namespace {

std::size_t chunks_of(std::size_t num_bytes, std::size_t chunk_bytes) {
  return std::max<std::size_t>(1,
                               (num_bytes + chunk_bytes - 1) / chunk_bytes);  // an empty tensor is one frame
}

}  // namespace

SendChannel::SendChannel(ChannelOptions options, Transport& transport, Wakeup& wakeup, Device& device,
                         SlotGroup* staging)
    : options_(std::move(options)),
      transport_(transport),
      wakeup_(wakeup),
      staging_(staging),
      copy_stream_(staging != nullptr ? device.make_stream() : nullptr),
      queued_(options_.num_items_max + kNumSpareItems),
      started_(options_.num_items_max + kNumSpareItems) {
  PD_CHECK(options_.chunk_bytes > 0 && options_.chunk_bytes <= kChunkBytesMax, options_.chunk_bytes);
  PD_CHECK(options_.num_items_max > 0, options_.name);
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
SendChannel::~SendChannel() {
  if (copy_stream_) copy_stream_->synchronize();
}

void SendChannel::send(MinibatchId minibatch, MicrobatchIndex microbatch, std::uint64_t tag,
                       const std::vector<TensorView>& tensors, std::unique_ptr<Event> ready,
                       std::shared_ptr<void> keep_alive) {
  if (tensors.size() != options_.spec.num_tensors()) {
    throw UserError(options_.name + ", minibatch " + std::to_string(minibatch.value()) + ": " +
                    std::to_string(tensors.size()) + " tensors, planned " +
                    std::to_string(options_.spec.num_tensors()));
  }
  std::size_t num_chunks = 0;
  for (std::size_t tensor_index = 0; tensor_index < tensors.size(); ++tensor_index) {
    const TensorView& tensor = tensors[tensor_index];
    if (auto why = options_.spec.mismatch(tensor_index, tensor.dtype, tensor.num_dims, tensor.size_bytes())) {
      throw UserError(options_.name + ", minibatch " + std::to_string(minibatch.value()) + ": " + *why +
                      " (" + to_string(tensor) + "); sizes are planned from the first minibatch");
    }
    num_chunks += chunks_of(tensor.size_bytes(), options_.chunk_bytes);
  }
  Item* item = take_free_item();
  item->is_end = false;
  item->minibatch = minibatch;
  item->microbatch = microbatch;
  item->tag = tag;
  item->tensors.assign(tensors.begin(), tensors.end());
  item->ready = std::move(ready);
  item->keep_alive = std::move(keep_alive);
  item->num_chunks = num_chunks;
  item->num_chunks_copied = 0;
  item->num_chunks_framed = 0;
  item->num_chunks_left = num_chunks;
  enqueue(item);
}

void SendChannel::send_end(std::int64_t num_minibatches) {
  Item* item = take_free_item();
  item->is_end = true;
  item->minibatch = MinibatchId(num_minibatches);
  item->tensors.clear();
  item->num_chunks = 0;
  item->num_chunks_framed = 0;
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
  {
    const std::lock_guard lock(mutex_);
    queued_.push_back(item);
  }
  schedule_pump();
}

void SendChannel::schedule_pump() {
  if (!pump_scheduled_.exchange(true)) transport_.post([this] { pump(); });
}

// Starts what has a credit and a staging slot, and frames what has been copied, strictly in order.
void SendChannel::pump() {
  pump_scheduled_.store(false);  // before looking: what comes from now on schedules anew
  if (failed_) return fail_queued();
  if (peer_left_ && has_unsent_tensors()) return on_closed(*link_.load());
  for (;;) {
    Item* next = nullptr;
    {
      const std::lock_guard lock(mutex_);
      if (!queued_.empty()) next = queued_.front();
    }
    if (next == nullptr || !start(*next)) break;
    const std::lock_guard lock(mutex_);
    queued_.pop_front();
    started_.push_back(next);
  }
  while (!started_.empty()) {
    Item& item = *started_.front();
    frame_copied_chunks(item);
    if (item.num_chunks_framed < item.num_chunks) return;
    started_.pop_front();
    if (item.is_end) release(item);
  }
}

// False when the item must wait.
bool SendChannel::start(Item& item) {
  if (item.is_end) return true;
  if (num_credits_ == 0) return false;
  if (staging_ == nullptr) {
    item.num_chunks_copied = item.num_chunks;
  } else {
    auto lease = staging_->try_lease();
    if (!lease) return false;
    item.staging = std::move(*lease);
    if (item.ready) copy_stream_->wait(*item.ready);
    for (std::size_t tensor_index = 0; tensor_index < item.tensors.size(); ++tensor_index) {
      const TensorView& tensor = item.tensors[tensor_index];
      const std::size_t num_bytes = tensor.size_bytes();
      std::byte* staged = item.staging.data() + options_.spec.offset_bytes(tensor_index);
      std::size_t offset = 0;
      do {
        const std::size_t length = std::min(options_.chunk_bytes, num_bytes - offset);
        if (length > 0) copy_stream_->copy(staged + offset, tensor.data + offset, length);
        copy_stream_->call([&item] {
          item.num_chunks_copied.fetch_add(1);
          item.channel->schedule_pump();
        });
        offset += length;
      } while (offset < num_bytes);
    }
  }
  --num_credits_;
  return true;
}

void SendChannel::frame_copied_chunks(Item& item) {
  if (item.is_end) {
    OutgoingFrame frame;
    frame.header.kind = FrameKind::kEnd;
    frame.header.minibatch = item.minibatch;
    link_.load()->send(std::move(frame));
    return;
  }
  const std::size_t num_chunks_copied = item.num_chunks_copied.load();
  std::size_t chunk_index = 0;
  for (std::size_t tensor_index = 0; tensor_index < item.tensors.size(); ++tensor_index) {
    const std::size_t num_chunks = chunks_of(item.tensors[tensor_index].size_bytes(), options_.chunk_bytes);
    for (std::size_t chunk = 0; chunk < num_chunks; ++chunk, ++chunk_index) {
      if (chunk_index < item.num_chunks_framed) continue;
      if (chunk_index >= num_chunks_copied) return;
      ++item.num_chunks_framed;
      frame_chunk(item, tensor_index, chunk * options_.chunk_bytes);
    }
  }
}

void SendChannel::frame_chunk(Item& item, std::size_t tensor_index, std::size_t offset) {
  const TensorView& tensor = item.tensors[tensor_index];
  const std::size_t num_bytes = tensor.size_bytes();
  const std::byte* source =
      item.staging.valid() ? item.staging.data() + options_.spec.offset_bytes(tensor_index) : tensor.data;
  OutgoingFrame frame;
  FrameHeader& header = frame.header;
  header.kind = FrameKind::kTensor;
  header.minibatch = item.minibatch;
  header.microbatch = item.microbatch;
  header.tag = item.tag;
  header.tensor_index = static_cast<std::uint16_t>(tensor_index);
  header.num_tensors = static_cast<std::uint16_t>(item.tensors.size());
  header.dtype = tensor.dtype;
  header.num_dims = tensor.num_dims;
  header.shape = tensor.shape;
  header.tensor_bytes = num_bytes;
  header.chunk_offset = offset;
  header.payload_bytes = std::min(options_.chunk_bytes, num_bytes - offset);
  frame.payload = std::span<const std::byte>(source + offset, header.payload_bytes);
  frame.on_sent = [&item] { item.channel->chunk_sent(item); };
  link_.load()->send(std::move(frame));
}

// Any thread.
void SendChannel::chunk_sent(Item& item) {
  if (item.num_chunks_left.fetch_sub(1) == 1) release(item);
}

void SendChannel::release(Item& item) {
  const bool staged = item.staging.valid();
  item.staging.release();
  {
    const std::lock_guard lock(mutex_);
    released_.push_back(std::move(item.keep_alive));
    item.keep_alive = nullptr;
    free_items_.push_back(&item);
  }
  num_unreleased_.fetch_sub(1);
  if (waiting_for_release_.load()) wakeup_.update([] {});
  if (staged) schedule_pump();  // the staging slot is free for the next item
}

LinkCounters SendChannel::counters() const {
  const Link* link = link_.load();
  return link == nullptr ? LinkCounters{} : link->counters();
}

void SendChannel::on_open(Link& link) {
  attach(link);
  wakeup_.update([&] { open_.store(true); });
}

std::optional<Failure> SendChannel::on_frame(Link& /*link*/, const FrameHeader& header,
                                             std::span<const std::byte> payload) {
  switch (header.kind) {
    case FrameKind::kCredit:
      if (header.tag > kCreditsMax) break;
      num_credits_ += header.tag;
      pump();
      return std::nullopt;
    case FrameKind::kAbort:
      return Failure{FailureKind::kAborted,
                     std::string(reinterpret_cast<const char*>(payload.data()), payload.size())};
    default:
      break;
  }
  return Failure{FailureKind::kCorruptFrame, options_.name + ": the receiver sent a " +
                                                 std::string(frame_kind_name(header.kind)) +
                                                 " frame that is not allowed here"};
}

void SendChannel::on_failed(Link& /*link*/, const Failure& failure) {
  failed_ = true;
  if (copy_stream_) copy_stream_->synchronize();  // the copies still read the items' memory
  fail_queued();
  wakeup_.fail(failure);
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

SendChannel::Item* SendChannel::take_queued() {
  const std::lock_guard lock(mutex_);
  return queued_.empty() ? nullptr : queued_.take_front();
}

// Frames that were handed to the link are released by it; the rest here.
void SendChannel::fail_queued() {
  while (Item* item = take_queued()) release(*item);
  while (!started_.empty()) {
    Item& item = *started_.take_front();
    if (item.is_end) {
      release(item);
      continue;
    }
    const std::size_t num_never_framed = item.num_chunks - item.num_chunks_framed;
    if (num_never_framed == 0) continue;
    item.num_chunks_framed = item.num_chunks;
    if (item.num_chunks_left.fetch_sub(num_never_framed) == num_never_framed) release(item);
  }
}

}  // namespace pipedream
