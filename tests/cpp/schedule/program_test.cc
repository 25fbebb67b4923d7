// Tests that programs have the order that the papers show, and the weight versions of the formulas. Also
// tests that a cursor, which walks through a program and stores no list, gives the same instructions.
#include "schedule/program.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <string>
#include <vector>

#include "base/failure.h"
#include "schedule/programs.h"

namespace pipedream {
namespace {

// Returns the versions of all instructions of one opcode, in program order.
Counts versions_of(Opcode opcode, const ScheduleOptions& options, std::int64_t worker,
                   std::int64_t num_minibatches) {
  Counts versions;
  for (const Instruction& instruction : make_compute_program(options, Rank(worker), num_minibatches)) {
    if (instruction.opcode == opcode) versions.push_back(instruction.version.value());
  }
  return versions;
}

std::string error_of_placement(const std::string& schedule, const Counts& rank_of_stage) {
  ScheduleOptions options = make_options(schedule, straight(static_cast<std::int64_t>(rank_of_stage.size())));
  options.placement = Placement::at_ranks(rank_of_stage);
  return error_of(options);
}

// PipeDream (SOSP'19), figures 4 and 8.

TEST(PipeDream, OneStageIsPlainTraining) {
  const ScheduleOptions options = make_options("pipedream", {1});
  EXPECT_EQ(on_paper(options, 0, 3), "F0 B0 U0 F1 B1 U1 F2 B2 U2");
  EXPECT_EQ(versions_of(Opcode::kForward, options, 0, 3), (Counts{0, 1, 2}));
  EXPECT_EQ(versions_of(Opcode::kBackward, options, 0, 3), (Counts{0, 1, 2}));
  EXPECT_EQ(versions_of(Opcode::kUpdate, options, 0, 3), (Counts{1, 2, 3}));
}

TEST(PipeDream, FourStagesHaveTheShapeOnPaper) {
  const ScheduleOptions options = make_options("pipedream", {4, 3, 2, 1});
  EXPECT_EQ(on_paper(options, 0, 6), "F0 F1 F2 | F3 B0 U0 F4 B1 U1 F5 B2 U2 | B3 U3 B4 U4 B5 U5");
  EXPECT_EQ(on_paper(options, 1, 6), "F0 F1 | F2 B0 U0 F3 B1 U1 F4 B2 U2 F5 B3 U3 | B4 U4 B5 U5");
  EXPECT_EQ(on_paper(options, 2, 6), "F0 | F1 B0 U0 F2 B1 U1 F3 B2 U2 F4 B3 U3 F5 B4 U4 | B5 U5");
  EXPECT_EQ(on_paper(options, 3, 6), "F0 B0 U0 F1 B1 U1 F2 B2 U2 F3 B3 U3 F4 B4 U4 F5 B5 U5");
  EXPECT_EQ(versions_of(Opcode::kForward, options, 0, 6), (Counts{0, 0, 0, 0, 1, 2}));
  EXPECT_EQ(versions_of(Opcode::kBackward, options, 0, 6), (Counts{0, 0, 0, 0, 1, 2}));
  EXPECT_EQ(versions_of(Opcode::kForward, options, 3, 6), (Counts{0, 1, 2, 3, 4, 5}));
  EXPECT_EQ(versions_of(Opcode::kUpdate, options, 0, 6), (Counts{1, 2, 3, 4, 5, 6}));
}

TEST(PipeDream, FewerMinibatchesThanInFlightGoesFromWarmUpToCoolDown) {
  const ScheduleOptions options = make_options("pipedream", {4, 3, 2, 1});
  EXPECT_EQ(on_paper(options, 0, 2), "F0 F1 | B0 U0 B1 U1");
  EXPECT_EQ(on_paper(options, 1, 2), "F0 F1 | B0 U0 B1 U1");
  EXPECT_EQ(on_paper(options, 2, 2), "F0 | F1 B0 U0 | B1 U1");
  EXPECT_EQ(on_paper(options, 0, 1), "F0 | B0 U0");
  EXPECT_EQ(on_paper(options, 0, 0), "");
}

TEST(PipeDream, OnlyTheFirstMicrobatchesOfAMinibatchReadAnOlderVersion) {
  const ScheduleOptions options = make_options("pipedream", {2, 1}, 2);
  EXPECT_EQ(on_paper(options, 0, 3),
            "F0.0 | F0.1 B0.0 F1.0 B0.1 U0 F1.1 B1.0 F2.0 B1.1 U1 F2.1 B2.0 | B2.1 U2");
  EXPECT_EQ(on_paper(options, 1, 2), "F0.0 B0.0 F0.1 B0.1 U0 F1.0 B1.0 F1.1 B1.1 U1");
  EXPECT_EQ(versions_of(Opcode::kForward, options, 0, 3), (Counts{0, 0, 0, 1, 1, 2}));
  EXPECT_EQ(versions_of(Opcode::kBackward, options, 0, 3), (Counts{0, 0, 0, 1, 1, 2}));
  EXPECT_EQ(versions_of(Opcode::kBackward, make_options("unstashed", {2, 1}, 2), 0, 3),
            (Counts{0, 0, 1, 1, 2, 2}));
  EXPECT_EQ(versions_of(Opcode::kUpdate, options, 0, 3), (Counts{1, 2, 3}));
}

TEST(VerticalSync, HasPipeDreamsOrderAndTheInputStagesVersionsEverywhere) {
  const ScheduleOptions options = make_options("vertical_sync", {3, 2, 1});
  EXPECT_EQ(on_paper(options, 0, 5), on_paper(make_options("pipedream", {3, 2, 1}), 0, 5));
  EXPECT_EQ(on_paper(options, 2, 5), on_paper(make_options("pipedream", {3, 2, 1}), 2, 5));
  for (std::int64_t worker = 0; worker < 3; ++worker) {
    EXPECT_EQ(versions_of(Opcode::kForward, options, worker, 5), (Counts{0, 0, 0, 1, 2}));
    EXPECT_EQ(versions_of(Opcode::kBackward, options, worker, 5), (Counts{0, 0, 0, 1, 2}));
  }
}

TEST(Naive, BackwardReadsTheNewestVersion) {
  const ScheduleOptions options = make_options("naive", {3, 2, 1});
  EXPECT_EQ(on_paper(options, 0, 5), on_paper(make_options("pipedream", {3, 2, 1}), 0, 5));
  EXPECT_EQ(versions_of(Opcode::kForward, options, 0, 5), (Counts{0, 0, 0, 1, 2}));
  EXPECT_EQ(versions_of(Opcode::kBackward, options, 0, 5), (Counts{0, 1, 2, 3, 4}));
}

// The expected text is figure 2 of PipeDream-2BW (ICML'21): 4 workers, 4 microbatches per minibatch.
TEST(TwoBw, HasTheShapeOnPaper) {
  const ScheduleOptions options = make_options("2bw", {4, 3, 2, 1}, 4);
  EXPECT_EQ(on_paper(options, 0, 3),
            "F0.0 F0.1 F0.2 | F0.3 B0.0 F1.0 B0.1 F1.1 B0.2 F1.2 B0.3 U0 "
            "F1.3 B1.0 F2.0 B1.1 F2.1 B1.2 F2.2 B1.3 U1 F2.3 B2.0 | B2.1 B2.2 B2.3 U2");
  EXPECT_EQ(on_paper(options, 3, 2),
            "F0.0 B0.0 F0.1 B0.1 F0.2 B0.2 F0.3 B0.3 U0 F1.0 B1.0 F1.1 B1.1 F1.2 B1.2 F1.3 B1.3 U1");
}

TEST(TwoBw, MicrobatchKReadsThePapersVersionAtEveryStage) {
  for (std::int64_t num_microbatches = 4; num_microbatches <= 7; ++num_microbatches) {
    const ScheduleOptions options = make_options("2bw", {4, 3, 2, 1}, num_microbatches);
    for (std::int64_t worker = 0; worker < 4; ++worker) {
      std::int64_t k = 1;  // numbers the microbatches of the run from 1, as in the paper
      for (const std::int64_t version : versions_of(Opcode::kForward, options, worker, 6)) {
        EXPECT_EQ(version, std::max<std::int64_t>((k - 1) / num_microbatches - 1, 0));
        ++k;
      }
    }
  }
}

// PipeDream-2BW (ICML'21), section 3.2.
TEST(Flush, IsOneForwardOneBackwardThatDrainsInEveryMinibatch) {
  const ScheduleOptions options = make_options("flush", {3, 2, 1}, 4);
  EXPECT_EQ(
      on_paper(options, 0, 2),
      "F0.0 F0.1 | F0.2 B0.0 F0.3 B0.1 | B0.2 B0.3 U0 | F1.0 F1.1 | F1.2 B1.0 F1.3 B1.1 | B1.2 B1.3 U1");
  EXPECT_EQ(on_paper(options, 1, 1), "F0.0 | F0.1 B0.0 F0.2 B0.1 F0.3 B0.2 | B0.3 U0");
  EXPECT_EQ(on_paper(options, 2, 1), "F0.0 B0.0 F0.1 B0.1 F0.2 B0.2 F0.3 B0.3 U0");
  EXPECT_EQ(versions_of(Opcode::kForward, options, 0, 2), (Counts{0, 0, 0, 0, 1, 1, 1, 1}));
}

TEST(Flush, FewerMicrobatchesThanStagesGoesFromWarmUpToCoolDown) {
  EXPECT_EQ(on_paper(make_options("flush", {4, 3, 2, 1}, 2), 0, 1), "F0.0 | F0.1 B0.0 | B0.1 U0");
  EXPECT_EQ(on_paper(make_options("flush", {4, 3, 2, 1}, 1), 0, 2), "F0 B0 U0 F1 B1 U1");
}

// GPipe (NeurIPS'19), figure 2.
TEST(Gpipe, ForwardsAllMicrobatchesAndThenBackwardsAll) {
  const ScheduleOptions options = make_options("gpipe", {4, 3, 2, 1}, 4);
  for (std::int64_t worker = 0; worker < 4; ++worker) {
    EXPECT_EQ(
        on_paper(options, worker, 2),
        "F0.0 F0.1 F0.2 | F0.3 B0.0 | B0.1 B0.2 B0.3 U0 | F1.0 F1.1 F1.2 | F1.3 B1.0 | B1.1 B1.2 B1.3 U1");
  }
}

TEST(Gpipe, RecomputeStandsRightBeforeItsBackward) {
  ScheduleOptions options = make_options("gpipe", {2, 1}, 2);
  options.recompute = {true, false};
  EXPECT_EQ(on_paper(options, 0, 1), "F0.0 | F0.1 R0.0 B0.0 | R0.1 B0.1 U0");
  EXPECT_EQ(on_paper(options, 1, 1), "F0.0 | F0.1 B0.0 | B0.1 U0");
}

TEST(ModelParallel, HasOneMicrobatchInFlightWhateverThePlanSays) {
  EXPECT_EQ(on_paper(make_options("model_parallel", {4, 3, 2, 1}), 0, 3), "F0 B0 U0 F1 B1 U1 F2 B2 U2");
  EXPECT_EQ(on_paper(make_options("model_parallel", {2, 1}, 2), 0, 2),
            "F0.0 B0.0 F0.1 B0.1 U0 F1.0 B1.0 F1.1 B1.1 U1");
}

// The expected text is figure 4, lower half, of Megatron-LM (SC'21): 4 workers, 2 chunks each, 8
// microbatches.
TEST(Interleaved, HasMegatronsOrder) {
  const ScheduleOptions options = make_interleaved(4, 2, 8);
  EXPECT_EQ(on_paper(options, 0, 1),
            "F0:0.0 F0:0.1 F0:0.2 F0:0.3 F4:0.0 F4:0.1 F4:0.2 F4:0.3 F0:0.4 F0:0.5 | "
            "F0:0.6 B4:0.0 F0:0.7 B4:0.1 F4:0.4 B4:0.2 F4:0.5 B4:0.3 F4:0.6 B0:0.0 F4:0.7 B0:0.1 | "
            "B0:0.2 B0:0.3 B4:0.4 B4:0.5 B4:0.6 B4:0.7 B0:0.4 B0:0.5 B0:0.6 B0:0.7 U0:0 U4:0");
  EXPECT_EQ(on_paper(options, 3, 1),
            "F3:0.0 F3:0.1 F3:0.2 F3:0.3 | F7:0.0 B7:0.0 F7:0.1 B7:0.1 F7:0.2 B7:0.2 F7:0.3 B7:0.3 "
            "F3:0.4 B3:0.0 F3:0.5 B3:0.1 F3:0.6 B3:0.2 F3:0.7 B3:0.3 F7:0.4 B7:0.4 F7:0.5 B7:0.5 "
            "F7:0.6 B7:0.6 F7:0.7 B7:0.7 | B3:0.4 B3:0.5 B3:0.6 B3:0.7 U3:0 U7:0");
}

TEST(Interleaved, MicrobatchesThatDoNotFillAGroupArePassedOver) {
  const ScheduleOptions options = make_interleaved(2, 2, 3);
  EXPECT_EQ(
      on_paper(options, 0, 1),
      "F0:0.0 F0:0.1 F2:0.0 F2:0.1 | F0:0.2 B2:0.0 B2:0.1 F2:0.2 B0:0.0 | B0:0.1 B2:0.2 B0:0.2 U0:0 U2:0");
  EXPECT_EQ(on_paper(make_interleaved(3, 2, 1), 0, 2),
            "F0:0 F3:0 | B3:0 B0:0 U0:0 U3:0 | F0:1 F3:1 | B3:1 B0:1 U0:1 U3:1");
}

TEST(Interleaved, OneChunkPerWorkerIsFlush) {
  for (std::int64_t num_workers = 1; num_workers <= 5; ++num_workers) {
    for (std::int64_t num_microbatches = 1; num_microbatches <= 9; ++num_microbatches) {
      const ScheduleOptions flush = make_options("flush", straight(num_workers), num_microbatches);
      EXPECT_EQ(make_compute_programs(make_interleaved(num_workers, 1, num_microbatches), 3),
                make_compute_programs(flush, 3));
      // The plan's number of microbatches in flight changes nothing.
      ScheduleOptions interleaved = make_options("interleaved", flush.in_flight, num_microbatches);
      interleaved.in_flight.assign(interleaved.in_flight.size(), 7);
      EXPECT_EQ(make_compute_programs(interleaved, 3), make_compute_programs(flush, 3));
    }
  }
}

// Computes the version by the table of docs/schedules.md, as a second implementation.
std::int64_t version_by_formula(const std::string& schedule, const Counts& in_flight, std::size_t stage,
                                std::int64_t minibatch, std::int64_t microbatch, std::int64_t m) {
  const std::int64_t k = minibatch * m + microbatch;
  if (schedule == "pipedream" || schedule == "naive") {
    return std::max<std::int64_t>(0, (k - in_flight[stage] + 1) / m);
  }
  if (schedule == "vertical_sync") return std::max<std::int64_t>(0, (k - in_flight[0] + 1) / m);
  if (schedule == "2bw") return std::max<std::int64_t>(0, minibatch - 1);
  return minibatch;
}

std::int64_t num_kept_by_formula(const std::string& schedule, const Counts& in_flight, std::size_t stage,
                                 std::int64_t m) {
  const auto kept_of = [m](std::int64_t count) { return 1 + (count - 1 + m - 1) / m; };
  const std::map<std::string, std::int64_t> kept = {
      {"pipedream", kept_of(in_flight[stage])}, {"vertical_sync", kept_of(in_flight[0])}, {"2bw", 2}};
  return kept.contains(schedule) ? kept.at(schedule) : 1;
}

TEST(Versions, EqualTheFormulas) {
  for (std::int64_t num_stages = 1; num_stages <= 6; ++num_stages) {
    for (const std::string& schedule : kStraightSchedules) {
      for (const std::int64_t m : {1, 2, 4, 5, 12}) {
        if (schedule == "2bw" && m < num_stages - 1) continue;
        const ScheduleOptions options = make_options(schedule, straight(num_stages), m);
        for (std::int64_t stage = 0; stage < num_stages; ++stage) {
          const auto stage_index = static_cast<std::size_t>(stage);
          EXPECT_EQ(num_versions_kept(options, StageIndex(stage)),
                    num_kept_by_formula(schedule, options.in_flight, stage_index, m));
          for (const Instruction& instruction : make_compute_program(options, Rank(stage), 9)) {
            const auto& [minibatch, microbatch] = std::pair(instruction.minibatch, instruction.microbatch);
            const std::int64_t formula = version_by_formula(schedule, options.in_flight, stage_index,
                                                            minibatch.value(), microbatch.value(), m);
            if (instruction.opcode == Opcode::kForward) {
              EXPECT_EQ(instruction.version.value(), formula);
              EXPECT_EQ(forward_version(options, instruction.stage, minibatch, microbatch),
                        instruction.version);
            } else if (instruction.opcode == Opcode::kBackward) {
              EXPECT_EQ(instruction.version.value(), schedule == "naive" ? minibatch.value() : formula);
              EXPECT_EQ(backward_version(options, instruction.stage, minibatch, microbatch),
                        instruction.version);
            } else {
              EXPECT_EQ(instruction.version.value(), minibatch.value() + 1);
            }
          }
        }
      }
    }
  }
}

TEST(Versions, WithOneStageOnlyTwoBwDelays) {
  for (const std::string& schedule : schedule_names()) {
    const ScheduleOptions options = make_options(schedule, {1}, 2);
    const std::int64_t delay = schedule == "2bw" ? 1 : 0;
    EXPECT_EQ(forward_version(options, StageIndex(0), MinibatchId(5)), WeightVersion(5 - delay)) << schedule;
    EXPECT_EQ(num_versions_kept(options, StageIndex(0)), 1 + delay) << schedule;
  }
}

TEST(Versions, InTheStashingSchedulesAForwardReadsTheNewest) {
  for (std::int64_t in_flight = 1; in_flight <= 8; ++in_flight) {
    for (std::int64_t num_microbatches = 1; num_microbatches <= 4; ++num_microbatches) {
      const ScheduleOptions options = make_options("pipedream", {in_flight}, num_microbatches);
      std::int64_t newest = 0;
      for (const Instruction& instruction : make_compute_program(options, Rank(0), 20)) {
        if (instruction.opcode == Opcode::kForward) {
          EXPECT_EQ(instruction.version.value(), newest);
        } else if (instruction.opcode == Opcode::kUpdate) {
          EXPECT_EQ(instruction.version.value(), ++newest);
        }
      }
      EXPECT_EQ(newest, 20);
    }
  }
}

TEST(TiedVersions, FollowVerticalSyncWhereStagesReadDifferentVersions) {
  const auto version = [](const std::string& schedule, std::int64_t minibatch) {
    return tied_version(make_options(schedule, {3, 2, 1}, 3), StageIndex(0), MinibatchId(minibatch),
                        MicrobatchIndex(1))
        .value();
  };
  for (std::int64_t minibatch = 0; minibatch < 9; ++minibatch) {
    for (const std::string schedule : {"pipedream", "vertical_sync", "naive"}) {
      EXPECT_EQ(version(schedule, minibatch), std::max<std::int64_t>(0, (3 * minibatch - 1) / 3)) << schedule;
    }
    for (const std::string schedule : {"flush", "gpipe", "model_parallel", "interleaved"}) {
      EXPECT_EQ(version(schedule, minibatch), minibatch) << schedule;
    }
    EXPECT_EQ(version("2bw", minibatch), std::max<std::int64_t>(0, minibatch - 1));
  }
}

TEST(TiedVersions, KeepWhatTheirRuleNeeds) {
  const std::map<std::string, std::int64_t> kept = {
      {"pipedream", 2}, {"vertical_sync", 2}, {"naive", 2},          {"2bw", 2},
      {"flush", 1},     {"gpipe", 1},         {"model_parallel", 1}, {"interleaved", 1}};
  for (const auto& [schedule, num_kept] : kept) {
    const ScheduleOptions options = make_options(schedule, {3, 2, 1}, 3);
    EXPECT_EQ(num_tied_versions_kept(options, StageIndex(1)), num_kept) << schedule;
  }
}

TEST(Window, IsTheTables) {
  const auto window = [](const std::string& schedule, std::int64_t num_microbatches, std::int64_t stage) {
    return num_microbatches_in_flight(make_options(schedule, {4, 3, 2, 1}, num_microbatches),
                                      StageIndex(stage));
  };
  for (const std::string schedule : {"pipedream", "vertical_sync", "naive"}) {
    EXPECT_EQ(window(schedule, 1, 0), 4);
    EXPECT_EQ(window(schedule, 5, 0), 4);
    EXPECT_EQ(window(schedule, 5, 3), 1);
  }
  EXPECT_EQ(window("2bw", 5, 1), 3);
  EXPECT_EQ(window("flush", 5, 1), 3);
  EXPECT_EQ(window("flush", 2, 0), 2);
  EXPECT_EQ(window("gpipe", 5, 3), 5);
  EXPECT_EQ(window("model_parallel", 5, 0), 1);
  EXPECT_EQ(window("interleaved", 5, 1), 3);
}

TEST(Window, OfInterleavedIsWhatEachStageHoldsAtMost) {
  // From the lists of HasMegatronsOrder.
  const ScheduleOptions options = make_interleaved(4, 2, 8);
  EXPECT_EQ(num_microbatches_in_flight(options, StageIndex(0)), 8);
  EXPECT_EQ(num_microbatches_in_flight(options, StageIndex(3)), 5);
  EXPECT_EQ(num_microbatches_in_flight(options, StageIndex(7)), 1);
}

TEST(Schedules, KnowWhichDrainAndWhichStash) {
  const std::map<std::string, bool> drains = {
      {"pipedream", false}, {"vertical_sync", false}, {"naive", false},         {"2bw", false},
      {"flush", true},      {"gpipe", true},          {"model_parallel", true}, {"interleaved", true}};
  for (const auto& [schedule, does_drain] : drains) {
    EXPECT_EQ(drains_every_minibatch(make_options(schedule, {2, 1}, 2)), does_drain) << schedule;
    EXPECT_EQ(stashes_versions(make_options(schedule, {2, 1}, 2), StageIndex(0)), schedule != "naive")
        << schedule;
  }
}

TEST(Schedules, AreNamedInTheOrderOfTheTable) {
  EXPECT_EQ(schedule_names(),
            (std::vector<std::string>{"pipedream", "vertical_sync", "unstashed", "2bw", "flush", "gpipe",
                                      "model_parallel", "data_parallel", "interleaved"}));
}

TEST(ScheduleOptions, WithoutAPlacementHaveStageSAtRankS) {
  const ScheduleOptions flush = make_options("flush", {3, 2, 1});
  EXPECT_EQ(num_workers(flush), 3);
  EXPECT_EQ(placement_of(flush), Placement::in_order({1, 1, 1}));
  const ScheduleOptions interleaved = make_interleaved(3, 2, 1);
  EXPECT_EQ(num_stages(interleaved), 6);
  EXPECT_EQ(num_workers(interleaved), 3);
  EXPECT_EQ(placement_of(interleaved), interleaved.placement);
}

TEST(Program, OfFewerThanNoMinibatchesIsRefused) {
  EXPECT_THROW((void)make_compute_program(make_options("flush", {2, 1}), Rank(0), -1), UserError);
}

TEST(Phase, NothingCoolsDownWhileTheNumberOfMinibatchesIsUnknown) {
  const ScheduleOptions options = make_options("pipedream", {3, 2, 1});
  const Instruction backward{Opcode::kBackward,  StageIndex(0),    MinibatchId(4),
                             MicrobatchIndex(0), WeightVersion(2), {}};
  EXPECT_EQ(phase_of(options, backward, std::nullopt), Phase::kSteady);
  EXPECT_EQ(phase_of(options, backward, 7), Phase::kSteady);
  EXPECT_EQ(phase_of(options, backward, 6), Phase::kCoolDown);
  EXPECT_STREQ(phase_name(Phase::kWarmUp), "warm-up");
  EXPECT_STREQ(phase_name(Phase::kSteady), "steady");
  EXPECT_STREQ(phase_name(Phase::kCoolDown), "cool-down");
}

TEST(Phase, OfADrainingScheduleDoesNotDependOnTheNumberOfMinibatches) {
  const ScheduleOptions options = make_options("flush", {2, 1}, 2);
  for (const Instruction& instruction : make_compute_program(options, Rank(0), 3)) {
    EXPECT_EQ(phase_of(options, instruction, std::nullopt), phase_of(options, instruction, 3));
  }
}

// Walks a cursor, which is told the number of minibatches just before its step `num_known_from`.
Instructions walk(const ScheduleOptions& options, std::int64_t worker, std::int64_t num_minibatches,
                  std::size_t num_known_from) {
  ComputeCursor cursor(options, Rank(worker));
  Instructions instructions;
  while (true) {
    if (instructions.size() == num_known_from) cursor.set_num_minibatches(num_minibatches);
    const std::optional<Instruction> instruction = cursor.current();
    if (!instruction) return instructions;
    instructions.push_back(*instruction);
    cursor.advance();
  }
}

// Returns the number of steps before the cursor would forward a minibatch that does not exist. This is the
// latest moment at which the cursor can be told the number of minibatches.
std::size_t num_steps_until_asked(const ScheduleOptions& options, std::int64_t worker,
                                  std::int64_t num_minibatches) {
  ComputeCursor cursor(options, Rank(worker));
  std::size_t num_steps = 0;
  for (; cursor.current()->minibatch.value() < num_minibatches; ++num_steps) cursor.advance();
  EXPECT_EQ(cursor.current()->opcode, Opcode::kForward);
  EXPECT_EQ(cursor.current()->microbatch, MicrobatchIndex(0));
  return num_steps;
}

TEST(ComputeCursor, LearningTheNumberOfMinibatchesLateGivesTheSameProgram) {
  std::vector<ScheduleOptions> all = {make_interleaved(2, 2, 3)};
  for (const std::string& schedule : kStraightSchedules) all.push_back(make_options(schedule, {3, 2, 1}, 3));
  for (ScheduleOptions& options : all) {
    options.recompute.assign(options.in_flight.size(), false);
    options.recompute.front() = true;
    for (std::int64_t worker = 0; worker < num_workers(options); ++worker) {
      for (std::int64_t num_minibatches = 0; num_minibatches <= 5; ++num_minibatches) {
        const Instructions expected = make_compute_program(options, Rank(worker), num_minibatches);
        const std::size_t latest = num_steps_until_asked(options, worker, num_minibatches);
        for (std::size_t num_known_from = 0; num_known_from <= latest; ++num_known_from) {
          EXPECT_EQ(walk(options, worker, num_minibatches, num_known_from), expected)
              << options.schedule << ", worker " << worker << ", " << num_minibatches
              << " minibatches, known from " << num_known_from;
        }
      }
    }
  }
}

TEST(ComputeCursor, AsksForAForwardWhileTheNumberOfMinibatchesIsUnknown) {
  ComputeCursor cursor(make_options("pipedream", {2, 1}), Rank(0));
  for (int position = 0; position < 3000; ++position) {
    ASSERT_TRUE(cursor.current().has_value());
    cursor.advance();
  }
  EXPECT_FALSE(cursor.num_minibatches().has_value());
}

TEST(ComputeCursor, NoMinibatchesEndsTheProgramAtOnce) {
  ComputeCursor cursor(make_options("gpipe", {2, 1}, 4), Rank(1));
  cursor.set_num_minibatches(0);
  EXPECT_FALSE(cursor.current().has_value());
  EXPECT_EQ(cursor.num_minibatches(), 0);
}

TEST(ComputeCursor, EndingInsideTheWarmUpGoesOnWithTheFirstBackward) {
  ComputeCursor cursor(make_options("pipedream", {4, 3, 2, 1}), Rank(0));
  cursor.advance();
  EXPECT_EQ(cursor.current()->opcode, Opcode::kForward);
  cursor.set_num_minibatches(1);
  EXPECT_EQ(to_string(*cursor.current()), "BACKWARD stage 0 minibatch 0 microbatch 0 reads version 0");
}

TEST(ComputeCursor, RecomputeForNaiveReadsWhatItsBackwardReads) {
  ScheduleOptions options = make_options("naive", {2, 1});
  options.recompute = {true, true};
  EXPECT_EQ(versions_of(Opcode::kForward, options, 0, 4), (Counts{0, 0, 1, 2}));
  EXPECT_EQ(versions_of(Opcode::kRecompute, options, 0, 4), (Counts{0, 1, 2, 3}));
  EXPECT_EQ(versions_of(Opcode::kBackward, options, 0, 4), (Counts{0, 1, 2, 3}));
}

TEST(ComputeCursorDeathTest, AbortsOnMisuse) {
  ComputeCursor cursor(make_options("pipedream", {4, 3, 2, 1}), Rank(0));
  cursor.advance();
  cursor.advance();
  EXPECT_DEATH(cursor.set_num_minibatches(1),
               "num_minibatches 1 is below the 2 microbatches already forwarded");
  EXPECT_DEATH(cursor.set_num_minibatches(-1), "num_minibatches -1");
  cursor.set_num_minibatches(2);
  EXPECT_DEATH(cursor.set_num_minibatches(2), "already set");
  for (int position = 0; position < 4; ++position) cursor.advance();
  EXPECT_FALSE(cursor.current().has_value());
  EXPECT_DEATH(cursor.advance(), "the program is over");
}

TEST(ComputeCursor, AnEndThatContradictsWhatWasDoneIsKnownBeforeItIsTaken) {
  ScheduleOptions options = make_options("pipedream", {4, 3, 2, 1});
  options.first_minibatch = MinibatchId(5);
  ComputeCursor cursor(options, Rank(0));
  cursor.advance();
  cursor.advance();
  for (const std::int64_t refused :
       {std::int64_t{-1}, std::int64_t{0}, std::int64_t{6}, kNumMinibatchesMax + 1}) {
    EXPECT_FALSE(cursor.may_set_num_minibatches(refused)) << refused;
  }
  EXPECT_TRUE(cursor.may_set_num_minibatches(7));
  cursor.set_num_minibatches(7);
  EXPECT_FALSE(cursor.may_set_num_minibatches(7)) << "a second time";
}

TEST(ComputeCursorDeathTest, AMinibatchThatWasBegunExists) {
  ComputeCursor cursor(make_options("gpipe", {2, 1}, 4), Rank(0));
  cursor.advance();
  EXPECT_DEATH(cursor.set_num_minibatches(0),
               "num_minibatches 0 is below the 1 microbatches already forwarded");
}

TEST(DeriveInFlight, AStraightPipelineHasOneMinibatchPerStageDownstreamAndItself) {
  for (std::int64_t num_stages = 1; num_stages <= 16; ++num_stages) {
    const Counts in_flight = straight(num_stages);
    for (std::int64_t stage = 0; stage < num_stages; ++stage) {
      EXPECT_EQ(in_flight[static_cast<std::size_t>(stage)], num_stages - stage);
    }
  }
}

TEST(DeriveInFlight, ReplicatedPlansFollowTheFormula) {
  EXPECT_EQ(derive_in_flight({15, 1}), (Counts{2, 1}));
  EXPECT_EQ(derive_in_flight({1, 2, 1}), (Counts{5, 2, 1}));
  EXPECT_EQ(derive_in_flight({2, 1}), (Counts{2, 1}));
  EXPECT_EQ(derive_in_flight({1, 2}), (Counts{3, 1}));
  EXPECT_EQ(derive_in_flight({2, 2}), (Counts{2, 1}));
  EXPECT_EQ(derive_in_flight({4, 3, 2, 1}), (Counts{4, 3, 2, 1}));
  EXPECT_EQ(derive_in_flight({1, 15}), (Counts{16, 1}));
}

TEST(DeriveInFlight, NeverDeadlocks) {
  // (n_s - 1) r_s never rises downstream.
  for (const Counts& num_replicas :
       std::vector<Counts>{{15, 1}, {1, 2, 1}, {3, 5, 2, 7}, {7, 2, 5, 3}, {1, 9, 1, 9}}) {
    const Counts in_flight = derive_in_flight(num_replicas);
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

TEST(ScheduleOptions, AnUnknownScheduleListsTheKnownOnes) {
  EXPECT_EQ(
      error_of(make_options("pipedreams", {1})),
      "unknown schedule \"pipedreams\"; known are: \"pipedream\", \"vertical_sync\", \"unstashed\", \"2bw\", "
      "\"flush\", \"gpipe\", \"model_parallel\", \"data_parallel\", \"interleaved\"");
}

TEST(ScheduleOptions, RefusesCountsThatAreOutOfRange) {
  EXPECT_EQ(error_of(make_options("flush", {})),
            "in_flight is empty; it has one number per stage, and at least one stage");
  EXPECT_EQ(error_of(make_options("flush", {2, 0})),
            "in_flight is 0 at stage 1; it must be at least 1 and at most 1099511627776");
  EXPECT_NE(error_of(make_options("flush", {kInFlightMax + 1})), "");
  EXPECT_EQ(error_of(make_options("flush", {kInFlightMax}, kNumMicrobatchesMax)), "");
  EXPECT_EQ(error_of(make_options("flush", {1}, 0)),
            "num_microbatches is 0; it must be at least 1 and at most 1048576");
  EXPECT_NE(error_of(make_options("flush", {1}, kNumMicrobatchesMax + 1)), "");
}

TEST(ScheduleOptions, RefusesListsOfTheWrongLength) {
  ScheduleOptions options = make_options("flush", {2, 1});
  options.recompute = {true};
  EXPECT_EQ(error_of(options), "recompute has 1 entries for 2 stages; give one per stage, or none");
  options.recompute = {true, false};
  options.placement = Placement::in_order({1, 1, 1});
  EXPECT_EQ(error_of(options), "placement has 3 entries for 2 stages; give one per stage, or none");
}

TEST(ScheduleOptions, TwoBwNeedsAsManyMicrobatchesAsAreInFlightBesideOne) {
  EXPECT_EQ(error_of(make_options("2bw", {4, 3, 2, 1}, 2)),
            "num_microbatches is 2 with in_flight 4 at stage 0; schedule \"2bw\" keeps two versions, so an "
            "update needs at least 3 microbatches of each replica: use 3");
  EXPECT_EQ(error_of(make_options("2bw", {4, 3, 2, 1}, 3)), "");
}

TEST(ScheduleOptions, OnlyInterleavedHasSeveralStagesAtAWorker) {
  EXPECT_EQ(error_of_placement("flush", {0, 1, 2}), "");
  EXPECT_EQ(error_of_placement("flush", {0, 1, 0}),
            "stage 2 is at rank 0; it must be at rank 2: only schedule \"interleaved\" runs several stages "
            "at a worker");
  EXPECT_EQ(error_of_placement("flush", {0, 2, 1}),
            "stage 1 is at rank 2; it must be at rank 1: stages lie at the ranks in order, replica by "
            "replica");
}

TEST(ScheduleOptions, InterleavedDealsItsStagesOut) {
  EXPECT_EQ(error_of_placement("interleaved", {0, 1, 0, 1}), "");
  EXPECT_EQ(error_of_placement("interleaved", {0, 1, 2}), "");
  EXPECT_EQ(error_of_placement("interleaved", {0}), "");
  EXPECT_EQ(
      error_of_placement("interleaved", {0, 1, 1, 0}),
      "stage 2 is at rank 1; it must be at rank 0: schedule \"interleaved\" has stage s at rank s mod 2");
  EXPECT_EQ(error_of_placement("interleaved", {0, 1, 0}),
            "the placement spreads 3 stages over 2 workers; schedule \"interleaved\" needs as many stages at "
            "every worker");
  EXPECT_EQ(error_of_placement("interleaved", {0, 0}),
            "the placement puts all 2 stages at one worker; schedule \"interleaved\" needs at least 2 "
            "workers");
}

}  // namespace
}  // namespace pipedream
