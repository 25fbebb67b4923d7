#include "channel/receive_channel.h"

#include <cstring>
#include <memory>
#include <utility>

namespace pipedream {

ReceivedItem::~ReceivedItem() {
  if (use && staged) {
    use->compute_stream->record(*use->last_read.at(static_cast<std::size_t>(staged->slot.slot().value())));
  }
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
      device_(device),
      slots_(slots),
      staging_(staging),
      copy_stream_(staging != nullptr ? device.make_stream() : nullptr),
      credit_return_(std::make_shared<CreditReturn>()) {
  PD_CHECK(slots.term().slot_bytes >= options_.spec.slot_bytes(), options_.name);
  PD_CHECK(staging == nullptr || staging->term().num_slots >= slots.term().num_slots, options_.name);
  PD_CHECK(compute_stream == nullptr || staging != nullptr, options_.name);  // who computes apart is staged
  if (compute_stream != nullptr) {
    use_ = std::make_shared<SlotUse>();
    use_->compute_stream = compute_stream;
    for (std::int64_t slot = 0; slot < slots.term().num_slots; ++slot)
      use_->last_read.push_back(device.make_event());
  }
  credit_return_->channel = this;
  slots_.on_release([credit_return = credit_return_] {
    const std::lock_guard lock(credit_return->mutex);
    if (credit_return->channel != nullptr) credit_return->channel->slot_released();
  });
}

ReceiveChannel::~ReceiveChannel() { detach(); }

void ReceiveChannel::detach() {
  const std::lock_guard lock(credit_return_->mutex);
  credit_return_->channel = nullptr;
}

bool ReceiveChannel::try_take(ReceivedItem& item) {
  if (inbox_.empty()) return false;
  item = std::move(inbox_.front());
  inbox_.pop_front();
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
  if (header.minibatch != minibatch || header.microbatch != MicrobatchIndex(0)) {
    return "minibatch " + std::to_string(header.minibatch.value()) + " where " +
           std::to_string(minibatch.value()) + " is due";
  }
  if (header.tensor_index != tensor_index_ || header.chunk_offset != tensor_offset_) {
    return "tensor " + std::to_string(header.tensor_index) + " from byte " +
           std::to_string(header.chunk_offset) + " where tensor " + std::to_string(tensor_index_) +
           " from byte " + std::to_string(tensor_offset_) + " is due";
  }
  const bool first_chunk = tensor_offset_ == 0;
  if (!first_chunk && current_->tensors.back().shape != header.shape)
    return "a shape that changes between chunks";
  if (header.payload_bytes == 0 && header.tensor_bytes != 0) return "an empty chunk";
  return std::nullopt;
}

std::optional<Failure> ReceiveChannel::begin_item(const FrameHeader& header) {
  auto slot = slots_.try_lease();
  if (!slot) return broken("an item without a credit");
  ReceivedItem& item = current_.emplace();
  item.minibatch = header.minibatch;
  item.microbatch = header.microbatch;
  item.tag = header.tag;
  item.tensors.reserve(options_.spec.num_tensors());
  if (staging_ == nullptr) {
    item.slot = std::move(*slot);
    return std::nullopt;
  }
  item.staged = std::make_shared<StagedLease>(StagedLease{std::move(*slot), staging_->lease()});
  if (use_) {
    item.use = use_;
    copy_stream_->wait(*use_->last_read.at(static_cast<std::size_t>(item.staged->slot.slot().value())));
  }
  return std::nullopt;
}

void ReceiveChannel::land(const FrameHeader& header, std::span<const std::byte> payload) {
  ReceivedItem& item = *current_;
  const std::size_t tensor_at = options_.spec.offset_bytes(tensor_index_);
  std::byte* const tensor = (item.staged ? item.staged->slot : item.slot).data() + tensor_at;
  if (tensor_offset_ == 0) {
    item.tensors.push_back(TensorView{header.dtype, header.num_dims, header.shape, tensor});
  }
  if (!payload.empty()) {
    std::byte* slot = tensor + tensor_offset_;
    if (staging_ == nullptr) {
      std::memcpy(slot, payload.data(), payload.size());
    } else {
      std::byte* staged = item.staged->staging.data() + tensor_at + tensor_offset_;
      std::memcpy(staged, payload.data(), payload.size());
      copy_stream_->copy(slot, staged, payload.size());
    }
  }
  tensor_offset_ += payload.size();
  if (tensor_offset_ < header.tensor_bytes) return;
  tensor_offset_ = 0;
  if (++tensor_index_ < header.num_tensors) return;
  tensor_index_ = 0;
  next_minibatch_ = item.minibatch.next();
  if (copy_stream_) {
    item.ready = device_.make_event();
    copy_stream_->record(*item.ready);
    copy_stream_->call([staged = item.staged] {});  // dropped when the copies before it are done
  }
  deliver(std::move(item));
  current_.reset();
}

void ReceiveChannel::deliver(ReceivedItem item) {
  wakeup_.update([&] { inbox_.push_back(std::move(item)); });
}

std::optional<Failure> ReceiveChannel::on_end(const FrameHeader& header) {
  if (ended_ || current_ || header.minibatch != next_minibatch_) {
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
