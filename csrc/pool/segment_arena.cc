// Implements best fit over an ordered free list. See the header.
#include "pool/segment_arena.h"

#include <algorithm>
#include <cstdint>
#include <iterator>
#include <utility>

#include "base/check.h"

namespace pipedream {

SegmentArena::SegmentArena(std::byte* base, std::size_t num_bytes, std::function<void()> wait_until_unused)
    : wait_until_unused_(std::move(wait_until_unused)) {
  const auto address = reinterpret_cast<std::uintptr_t>(base);  // NOLINT(*-reinterpret-cast)
  const std::size_t skipped = (kAlignment - address % kAlignment) % kAlignment;
  if (num_bytes < skipped + kAlignment) return;
  free_[base + skipped] = (num_bytes - skipped) / kAlignment * kAlignment;
}

std::byte* SegmentArena::allocate(std::size_t num_bytes) {
  const std::lock_guard lock(mutex_);
  const std::size_t rounded =
      (std::max<std::size_t>(num_bytes, 1) + kAlignment - 1) / kAlignment * kAlignment;
  if (rounded < num_bytes) return nullptr;  // the addition overflowed
  auto best = free_.end();
  for (auto piece = free_.begin(); piece != free_.end(); ++piece) {
    if (piece->second >= rounded && (best == free_.end() || piece->second < best->second)) best = piece;
  }
  if (best == free_.end()) return nullptr;
  std::byte* const segment = best->first;
  const std::size_t left = best->second - rounded;
  free_.erase(best);
  if (left > 0) free_[segment + rounded] = left;
  used_[segment] = rounded;
  used_bytes_ += rounded;
  peak_bytes_ = std::max(peak_bytes_, used_bytes_);
  return segment;
}

void SegmentArena::free(std::byte* segment) {
  if (wait_until_unused_) wait_until_unused_();
  const std::lock_guard lock(mutex_);
  const auto found = used_.find(segment);
  PD_CHECK(found != used_.end(), "no segment at " << static_cast<const void*>(segment));
  const std::size_t num_bytes = found->second;
  used_.erase(found);
  used_bytes_ -= num_bytes;
  auto piece = free_.emplace(segment, num_bytes).first;
  if (const auto next = std::next(piece); next != free_.end() && segment + num_bytes == next->first) {
    piece->second += next->second;
    free_.erase(next);
  }
  if (piece == free_.begin()) return;
  const auto before = std::prev(piece);
  if (before->first + before->second != segment) return;
  before->second += piece->second;
  free_.erase(piece);
}

std::size_t SegmentArena::peak_bytes() const {
  const std::lock_guard lock(mutex_);
  return peak_bytes_;
}

std::size_t SegmentArena::used_bytes() const {
  const std::lock_guard lock(mutex_);
  return used_bytes_;
}

}  // namespace pipedream
