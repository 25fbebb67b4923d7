// The receiver's slots that a sender may fill next, in the order in which they were granted. On
// the thread that drives.
#pragma once

#include <bitset>
#include <cstddef>
#include <cstdint>

#include "base/ring_buffer.h"

namespace pipedream {

// A receiver never grants more at once, however many slots it has.
inline constexpr std::size_t kNumGrantsMax = 4096;

class GrantedSlots {
 public:
  // False when the slot is granted already, or too many are: the receiver breaks the protocol.
  [[nodiscard]] bool add(std::uint16_t slot) {
    if (is_granted_.test(slot) || slots_.full()) return false;
    is_granted_.set(slot);
    slots_.push_back(slot);
    return true;
  }
  [[nodiscard]] bool empty() const { return slots_.empty(); }
  [[nodiscard]] std::uint16_t take() {
    const std::uint16_t slot = slots_.take_front();
    is_granted_.reset(slot);
    return slot;
  }

 private:
  RingBuffer<std::uint16_t> slots_{kNumGrantsMax};
  std::bitset<std::size_t{1} << 16> is_granted_;
};

}  // namespace pipedream
