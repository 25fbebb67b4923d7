// Queues the receiver's slots that a sender may fill next, in the order in which they were granted. Used on
// the thread that drives the transport.
#pragma once

#include <bitset>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "base/ring_buffer.h"

namespace pipedream {

// The most slots that may be granted and not yet filled at a time. A receiver with more slots grants them
// later, as slots are filled.
inline constexpr std::size_t kNumGrantsMax = 4096;

// The place that the receiver has posted for the item that fills a slot. With 0 bytes nothing is posted, and
// the item lands in the slot's own memory.
struct PostedRange {
  std::size_t offset = 0;  // in the receiver's shared memory
  std::size_t num_bytes = 0;
};

class GrantedSlots {
 public:
  // False when the slot is granted already, or when kNumGrantsMax slots are granted. Then the receiver has
  // broken the protocol.
  [[nodiscard]] bool add(std::uint16_t slot, PostedRange range = {}) {
    if (is_granted_.test(slot) || slots_.full()) return false;
    is_granted_.set(slot);
    slots_.push_back(slot);
    // ranges_ grows during the first items, until it has an entry for each slot of the receiver.
    if (range.num_bytes > 0 && slot >= ranges_.size()) ranges_.resize(std::size_t{slot} + 1);
    if (slot < ranges_.size()) ranges_[slot] = range;
    return true;
  }
  [[nodiscard]] bool empty() const { return slots_.empty(); }
  [[nodiscard]] std::uint16_t take() {
    const std::uint16_t slot = slots_.take_front();
    is_granted_.reset(slot);
    return slot;
  }
  // The range of the last grant of this slot.
  [[nodiscard]] PostedRange range_of(std::uint16_t slot) const {
    return slot < ranges_.size() ? ranges_[slot] : PostedRange{};
  }

 private:
  RingBuffer<std::uint16_t> slots_{kNumGrantsMax};
  std::bitset<std::size_t{1} << 16> is_granted_;
  std::vector<PostedRange> ranges_;  // by slot; empty while no place has been posted
};

}  // namespace pipedream
