#include "channel/receive_channel.h"

#include <cstring>
#include <memory>
#include <utility>

namespace pipedream {

// The staging buffer goes first: a slot that is free has one. After the slot has gone, all of this belongs to
// the next item.
void ReceivedSlot::drop() {
  if (num_holders.fetch_sub(1) != 1) return;
  Lease released = std::move(slot);
  staging.release();
  released.release();
}

ReceivedItem::~ReceivedItem() {
  if (!held) return;
  if (held->compute_stream != nullptr) held->compute_stream->record(*held->last_read);
  held->drop();
}

ReceivedItem& ReceivedItem::operator=(ReceivedItem&& other) noexcept {
  if (this != &other) {
    std::destroy_at(this);
    std::construct_at(this, std::move(other));
  }
  return *this;
}

ReceiveChannel::ReceiveChannel(ChannelOptions options, Transport& transport, Wakeup& wakeup, Device& device,
                               SlotGroup& slots, SlotGroup* staging, Stream* compute_stream)
    : options_(std::move(options)),
      transport_(transport),
      wakeup_(wakeup),
      slots_(slots),
      staging_(staging),
      received_slots_(
          std::make_shared<std::vector<ReceivedSlot>>(static_cast<std::size_t>(slots.term().num_slots))),
      copy_stream_(staging != nullptr ? device.make_stream() : nullptr),
      credit_return_(std::make_shared<CreditReturn>()),
      inbox_(received_slots_->size() + 1) {
  PD_CHECK(slots.term().slot_bytes >= options_.spec.slot_bytes(), options_.name);
  PD_CHECK(staging == nullptr || staging->term().num_slots >= slots.term().num_slots, options_.name);
  PD_CHECK(compute_stream == nullptr || staging != nullptr, options_.name);  // who computes apart is staged
  for (ReceivedSlot& received : *received_slots_) {
    received.tensors.reserve(options_.spec.num_tensors());
    if (staging != nullptr) received.ready = device.make_event();
    received.compute_stream = compute_stream;
    if (compute_stream != nullptr) received.last_read = device.make_event();
  }
  credit_return_->channel = this;
  slots_.on_release([credit_return = credit_return_] {
    const std::lock_guard lock(credit_return->mutex);
    if (credit_return->channel != nullptr) credit_return->channel->slot_released();
  });
}

// Copies of half an item may still be enqueued: they write into slots that go back to the pool now.
ReceiveChannel::~ReceiveChannel() {
  detach();
  if (copy_stream_) copy_stream_->synchronize();
}

void ReceiveChannel::detach() {
  const std::lock_guard lock(credit_return_->mutex);
  credit_return_->channel = nullptr;
}

bool ReceiveChannel::try_take(ReceivedItem& item) {
  if (inbox_.empty()) return false;
  item = inbox_.take_front();
  return true;
}

LinkCounters ReceiveChannel::counters() const {
  const Link* link = link_.load();
  return link == nullptr ? LinkCounters{} : link->counters();
}

void ReceiveChannel::on_open(Link& link) {
  attach(link);
  num_credits_owed_.fetch_add(static_cast<std::uint64_t>(slots_.term().num_slots));
  return_credits();
  wakeup_.update([&] { open_.store(true); });
}

std::optional<Failure> ReceiveChannel::on_frame(Link& /*link*/, const FrameHeader& header,
                                                std::span<const std::byte> payload) {
  switch (header.kind) {
    case FrameKind::kTensor:
      return on_tensor(header, payload);
    case FrameKind::kEnd:
      return on_end(header);
    case FrameKind::kAbort:
      return Failure{FailureKind::kAborted,
                     std::string(reinterpret_cast<const char*>(payload.data()), payload.size())};
    default:
      return broken("a " + std::string(frame_kind_name(header.kind)) + " frame");
  }
}

std::optional<Failure> ReceiveChannel::on_tensor(const FrameHeader& header,
                                                 std::span<const std::byte> payload) {
  if (auto what = misplaced(header)) return broken(*what);
  if (auto what =
          options_.spec.mismatch(header.tensor_index, header.dtype, header.num_dims, header.tensor_bytes)) {
    return broken(*what);
  }
  if (!current_) {
    if (auto failure = begin_item(header)) return failure;
  }
  land(header, payload);
  return std::nullopt;
}

// What is out of order about the frame. Chunks of a tensor, tensors of an item, microbatches and
// minibatches come strictly in order, each complete before the next begins.
std::optional<std::string> ReceiveChannel::misplaced(const FrameHeader& header) const {
  if (ended_) return "a tensor after the end";
  if (header.num_tensors != options_.spec.num_tensors()) {
    return std::to_string(header.num_tensors) + " tensors, planned " +
           std::to_string(options_.spec.num_tensors());
  }
  const MinibatchId minibatch = current_ ? current_->minibatch : next_minibatch_;
  const MicrobatchIndex microbatch = current_ ? current_->microbatch : next_microbatch_;
  if (header.minibatch != minibatch || header.microbatch != microbatch) {
    return "minibatch " + std::to_string(header.minibatch.value()) + " microbatch " +
           std::to_string(header.microbatch.value()) + " where " + std::to_string(minibatch.value()) +
           " microbatch " + std::to_string(microbatch.value()) + " is due";
  }
  if (header.tensor_index != tensor_index_ || header.chunk_offset != tensor_offset_) {
    return "tensor " + std::to_string(header.tensor_index) + " from byte " +
           std::to_string(header.chunk_offset) + " where tensor " + std::to_string(tensor_index_) +
           " from byte " + std::to_string(tensor_offset_) + " is due";
  }
  const bool first_chunk = tensor_offset_ == 0;
  if (!first_chunk && current_->held->tensors.back().shape != header.shape)
    return "a shape that changes between chunks";
  if (header.payload_bytes == 0 && header.tensor_bytes != 0) return "an empty chunk";
  return std::nullopt;
}

std::optional<Failure> ReceiveChannel::begin_item(const FrameHeader& header) {
  auto slot = slots_.try_lease();
  if (!slot) return broken("an item without a credit");
  ReceivedSlot& received = received_slots_->at(static_cast<std::size_t>(slot->slot().value()));
  received.num_holders = 1;
  received.slot = std::move(*slot);
  received.tensors.clear();
  if (staging_ != nullptr) received.staging = staging_->lease();
  if (received.last_read) copy_stream_->wait(*received.last_read);
  ReceivedItem& item = current_.emplace();
  item.minibatch = header.minibatch;
  item.microbatch = header.microbatch;
  item.tag = header.tag;
  item.held = std::shared_ptr<ReceivedSlot>(received_slots_, &received);
  return std::nullopt;
}

void ReceiveChannel::land(const FrameHeader& header, std::span<const std::byte> payload) {
  ReceivedSlot& received = *current_->held;
  const std::size_t tensor_at = options_.spec.offset_bytes(tensor_index_);
  std::byte* const tensor = received.slot.data() + tensor_at;
  if (tensor_offset_ == 0) {
    received.tensors.push_back(TensorView{header.dtype, header.num_dims, header.shape, tensor});
  }
  if (!payload.empty()) {
    std::byte* slot = tensor + tensor_offset_;
    if (staging_ == nullptr) {
      std::memcpy(slot, payload.data(), payload.size());
    } else {
      std::byte* staged = received.staging.data() + tensor_at + tensor_offset_;
      std::memcpy(staged, payload.data(), payload.size());
      copy_stream_->copy(slot, staged, payload.size());
    }
  }
  tensor_offset_ += payload.size();
  if (tensor_offset_ < header.tensor_bytes) return;
  tensor_offset_ = 0;
  if (++tensor_index_ < header.num_tensors) return;
  tensor_index_ = 0;
  finish_item();
}

void ReceiveChannel::finish_item() {
  ReceivedItem& item = *current_;
  next_microbatch_ = item.microbatch.next();
  if (next_microbatch_.value() == options_.num_microbatches) {
    next_microbatch_ = MicrobatchIndex(0);
    next_minibatch_ = item.minibatch.next();
  }
  ReceivedSlot& received = *item.held;
  item.tensors = TensorList(received.tensors);
  if (copy_stream_) {
    copy_stream_->record(*received.ready);
    item.ready = received.ready.get();
    ++received.num_holders;
    copy_stream_->call([&received] { received.drop(); });  // when the copies before it are done
  }
  deliver(std::move(item));
  current_.reset();
}

void ReceiveChannel::deliver(ReceivedItem item) {
  wakeup_.update([&] { inbox_.push_back(std::move(item)); });
}

std::optional<Failure> ReceiveChannel::on_end(const FrameHeader& header) {
  if (ended_ || current_ || header.minibatch != next_minibatch_ || next_microbatch_.value() != 0) {
    return broken("an end after " + std::to_string(header.minibatch.value()) + " minibatches where " +
                  std::to_string(next_minibatch_.value()) + " have come");
  }
  ended_ = true;
  ReceivedItem item;
  item.is_end = true;
  item.num_minibatches = header.minibatch.value();
  deliver(std::move(item));
  return std::nullopt;
}

Failure ReceiveChannel::broken(const std::string& what) const {
  return {FailureKind::kCorruptFrame, options_.name + ": the sender broke the protocol: " + what};
}

void ReceiveChannel::on_failed(Link& /*link*/, const Failure& failure) {
  if (copy_stream_) copy_stream_->synchronize();  // nothing writes into a slot that is given back
  current_.reset();
  wakeup_.fail(failure);
}

void ReceiveChannel::on_closed(Link& /*link*/) {
  wakeup_.update([&] { closed_ = true; });
}

// Any thread: whichever drops the last reference to an item's tensors.
void ReceiveChannel::slot_released() {
  if (num_credits_owed_.fetch_add(1) == 0) transport_.post([this] { return_credits(); });
}

void ReceiveChannel::return_credits() {
  Link* link = link_.load();
  if (link == nullptr) return;  // nothing was received yet, so nothing is owed
  const std::uint64_t num_credits = num_credits_owed_.exchange(0);
  if (num_credits == 0) return;
  OutgoingFrame frame;
  frame.header.kind = FrameKind::kCredit;
  frame.header.tag = num_credits;
  link->send(std::move(frame));
}

}  // namespace pipedream
