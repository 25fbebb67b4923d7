// Implements the copies of a sending channel. item_copier.h says which thread runs what.
#include "channel/item_copier.h"

#include <cstring>
#include <utility>

#include "base/check.h"
#include "base/clock.h"

namespace pipedream {
namespace {

std::vector<Lease> lease_all(SlotGroup* slots) {
  std::vector<Lease> leases;
  for (std::int64_t slot = 0; slots != nullptr && slot < slots->term().num_slots; ++slot) {
    leases.push_back(slots->lease());
  }
  return leases;
}

}  // namespace

ItemCopier::ItemCopier(const WireLayout& layout, Device& device, SlotGroup* staging, SlotGroup* residual,
                       SlotGroup* encoded, std::function<void()> on_copied)
    : layout_(layout),
      device_(device),
      staging_(staging),
      residuals_(lease_all(residual)),
      encoded_(encoded != nullptr ? encoded->lease() : Lease()),
      on_copied_(std::move(on_copied)),
      stream_codec_(layout.encodes() ? make_stream_codec(device, layout.num_elements_max()) : nullptr) {
  if (staging != nullptr) make_streams();
  PD_CHECK(!layout.encodes() || staging != nullptr, "what is encoded lies somewhere");
  PD_CHECK(layout.residual_bytes() == 0 || residual != nullptr, "what is left out lies somewhere");
  for (const Lease& kept : residuals_) {
    PD_CHECK(layout.residual_bytes() <= kept.size_bytes(), layout.residual_bytes());
  }
}

void ItemCopier::make_streams() {
  copy_stream_ = device_.make_copy_stream(CopyUse::kSend);
  if (device_.type() == DeviceType::kHost) return;
  telling_stream_ = device_.make_copy_stream(CopyUse::kTell);
  copied_ = device_.make_event();
}

std::vector<std::vector<std::span<std::byte>>> ItemCopier::residuals() const {
  std::vector<std::vector<std::span<std::byte>>> residuals;
  if (layout_.residual_bytes() == 0) return residuals;
  for (const Lease& kept : residuals_) {
    auto& of_item = residuals.emplace_back();
    for (std::size_t tensor = 0; tensor < layout_.num_tensors(); ++tensor) {
      of_item.emplace_back(kept.data() + layout_.residual_offset_bytes(tensor),
                           layout_.residual_bytes(tensor));
    }
  }
  return residuals;
}

void ItemCopier::place_into(std::unique_ptr<SharedMemory> memory, bool are_posted) {
  const std::size_t slot_bytes = are_posted ? 0 : layout_.slot_bytes();
  placed_slots_ = std::make_unique<PlacedSlots>(std::move(memory), device_, slot_bytes);
  if (!copy_stream_) make_streams();
}

bool ItemCopier::can_reach(std::uint16_t slot, PostedRange posted) const {
  if (placed_slots_ == nullptr) return true;
  if (placed_slots_->are_posted()) {
    return posted.num_bytes > 0 && placed_slots_->contains(posted.offset, posted.num_bytes);
  }
  return placed_slots_->contains(placed_slots_->slot_offset(slot), placed_slots_->slot_bytes());
}

bool ItemCopier::reserve(SendItem& item) {
  item.copy = nullptr;
  item.copier = this;
  if (item.is_placed || staging_ == nullptr) return true;
  auto lease = staging_->try_lease();
  if (!lease) return false;
  item.staging = std::move(*lease);
  item.copy = item.staging.data();
  return true;
}

void ItemCopier::start(SendItem& item) {
  if (!residuals_.empty()) item.residual = residuals_[num_started_++ % residuals_.size()].data();
  if (item.is_placed) {
    const std::size_t offset =
        placed_slots_->are_posted() ? item.posted.offset : placed_slots_->slot_offset(item.slot);
    item.copy = placed_slots_->at(offset);
  }
  if (item.copy == nullptr) {
    item.num_chunks_copied = item.num_chunks;
  } else if (item.ready) {
    copy_stream_->wait(*item.ready);
  }
}

bool ItemCopier::copy(SendItem& item) {
  if (item.copy == nullptr) return true;
  while (item.copied.num_passed < item.num_chunks) {
    if (is_copied_here(item)) {
      copy_here(item);
      continue;
    }
    if (num_copies_.load() >= kNumCopiesMax) return false;
    num_copies_.fetch_add(1);
    const bool begins_encoded = is_encoded(item) && item.copied.offset == 0;
    if (begins_encoded) enqueue_encoding(item, encoded_.valid() ? encoded_.data() : item.copy);
    if (begins_encoded && !encoded_.valid()) {
      pass_tensor(item);
    } else {
      enqueue_copy(item);
    }
  }
  return true;
}

bool ItemCopier::is_encoded(const SendItem& item) const {
  const std::size_t tensor_index = item.copied.tensor_index;
  return layout_.codec(tensor_index).kind != CodecKind::kNone && item.wire_bytes(tensor_index) > 0;
}

bool ItemCopier::is_copied_here(const SendItem& item) const {
  return item.is_placed && item.num_wire_bytes <= kCopiedHereBytesMax && !item.ready && !layout_.encodes() &&
         !placed_slots_->on_device() && device_.type() == DeviceType::kHost;
}

ItemCopier::CopyRange ItemCopier::next_copy(const SendItem& item) const {
  const auto [tensor_index, offset, num_passed] = item.copied;
  const std::size_t tensor_offset = layout_.offset_bytes(tensor_index);
  const std::byte* const from =
      is_encoded(item) ? encoded_.data() + tensor_offset : item.tensors[tensor_index].data;
  return {item.copy + tensor_offset + offset, from + offset, item.bytes_of_chunk(item.copied)};
}

void ItemCopier::copy_here(SendItem& item) {
  const CopyRange range = next_copy(item);
  if (range.num_bytes > 0) std::memcpy(range.to, range.from, range.num_bytes);
  item.pass_chunk(item.copied);
  if (item.copied.num_passed == item.num_chunks) item.copied_ns = now_ns();
  item.num_chunks_copied.fetch_add(1);
}

void ItemCopier::enqueue_copy(SendItem& item) {
  const CopyRange range = next_copy(item);
  if (range.num_bytes > 0) copy_stream_->copy(range.to, range.from, range.num_bytes);
  item.pass_chunk(item.copied);
  tell_when_copied(item, 1);
}

// Enqueues the encoding of the whole tensor. to: the start of the item's encoded tensors.
void ItemCopier::enqueue_encoding(SendItem& item, std::byte* to) {
  const std::size_t tensor_index = item.copied.tensor_index;
  const TensorView& tensor = item.tensors[tensor_index];
  CodecWork work;
  work.codec = layout_.codec(tensor_index);
  work.dtype = tensor.dtype;
  work.num_elements = tensor.size_bytes() / dtype_bytes(tensor.dtype);
  work.values = tensor.data;
  work.encoded = to + layout_.offset_bytes(tensor_index);
  if (layout_.has_residual(tensor_index)) {
    work.residual = item.residual + layout_.residual_offset_bytes(tensor_index);
  }
  stream_codec_->encode(*copy_stream_, work);
}

// Marks all chunks of the tensor as copied once the enqueued work is done.
void ItemCopier::pass_tensor(SendItem& item) {
  const std::size_t num_chunks = item.num_chunks_of(item.copied.tensor_index);
  for (std::size_t chunk = 0; chunk < num_chunks; ++chunk) item.pass_chunk(item.copied);
  tell_when_copied(item, num_chunks);
}

void ItemCopier::tell_when_copied(SendItem& item, std::size_t num_chunks) {
  auto tell = [&item, num_chunks] { item.copier->note_copied(item, num_chunks); };
  if (!telling_stream_) return copy_stream_->call(std::move(tell));
  copy_stream_->record(*copied_);
  telling_stream_->wait(*copied_);
  telling_stream_->call(std::move(tell));
}

// Runs on the thread of telling_stream_; on the host, on the copy stream's thread.
void ItemCopier::note_copied(SendItem& item, std::size_t num_chunks) {
  num_copies_.fetch_sub(1);
  // The time is written before the counter, because another thread may release the item once the counter is
  // complete.
  if (item.num_chunks_copied.load() + num_chunks == item.num_chunks) item.copied_ns = now_ns();
  item.num_chunks_copied.fetch_add(num_chunks);
  on_copied_();
}

void ItemCopier::synchronize() {
  if (telling_stream_) telling_stream_->synchronize();  // its work comes after all copies
  if (copy_stream_) copy_stream_->synchronize();
}

}  // namespace pipedream
