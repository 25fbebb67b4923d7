// The validator accepts every right list and says where a broken one breaks.
#include "schedule/validator.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <utility>

namespace pipedream {
namespace {

std::vector<StageProgram> make_programs(const std::vector<std::int64_t>& in_flight,
                                        std::int64_t num_minibatches) {
  std::vector<StageProgram> programs;
  const auto num_stages = static_cast<std::int64_t>(in_flight.size());
  for (std::int64_t stage = 0; stage < num_stages; ++stage) {
    const ProgramOptions options{"pipedream", StageIndex(stage), num_stages,
                                 in_flight[static_cast<std::size_t>(stage)]};
    programs.push_back({options, make_program(options, num_minibatches)});
  }
  return programs;
}

std::vector<StageProgram> make_straight_programs(std::int64_t num_stages, std::int64_t num_minibatches) {
  return make_programs(derive_in_flight(std::vector<std::int64_t>(static_cast<std::size_t>(num_stages), 1)),
                       num_minibatches);
}

using Instructions = std::vector<Instruction>;

Instructions::iterator find(Instructions& instructions, Opcode opcode, std::int64_t minibatch) {
  return std::find_if(instructions.begin(), instructions.end(), [&](const Instruction& instruction) {
    return instruction.opcode == opcode && instruction.minibatch.value() == minibatch;
  });
}

void expect_fault(const std::vector<StageProgram>& programs, std::int64_t num_minibatches,
                  const std::string& error) {
  const ReplayReport report = replay(programs, num_minibatches);
  EXPECT_FALSE(report.ok);
  EXPECT_EQ(report.error, error);
}

// Most slots in use at once at a stage, from the formula alone: during the update of minibatch i, the
// newest version i, the new version i + 1 (in place with one slot), and what minibatches i + 1 to
// i + n_s - 1 still read.
std::int64_t slots_from_formula(std::int64_t in_flight, std::int64_t num_minibatches) {
  std::int64_t num_slots_max = 1;
  for (std::int64_t updated = 0; in_flight > 1 && updated < num_minibatches; ++updated) {
    std::vector<std::int64_t> versions = {updated, updated + 1};
    for (std::int64_t reader = updated + 1; reader < std::min(updated + in_flight, num_minibatches);
         ++reader) {
      versions.push_back(std::max<std::int64_t>(0, reader - in_flight + 1));
    }
    std::sort(versions.begin(), versions.end());
    versions.erase(std::unique(versions.begin(), versions.end()), versions.end());
    num_slots_max = std::max(num_slots_max, static_cast<std::int64_t>(versions.size()));
  }
  return num_slots_max;
}

TEST(Validator, AcceptsStraightPipelinesOfEveryDepthAndLength) {
  for (std::int64_t num_stages = 1; num_stages <= 16; ++num_stages) {
    for (const std::int64_t num_minibatches : {0, 1, 2, 3, 7, 15, 16, 17, 40}) {
      const ReplayReport report =
          replay(make_straight_programs(num_stages, num_minibatches), num_minibatches);
      ASSERT_TRUE(report.ok) << report.error;
      for (std::int64_t stage = 0; stage < num_stages; ++stage) {
        const auto stage_index = static_cast<std::size_t>(stage);
        EXPECT_EQ(report.activations_live_max[stage_index], std::min(num_stages - stage, num_minibatches));
        EXPECT_EQ(report.versions_live_max[stage_index],
                  slots_from_formula(num_stages - stage, num_minibatches))
            << "stage " << stage << " of " << num_stages << ", " << num_minibatches << " minibatches";
      }
    }
  }
}

TEST(Validator, VersionsKeptIsTight) {
  // Never more than n_s slots, and all of them as soon as the run is long enough: no spare slot, none less.
  for (std::int64_t in_flight = 1; in_flight <= 16; ++in_flight) {
    const std::int64_t num_minibatches_to_fill = std::max<std::int64_t>(1, 2 * in_flight - 3);
    for (std::int64_t num_minibatches = 1; num_minibatches <= 3 * in_flight; ++num_minibatches) {
      const ReplayReport report = replay(make_programs({in_flight}, num_minibatches), num_minibatches);
      ASSERT_TRUE(report.ok) << report.error;
      EXPECT_LE(report.versions_live_max[0], in_flight);
      EXPECT_EQ(report.versions_live_max[0] == in_flight, num_minibatches >= num_minibatches_to_fill)
          << "in_flight " << in_flight << ", " << num_minibatches << " minibatches";
    }
  }
}

TEST(Validator, BoundaryQueuesAreBoundedAtAnySpeedOfTheStages) {
  for (std::int64_t num_stages = 2; num_stages <= 8; ++num_stages) {
    const ReplayReport report = replay(make_straight_programs(num_stages, 50), 50);
    ASSERT_TRUE(report.ok) << report.error;
    for (std::int64_t boundary = 0; boundary + 1 < num_stages; ++boundary) {
      const auto boundary_index = static_cast<std::size_t>(boundary);
      // Downstream stands still: everything that upstream may have in flight waits there.
      EXPECT_EQ(report.activations_queued_max[boundary_index], num_stages - boundary);
      // Upstream stands still after its last forward: downstream finishes all that is in flight.
      EXPECT_EQ(report.gradients_queued_max[boundary_index], num_stages - boundary);
    }
  }
}

TEST(Validator, AcceptsMoreInFlightThanNeeded) {
  const ReplayReport report = replay(make_programs({6, 3, 1}, 20), 20);
  EXPECT_TRUE(report.ok) << report.error;
  EXPECT_EQ(report.versions_live_max, (std::vector<std::int64_t>{6, 3, 1}));
  EXPECT_EQ(report.activations_queued_max, (std::vector<std::int64_t>{6, 3}));
}

TEST(Validator, InFlightThatRisesDownstreamDeadlocks) {
  expect_fault(
      make_programs({1, 2}, 4), 4,
      "deadlock; stage 0, position 1, BACKWARD minibatch 0 microbatch 0 reads version 0: waits for the "
      "gradient from stage 1; stage 1, position 1, FORWARD minibatch 1 microbatch 0 reads version 0: waits "
      "for the activation from stage 0");
}

TEST(Validator, InFlightThatRisesDownstreamIsHarmlessWhenTheRunIsShorter) {
  EXPECT_TRUE(replay(make_programs({1, 2}, 1), 1).ok);
}

TEST(Validator, SwappedOrderThatDeadlocksIsFound) {
  std::vector<StageProgram> programs = make_straight_programs(3, 5);
  Instructions& instructions = programs[0].instructions;  // F0 F1 F2 B0 ... becomes F0 B0 F2 F1 ...
  std::swap(instructions[1], instructions[3]);
  expect_fault(
      programs, 5,
      "deadlock; stage 0, position 1, BACKWARD minibatch 0 microbatch 0 reads version 0: waits for the "
      "gradient from stage 1; stage 1, position 1, FORWARD minibatch 1 microbatch 0 reads version 0: waits "
      "for the activation from stage 0; stage 2, position 3, FORWARD minibatch 1 microbatch 0 reads version "
      "1: waits for the activation from stage 1");
}

TEST(Validator, MissingBackwardLeavesTheUpdateWithoutAGradient) {
  std::vector<StageProgram> programs = make_straight_programs(2, 4);
  Instructions& instructions = programs[1].instructions;
  instructions.erase(find(instructions, Opcode::kBackward, 1));
  expect_fault(
      programs, 4,
      "stage 1, position 4, UPDATE minibatch 1 microbatch 0 writes version 2: there is no gradient: the "
      "backward of the minibatch was not done yet");
}

TEST(Validator, MissingInstructionAtTheEndIsNamedRatherThanTheDeadlockItCauses) {
  std::vector<StageProgram> programs = make_straight_programs(2, 3);
  Instructions& instructions = programs[1].instructions;
  instructions.pop_back();
  expect_fault(programs, 3, "stage 1, position 8, end of the program: UPDATE minibatch 2 is missing");
  instructions.pop_back();
  expect_fault(programs, 3, "stage 1, position 7, end of the program: BACKWARD minibatch 2 is missing");
  instructions.pop_back();
  expect_fault(programs, 3, "stage 1, position 6, end of the program: FORWARD minibatch 2 is missing");
}

TEST(Validator, WrongVersionIsFound) {
  std::vector<StageProgram> programs = make_straight_programs(3, 5);
  Instructions& instructions = programs[0].instructions;
  find(instructions, Opcode::kForward, 3)->version = WeightVersion(0);  // still held, but not the newest
  expect_fault(
      programs, 5,
      "stage 0, position 5, FORWARD minibatch 3 microbatch 0 reads version 0: the rule names version 1");
}

TEST(Validator, BackwardThatReadsAnotherVersionThanItsForwardIsFound) {
  std::vector<StageProgram> programs = make_straight_programs(2, 5);
  Instructions& instructions = programs[0].instructions;
  find(instructions, Opcode::kBackward, 1)->version = WeightVersion(1);  // the newest, as without stashing
  expect_fault(
      programs, 5,
      "stage 0, position 5, BACKWARD minibatch 1 microbatch 0 reads version 1: the rule names version 0");
}

TEST(Validator, VersionThatIsNotWrittenYetIsFound) {
  std::vector<StageProgram> programs = make_straight_programs(2, 5);
  find(programs[0].instructions, Opcode::kForward, 1)->version = WeightVersion(1);
  expect_fault(
      programs, 5,
      "stage 0, position 1, FORWARD minibatch 1 microbatch 0 reads version 1: version 1 is not written yet; "
      "the newest is 0");
}

TEST(Validator, VersionThatWasOverwrittenIsFound) {
  std::vector<StageProgram> programs = make_straight_programs(2, 6);
  find(programs[0].instructions, Opcode::kForward, 4)->version = WeightVersion(1);
  expect_fault(
      programs, 6,
      "stage 0, position 10, FORWARD minibatch 4 microbatch 0 reads version 1: version 1 was overwritten; "
      "held are 2 to 3 in 2 slots");
}

TEST(Validator, InPlaceUpdateOverwritesTheOnlySlot) {
  std::vector<StageProgram> programs = make_straight_programs(1, 3);
  find(programs[0].instructions, Opcode::kForward, 1)->version = WeightVersion(0);
  expect_fault(
      programs, 3,
      "stage 0, position 3, FORWARD minibatch 1 microbatch 0 reads version 0: version 0 was overwritten; "
      "held are 1 to 1 in 1 slots");
}

TEST(Validator, DoubleUpdateIsFound) {
  std::vector<StageProgram> programs = make_straight_programs(2, 4);
  Instructions& instructions = programs[1].instructions;
  const auto update = find(instructions, Opcode::kUpdate, 1);
  instructions.insert(update, *update);
  expect_fault(
      programs, 4,
      "stage 1, position 6, UPDATE minibatch 1 microbatch 0 writes version 2: the update was already done");
}

TEST(Validator, UpdateBeforeItsBackwardIsFound) {
  std::vector<StageProgram> programs = make_straight_programs(2, 4);
  Instructions& instructions = programs[0].instructions;  // F0 F1 B0 U0 becomes F0 F1 U0 B0
  std::swap(instructions[2], instructions[3]);
  expect_fault(
      programs, 4,
      "stage 0, position 2, UPDATE minibatch 0 microbatch 0 writes version 1: there is no gradient: the "
      "backward of the minibatch was not done yet");
}

TEST(Validator, UpdateThatSkipsAVersionIsFound) {
  std::vector<StageProgram> programs = make_straight_programs(1, 3);
  find(programs[0].instructions, Opcode::kUpdate, 1)->version = WeightVersion(3);
  expect_fault(programs, 3,
               "stage 0, position 5, UPDATE minibatch 1 microbatch 0 writes version 3: the newest version is "
               "1, so the "
               "update writes version 2");
}

TEST(Validator, UpdatesOutOfOrderAreFound) {
  std::vector<StageProgram> programs = make_programs({2}, 2);  // F0 F1 B0 U0 B1 U1 becomes F0 F1 B0 B1 U1 U0
  Instructions& instructions = programs[0].instructions;
  std::rotate(instructions.begin() + 3, instructions.begin() + 4, instructions.end());
  expect_fault(
      programs, 2,
      "stage 0, position 4, UPDATE minibatch 1 microbatch 0 writes version 2: updates go in order; the next "
      "minibatch is 0");
}

TEST(Validator, BackwardBeforeItsForwardIsFound) {
  std::vector<StageProgram> programs = make_straight_programs(1, 2);
  std::swap(programs[0].instructions[0], programs[0].instructions[1]);
  expect_fault(
      programs, 2,
      "stage 0, position 0, BACKWARD minibatch 0 microbatch 0 reads version 0: the minibatch was not "
      "forwarded yet");
}

TEST(Validator, RepeatedForwardAndBackwardAreFound) {
  std::vector<StageProgram> programs = make_programs({2}, 3);
  Instructions& instructions = programs[0].instructions;
  instructions.insert(instructions.begin(), instructions.front());
  expect_fault(
      programs, 3,
      "stage 0, position 1, FORWARD minibatch 0 microbatch 0 reads version 0: the minibatch was already "
      "forwarded");
  instructions.erase(instructions.begin());
  const auto backward = find(instructions, Opcode::kBackward, 0);
  instructions.insert(backward, *backward);
  expect_fault(programs, 3,
               "stage 0, position 3, BACKWARD minibatch 0 microbatch 0 reads version 0: the backward was "
               "already done");
}

TEST(Validator, GradientsThatArriveInAnotherOrderAreFound) {
  std::vector<StageProgram> programs = make_programs({2, 2}, 2);
  Instructions& instructions = programs[0].instructions;  // F0 F1 B0 U0 B1 U1 becomes F0 F1 B1 U0 B0 U1
  std::swap(instructions[2], instructions[4]);
  expect_fault(
      programs, 2,
      "stage 0, position 2, BACKWARD minibatch 1 microbatch 0 reads version 0: the next message to arrive is "
      "of minibatch 0");
}

TEST(Validator, ForwardsOutOfOrderAreFound) {
  std::vector<StageProgram> programs = make_straight_programs(2, 3);
  std::swap(programs[0].instructions[0], programs[0].instructions[1]);
  expect_fault(
      programs, 3,
      "stage 0, position 0, FORWARD minibatch 1 microbatch 0 reads version 0: forwards go in order; the next "
      "minibatch is 0");
}

TEST(Validator, MoreInFlightThanAllowedIsFound) {
  std::vector<StageProgram> programs = make_programs({3}, 5);
  programs[0].options.in_flight = 2;  // the list was made for 3
  expect_fault(
      programs, 5,
      "stage 0, position 2, FORWARD minibatch 2 microbatch 0 reads version 0: in_flight is 2, and as many "
      "minibatches still wait for their backward");
}

TEST(Validator, MinibatchesAndMicrobatchesThatDoNotExistAreFound) {
  std::vector<StageProgram> programs = make_straight_programs(1, 3);
  expect_fault(
      programs, 2,
      "stage 0, position 6, FORWARD minibatch 2 microbatch 0 reads version 2: the minibatch does not exist; "
      "there are 2");
  programs[0].instructions[0].microbatch = MicrobatchIndex(1);
  expect_fault(
      programs, 3,
      "stage 0, position 0, FORWARD minibatch 0 microbatch 1 reads version 0: the microbatch does not exist; "
      "a minibatch has one");
}

TEST(Validator, RefusesProgramsThatAreNoPipeline) {
  expect_fault({}, 1, "there are no programs; a plan has at least one stage");
  expect_fault(make_straight_programs(1, 1), -1, "num_minibatches is -1; it must be 0 or more");
  std::vector<StageProgram> programs = make_straight_programs(2, 1);
  std::swap(programs[0], programs[1]);
  expect_fault(programs, 1, "program 0 of 2 is for stage 1 of 2");
  programs.pop_back();
  expect_fault(programs, 1, "program 0 of 1 is for stage 1 of 2");
  programs = make_straight_programs(1, 1);
  programs[0].options.in_flight = 0;
  expect_fault(programs, 1, "in_flight is 0 at stage 0; it must be at least 1");
}

}  // namespace
}  // namespace pipedream
