// The credits that a receiver has not told its sender yet. One that comes alone costs a frame, on a network a
// packet and three wake-ups, as much as a small item itself; so, while the sender has others left, they wait
// for each other and leave together. On the thread that drives.
//
//   slots 8, enough 4       granted at first: 8 in one frame
//   items fill 5 slots      the sender has 3 left: what is free by now leaves, and what becomes free
//   an item fills the last  as the sender says with it: what is free leaves, and each that becomes free,
//                           until an item comes that did not
//
// So nobody waits for a credit that is held. The receiver's own count does not tell it: items may be on their
// way here in all the slots that it takes for the sender's.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "base/check.h"

namespace pipedream {

// Slots of one CREDIT frame: `slot`, and slot + 1 + k for each bit k of `further_slots`.
struct Credit {
  std::uint16_t slot = 0;
  std::uint64_t further_slots = 0;
};

class HeldCredits {
 public:
  // num_slots: as many as the sender can have at most. num_names: slots are named by numbers below this.
  HeldCredits(std::size_t num_slots, std::size_t num_names)
      : num_enough_(std::max(kNumEnoughMin, num_slots / 2)), is_told_(num_names) {
    free_slots_.reserve(num_slots);
  }

  void add(std::uint16_t slot) { free_slots_.push_back(slot); }
  // The sender was told of the slot and has not filled it since. False for a credit that is still held here:
  // a sender that fills such a slot breaks the protocol.
  [[nodiscard]] bool is_told(std::uint16_t slot) const { return is_told_.at(slot); }
  // The sender has filled a slot that it was told of; was_last: it had no other then.
  void note_filled(std::uint16_t slot, bool was_last) {
    PD_CHECK(is_told(slot), "slot " << slot << " was filled, which was not granted");
    is_told_[slot] = false;
    --num_told_;
    was_last_ = was_last;
  }

  [[nodiscard]] bool are_due() const {
    return !free_slots_.empty() && (was_last_ || num_told_ < num_enough_);
  }

  // Tells all, by `tell(Credit)`.
  template <class Tell>
  void tell_all(Tell tell) {
    note_told();
    std::ranges::sort(free_slots_);
    for (std::size_t index = 0; index < free_slots_.size();) {
      Credit credit{free_slots_[index++]};
      for (; index < free_slots_.size(); ++index) {
        const std::size_t distance = std::size_t{free_slots_[index]} - credit.slot;
        if (distance > kNumFurtherMax) break;
        credit.further_slots |= std::uint64_t{1} << (distance - 1);
      }
      tell(credit);
    }
    free_slots_.clear();
  }
  // Each by itself, in the order in which they were added.
  template <class Tell>
  void tell_each(Tell tell) {
    note_told();
    for (const std::uint16_t slot : free_slots_) tell(Credit{slot});
    free_slots_.clear();
  }

 private:
  static constexpr std::size_t kNumFurtherMax = 64;
  // One under way and one to go on with, so that a window of two slots holds nothing.
  static constexpr std::size_t kNumEnoughMin = 2;

  void note_told() {
    num_told_ += free_slots_.size();
    for (const std::uint16_t slot : free_slots_) is_told_.at(slot) = true;
  }

  const std::size_t num_enough_;
  std::size_t num_told_ = 0;   // and not seen filled yet
  bool was_last_ = false;      // the slot that was filled last, of the sender's
  std::vector<bool> is_told_;  // by slot
  std::vector<std::uint16_t> free_slots_;
};

}  // namespace pipedream
