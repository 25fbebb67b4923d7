#include "channel/held_credits.h"

#include <gtest/gtest.h>

#include <bit>
#include <deque>
#include <random>
#include <vector>

namespace pipedream {
namespace {

std::vector<std::uint16_t> slots_of(const Credit& credit) {
  std::vector<std::uint16_t> slots = {credit.slot};
  for (int bit = 0; bit < 64; ++bit) {
    if ((credit.further_slots >> bit & 1) != 0)
      slots.push_back(static_cast<std::uint16_t>(credit.slot + 1 + bit));
  }
  return slots;
}

std::vector<Credit> told(HeldCredits& credits) {
  std::vector<Credit> all;
  credits.tell_all([&](const Credit& credit) { all.push_back(credit); });
  return all;
}

HeldCredits with_slots(std::size_t num_slots) {
  HeldCredits credits(num_slots, num_slots);
  for (std::size_t slot = 0; slot < num_slots; ++slot) credits.add(static_cast<std::uint16_t>(slot));
  return credits;
}

TEST(HeldCredits, AllSlotsLeaveAtFirstInOneFrame) {
  HeldCredits credits = with_slots(8);
  ASSERT_TRUE(credits.are_due());
  const std::vector<Credit> all = told(credits);
  ASSERT_EQ(all.size(), 1U);
  EXPECT_EQ(slots_of(all.front()), (std::vector<std::uint16_t>{0, 1, 2, 3, 4, 5, 6, 7}));
  EXPECT_FALSE(credits.are_due());
}

TEST(HeldCredits, AWindowOfTwoSlotsHoldsNothing) {
  for (const std::size_t num_slots : {1, 2}) {
    HeldCredits credits = with_slots(num_slots);
    static_cast<void>(told(credits));
    credits.note_filled(0, /*was_last=*/false);
    credits.add(0);
    EXPECT_TRUE(credits.are_due()) << num_slots;
  }
}

TEST(HeldCredits, WaitForEachOtherWhileTheSenderHasHalfOfThem) {
  HeldCredits credits = with_slots(8);
  static_cast<void>(told(credits));
  for (std::uint16_t slot = 0; slot < 4; ++slot) {
    credits.note_filled(slot, /*was_last=*/false);
    credits.add(slot);
    EXPECT_FALSE(credits.are_due()) << slot;
  }
  // Now the sender has 3 slots left, fewer than half of them.
  credits.note_filled(4, /*was_last=*/false);
  EXPECT_TRUE(credits.are_due());
  EXPECT_EQ(slots_of(told(credits).front()), (std::vector<std::uint16_t>{0, 1, 2, 3}));
}

// A sender that has no slot left says so in its last item. The receiver then sends its credits at once.
// Without this rule the receiver would hold credits back while the sender waits.
TEST(HeldCredits, LeaveAtOnceWhileTheSenderSaysThatItHasNone) {
  HeldCredits credits = with_slots(8);
  static_cast<void>(told(credits));
  for (std::uint16_t slot = 0; slot < 3; ++slot) {
    credits.note_filled(slot, /*was_last=*/true);
    EXPECT_FALSE(credits.are_due()) << slot << ": none is free";
    credits.add(slot);
    ASSERT_TRUE(credits.are_due()) << slot;
    EXPECT_EQ(slots_of(told(credits).front()), (std::vector<std::uint16_t>{slot}));
  }
  credits.note_filled(3, /*was_last=*/false);
  credits.add(3);
  EXPECT_FALSE(credits.are_due());
}

TEST(HeldCredits, SlotsThatAreFarApartTakeFramesOfTheirOwn) {
  HeldCredits credits(5, 65536);
  for (const int slot : {65, 130, 0, 64, 65535}) credits.add(static_cast<std::uint16_t>(slot));
  const std::vector<Credit> all = told(credits);
  ASSERT_EQ(all.size(), 4U);
  EXPECT_EQ(slots_of(all[0]), (std::vector<std::uint16_t>{0, 64}));
  EXPECT_EQ(slots_of(all[1]), (std::vector<std::uint16_t>{65}));
  EXPECT_EQ(slots_of(all[2]), (std::vector<std::uint16_t>{130}));
  EXPECT_EQ(slots_of(all[3]), (std::vector<std::uint16_t>{65535}));
}

TEST(HeldCredits, ASlotIsToldFromItsCreditUntilItIsFilled) {
  HeldCredits credits = with_slots(8);
  EXPECT_FALSE(credits.is_told(0));
  static_cast<void>(told(credits));
  EXPECT_TRUE(credits.is_told(0));
  credits.note_filled(0, /*was_last=*/false);
  credits.add(0);  // held back, because the sender has seven other slots
  EXPECT_FALSE(credits.are_due());
  EXPECT_FALSE(credits.is_told(0));
}

TEST(HeldCreditsDeathTest, ASlotThatWasNotToldIsNotFilled) {
  HeldCredits credits(2, 2);
  EXPECT_DEATH(credits.note_filled(0, /*was_last=*/false), "not granted");
}

// A sender always gets a slot in the end, whatever the order in which items are sent, taken and dropped.
TEST(HeldCredits, SenderNeverStarves) {
  std::mt19937 random(7);
  for (std::size_t num_slots = 1; num_slots <= 20; ++num_slots) {
    HeldCredits credits = with_slots(num_slots);
    std::deque<std::uint16_t> at_sender;
    std::vector<std::uint16_t> held;
    const auto tell = [&] {
      if (!credits.are_due()) return;
      for (const Credit& credit : told(credits)) {
        for (const std::uint16_t slot : slots_of(credit)) at_sender.push_back(slot);
      }
    };
    tell();
    for (int turn = 0; turn < 500; ++turn) {
      if (at_sender.empty()) {
        ASSERT_FALSE(held.empty()) << num_slots << " slots, turn " << turn;
      }
      const bool sends = !at_sender.empty() && random() % 2 == 0;
      if (sends) {
        held.push_back(at_sender.front());
        at_sender.pop_front();
        credits.note_filled(held.back(), at_sender.empty());
      } else if (!held.empty()) {
        credits.add(held.back());
        held.pop_back();
      }
      tell();
    }
  }
}

}  // namespace
}  // namespace pipedream
