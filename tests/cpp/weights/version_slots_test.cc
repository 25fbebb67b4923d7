// Tests the slots with the programs of every stage. Each read finds the content of its version, and no slot
// is unneeded.
#include "weights/version_slots.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "schedule/program.h"

namespace pipedream {
namespace {

constexpr std::int64_t kPoison = -1;

// A stage whose only weight is the number of its version. So a wrong or torn read shows.
class StageWeights {
 public:
  explicit StageWeights(std::int64_t num_slots)
      : slots_(num_slots), content_(static_cast<std::size_t>(num_slots), kPoison) {
    content_at(slots_.slot_of(WeightVersion(0))) = 0;
  }

  void forward(WeightVersion version) {
    ASSERT_EQ(content_at(slots_.acquire(version)), version.value());
    note_live();
  }

  void backward(WeightVersion version) {
    ASSERT_EQ(content_at(slots_.slot_of(version)), version.value());
    slots_.release(version);
  }

  // Writes the next version. Returns its slot.
  SlotIndex update(WeightVersion version) {
    const SlotIndex source = slots_.slot_of(slots_.newest());
    const SlotIndex target = slots_.begin_update();
    const std::int64_t updated = content_at(source) + 1;
    content_at(target) = kPoison;  // the slot's old content is lost from here on
    if (slots_.num_slots() > 1) {
      EXPECT_EQ(content_at(source), slots_.newest().value());
    }
    content_at(target) = updated;
    slots_.publish(target);
    EXPECT_EQ(slots_.newest(), version);
    EXPECT_EQ(content_at(slots_.slot_of(version)), version.value());
    note_live();
    return target;
  }

  [[nodiscard]] const VersionSlots& slots() const { return slots_; }
  [[nodiscard]] std::int64_t num_live_max() const { return num_live_max_; }

 private:
  std::int64_t& content_at(SlotIndex slot) { return content_.at(static_cast<std::size_t>(slot.value())); }
  void note_live() { num_live_max_ = std::max(num_live_max_, slots_.num_live()); }

