#include "channel/receive_channel.h"

#include <algorithm>
#include <cstring>
#include <memory>
#include <utility>

#include "channel/heard_abort.h"

namespace pipedream {

ReceiveChannel::ReceiveChannel(ChannelOptions options, Transport& transport, Wakeup& wakeup, Device& device,
                               SlotGroup& slots, SlotGroup* staging, Stream* compute_stream,
                               const SharedMemory* shared, SlotGroup* encoded)
    : options_(std::move(options)),
      layout_(options_.item, options_.codec),
      transport_(transport),
      wakeup_(wakeup),
      slots_(slots),
      staging_(staging),
      encoded_(encoded != nullptr ? encoded->lease() : Lease()),
      shared_(shared),
      received_slots_(
          std::make_shared<std::vector<ReceivedSlot>>(static_cast<std::size_t>(slots.term().num_slots))),
      stream_codec_(layout_.encodes() ? make_stream_codec(device, layout_.num_elements_max()) : nullptr),
      copy_stream_(staging != nullptr || compute_stream != nullptr
                       ? device.make_copy_stream(CopyUse::kReceive)
                       : nullptr),
      access_(std::make_shared<ReceiverAccess>(*this, options_.side_stream)),
      transfers_(options_.num_transfers_kept),
      posts_(options_.num_posts_max),
      inbox_(static_cast<std::size_t>(slots.term().num_slots) + 1),
      granted_(static_cast<std::size_t>((staging != nullptr ? *staging : slots).term().num_slots)),
      credits_(std::min(static_cast<std::size_t>(slots.term().num_slots), kNumGrantsMax), granted_.size()),
      next_number_(options_.first_microbatch) {
  PD_CHECK(options_.microbatch_stride >= 0 && options_.num_microbatches >= 1, options_.name);
  PD_CHECK(takes_posts() || slots.term().slot_bytes >= options_.item.slot_bytes(), options_.name);
  PD_CHECK(!takes_posts() || (staging == nullptr && compute_stream == nullptr && !is_placed_on_device() &&
                              options_.item.num_tensors() == 1),
           options_.name);
  PD_CHECK(staging == nullptr || (staging->term().num_slots >= slots.term().num_slots &&
                                  staging->term().slot_bytes >= layout_.slot_bytes()),
           options_.name);
  // If the device has a compute stream, items are staged unless the sender writes device memory itself.
  // Encoded tensors are always staged.
  PD_CHECK(compute_stream == nullptr || staging != nullptr || is_placed_on_device(), options_.name);
  PD_CHECK(staging == nullptr || !is_placed_on_device(), options_.name);
  PD_CHECK(!layout_.encodes() || staging != nullptr, options_.name);
  for (ReceivedSlot& received : *received_slots_) {
    received.receiver = access_.get();
    received.tensors.reserve(options_.item.num_tensors());
    if (staging != nullptr) received.ready = device.make_event();
    received.device = &device;
    received.compute_stream = compute_stream;
    if (compute_stream != nullptr) received.last_read = device.make_event();
  }
  slots_.on_release([access = access_] { access->slot_released(); });
}

// Waits for the copies of an item that is half received, because they write into its slot. Then gives back
// the slots that were granted and never filled. All other slots belong to items, which may outlive the
// channel.
ReceiveChannel::~ReceiveChannel() {
  detach();
  finish_copies();
  for (ReceivedSlot& received : *received_slots_) {
    if (!received.awaits_item) continue;
    received.staging.release();
    received.slot.release();
  }
}

void ReceiveChannel::detach() { access_->detach(); }

bool ReceiveChannel::try_take(ReceivedItem& item) {
  if (inbox_.empty()) return false;
  item = inbox_.take_front();
  return true;
}

ChannelStats ReceiveChannel::stats() const {
  ChannelStats stats;
  if (const Link* link = link_.load()) stats.link = link->counters();
  stats.num_items = num_items_received_.load(std::memory_order_relaxed);
  stats.num_chunks = num_chunks_received_.load(std::memory_order_relaxed);
  stats.tensor_bytes = num_tensor_bytes_.load(std::memory_order_relaxed);
  stats.placed_bytes = num_placed_bytes_.load(std::memory_order_relaxed);
  stats.transfer_ns = arrival_ns_.load(std::memory_order_relaxed);
  stats.wait_ns = wait_ns_.load(std::memory_order_relaxed);
  return stats;
}

std::vector<ReceivedTransfer> ReceiveChannel::transfers() const {
  const std::lock_guard lock(transfers_mutex_);
  return transfers_.items();
}

// ---- Granting slots: on the thread that drives the transport, except post() and note_release() ----

void ReceiveChannel::on_open(Link& link) {
  attach(link);
  // With a copy stream, frames should be read at once, so that copies begin before the compute thread waits
  // for the item.
  link.let_wait(copy_stream_ == nullptr ? Patience::kUntilOneWaits : Patience::kNone);
  grant_free_slots();
  wakeup_.update([&] { open_.store(true); });
}

void ReceiveChannel::post(std::span<const std::span<std::byte>> places) {
  PD_CHECK(takes_posts(), options_.name);
  posts_.push(places);
  if (note_release()) transport_.post_and_drive([this] { grant_free_slots(); });
}

bool ReceiveChannel::has_post_to_grant() {
  const auto next = posts_.next();
  return next && !is_awaited(next->data());
}

// Whether an item that is not complete yet will land in this place.
bool ReceiveChannel::is_awaited(const std::byte* place) const {
  if (current_ && current_->held->data == place) return true;
  return std::ranges::any_of(
      granted_, [&](const ReceivedSlot* received) { return received != nullptr && received->data == place; });
}

// Returns true if the caller must arrange for grant_free_slots() to run. Any thread.
bool ReceiveChannel::note_release() { return !grant_scheduled_.exchange(true); }

void ReceiveChannel::grant_free_slots() {
  grant_scheduled_.store(false);  // cleared before looking: slots released later schedule this again
  on_device([this] {
    while (!failed_ && grant_slot()) {
    }
    tell_due_credits();
  });
}

// Grants one slot. False when there is nothing to grant.
bool ReceiveChannel::grant_slot() {
  if (takes_posts() && !has_post_to_grant()) return false;
  // Counted before the slot is leased. Otherwise all_slots_held() could find neither a free nor a granted
  // slot in between.
  if (num_granted_.fetch_add(1) < kNumGrantsMax) {
    if (auto slot = slots_.try_lease()) {
      ReceivedSlot& received = received_slots_->at(static_cast<std::size_t>(slot->slot().value()));
      received.slot = std::move(*slot);
      received.data = received.slot.data();
      if (takes_posts()) {
        const std::span<std::byte> place = posts_.take_next();
        received.data = place.data();
        received.num_posted_bytes = place.size();
      }
      if (staging_ != nullptr) received.staging = staging_->lease();  // any free buffer
      received.awaits_item = true;
      if (is_placed_on_device() && received.has_readers()) {
        grant_when_read(received);
      } else {
        grant(received);
      }
      return true;
    }
  }
  num_granted_.fetch_sub(1);
  return false;
}

// Grants the slot once the kernels that read it are done. The sender may write into a granted slot at once,
// so the slot must not be granted earlier.
void ReceiveChannel::grant_when_read(ReceivedSlot& received) {
  received.wait_for_readers(*copy_stream_);
  copy_stream_->call([this, &received] {
    transport_.post([this, &received] {
      grant(received);
      tell_due_credits();
    });
  });
}

void ReceiveChannel::grant(ReceivedSlot& received) {
  const SlotIndex named = received.staging.valid() ? received.staging.slot() : received.slot.slot();
  granted_.at(static_cast<std::size_t>(named.value())) = &received;
  credits_.add(static_cast<std::uint16_t>(named.value()));
}

void ReceiveChannel::tell_due_credits() {
  if (failed_ || !credits_.are_due()) return;
  const auto tell_one = [this](const Credit& credit) { tell(credit); };
  if (takes_posts()) {
    credits_.tell_each(tell_one);
  } else {
    credits_.tell_all(tell_one);
  }
}

void ReceiveChannel::tell(const Credit& credit) {
  OutgoingFrame frame;
  frame.header.kind = FrameKind::kCredit;
  frame.header.slot = credit.slot;
  frame.header.further_slots = credit.further_slots;
  if (takes_posts()) {
    const ReceivedSlot& received = *granted_.at(credit.slot);
    frame.header.tensor_bytes = received.num_posted_bytes;
    if (shared_ != nullptr) {
      frame.header.chunk_offset = static_cast<std::size_t>(received.data - shared_->data());
    }
  }
  link_.load()->send(std::move(frame));
}

// ---- Errors of the device: on the thread that drives the transport ----

template <class Function>
void ReceiveChannel::on_device(Function function) {
  if (!wakeup_.try_on_device(options_.name, function)) give_up();
}

// Stops receiving but leaves the link open, so that the peer can be told why.
void ReceiveChannel::give_up() {
  failed_ = true;
  finish_copies();  // so that no copy writes into a slot after its release
  current_.reset();
}

// Waits for all copies. After an error of the device no copy is under way, but the wait may throw the error
// once more.
void ReceiveChannel::finish_copies() {
  if (copy_stream_) {
    static_cast<void>(wakeup_.try_on_device(options_.name, [this] { copy_stream_->synchronize(); }));
  }
}

// ---- Receiving: on the thread that drives the transport ----

std::optional<Failure> ReceiveChannel::on_frame(Link& link, const FrameHeader& header,
                                                std::span<const std::byte> payload) {
  std::optional<Failure> failure;
  switch (header.kind) {
    case FrameKind::kTensor:
      if (!failed_) on_device([&] { failure = on_tensor(header, payload); });
      return failure;
    case FrameKind::kEnd:
      return failed_ ? failure : on_end(header);
    case FrameKind::kAbort:
      return heard_abort(link, payload);
    default:
      return broken("a " + std::string(frame_kind_name(header.kind)) + " frame");
  }
}

std::optional<Failure> ReceiveChannel::on_tensor(const FrameHeader& header,
                                                 std::span<const std::byte> payload) {
  if (auto what = misplaced(header)) return broken(*what);
  if (auto what = unplanned(header)) return broken(*what);
  if (!current_) {
    if (auto failure = begin_item(header)) return failure;
  }
  land(header, payload);
  if (tensor_offset_ < header.tensor_bytes) return std::nullopt;
  if (auto what = finish_tensor(header)) return broken(*what);
  if (tensor_index_ == header.num_tensors) finish_item();
  return std::nullopt;
}

// Returns an error message if the frame is out of order. Chunks of a tensor, tensors of an item, microbatches
// and minibatches come strictly in order.
std::optional<std::string> ReceiveChannel::misplaced(const FrameHeader& header) const {
  if (ended_) return "a tensor after the end";
  if (header.num_tensors != options_.item.num_tensors()) {
    return std::to_string(header.num_tensors) + " tensors, planned " +
           std::to_string(options_.item.num_tensors());
  }
  const MinibatchId minibatch =
      current_ ? current_->minibatch : MinibatchId(next_number_ / options_.num_microbatches);
  const MicrobatchIndex microbatch =
      current_ ? current_->microbatch : MicrobatchIndex(next_number_ % options_.num_microbatches);
  const std::int64_t number =
      header.minibatch.value() * options_.num_microbatches + header.microbatch.value();
  const bool is_later = !current_ && options_.microbatch_stride == 0 && number > next_number_ &&
                        header.microbatch.value() < options_.num_microbatches;
  if ((header.minibatch != minibatch || header.microbatch != microbatch) && !is_later) {
    return "minibatch " + std::to_string(header.minibatch.value()) + " microbatch " +
           std::to_string(header.microbatch.value()) + " where " + std::to_string(minibatch.value()) +
           " microbatch " + std::to_string(microbatch.value()) + " is due";
  }
  if (header.tensor_index != tensor_index_ || header.chunk_offset != tensor_offset_) {
    return "tensor " + std::to_string(header.tensor_index) + " from byte " +
           std::to_string(header.chunk_offset) + " where tensor " + std::to_string(tensor_index_) +
           " from byte " + std::to_string(tensor_offset_) + " is due";
  }
  if (current_ && header.slot != current_slot_) {
    return "slot " + std::to_string(header.slot) + " inside an item in slot " + std::to_string(current_slot_);
  }
  if (current_ && header.fields != current_->fields) return "fields of the item that change inside it";
  const bool first_chunk = tensor_offset_ == 0;
  if (!first_chunk && current_->held->tensors.back().shape != header.shape)
    return "a shape that changes between chunks";
  if (header.payload_bytes + header.placed_bytes == 0 && header.tensor_bytes != 0) return "an empty chunk";
  return std::nullopt;
}

// Returns an error message if the plan does not allow the frame.
std::optional<std::string> ReceiveChannel::unplanned(const FrameHeader& header) const {
  const TensorView tensor{header.dtype, header.num_dims, header.shape, nullptr};
  const std::size_t tensor_bytes = tensor.size_bytes();
  if (auto what = options_.item.mismatch(tensor_index_, header.dtype, header.num_dims, tensor_bytes)) {
    return what;
  }
  const auto which = [&] { return "tensor " + std::to_string(tensor_index_); };
  const Codec& codec = layout_.codec(tensor_index_);
  if (header.codec != codec.kind) {
    return which() + " has codec " + codec_name({header.codec}) + ", planned " + codec_name(codec);
  }
  const std::size_t wire_bytes = layout_.wire_bytes(tensor_index_, tensor_bytes);
  if (header.tensor_bytes != wire_bytes) {
    return which() + " has " + std::to_string(header.tensor_bytes) + " bytes where codec " +
           codec_name(codec) + " makes " + std::to_string(wire_bytes);
  }
  if (header.placed_bytes != 0 && !is_claimed()) {
    return which() + " is placed in memory that is not shared";
  }
  if (header.payload_bytes != 0 && is_placed_on_device()) {
    return which() + " comes by the wire, which cannot write the device's memory";
  }
  return std::nullopt;
}

std::optional<Failure> ReceiveChannel::begin_item(const FrameHeader& header) {
  const bool is_granted =
      header.slot < granted_.size() && granted_[header.slot] != nullptr && credits_.is_told(header.slot);
  if (!is_granted) {
    return broken("an item in slot " + std::to_string(header.slot) + ", which was not granted");
  }
  ReceivedSlot& received = *granted_[header.slot];
  if (takes_posts() && header.tensor_bytes != received.num_posted_bytes) {
    return broken("an item of " + std::to_string(header.tensor_bytes) + " bytes where " +
                  std::to_string(received.num_posted_bytes) + " were posted");
  }
  if (!is_placed_on_device() && copy_stream_) received.wait_for_readers(*copy_stream_);
  granted_[header.slot] = nullptr;
  credits_.note_filled(header.slot, header.has_last_slot);
  arrived_ns_ = now_ns();
  num_item_bytes_ = 0;
  received.awaits_item = false;
  received.num_holders = 1;
  received.tensors.clear();
  current_slot_ = header.slot;
  ReceivedItem& item = current_.emplace();
  item.minibatch = header.minibatch;
  item.microbatch = header.microbatch;
  item.fields = header.fields;
  item.held = std::shared_ptr<ReceivedSlot>(received_slots_, &received);
  return std::nullopt;
}

void ReceiveChannel::land(const FrameHeader& header, std::span<const std::byte> payload) {
  ReceivedSlot& received = *current_->held;
  std::byte* const tensor = received.data + options_.item.offset_bytes(tensor_index_);
  if (tensor_offset_ == 0) {
    received.tensors.push_back(TensorView{header.dtype, header.num_dims, header.shape, tensor});
  }
  std::byte* const wire =
      staging_ == nullptr ? tensor : received.staging.data() + layout_.offset_bytes(tensor_index_);
  if (!payload.empty()) std::memcpy(wire + tensor_offset_, payload.data(), payload.size());
  const std::size_t num_bytes = payload.size() + header.placed_bytes;
  std::byte* const copy = header.codec == CodecKind::kNone ? tensor : encoded_at(tensor_index_);
  if (staging_ != nullptr && num_bytes > 0 && copy != nullptr) {
    copy_stream_->copy(copy + tensor_offset_, wire + tensor_offset_, num_bytes);
  }
  note_arrival(num_bytes);
  tensor_offset_ += num_bytes;
  num_chunks_received_.fetch_add(1, std::memory_order_relaxed);
  num_placed_bytes_.fetch_add(header.placed_bytes, std::memory_order_relaxed);
}

// The device memory from which the tensor is decoded; null if it is decoded from the staging buffer.
std::byte* ReceiveChannel::encoded_at(std::size_t tensor_index) const {
  return encoded_.valid() ? encoded_.data() + layout_.offset_bytes(tensor_index) : nullptr;
}

// Counts the item's bytes, and keeps the time and the size of its first chunk. arrival_ns() estimates from
// the later chunks how long the first chunk took to arrive.
void ReceiveChannel::note_arrival(std::size_t num_bytes) {
  if (num_item_bytes_ == 0) {
    first_arrival_ns_ = now_ns();
    num_first_bytes_ = num_bytes;
  }
  num_item_bytes_ += num_bytes;
}

void ReceiveChannel::note_complete(const ReceivedItem& item) {
  const std::int64_t complete_ns = now_ns();
  num_items_received_.fetch_add(1, std::memory_order_relaxed);
  arrival_ns_.fetch_add(arrival_ns(complete_ns), std::memory_order_relaxed);
  const std::lock_guard lock(transfers_mutex_);
  transfers_.add({item.minibatch, item.microbatch, num_item_bytes_, arrived_ns_, complete_ns});
}

std::int64_t ReceiveChannel::arrival_ns(std::int64_t complete_ns) const {
  const std::size_t num_bytes = num_item_bytes_;
  if (num_bytes <= num_first_bytes_) return 0;
  const double of_rest = static_cast<double>(num_bytes) / static_cast<double>(num_bytes - num_first_bytes_);
  return static_cast<std::int64_t>(static_cast<double>(complete_ns - first_arrival_ns_) * of_rest);
}

// Decodes the tensor if it is encoded, and goes on to the next tensor. Returns an error message if the
// encoding is wrong.
std::optional<std::string> ReceiveChannel::finish_tensor(const FrameHeader& header) {
  const ReceivedSlot& received = *current_->held;
  const TensorView& tensor = received.tensors.back();
  if (header.codec != CodecKind::kNone && header.tensor_bytes > 0) {
    CodecWork work;
    work.codec = layout_.codec(tensor_index_);
    work.dtype = tensor.dtype;
    work.num_elements = tensor.size_bytes() / dtype_bytes(tensor.dtype);
    work.values = tensor.data;
    work.encoded = received.staging.data() + layout_.offset_bytes(tensor_index_);
    const std::span<const std::byte> encoded(work.encoded, header.tensor_bytes);
    if (auto what = encoding_violation(work.codec, work.dtype, work.num_elements, encoded)) {
      return "tensor " + std::to_string(tensor_index_) + ": " + *what;
    }
    if (std::byte* const copied = encoded_at(tensor_index_)) work.encoded = copied;
    stream_codec_->decode(*copy_stream_, work);
  }
  num_tensor_bytes_.fetch_add(tensor.size_bytes(), std::memory_order_relaxed);
  tensor_offset_ = 0;
  ++tensor_index_;
  return std::nullopt;
}

void ReceiveChannel::finish_item() {
  ReceivedItem& item = *current_;
  tensor_index_ = 0;
  next_number_ = item.minibatch.value() * options_.num_microbatches + item.microbatch.value() +
                 std::max<std::int64_t>(1, options_.microbatch_stride);
  ReceivedSlot& received = *item.held;
  item.tensors = TensorList(received.tensors);
  if (staging_ != nullptr) {
    copy_stream_->record(*received.ready);
    item.ready = received.ready.get();
    ++received.num_holders;
    copy_stream_->call([&received] {  // runs after the copies above
      const PassiveScope on_the_stream;
      received.drop();
    });
  }
  note_complete(item);
  num_granted_.fetch_sub(1);
  deliver(std::move(item));
  current_.reset();
  // Free slots may lack a grant, because at most kNumGrantsMax slots are granted at a time. The item may also
  // have made held credits due (held_credits.h).
  if (slots_.num_free() > 0) {
    grant_free_slots();
  } else {
    tell_due_credits();
  }
}

void ReceiveChannel::deliver(ReceivedItem item) {
  wakeup_.update([&] { inbox_.push_back(std::move(item)); });
}

std::optional<Failure> ReceiveChannel::on_end(const FrameHeader& header) {
  const std::int64_t num_minibatches = header.minibatch.value();
  const std::int64_t end = num_minibatches * options_.num_microbatches;
  const std::int64_t last = next_number_ - options_.microbatch_stride;  // the last microbatch received
  const bool lacks = next_number_ < end;
  const bool exceeds = last >= options_.first_microbatch && last >= end;
  if (ended_ || current_ || lacks || exceeds) {
    return broken("an end after " + std::to_string(num_minibatches) + " minibatches where minibatch " +
                  std::to_string(next_number_ / options_.num_microbatches) + " is due");
  }
  ended_ = true;
  ReceivedItem item;
  item.is_end = true;
  item.num_minibatches = num_minibatches;
  item.fields = header.fields;
  deliver(std::move(item));
  return std::nullopt;
}

Failure ReceiveChannel::broken(const std::string& what) const {
  return {FailureKind::kCorruptFrame, options_.name + ": the sender broke the protocol: " + what};
}

void ReceiveChannel::on_failed(Link& /*link*/, const Failure& failure) {
  give_up();
  wakeup_.fail(failure);
}

bool ReceiveChannel::is_claimed() const {
  if (shared_ == nullptr) return false;
  return takes_posts() ? shared_->is_claimed_for(options_.channel_id) : shared_->is_claimed();
}

void ReceiveChannel::on_closed(Link& /*link*/) {
  wakeup_.update([&] { closed_ = true; });
}

}  // namespace pipedream
