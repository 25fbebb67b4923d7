// Holds the free slots that a receiver has not yet granted to its sender. A CREDIT frame for a single slot
// costs a packet and three wake-ups on a network, as much as a small item. So the receiver holds credits back
// while the sender has enough slots left, and then sends several in one frame. Runs on the thread that drives
// the transport.
//
// For example, with 8 slots, of which 4 are enough:
//
//   at the start                all 8 slots are granted in one frame
//   items have filled 5 slots   the sender has 3 left. All free slots are granted, and later ones as soon as
//                               they are free, until the sender has 4 again
//   an item fills the last      the item's frame says so. Slots are granted as soon as they are free, until
//   slot                        an item comes that does not fill the last slot
//
// The sender has to say this: items may be on their way, so the receiver cannot know how many slots the
// sender has left. With this rule no sender waits for a credit that is held back.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "base/check.h"

namespace pipedream {

// The slots of one CREDIT frame: `slot`, and slot + 1 + k for each bit k that is set in `further_slots`.
struct Credit {
  std::uint16_t slot = 0;
  std::uint64_t further_slots = 0;
};

class HeldCredits {
 public:
  // num_slots: the most slots that the sender can have at once. num_names: slot numbers are below it.
  HeldCredits(std::size_t num_slots, std::size_t num_names)
      : num_enough_(std::max(kNumEnoughMin, num_slots / 2)), is_told_(num_names) {
    free_slots_.reserve(num_slots);
  }

  void add(std::uint16_t slot) { free_slots_.push_back(slot); }
  // Whether the slot is granted to the sender and not yet filled. A sender that fills a slot whose credit is
  // still held here breaks the protocol.
  [[nodiscard]] bool is_told(std::uint16_t slot) const { return is_told_.at(slot); }
  // Notes that the sender has filled a granted slot. was_last: whether the sender had no other slot left.
  void note_filled(std::uint16_t slot, bool was_last) {
    PD_CHECK(is_told(slot), "slot " << slot << " was filled, which was not granted");
    is_told_[slot] = false;
    --num_told_;
    was_last_ = was_last;
  }

  [[nodiscard]] bool are_due() const {
    return !free_slots_.empty() && (was_last_ || num_told_ < num_enough_);
  }

  // Grants all held slots in as few CREDIT frames as possible: calls tell(Credit) for each frame.
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
  // Grants each held slot in a frame of its own, in the order of add().
  template <class Tell>
  void tell_each(Tell tell) {
    note_told();
    for (const std::uint16_t slot : free_slots_) tell(Credit{slot});
    free_slots_.clear();
  }

 private:
  static constexpr std::size_t kNumFurtherMax = 64;
  // The receiver holds credits back only while the sender has at least this many slots: one for the item
  // under way and one for the next item.
  static constexpr std::size_t kNumEnoughMin = 2;

  void note_told() {
    num_told_ += free_slots_.size();
    for (const std::uint16_t slot : free_slots_) is_told_.at(slot) = true;
  }

  const std::size_t num_enough_;
  // Slots that are granted and, as far as the receiver knows, not yet filled.
  std::size_t num_told_ = 0;
  bool was_last_ = false;      // the last item filled the sender's last slot
  std::vector<bool> is_told_;  // by slot
  std::vector<std::uint16_t> free_slots_;
};

}  // namespace pipedream
