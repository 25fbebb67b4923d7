// The programs in the shape they have on paper, and their weight versions against the formula.
#include "schedule/program.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "base/failure.h"

namespace pipedream {
namespace {

ProgramOptions straight_options(std::int64_t stage, std::int64_t num_stages) {
  return {"pipedream", StageIndex(stage), num_stages, num_stages - stage};
}

// "F0 F1 | F2 B0 U0 | B1 U1": bars stand between the phases.
std::string on_paper(const ProgramOptions& options, std::int64_t num_minibatches) {
  std::string text;
  std::optional<Phase> phase;
  for (const Instruction& instruction : make_program(options, num_minibatches)) {
    const Phase next = phase_of(options, instruction, num_minibatches);
    if (phase && *phase != next) text += " |";
    phase = next;
    if (!text.empty()) text += ' ';
    text +=
        std::string(1, opcode_name(instruction.opcode)[0]) + std::to_string(instruction.minibatch.value());
  }
  return text;
}

// Versions of all instructions of one kind, in program order.
std::vector<std::int64_t> versions_of(Opcode opcode, const ProgramOptions& options,
                                      std::int64_t num_minibatches) {
  std::vector<std::int64_t> versions;
  for (const Instruction& instruction : make_program(options, num_minibatches)) {
    if (instruction.opcode == opcode) versions.push_back(instruction.version.value());
  }
  return versions;
}

std::string message_of(const ProgramOptions& options) {
  try {
    check_program_options(options);
  } catch (const UserError& error) {
    return error.what();
  }
  return "";
}

using Versions = std::vector<std::int64_t>;

TEST(Program, OneStageIsPlainTraining) {
  EXPECT_EQ(on_paper(straight_options(0, 1), 3), "F0 B0 U0 F1 B1 U1 F2 B2 U2");
  EXPECT_EQ(versions_of(Opcode::kForward, straight_options(0, 1), 3), (Versions{0, 1, 2}));
  EXPECT_EQ(versions_of(Opcode::kBackward, straight_options(0, 1), 3), (Versions{0, 1, 2}));
  EXPECT_EQ(versions_of(Opcode::kUpdate, straight_options(0, 1), 3), (Versions{1, 2, 3}));
}

TEST(Program, TwoStagesHaveTheShapeOnPaper) {
  EXPECT_EQ(on_paper(straight_options(0, 2), 4), "F0 | F1 B0 U0 F2 B1 U1 F3 B2 U2 | B3 U3");
  EXPECT_EQ(on_paper(straight_options(1, 2), 4), "F0 B0 U0 F1 B1 U1 F2 B2 U2 F3 B3 U3");
  EXPECT_EQ(versions_of(Opcode::kForward, straight_options(0, 2), 4), (Versions{0, 0, 1, 2}));
  EXPECT_EQ(versions_of(Opcode::kForward, straight_options(1, 2), 4), (Versions{0, 1, 2, 3}));
}

TEST(Program, ThreeStagesHaveTheShapeOnPaper) {
  EXPECT_EQ(on_paper(straight_options(0, 3), 5), "F0 F1 | F2 B0 U0 F3 B1 U1 F4 B2 U2 | B3 U3 B4 U4");
  EXPECT_EQ(on_paper(straight_options(1, 3), 5), "F0 | F1 B0 U0 F2 B1 U1 F3 B2 U2 F4 B3 U3 | B4 U4");
  EXPECT_EQ(on_paper(straight_options(2, 3), 5), "F0 B0 U0 F1 B1 U1 F2 B2 U2 F3 B3 U3 F4 B4 U4");
  EXPECT_EQ(versions_of(Opcode::kForward, straight_options(0, 3), 5), (Versions{0, 0, 0, 1, 2}));
  EXPECT_EQ(versions_of(Opcode::kBackward, straight_options(0, 3), 5), (Versions{0, 0, 0, 1, 2}));
  EXPECT_EQ(versions_of(Opcode::kForward, straight_options(1, 3), 5), (Versions{0, 0, 1, 2, 3}));
}

TEST(Program, FourStagesHaveTheShapeOnPaper) {
  EXPECT_EQ(on_paper(straight_options(0, 4), 6), "F0 F1 F2 | F3 B0 U0 F4 B1 U1 F5 B2 U2 | B3 U3 B4 U4 B5 U5");
  EXPECT_EQ(on_paper(straight_options(1, 4), 6), "F0 F1 | F2 B0 U0 F3 B1 U1 F4 B2 U2 F5 B3 U3 | B4 U4 B5 U5");
  EXPECT_EQ(on_paper(straight_options(2, 4), 6), "F0 | F1 B0 U0 F2 B1 U1 F3 B2 U2 F4 B3 U3 F5 B4 U4 | B5 U5");
  EXPECT_EQ(on_paper(straight_options(3, 4), 6), "F0 B0 U0 F1 B1 U1 F2 B2 U2 F3 B3 U3 F4 B4 U4 F5 B5 U5");
  EXPECT_EQ(versions_of(Opcode::kForward, straight_options(0, 4), 6), (Versions{0, 0, 0, 0, 1, 2}));
  EXPECT_EQ(versions_of(Opcode::kUpdate, straight_options(0, 4), 6), (Versions{1, 2, 3, 4, 5, 6}));
}

TEST(Program, FewerMinibatchesThanInFlightGoesFromWarmUpToCoolDown) {
  EXPECT_EQ(on_paper(straight_options(0, 4), 2), "F0 F1 | B0 U0 B1 U1");
  EXPECT_EQ(on_paper(straight_options(1, 4), 2), "F0 F1 | B0 U0 B1 U1");
  EXPECT_EQ(on_paper(straight_options(2, 4), 2), "F0 | F1 B0 U0 | B1 U1");
  EXPECT_EQ(on_paper(straight_options(0, 4), 1), "F0 | B0 U0");
  EXPECT_EQ(on_paper(straight_options(0, 4), 0), "");
}

TEST(Program, VersionsAreTheNewestAtTheForwardAndEqualTheFormula) {
  for (std::int64_t in_flight = 1; in_flight <= 16; ++in_flight) {
    const ProgramOptions options{"pipedream", StageIndex(0), 1, in_flight};
    for (const std::int64_t num_minibatches : {0, 1, 2, 15, 16, 17, 50}) {
      std::int64_t newest = 0;
      std::vector<std::int64_t> version_read(static_cast<std::size_t>(num_minibatches), -1);
      for (const Instruction& instruction : make_program(options, num_minibatches)) {
        const std::int64_t minibatch = instruction.minibatch.value();
        const std::int64_t formula = std::max<std::int64_t>(0, minibatch - in_flight + 1);
        std::int64_t& read = version_read[static_cast<std::size_t>(minibatch)];
        switch (instruction.opcode) {
          case Opcode::kForward:
            EXPECT_EQ(instruction.version.value(), newest);
            EXPECT_EQ(instruction.version.value(), formula);
            EXPECT_EQ(forward_version(options, instruction.minibatch), instruction.version);
            read = instruction.version.value();
            break;
          case Opcode::kBackward:
            EXPECT_EQ(instruction.version.value(), read);
            EXPECT_EQ(backward_version(options, instruction.minibatch), instruction.version);
            break;
          case Opcode::kUpdate:
            EXPECT_EQ(instruction.version.value(), ++newest);
            break;
        }
      }
      EXPECT_EQ(newest, num_minibatches);
    }
  }
}

TEST(Program, NumVersionsKeptIsInFlight) {
  for (std::int64_t stage = 0; stage < 4; ++stage)
    EXPECT_EQ(num_versions_kept(straight_options(stage, 4)), 4 - stage);
}

TEST(Instruction, TextSaysWhatIsReadAndWhatIsWritten) {
  const Instruction forward{Opcode::kForward, MinibatchId(3), MicrobatchIndex(0), WeightVersion(1)};
  const Instruction update{Opcode::kUpdate, MinibatchId(3), MicrobatchIndex(0), WeightVersion(4)};
  EXPECT_EQ(to_string(forward), "FORWARD minibatch 3 microbatch 0 reads version 1");
  EXPECT_EQ(to_string(update), "UPDATE minibatch 3 microbatch 0 writes version 4");
}

TEST(Phase, NothingCoolsDownWhileTheNumberOfMinibatchesIsUnknown) {
  const ProgramOptions options = straight_options(0, 3);
  const Instruction backward{Opcode::kBackward, MinibatchId(4), MicrobatchIndex(0), WeightVersion(2)};
  EXPECT_EQ(phase_of(options, backward, std::nullopt), Phase::kSteady);
  EXPECT_EQ(phase_of(options, backward, 7), Phase::kSteady);
  EXPECT_EQ(phase_of(options, backward, 6), Phase::kCoolDown);
  EXPECT_STREQ(phase_name(Phase::kCoolDown), "cool-down");
}

// Walks a cursor that learns the number of minibatches just before its `num_known_from`-th step.
std::vector<Instruction> walk(const ProgramOptions& options, std::int64_t num_minibatches,
                              std::size_t num_known_from) {
  ProgramCursor cursor(options);
  std::vector<Instruction> instructions;
  while (true) {
    if (instructions.size() == num_known_from) cursor.set_num_minibatches(num_minibatches);
    const std::optional<Instruction> instruction = cursor.current();
    if (!instruction) return instructions;
    instructions.push_back(*instruction);
    cursor.advance();
  }
}

TEST(ProgramCursor, LearningTheNumberOfMinibatchesLateGivesTheSameProgram) {
  for (std::int64_t in_flight = 1; in_flight <= 5; ++in_flight) {
    const ProgramOptions options{"pipedream", StageIndex(0), 1, in_flight};
    for (std::int64_t num_minibatches = 0; num_minibatches <= 9; ++num_minibatches) {
      const std::vector<Instruction> expected = make_program(options, num_minibatches);
      // The latest moment: the stage would forward a minibatch that does not exist.
      std::size_t latest = 0;
      for (std::size_t position = 0; position < expected.size(); ++position) {
        if (expected[position].opcode == Opcode::kForward) latest = position + 1;
      }
      if (num_minibatches >= in_flight) latest += 2;  // the backward and update that make room again
      for (std::size_t num_known_from = 0; num_known_from <= latest; ++num_known_from) {
        EXPECT_EQ(walk(options, num_minibatches, num_known_from), expected)
            << "in_flight " << in_flight << ", " << num_minibatches << " minibatches, known from "
            << num_known_from;
      }
    }
  }
}

TEST(ProgramCursor, AsksForAForwardWhileTheNumberOfMinibatchesIsUnknown) {
  ProgramCursor cursor(straight_options(0, 2));
  for (int position = 0; position < 3000; ++position) {
    ASSERT_TRUE(cursor.current().has_value());
    cursor.advance();
  }
  EXPECT_FALSE(cursor.num_minibatches().has_value());
}

TEST(ProgramCursor, NoMinibatchesEndsTheProgramAtOnce) {
  ProgramCursor cursor(straight_options(0, 3));
  cursor.set_num_minibatches(0);
  EXPECT_FALSE(cursor.current().has_value());
  EXPECT_EQ(cursor.num_minibatches(), 0);
}

TEST(ProgramCursor, EndingInsideTheWarmUpGoesOnWithTheFirstBackward) {
  ProgramCursor cursor(straight_options(0, 4));
  cursor.advance();
  EXPECT_EQ(cursor.current()->opcode, Opcode::kForward);
  cursor.set_num_minibatches(1);
  EXPECT_EQ(to_string(*cursor.current()), "BACKWARD minibatch 0 microbatch 0 reads version 0");
}

TEST(ProgramCursorDeathTest, AbortsOnMisuse) {
  ProgramCursor cursor(straight_options(0, 4));
  cursor.advance();
  cursor.advance();
  EXPECT_DEATH(cursor.set_num_minibatches(1), "num_minibatches 1 is below the 2 already forwarded");
  EXPECT_DEATH(cursor.set_num_minibatches(-1), "num_minibatches -1");
  cursor.set_num_minibatches(2);
  EXPECT_DEATH(cursor.set_num_minibatches(2), "already set");
  for (int position = 0; position < 4; ++position) cursor.advance();
  EXPECT_FALSE(cursor.current().has_value());
  EXPECT_DEATH(cursor.advance(), "the program is over");
}

TEST(DeriveInFlight, AStraightPipelineHasOneMinibatchPerStageDownstreamAndItself) {
  for (std::size_t num_stages = 1; num_stages <= 16; ++num_stages) {
    const std::vector<std::int64_t> in_flight = derive_in_flight(std::vector<std::int64_t>(num_stages, 1));
    for (std::size_t stage = 0; stage < num_stages; ++stage) {
      EXPECT_EQ(in_flight[stage], static_cast<std::int64_t>(num_stages - stage));
    }
  }
}

TEST(DeriveInFlight, ReplicatedPlansFollowTheFormula) {
  EXPECT_EQ(derive_in_flight({15, 1}), (std::vector<std::int64_t>{2, 1}));
  EXPECT_EQ(derive_in_flight({1, 2, 1}), (std::vector<std::int64_t>{5, 2, 1}));
  EXPECT_EQ(derive_in_flight({2, 1}), (std::vector<std::int64_t>{2, 1}));
  EXPECT_EQ(derive_in_flight({1, 2}), (std::vector<std::int64_t>{3, 1}));
  EXPECT_EQ(derive_in_flight({2, 2}), (std::vector<std::int64_t>{2, 1}));
  EXPECT_EQ(derive_in_flight({4, 3, 2, 1}), (std::vector<std::int64_t>{4, 3, 2, 1}));
  EXPECT_EQ(derive_in_flight({1, 15}), (std::vector<std::int64_t>{16, 1}));
}

TEST(DeriveInFlight, NeverDeadlocks) {
  // (n_s - 1) r_s never rises downstream.
  for (const std::vector<std::int64_t>& num_replicas :
       std::vector<std::vector<std::int64_t>>{{15, 1}, {1, 2, 1}, {3, 5, 2, 7}, {7, 2, 5, 3}, {1, 9, 1, 9}}) {
    const std::vector<std::int64_t> in_flight = derive_in_flight(num_replicas);
    for (std::size_t stage = 0; stage + 1 < in_flight.size(); ++stage) {
      EXPECT_GE((in_flight[stage] - 1) * num_replicas[stage],
                (in_flight[stage + 1] - 1) * num_replicas[stage + 1]);
    }
  }
}

TEST(DeriveInFlight, RefusesNoStagesAndImpossibleReplicaCounts) {
  EXPECT_THROW((void)derive_in_flight({}), UserError);
  EXPECT_THROW((void)derive_in_flight({1, 0}), UserError);
  EXPECT_THROW((void)derive_in_flight({-1}), UserError);
  EXPECT_THROW((void)derive_in_flight({std::int64_t{1} << 40}), UserError);
}

TEST(ProgramOptions, PublishedSchedulesThatAreNotBuiltAreNamedAsSuch) {
  for (const std::string schedule : {"vertical_sync", "2bw", "flush", "gpipe", "naive", "model_parallel",
                                     "data_parallel", "interleaved"}) {
    EXPECT_EQ(message_of({schedule, StageIndex(0), 1, 1}),
              "schedule \"" + schedule + "\" is not built yet; use one that is: \"pipedream\"");
  }
}

TEST(ProgramOptions, AnUnknownScheduleListsTheKnownOnes) {
  EXPECT_EQ(
      message_of({"pipedreams", StageIndex(0), 1, 1}),
      "unknown schedule \"pipedreams\"; known are \"pipedream\", \"vertical_sync\", \"2bw\", \"flush\", "
      "\"gpipe\", \"naive\", \"model_parallel\", \"data_parallel\", \"interleaved\"");
}

TEST(ProgramOptions, RefusesWhatIsOutOfRange) {
  EXPECT_NE(message_of({"pipedream", StageIndex(0), 1, 0}).find("in_flight is 0 at stage 0"),
            std::string::npos);
  EXPECT_NE(message_of({"pipedream", StageIndex(2), 2, 1}).find("stage 2 is outside"), std::string::npos);
  EXPECT_NE(message_of({"pipedream", StageIndex(-1), 2, 1}).find("stage -1 is outside"), std::string::npos);
  EXPECT_EQ(message_of({"pipedream", StageIndex(1), 2, 1}), "");
  EXPECT_THROW((void)make_program(straight_options(0, 1), -1), UserError);
  EXPECT_THROW((void)forward_version(straight_options(0, 1), MinibatchId(-1)), UserError);
  EXPECT_THROW(ProgramCursor(ProgramOptions{"gpipe", StageIndex(0), 1, 1}), UserError);
}

}  // namespace
}  // namespace pipedream