  VersionSlots slots_;
  std::vector<std::int64_t> content_;
  std::int64_t num_live_max_ = 0;
};

std::vector<std::int64_t> straight_in_flight(std::int64_t num_stages) {
  std::vector<std::int64_t> in_flight;
  for (std::int64_t stage = 0; stage < num_stages; ++stage) in_flight.push_back(num_stages - stage);
  return in_flight;
}

// naive is left out, because it counts no readers: its backward reads the newest version.
TEST(VersionSlots, EveryStageProgramReadsItsVersionsFromTheSlotsKept) {
  for (const std::string schedule : {"pipedream", "vertical_sync", "2bw", "flush", "gpipe"}) {
    for (std::int64_t num_stages = 1; num_stages <= 6; ++num_stages) {
      ScheduleOptions options{schedule, straight_in_flight(num_stages), 1, {}, {}};
      if (schedule == "2bw") options.num_microbatches = num_stages;
      for (std::int64_t stage = 0; stage < num_stages; ++stage) {
        const std::int64_t num_kept = num_versions_kept(options, StageIndex(stage));
        for (const std::int64_t num_minibatches : {0, 1, 2, 5, 8, 9, 30}) {
          StageWeights weights(num_kept);
          for (const Instruction& instruction : make_compute_program(options, Rank(stage), num_minibatches)) {
            SCOPED_TRACE(schedule + ", " + std::to_string(num_stages) + " stages, " + to_string(instruction));
            if (instruction.opcode == Opcode::kForward) weights.forward(instruction.version);
            if (instruction.opcode == Opcode::kBackward) weights.backward(instruction.version);
            if (instruction.opcode == Opcode::kUpdate) weights.update(instruction.version);
            if (HasFatalFailure()) return;
          }
          EXPECT_EQ(weights.slots().newest().value(), num_minibatches);
          EXPECT_EQ(weights.slots().num_live(), 1);
          EXPECT_LE(weights.num_live_max(), num_kept);
          // With so many minibatches all slots are in use at some time, because version 0 is still read then.
          if (num_minibatches == 30 && schedule == "pipedream") {
            EXPECT_EQ(weights.num_live_max(), num_kept);
          }
        }
      }
    }
  }
}

TEST(VersionSlots, AnUpdateWritesIntoTheSlotThatItsOwnBackwardFreed) {
  for (std::int64_t in_flight = 1; in_flight <= 8; ++in_flight) {
    const ScheduleOptions options{"pipedream", {in_flight}, 1, {}, {}};
    StageWeights weights(in_flight);
    SlotIndex freed(-1);
    for (const Instruction& instruction : make_compute_program(options, Rank(0), 40)) {
      if (instruction.opcode == Opcode::kForward) weights.forward(instruction.version);
      if (instruction.opcode == Opcode::kBackward) {
        freed = weights.slots().slot_of(instruction.version);
        weights.backward(instruction.version);
      }
      if (instruction.opcode != Opcode::kUpdate) continue;
      // While the minibatches of the warm-up still read version 0, an update fills an empty slot instead.
      const bool is_freed = instruction.minibatch.value() >= in_flight - 1;
      EXPECT_EQ(weights.update(instruction.version) == freed, is_freed)
          << "in_flight " << in_flight << ", " << to_string(instruction);
    }
  }
}

TEST(VersionSlots, CountsTheReadersOfAVersion) {
  VersionSlots slots(2);
  EXPECT_EQ(slots.num_readers(WeightVersion(0)), 0);
  slots.acquire(WeightVersion(0));
  slots.acquire(WeightVersion(0));
  EXPECT_EQ(slots.num_readers(WeightVersion(0)), 2);
  slots.release(WeightVersion(0));
  EXPECT_EQ(slots.num_readers(WeightVersion(0)), 1);
}

TEST(VersionSlots, VersionZeroLiesInSlotZero) {
  const VersionSlots slots(3);
  EXPECT_EQ(slots.newest(), WeightVersion(0));
  EXPECT_EQ(slots.slot_of(WeightVersion(0)), SlotIndex(0));
  EXPECT_EQ(slots.num_slots(), 3);
  EXPECT_EQ(slots.num_live(), 1);
}

TEST(VersionSlots, ASingleSlotIsUpdatedInPlace) {
  VersionSlots slots(1);
  EXPECT_EQ(slots.begin_update(), SlotIndex(0));
  slots.publish(SlotIndex(0));
  EXPECT_EQ(slots.newest(), WeightVersion(1));
  EXPECT_EQ(slots.slot_of(WeightVersion(1)), SlotIndex(0));
}

TEST(VersionSlots, AVersionLivesUntilItsLastReaderIsDone) {
  VersionSlots slots(2);
  slots.acquire(WeightVersion(0));
  slots.acquire(WeightVersion(0));
  slots.publish(slots.begin_update());
  EXPECT_EQ(slots.num_live(), 2);
  slots.release(WeightVersion(0));
  EXPECT_EQ(slots.num_live(), 2);
  slots.release(WeightVersion(0));
  EXPECT_EQ(slots.num_live(), 1);
  EXPECT_EQ(slots.begin_update(), SlotIndex(0));
}

TEST(VersionSlotsDeathTest, AVersionThatWasOverwrittenOrNotWrittenYetIsNotHeld) {
  VersionSlots slots(2);
  EXPECT_DEATH(slots.acquire(WeightVersion(1)), "version 1 is not held in 2 slots; the newest is 0");
  slots.publish(slots.begin_update());
  slots.publish(slots.begin_update());
  EXPECT_DEATH(slots.acquire(WeightVersion(0)), "version 0 is not held");
  EXPECT_DEATH((void)slots.slot_of(WeightVersion(0)), "version 0 is not held");
  EXPECT_DEATH(slots.release(WeightVersion(0)), "version 0 is not held");
}

TEST(VersionSlotsDeathTest, AReleaseWithoutAnAcquireAborts) {
  VersionSlots slots(2);
  slots.acquire(WeightVersion(0));
  slots.release(WeightVersion(0));
  EXPECT_DEATH(slots.release(WeightVersion(0)), "version 0 has no readers");
}

TEST(VersionSlotsDeathTest, AnUpdateWithoutAFreeSlotAborts) {
  VersionSlots in_place(1);
  in_place.acquire(WeightVersion(0));
  EXPECT_DEATH((void)in_place.begin_update(), "no slot is free for version 1: all 1 are read");

  VersionSlots slots(2);
  slots.acquire(WeightVersion(0));
  slots.publish(slots.begin_update());
  // A minibatch reads slot 0, and the optimizer reads slot 1.
  EXPECT_DEATH((void)slots.begin_update(), "no slot is free for version 2: all 2 are read");
}

TEST(VersionSlotsDeathTest, PublishingIntoASlotThatIsReadAborts) {
  VersionSlots slots(3);
  EXPECT_DEATH(slots.publish(SlotIndex(0)), "slot 0 holds version 0 with 0 readers; the newest is 0");
  slots.acquire(WeightVersion(0));
  slots.publish(slots.begin_update());
  EXPECT_DEATH(slots.publish(SlotIndex(0)), "slot 0 holds version 0 with 1 readers; the newest is 1");
  EXPECT_DEATH(slots.publish(SlotIndex(3)), "slot 3 of 3");
  EXPECT_DEATH(slots.publish(SlotIndex(-1)), "slot -1 of 3");
}

TEST(VersionSlotsDeathTest, NoSlotsAtAllAborts) { EXPECT_DEATH(VersionSlots(0), "num_slots 0"); }

}  // namespace
}  // namespace pipedream
