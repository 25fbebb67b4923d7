// Tests replicated stages: which replica computes which microbatch, which versions are read, and what
// replicas push and pull. A round is the minibatches of one update.
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <numeric>
#include <random>

#include "base/failure.h"
#include "schedule/programs.h"
#include "schedule/validator.h"

namespace pipedream {
namespace {

// Returns a program as text: "F0 B0 >1:0 <1:1 Rn1:0 Sn1:0 U0 }1:0 {1:0". Each transfer has the other rank or
// replica and the minibatch.
// - ">" is a push to a replica, "<" a push from a replica.
// - "}" is a pull sent to a replica, "{" a pull from a replica.
// - "Rn" receives a norm from a rank, "Sn" sends a norm to a rank.
//
// Activations and gradients are left out.
std::string sync_on_paper(const ScheduleOptions& options, std::int64_t rank, std::int64_t num_minibatches) {
  std::string text;
  for (const Instruction& instruction : make_program(options, Rank(rank), num_minibatches)) {
    const EdgeKind kind = instruction.edge.kind;
    const bool is_sync = kind == EdgeKind::kPush || kind == EdgeKind::kPull || kind == EdgeKind::kNorm;
    if (travels(instruction.opcode) && !is_sync) continue;
    if (!text.empty()) text += ' ';
    const bool sends = instruction.opcode == Opcode::kSend;
    const StageReplica& other = sends ? instruction.edge.to : instruction.edge.from;
    if (!travels(instruction.opcode)) {
      text += opcode_name(instruction.opcode)[0];
    } else if (kind == EdgeKind::kNorm) {
      text += (sends ? "Sn" : "Rn");
      text += std::to_string(options.placement.rank_of(other.stage, other.replica).value()) + ':';
    } else {
      text += kind == EdgeKind::kPush ? (sends ? '>' : '<') : (sends ? '}' : '{');
      text += std::to_string(other.replica.value()) + ':';
    }
    text += std::to_string(instruction.minibatch.value());
  }
  return text;
}

std::string name_of(const ScheduleOptions& options, std::int64_t num_minibatches) {
  std::string name = options.schedule + ' ';
  for (StageIndex stage; stage.value() < num_stages(options); stage = stage.next()) {
    name += std::to_string(options.placement.num_replicas(stage)) + '-';
  }
  return name + ", " + std::to_string(options.num_microbatches) + " microbatches, staleness " +
         std::to_string(options.staleness) + ", from " + std::to_string(options.first_minibatch.value()) +
         " to " + std::to_string(num_minibatches);
}

TEST(Replicas, TakeMinibatchesInTurnsAndUpdateOnceARound) {
  const ScheduleOptions options = make_replicated("pipedream", {2, 1});
  EXPECT_EQ(on_paper(options, 0, 8), "F0 | F2 B0 U0 F4 B2 U2 F6 B4 U4 | B6 U6");
}

TEST(Replicas, PushAfterTheBackwardAndPullBeforeTheForwardThatReads) {
  const ScheduleOptions options = make_replicated("pipedream", {2, 1});
  EXPECT_EQ(sync_on_paper(options, 0, 8),
            "F0 F2 B0 >1:0 <1:1 U0 }1:0 {1:0 F4 B2 >1:2 <1:3 U2 }1:2 {1:2 F6 B4 >1:4 <1:5 U4 }1:4 "
            "B6 >1:6 <1:7 U6 }1:6 {1:4 {1:6");
  EXPECT_EQ(sync_on_paper(options, 1, 4), "F1 F3 B1 >0:1 <0:0 U0 }0:0 B3 >0:3 <0:2 U2 }0:2 {0:0 {0:2");
  EXPECT_EQ(sync_on_paper(options, 2, 3), "F0 B0 U0 F1 B1 U1 F2 B2 U2");
}

TEST(Replicas, WithoutAMinibatchInTheLastRoundUpdateTheirShardAllTheSame) {
  const ScheduleOptions options = make_replicated("pipedream", {3, 1});
  EXPECT_EQ(sync_on_paper(options, 0, 4),
            "F0 F3 B0 >1:0 >2:0 <1:1 <2:2 U0 }1:0 }2:0 B3 >1:3 >2:3 U3 }1:3 }2:3 {1:0 {2:0 {1:3 {2:3");
  EXPECT_EQ(sync_on_paper(options, 2, 4),
            "F2 B2 >0:2 >1:2 <0:0 <1:1 U0 }0:0 }1:0 <0:3 U3 }0:3 }1:3 {0:0 {1:0 {0:3 {1:3");
  EXPECT_EQ(sync_on_paper(options, 2, 1), "<0:0 U0 }0:0 }1:0 {0:0 {1:0");
  EXPECT_EQ(sync_on_paper(options, 2, 0), "");
}

TEST(Replicas, StalenessLetsTheUpdateWaitForHalfAsManyMoreRounds) {
  const ScheduleOptions options = make_replicated("pipedream", {2, 1}, 1, 1);
  EXPECT_EQ(sync_on_paper(options, 0, 8),
            "F0 F2 B0 >1:0 F4 B2 >1:2 <1:1 U0 }1:0 {1:0 F6 B4 >1:4 <1:3 U2 }1:2 B6 >1:6 <1:5 U4 }1:4 <1:7 U6 "
            "}1:6 {1:2 {1:4 {1:6");
  // A stage with one replica waits for no other replica, so it updates at once. But it reads a version that
  // is older by one, as the other stages do.
  EXPECT_EQ(on_paper(options, 2, 3), "F0 B0 U0 F1 B1 U1 F2 B2 U2");
  EXPECT_EQ(forward_version(options, StageIndex(1), MinibatchId(5)), WeightVersion(4));
  EXPECT_EQ(num_gradients_kept(options, StageIndex(0)), 2);
  EXPECT_EQ(num_gradients_kept(options, StageIndex(1)), 1);
  EXPECT_EQ(sync_on_paper(make_replicated("pipedream", {2, 1}, 1, 2), 0, 6),
            "F0 F2 B0 >1:0 F4 B2 >1:2 <1:1 U0 }1:0 B4 >1:4 <1:3 U2 }1:2 <1:5 U4 }1:4 {1:0 {1:2 {1:4");
}

TEST(Replicas, OfADrainingScheduleUpdateTogetherOnceInTheirLeastCommonMultiple) {
  const ScheduleOptions options = make_replicated("flush", {2, 1}, 2);
  EXPECT_EQ(on_paper(options, 1, 2), "F0.1 B0.1 U0 F1.1 B1.1 U1");
  EXPECT_EQ(on_paper(options, 2, 2), "F0.0 B0.0 F0.1 B0.1 U0 F1.0 B1.0 F1.1 B1.1 U1");
  const ScheduleOptions odd = make_replicated("flush", {2, 1}, 3);
  EXPECT_EQ(on_paper(odd, 0, 4),
            "F0.0 | F0.2 B0.0 F1.1 B0.2 | B1.1 U0 | F2.0 | F2.2 B2.0 F3.1 B2.2 | B3.1 U2");
  EXPECT_EQ(sync_on_paper(odd, 1, 3),
            "F0 F1 B0 F1 B1 B1 >0:0 <0:0 U0 }0:0 {0:0 F2 B2 >0:2 <0:2 U2 }0:2 {0:2");
  const ScheduleOptions sixfold = make_replicated("gpipe", {3, 2});
  EXPECT_EQ(sync_on_paper(sixfold, 3, 6), "F0 F2 F4 B0 B2 B4 >1:0 <1:1 U0 }1:0 {1:0");
  EXPECT_EQ(sync_on_paper(sixfold, 3, 8),
            "F0 F2 F4 B0 B2 B4 >1:0 <1:1 U0 }1:0 {1:0 F6 B6 >1:6 <1:7 U6 }1:6 {1:6");
  EXPECT_EQ(sync_on_paper(sixfold, 4, 7), "F1 F3 F5 B1 B3 B5 >0:1 <0:0 U0 }0:0 <0:6 U6 }0:6 {0:0 {0:6");
}

TEST(Replicas, WithoutStashingPullIntoTheirOnlySlotRightAfterTheUpdate) {
  EXPECT_EQ(sync_on_paper(make_replicated("naive", {2, 1}), 0, 6),
            "F0 F2 B0 >1:0 <1:1 U0 }1:0 {1:0 F4 B2 >1:2 <1:3 U2 }1:2 {1:2 B4 >1:4 <1:5 U4 }1:4 {1:4");
}

TEST(Replicas, OfDataParallelTakeEquallyManyMicrobatchesEachARound) {
  const ScheduleOptions options = make_replicated("data_parallel", {2}, 4);
  EXPECT_EQ(on_paper(options, 1, 2), "F0.1 B0.1 F0.3 B0.3 U0 F1.1 B1.1 F1.3 B1.3 U1");
  EXPECT_EQ(sync_on_paper(make_replicated("data_parallel", {2}), 0, 3),
            "F0 B0 >1:0 <1:1 U0 }1:0 {1:0 F2 B2 >1:2 U2 }1:2 {1:2");
}

TEST(Replicas, ThatReduceTogetherPushAndPullNothing) {
  ScheduleOptions options = make_replicated("pipedream", {2, 1});
  options.uses_allreduce = true;
  EXPECT_EQ(sync_on_paper(options, 0, 5), "F0 F2 B0 U0 F4 B2 U2 B4 U4");
  EXPECT_EQ(edges_of(options).size(), 4U) << "activations and gradients";
}

TEST(Replicas, ThatReduceTogetherDeadlockWhereOneUpdatesOutOfTurn) {
  ScheduleOptions options = make_replicated("pipedream", {1, 2});
  options.uses_allreduce = true;
  Programs programs = make_programs(options, 4);
  EXPECT_EQ(replay(options, programs, 4).error, "");
  // Stage 0 sends minibatch 1 only after it has received the gradient of minibatch 0. Replica 0 sends that
  // gradient only after its update.
  Instructions& last = programs[1];
  const auto of = [](Opcode opcode) {
    return [opcode](const Instruction& instruction) { return instruction.opcode == opcode; };
  };
  const auto gradient = std::find_if(last.begin(), last.end(), of(Opcode::kSend));
  const auto update = std::find_if(last.begin(), last.end(), of(Opcode::kUpdate));
  std::rotate(gradient, update, update + 1);
  options.in_flight[0] = 1;
  programs[0] = make_program(options, Rank(0), 4);
  const std::string error = replay(options, programs, 4).error;
  EXPECT_TRUE(error.starts_with("deadlock")) << error;
  EXPECT_NE(error.find("UPDATE stage 1 minibatch 0 writes version 1: waits for the other replicas"),
            std::string::npos)
      << error;
}

ScheduleOptions make_asynchronous(const std::string& schedule, const Counts& num_replicas,
                                  std::int64_t num_microbatches = 1) {
  ScheduleOptions options = make_replicated(schedule, num_replicas, num_microbatches);
  options.asynchronous = true;
  return options;
}

TEST(AsynchronousShards, AreAskedOnceAMinibatchAndWaitForNobody) {
  const ScheduleOptions options = make_asynchronous("pipedream", {2, 1});
  EXPECT_EQ(sync_on_paper(options, 0, 8),
            "F0 F2 B0 >1:0 U0 {1:0 F4 B2 >1:2 U2 {1:2 F6 B4 >1:4 U4 B6 {1:4 >1:6 U6 {1:6");
  EXPECT_EQ(sync_on_paper(options, 1, 4), "F1 F3 B1 >0:1 U0 B3 {0:0 >0:3 U2 {0:2");
  EXPECT_EQ(sync_on_paper(options, 2, 3), "F0 B0 U0 F1 B1 U1 F2 B2 U2");
  EXPECT_EQ(sync_on_paper(make_asynchronous("data_parallel", {2}), 0, 3),
            "F0 B0 >1:0 U0 {1:0 F2 B2 >1:2 U2 {1:2");
}

TEST(AsynchronousShards, GiveAReplicaNoVersionOfARoundThatItHasNoMinibatchIn) {
  const ScheduleOptions options = make_asynchronous("pipedream", {3, 1});
  EXPECT_EQ(sync_on_paper(options, 0, 4), "F0 F3 B0 >1:0 >2:0 U0 B3 {1:0 {2:0 >1:3 >2:3 U3 {1:3 {2:3");
  EXPECT_EQ(sync_on_paper(options, 2, 4), "F2 B2 >0:2 >1:2 U0 {0:0 {1:0");
  EXPECT_EQ(sync_on_paper(options, 2, 2), "");
}

TEST(AsynchronousShards, ServeEachPushByAPull) {
  const std::vector<Instructions> services = make_services(make_asynchronous("pipedream", {2, 1}), 3);
  ASSERT_EQ(services.size(), 2U);
  std::vector<std::string> texts;
  for (const Instructions& service : services) {
    std::string& text = texts.emplace_back();
    for (const Instruction& instruction : service) text += to_string(instruction) + '\n';
  }
  EXPECT_EQ(texts[0],
            "RECV push stage 0 to stage 0 replica 1 minibatch 0\n"
            "SEND pull stage 0 replica 1 to stage 0 minibatch 0\n"
            "RECV push stage 0 to stage 0 replica 1 minibatch 2\n"
            "SEND pull stage 0 replica 1 to stage 0 minibatch 2\n");
  EXPECT_EQ(texts[1],
            "RECV push stage 0 replica 1 to stage 0 minibatch 1\n"
            "SEND pull stage 0 to stage 0 replica 1 minibatch 0\n");
  EXPECT_TRUE(make_services(make_replicated("pipedream", {2, 1}), 3).empty());
}

TEST(AsynchronousShards, AreRefusedWithWhatWantsRoundsInCommon) {
  for (const std::string& schedule : kStraightSchedules) {
    const std::string error = error_of(make_asynchronous(schedule, {2, 1}));
    EXPECT_EQ(error.empty(), schedule == "pipedream") << schedule << ": " << error;
  }
  EXPECT_EQ(error_of(make_asynchronous("flush", {2, 1})),
            "sync is 'asp', and schedule is 'flush': asp has no rounds, in which its replicas would update "
            "together; use schedule 'pipedream' or 'data_parallel', or sync='bsp'");
  ScheduleOptions options = make_asynchronous("pipedream", {2, 1});
  options.ties = {{StageIndex(0), StageIndex(1)}};
  EXPECT_EQ(
      error_of(options),
      "sync is 'asp', and stages share a parameter: the stages would have different versions of it; use "
      "sync='bsp'");
  options = make_asynchronous("pipedream", {2, 1});
  options.staleness = 1;
  EXPECT_NE(error_of(options).find("staleness is 1"), std::string::npos);
  options = make_asynchronous("pipedream", {2, 1});
  options.exchanges_norms = true;
  EXPECT_NE(error_of(options).find("norms of gradients"), std::string::npos);
  options = make_asynchronous("pipedream", {2, 1});
  options.uses_allreduce = true;
  EXPECT_NE(error_of(options).find("by a collective"), std::string::npos);
}

TEST(Replicas, OfADrainingScheduleAddUpTheNormsOfAllWorkersOnceARound) {
  ScheduleOptions options = make_replicated("flush", {2, 1});
  options.exchanges_norms = true;
  EXPECT_EQ(sync_on_paper(options, 0, 2), "F0 B0 >1:0 <1:1 Rn1:0 Sn1:0 U0 }1:0 {1:0");
  EXPECT_EQ(sync_on_paper(options, 1, 2), "F1 B1 >0:1 <0:0 Rn2:0 Sn0:0 Rn0:0 Sn2:0 U0 }0:0 {0:0");
  EXPECT_EQ(sync_on_paper(options, 2, 3), "F0 B0 F1 B1 Sn1:0 Rn1:0 U0 F2 B2 Sn1:2 Rn1:2 U2");
  EXPECT_EQ(sync_on_paper(options, 1, 1), "<0:0 Rn2:0 Sn0:0 Rn0:0 Sn2:0 U0 }0:0 {0:0");
}

TEST(Replicas, OfOtherSchedulesAddUpTheNormsOfTheirStage) {
  ScheduleOptions options = make_replicated("pipedream", {1, 2});
  options.exchanges_norms = true;
  EXPECT_EQ(sync_on_paper(options, 0, 2), "F0 F1 B0 U0 B1 U1");
  EXPECT_EQ(sync_on_paper(options, 1, 2), "F0 B0 >1:0 <1:1 Rn2:0 Sn2:0 U0 }1:0 {1:0");
  EXPECT_EQ(sync_on_paper(options, 2, 2), "F1 B1 >0:1 <0:0 Sn1:0 Rn1:0 U0 }0:0 {0:0");
}

// Computes the version by the rules of docs/schedules.md and program.h, as a second implementation.
std::int64_t version_by_formula(const ScheduleOptions& options, std::int64_t stage, std::int64_t minibatch,
                                std::int64_t microbatch, bool of_backward) {
  const auto replicas = [&](std::int64_t of) { return options.placement.num_replicas(StageIndex(of)); };
  const auto in_flight = [&](std::int64_t of) { return options.in_flight[static_cast<std::size_t>(of)]; };
  const std::int64_t m = options.num_microbatches;
  const std::int64_t k = minibatch * m + microbatch;
  const auto per_round = [&](std::int64_t of) { return std::lcm(m, replicas(of)) / m; };
  const auto own_per_round = [&](std::int64_t of) { return per_round(of) * m / replicas(of); };
  const std::int64_t j = minibatch / per_round(stage);
  const auto delayed = [&](std::int64_t of) {
    return std::max<std::int64_t>(0, k / replicas(of) - in_flight(of) + 1) / own_per_round(of);
  };
  if (options.schedule == "pipedream") return std::max<std::int64_t>(0, delayed(stage) - options.staleness);
  if (options.schedule == "naive") return of_backward ? j : delayed(stage);
  if (options.schedule == "vertical_sync") return delayed(0) * per_round(0) / per_round(stage);
  if (options.schedule == "2bw") return std::max<std::int64_t>(0, j - 1);
  std::int64_t common = m;
  for (std::int64_t of = 0; of < num_stages(options); ++of) common = std::lcm(common, replicas(of));
  return minibatch / (common / m);
}

using Ties = std::vector<TiedStages>;

// Returns ties in which every stage shares a parameter with every other stage.
Ties all_tied(std::size_t num_stages) {
  Ties ties;
  for (StageIndex owner; owner.value() < static_cast<std::int64_t>(num_stages); owner = owner.next()) {
    for (StageIndex user = owner.next(); user.value() < static_cast<std::int64_t>(num_stages);
         user = user.next()) {
      ties.push_back({owner, user});
    }
  }
  return ties;
}

const std::vector<Counts> kPlans = {{2, 1},    {1, 2},    {3, 1},    {2, 2},    {3, 2},       {2, 3},
                                    {2, 1, 1}, {1, 2, 1}, {4, 2, 1}, {1, 3, 2}, {2, 3, 1, 2}, {15, 1}};

// Returns the options of every schedule that a plan with these replicas allows.
std::vector<ScheduleOptions> all_of(const Counts& num_replicas, std::int64_t num_microbatches) {
  std::vector<ScheduleOptions> all;
  for (const std::string& schedule : kStraightSchedules) {
    all.push_back(make_replicated(schedule, num_replicas, num_microbatches));
    if (!error_of(all.back()).empty()) all.pop_back();
  }
  for (const std::int64_t staleness : {1, 2, 5}) {
    all.push_back(make_replicated("pipedream", num_replicas, num_microbatches, staleness));
  }
  return all;
}

// Returns asynchronous schedules of pipelines of several stages, and of one stage.
std::vector<ScheduleOptions> all_asynchronous() {
  std::vector<ScheduleOptions> all;
  for (const Counts& plan : kPlans) {
    for (const std::int64_t num_microbatches : {1, 3}) {
      all.push_back(make_asynchronous("pipedream", plan, num_microbatches));
      all.back().recompute.assign(plan.size(), num_microbatches == 3);
    }
  }
  for (const std::int64_t num_replicas : {1, 2, 5}) {
    all.push_back(make_asynchronous("data_parallel", {num_replicas}));
    all.push_back(make_asynchronous("pipedream", {num_replicas}));
  }
  return all;
}

TEST(AsynchronousShards, AreAcceptedByTheValidatorWithOneAnswerForEachAtMost) {
  for (ScheduleOptions options : all_asynchronous()) {
    for (const std::int64_t first : {0, 60}) {
      options.first_minibatch = MinibatchId(first);
      for (const std::int64_t num_own : {0, 1, 3, 7, 12, 31}) {
        const std::int64_t num_minibatches = options.first_minibatch.value() + num_own;
        const ReplayReport report = replay(options, make_programs(options, num_minibatches), num_minibatches);
        ASSERT_TRUE(report.ok) << name_of(options, num_minibatches) << ": " << report.error;
        for (StageIndex stage; stage.value() < num_stages(options); stage = stage.next()) {
          ASSERT_LE(report.versions_live_max[static_cast<std::size_t>(stage.value())],
                    num_versions_kept(options, stage));
        }
        for (const auto& [edge, queued_max] : report.edges) {
          if (edge.kind != EdgeKind::kPush && edge.kind != EdgeKind::kPull) continue;
          ASSERT_LE(queued_max, 1) << name_of(options, num_minibatches) << ": " << to_string(edge);
        }
      }
    }
  }
}

TEST(AsynchronousShards, ReadVersionsOfTheReplicasOwnRounds) {
  for (const ScheduleOptions& options : all_asynchronous()) {
    for (const Place& place : options.placement.places()) {
      const Rounds rounds = rounds_of(options, place.stage);
      const std::int64_t per_round = rounds.microbatches_per_round();
      const std::int64_t num_begun =
          (40 * options.num_microbatches - place.replica.value() + per_round - 1) / per_round;
      std::int64_t num_updates = 0;
      for (const Instruction& instruction : make_compute_program(options, place.rank, 40)) {
        if (instruction.opcode == Opcode::kUpdate) {
          ASSERT_EQ(instruction.version.value(), ++num_updates);
        } else {
          ASSERT_EQ(instruction.version.value(),
                    version_by_formula(options, place.stage.value(), instruction.minibatch.value(),
                                       instruction.microbatch.value(), false));
        }
      }
      ASSERT_EQ(num_updates, num_begun) << name_of(options, 40);
    }
  }
}

TEST(AsynchronousShards, AreNotAskedAgainBeforeTheirAnswerIsTakenIn) {
  const ScheduleOptions options = make_asynchronous("pipedream", {2, 1});
  Programs programs = make_programs(options, 8);
  Instructions& first = programs[0];
  const auto is_last_push = [](const Instruction& instruction) {
    return instruction.edge.kind == EdgeKind::kPush && instruction.minibatch == MinibatchId(6);
  };
  const auto push = std::find_if(first.begin(), first.end(), is_last_push);
  ASSERT_EQ(to_string(*(push - 1)), "RECV pull stage 0 replica 1 to stage 0 minibatch 4");
  std::iter_swap(push - 1, push);
  const std::string error = replay(options, programs, 8).error;
  EXPECT_NE(
      error.find("SEND push stage 0 to stage 0 replica 1 minibatch 6: RECV pull stage 0 replica 1 to stage 0 "
                 "minibatch 4 comes first"),
      std::string::npos)
      << error;
}

TEST(AsynchronousShards, ThatNobodyAsksLetTheReplicaWait) {
  const ScheduleOptions options = make_asynchronous("pipedream", {2, 1});
  Programs programs = make_programs(options, 4);
  Instructions& first = programs[0];
  const auto push = std::find_if(first.begin(), first.end(), [](const Instruction& instruction) {
    return instruction.edge.kind == EdgeKind::kPush;
  });
  first.erase(push);
  const std::string error = replay(options, programs, 4).error;
  EXPECT_NE(error.find("SEND push stage 0 to stage 0 replica 1 minibatch 0"), std::string::npos) << error;
}

// A cursor may be told late how many minibatches there are. It gives the same instructions. Only pulls before
// a forward of a minibatch that does not exist may be added.
TEST(AsynchronousShards, DoTheSameHoweverLateTheEndIsKnown) {
  for (const ScheduleOptions& options : all_asynchronous()) {
    if (options.placement.num_replicas(StageIndex(0)) == 15) continue;
    for (std::int64_t num_minibatches = 0; num_minibatches < 14; ++num_minibatches) {
      ProgramCursor cursor(options, Rank(0));
      Instructions done;
      while (const auto current = cursor.current()) {
        const bool is_over =
            current->opcode == Opcode::kForward && current->minibatch.value() >= num_minibatches;
        if (is_over && !cursor.num_minibatches()) {
          cursor.set_num_minibatches(num_minibatches);
          continue;
        }
        done.push_back(*current);
        cursor.advance();
      }
      const Instructions known = make_program(options, Rank(0), num_minibatches);
      ASSERT_TRUE(std::is_permutation(done.begin(), done.end(), known.begin(), known.end()))
          << name_of(options, num_minibatches);
      Programs programs = make_programs(options, num_minibatches);
      programs[0] = done;
      ASSERT_EQ(replay(options, programs, num_minibatches).error, "") << name_of(options, num_minibatches);
    }
  }
}

TEST(Replicas, ReadTheVersionsOfTheFormulas) {
  for (const Counts& plan : kPlans) {
    for (const ScheduleOptions& options : all_of(plan, plan.size() == 2 ? 4 : 1)) {
      for (std::int64_t rank = 0; rank < num_workers(options); ++rank) {
        for (const Instruction& instruction : make_compute_program(options, Rank(rank), 40)) {
          if (instruction.opcode == Opcode::kUpdate) continue;
          const std::int64_t minibatch = instruction.minibatch.value();
          const bool of_backward = instruction.opcode == Opcode::kBackward;
          ASSERT_EQ(instruction.version.value(),
                    version_by_formula(options, instruction.stage.value(), minibatch,
                                       instruction.microbatch.value(), of_backward))
              << name_of(options, 40) << ": " << to_string(instruction);
        }
      }
    }
  }
}

TEST(Replicas, EveryMicrobatchIsDoneOnceByItsReplicaAndEveryRoundIsUpdatedAtAllOfThem) {
  for (const Counts& plan : kPlans) {
    for (const ScheduleOptions& options : all_of(plan, 4)) {
      for (const Place& place : options.placement.places()) {
        const Rounds rounds = rounds_of(options, place.stage);
        std::map<Opcode, std::vector<std::int64_t>> done;
        for (const Instruction& instruction : make_compute_program(options, place.rank, 17)) {
          ASSERT_EQ(instruction.replica, place.replica);
          const bool is_update = instruction.opcode == Opcode::kUpdate;
          done[instruction.opcode].push_back(
              is_update ? instruction.minibatch.value()
                        : rounds.number_of(instruction.minibatch, instruction.microbatch));
        }
        Counts own;
        for (std::int64_t number = place.replica.value(); number < 17 * 4; number += rounds.num_replicas) {
          own.push_back(number);
        }
        Counts begins;
        for (std::int64_t begin = 0; begin < 17; begin += rounds.minibatches_per_round) {
          begins.push_back(begin);
        }
        ASSERT_EQ(done[Opcode::kForward], own) << name_of(options, 17);
        ASSERT_EQ(done[Opcode::kBackward], own) << name_of(options, 17);
        ASSERT_EQ(done[Opcode::kUpdate], begins) << name_of(options, 17);
      }
    }
  }
}

TEST(Replicas, ValidatorAcceptsEveryPlanScheduleAndLength) {
  for (const Counts& plan : kPlans) {
    for (const std::int64_t num_microbatches : {1, 6}) {
      for (ScheduleOptions options : all_of(plan, num_microbatches)) {
        options.recompute.assign(plan.size(), true);
        for (const std::int64_t num_minibatches : {0, 1, 3, 7, 12, 31}) {
          if (plan[0] == 15 && num_microbatches > 1) continue;
          options.exchanges_norms = num_minibatches % 2 == 1;
          options.ties = num_minibatches % 3 == 0 ? Ties{} : all_tied(plan.size());
          const ReplayReport report =
              replay(options, make_programs(options, num_minibatches), num_minibatches);
          ASSERT_TRUE(report.ok) << name_of(options, num_minibatches) << ": " << report.error;
          for (StageIndex stage; stage.value() < num_stages(options); stage = stage.next()) {
            const auto index = static_cast<std::size_t>(stage.value());
            ASSERT_LE(report.versions_live_max[index], num_versions_kept(options, stage))
                << name_of(options, num_minibatches) << ", stage " << stage.value();
            ASSERT_LE(report.activations_live_max[index], num_microbatches_in_flight(options, stage));
          }
          for (const auto& [edge, queued_max] : report.edges) {
            if (edge.kind == EdgeKind::kTiedVersion) {
              ASSERT_LE(queued_max, num_tied_versions_ahead(options, {edge.from.stage, edge.to.stage}))
                  << name_of(options, num_minibatches) << ": " << to_string(edge);
            }
            if (edge.kind != EdgeKind::kNorm) continue;
            ASSERT_EQ(queued_max, num_minibatches == 0 ? 0 : 1) << name_of(options, num_minibatches);
          }
        }
      }
    }
  }
}

TEST(Replicas, VersionsKeptIsTight) {
  for (const Counts& plan : kPlans) {
    if (plan[0] == 15) continue;
    for (const ScheduleOptions& options : all_of(plan, 6)) {
      const std::int64_t num_minibatches = 60;
      const ReplayReport report = replay(options, make_programs(options, num_minibatches), num_minibatches);
      ASSERT_TRUE(report.ok) << report.error;
      for (StageIndex stage; stage.value() < num_stages(options); stage = stage.next()) {
        EXPECT_EQ(report.versions_live_max[static_cast<std::size_t>(stage.value())],
                  num_versions_kept(options, stage))
            << name_of(options, num_minibatches) << ", stage " << stage.value();
      }
    }
  }
}

TEST(Replicas, ValidatorAcceptsRandomPlans) {
  std::mt19937 random(7);
  const auto draw = [&](std::int64_t most) {
    return static_cast<std::int64_t>(random() % static_cast<std::uint64_t>(most)) + 1;
  };
  for (int trial = 0; trial < 500; ++trial) {
    Counts plan(static_cast<std::size_t>(draw(4)));
    for (std::int64_t& num_replicas : plan) num_replicas = draw(4);
    const std::string& schedule = kStraightSchedules[static_cast<std::size_t>(draw(7) - 1)];
    ScheduleOptions options = make_replicated(schedule, plan, draw(4) == 1 ? 24 : draw(3));
    if (schedule == "pipedream") options.staleness = draw(4) - 1;
    options.exchanges_norms = draw(2) == 1;
    options.uses_allreduce = draw(3) == 1;
    if (draw(2) == 1) options.ties = all_tied(plan.size());
    // Puts more microbatches in flight than needed, unless the number would then rise downstream.
    const std::int64_t more = draw(3) - 1;
    for (std::size_t stage = 0; stage < plan.size(); ++stage) {
      options.in_flight[stage] +=
          more * (std::accumulate(plan.begin(), plan.end(), std::int64_t{1},
                                  [](auto one, auto two) { return std::lcm(one, two); }) /
                  plan[stage]);
    }
    if (!error_of(options).empty()) continue;
    std::int64_t common = 1;
    for (const std::int64_t num_replicas : plan) common = std::lcm(common, num_replicas);
    options.first_minibatch = MinibatchId(common * (draw(3) - 1));
    if (draw(2) == 1) options.oldest_minibatch = MinibatchId(0);
    const std::int64_t num_minibatches = options.first_minibatch.value() + draw(30) - 1;
    const ReplayReport report = replay(options, make_programs(options, num_minibatches), num_minibatches);
    ASSERT_TRUE(report.ok) << name_of(options, num_minibatches) << ": " << report.error;
  }
}

// Returns the transfers of tied parameters as text. "St0" sends a tied gradient (t) to rank 0, and "Rv1"
// receives a tied version (v) from rank 1.
std::string ties_on_paper(const ScheduleOptions& options, std::int64_t rank, std::int64_t num_minibatches) {
  std::string text;
  for (const Instruction& instruction : make_program(options, Rank(rank), num_minibatches)) {
    const EdgeKind kind = instruction.edge.kind;
    const bool is_of_tie = kind == EdgeKind::kTiedGradient || kind == EdgeKind::kTiedVersion;
    if (travels(instruction.opcode) && !is_of_tie) continue;
    if (!text.empty()) text += ' ';
    if (travels(instruction.opcode)) {
      const bool sends = instruction.opcode == Opcode::kSend;
      const StageReplica& other = sends ? instruction.edge.to : instruction.edge.from;
      text += (sends ? "S" : "R") + std::string(kind == EdgeKind::kTiedGradient ? "t" : "v");
      text += std::to_string(other.replica.value()) + ':';
    } else {
      text += opcode_name(instruction.opcode)[0];
    }
    text += std::to_string(instruction.minibatch.value());
  }
  return text;
}

TEST(Replicas, OfAnOwnerAddTheUsersGradientToTheirOwnAndSendItTheirShards) {
  ScheduleOptions options = make_replicated("pipedream", {2, 1});
  options.ties = {{StageIndex(0), StageIndex(1)}};
  EXPECT_EQ(ties_on_paper(options, 0, 4), "F0 F2 B0 Rt0:0 U0 Sv0:0 B2 Rt0:2 U2 Sv0:2");
  EXPECT_EQ(ties_on_paper(options, 1, 4), "F1 F3 B1 Rt0:1 U0 Sv0:0 B3 Rt0:3 U2 Sv0:2");
  EXPECT_EQ(ties_on_paper(options, 2, 6),
            "F0 B0 St0:0 U0 F1 B1 St1:1 U1 F2 B2 St0:2 U2 F3 B3 St1:3 U3 Rv0:0 Rv1:0 F4 B4 St0:4 U4 "
            "F5 B5 St1:5 U5 Rv0:2 Rv1:2 Rv0:4 Rv1:4");
  options.uses_allreduce = true;
  EXPECT_EQ(ties_on_paper(options, 0, 2), "F0 B0 Rt0:0 U0 Sv0:0");
  EXPECT_EQ(ties_on_paper(options, 1, 2), "F1 B1 Rt0:1 U0") << "which has the same";
}

TEST(Replicas, OfAUserEachReceiveEveryVersionAndSendTheGradientsOfTheirMinibatches) {
  ScheduleOptions options = make_replicated("flush", {1, 2});
  options.ties = {{StageIndex(0), StageIndex(1)}};
  EXPECT_EQ(ties_on_paper(options, 0, 3),
            "F0 F1 B0 Rt0:0 B1 Rt1:1 U0 Sv0:0 Sv1:0 F2 B2 Rt0:2 U2 Sv0:2 Sv1:2");
  EXPECT_EQ(ties_on_paper(options, 1, 3), "F0 B0 St0:0 U0 Rv0:0 F2 B2 St0:2 U2 Rv0:2");
  EXPECT_EQ(ties_on_paper(options, 2, 3), "F1 B1 St0:1 U0 U2 Rv0:0 Rv0:2");
}

// Computes the version of tied parameters by a second implementation of the rule. If stages would read
// different versions, all read the version that vertical_sync would read at the owner. A staleness of s makes
// every version older by s.
TEST(Replicas, ReadTiedVersionsInRoundsOfTheirOwner) {
  for (const Counts& plan : kPlans) {
    for (const ScheduleOptions& options : all_of(plan, 4)) {
      ScheduleOptions as_sync = options;
      as_sync.schedule = "vertical_sync";
      as_sync.staleness = 0;
      const bool differ = options.schedule == "pipedream" || options.schedule == "vertical_sync" ||
                          options.schedule == "naive";
      for (StageIndex owner; owner.value() < num_stages(options); owner = owner.next()) {
        for (std::int64_t k = 0; k < 40 * options.num_microbatches; ++k) {
          const std::int64_t minibatch = k / options.num_microbatches;
          const std::int64_t microbatch = k % options.num_microbatches;
          const std::int64_t version =
              version_by_formula(differ ? as_sync : options, owner.value(), minibatch, microbatch, false);
          ASSERT_EQ(tied_version(options, owner, MinibatchId(minibatch), MicrobatchIndex(microbatch)).value(),
                    std::max<std::int64_t>(0, version - options.staleness))
              << name_of(options, 40) << ", owner " << owner.value() << ", minibatch " << minibatch;
        }
      }
    }
  }
}

TEST(Replicas, EdgesJoinThoseThatHaveAMinibatchInCommonAndNameItsItems) {
  for (const Counts& plan : kPlans) {
    for (ScheduleOptions options : all_of(plan, 1)) {
      for (const std::int64_t first : {0, 30, 60}) {
        options.first_minibatch = MinibatchId(first);
        options.exchanges_norms = true;
        options.ties = all_tied(plan.size());
        if (!error_of(options).empty()) continue;
        const std::int64_t num_minibatches = first + 40;
        std::map<Edge, Counts> sent;
        for (const Instructions& program : make_programs(options, num_minibatches)) {
          for (const Instruction& instruction : program) {
            if (instruction.opcode != Opcode::kSend) continue;
            const bool is_cut = instruction.edge.kind == EdgeKind::kActivation ||
                                instruction.edge.kind == EdgeKind::kGradient;
            sent[instruction.edge].push_back(instruction.minibatch.value() *
                                                 (is_cut ? options.num_microbatches : 1) +
                                             instruction.microbatch.value());
          }
        }
        const std::vector<Edge> edges = edges_of(options);
        ASSERT_EQ(edges.size(), sent.size()) << name_of(options, num_minibatches);
        for (const Edge& edge : edges) {
          const auto [first_item, stride] = items_of(options, edge);
          const bool is_cut = edge.kind == EdgeKind::kActivation || edge.kind == EdgeKind::kGradient;
          const std::int64_t end = num_minibatches * (is_cut ? options.num_microbatches : 1);
          Counts named;
          for (std::int64_t item = first_item; item < end; item += stride) named.push_back(item);
          ASSERT_EQ(sent[edge], named) << name_of(options, num_minibatches) << ", " << to_string(edge);
        }
      }
    }
  }
}

// A replica is ahead of another replica by at most as many versions as are kept. The last round is an
// exception, because the other replica may have no minibatch in it.
TEST(Replicas, NoMorePushesAndPullsWaitThanVersionsAreKept) {
  for (const Counts& plan : kPlans) {
    if (plan[0] == 15) continue;
    for (const ScheduleOptions& options : all_of(plan, 6)) {
      const ReplayReport report = replay(options, make_programs(options, 31), 31);
      ASSERT_TRUE(report.ok) << report.error;
      for (const auto& [edge, queued_max] : report.edges) {
        if (edge.kind != EdgeKind::kPush && edge.kind != EdgeKind::kPull) continue;
        EXPECT_LE(queued_max, num_versions_kept(options, edge.from.stage) + (edge.kind == EdgeKind::kPull))
            << name_of(options, 31) << ", " << to_string(edge);
      }
    }
  }
}

// Walks a cursor, which is told the number of minibatches when an engine would learn it. That is when the
// next instruction is for a minibatch that does not exist and receives its activation, receives its push, or
// (at a first stage) does its forward.
Instructions walk(const ScheduleOptions& options, std::int64_t rank, std::int64_t num_minibatches) {
  ProgramCursor cursor(options, Rank(rank));
  Instructions instructions;
  while (const std::optional<Instruction> instruction = cursor.current()) {
    const bool tells =
        instruction->opcode == Opcode::kForward ||
        (instruction->opcode == Opcode::kRecv &&
         (instruction->edge.kind == EdgeKind::kActivation || instruction->edge.kind == EdgeKind::kPush));
    if (!cursor.num_minibatches() && tells && instruction->minibatch.value() >= num_minibatches) {
      cursor.set_num_minibatches(num_minibatches);
      continue;
    }
    instructions.push_back(*instruction);
    cursor.advance();
  }
  return instructions;
}

Instructions without_pulls(Instructions program) {
  std::erase_if(program, [](const Instruction& instruction) {
    return instruction.opcode == Opcode::kRecv && instruction.edge.kind == EdgeKind::kPull;
  });
  return program;
}

Instructions pulls_by_edge(Instructions program) {
  std::erase_if(program, [](const Instruction& instruction) {
    return instruction.opcode != Opcode::kRecv || instruction.edge.kind != EdgeKind::kPull;
  });
  std::stable_sort(program.begin(), program.end(),
                   [](const Instruction& one, const Instruction& other) { return one.edge < other.edge; });
  return program;
}

TEST(Replicas, CursorWalksTheSameListHoweverLateItLearnsTheNumberOfMinibatches) {
  for (const Counts& plan : kPlans) {
    for (ScheduleOptions options : all_of(plan, 4)) {
      for (const Place& place : options.placement.places()) {
        for (const std::int64_t num_minibatches : {0, 1, 2, 3, 4, 5, 6, 7, 19}) {
          options.exchanges_norms = num_minibatches % 2 == 1;
          options.ties = num_minibatches % 3 == 0 ? Ties{} : all_tied(plan.size());
          const Instructions program = make_program(options, place.rank, num_minibatches);
          const Instructions walked = walk(options, place.rank.value(), num_minibatches);
          const std::string name =
              name_of(options, num_minibatches) + ", rank " + std::to_string(place.rank.value());
          if (place.stage.value() > 0) {
            ASSERT_EQ(walked, program) << name;
          }
          // A first stage pulls versions before a forward, and only then finds that the forward's minibatch
          // does not exist.
          ASSERT_EQ(without_pulls(walked), without_pulls(program)) << name;
          ASSERT_EQ(pulls_by_edge(walked), pulls_by_edge(program)) << name;
        }
      }
    }
  }
}

// Broken lists.

class BrokenReplicas : public testing::Test {
 protected:
  // Finds the worker's first instruction whose text begins with `text`.
  Instructions::iterator find(std::size_t worker, const std::string& text) {
    Instructions& program = programs_.at(worker);
    const auto found = std::find_if(program.begin(), program.end(), [&](const Instruction& instruction) {
      return to_string(instruction).starts_with(text);
    });
    EXPECT_NE(found, program.end()) << text;
    return found;
  }
  void remove(std::size_t worker, const std::string& text) { programs_.at(worker).erase(find(worker, text)); }
  void repeat(std::size_t worker, const std::string& text) {
    const auto found = find(worker, text);
    programs_.at(worker).insert(found, *found);
  }
  void expect_fault(const std::string& error) const {
    EXPECT_EQ(replay(options_, programs_, kNumMinibatches).error, error);
  }

  static constexpr std::int64_t kNumMinibatches = 7;
  const ScheduleOptions options_ = make_replicated("pipedream", {3, 1});
  Programs programs_ = make_programs(options_, kNumMinibatches);
};

TEST_F(BrokenReplicas, GradientThatIsLostOnTheWayOrNotSent) {
  remove(0, "RECV push stage 0 replica 2 to stage 0 minibatch 2");
  expect_fault(
      "worker 0, position 9, UPDATE stage 0 minibatch 0 writes version 1: RECV push stage 0 replica 2 to "
      "stage 0 minibatch 2 comes first");
  programs_ = make_programs(options_, kNumMinibatches);
  remove(2, "SEND push stage 0 replica 2 to stage 0 minibatch 2");
  expect_fault(
      "worker 2, position 13, BACKWARD stage 0 replica 2 minibatch 5 microbatch 0 reads version 0: SEND push "
      "stage 0 replica 2 to stage 0 minibatch 2 comes first");
}

TEST_F(BrokenReplicas, GradientThatIsSentOrTakenTwice) {
  repeat(2, "SEND push stage 0 replica 2 to stage 0 minibatch 2");
  expect_fault(
      "worker 2, position 7, SEND push stage 0 replica 2 to stage 0 minibatch 2: there is nothing to send: "
      "it was not made yet, or it was sent already");
  programs_ = make_programs(options_, kNumMinibatches);
  repeat(0, "RECV push stage 0 replica 2 to stage 0 minibatch 2");
  expect_fault(
      "worker 0, position 10, RECV push stage 0 replica 2 to stage 0 minibatch 2: RECV push stage 0 replica "
      "2 to stage 0 minibatch 2 was not used yet");
}

TEST_F(BrokenReplicas, ForwardThatWouldMixVersions) {
  remove(0, "RECV pull stage 0 replica 2 to stage 0 minibatch 0");
  expect_fault(
      "worker 0, position 14, FORWARD stage 0 minibatch 6 microbatch 0 reads version 1: RECV pull stage 0 "
      "replica 2 to stage 0 minibatch 0 comes first");
}

TEST_F(BrokenReplicas, ForwardThatReadsOlderThanTheStalenessAllows) {
  find(0, "FORWARD stage 0 minibatch 6")->version = WeightVersion(0);
  expect_fault(
      "worker 0, position 15, FORWARD stage 0 minibatch 6 microbatch 0 reads version 0: the rule names "
      "version 1");
}

TEST_F(BrokenReplicas, MinibatchOfAnotherReplica) {
  find(0, "FORWARD stage 0 minibatch 3")->minibatch = MinibatchId(4);
  expect_fault(
      "worker 0, position 2, FORWARD stage 0 minibatch 4 microbatch 0 reads version 0: the minibatch is "
      "replica 1's");
}

TEST_F(BrokenReplicas, ShardThatMissesTheRoundInWhichItsReplicaHasNoMinibatch) {
  remove(2, "UPDATE stage 0 replica 2 minibatch 6");
  expect_fault("worker 2, position 31, end of the program: UPDATE stage 0 replica 2 minibatch 6 is missing");
}

TEST(Replicas, UpdateOfALaterRoundIsRefusedEvenWhereItsBackwardsAreDone) {
  // With a staleness of 1 the first update comes after the backward of the second round. So both backwards
  // come before it here.
  ScheduleOptions options = make_replicated("pipedream", {2}, 1, 1);
  options.uses_allreduce = true;
  Programs programs = make_programs(options, 3);
  const auto update =
      std::find_if(programs[0].begin(), programs[0].end(),
                   [](const Instruction& instruction) { return instruction.opcode == Opcode::kUpdate; });
  update->minibatch = MinibatchId(2);
  EXPECT_EQ(
      replay(options, programs, 3).error,
      "worker 0, position 4, UPDATE stage 0 minibatch 2 writes version 1: the update of minibatch 0 is due "
      "first");
}

TEST_F(BrokenReplicas, ListAtTheWorkerOfAnotherReplica) {
  std::swap(programs_[0], programs_[1]);
  expect_fault(
      "worker 0, position 0, FORWARD stage 0 replica 1 minibatch 1 microbatch 0 reads version 0: the replica "
      "lies at worker 1");
}

TEST(Replicas, StartOnlyWhereARoundBeginsAtEveryStage) {
  ScheduleOptions options = make_replicated("pipedream", {3, 2});
  options.first_minibatch = MinibatchId(6);
  EXPECT_EQ(error_of(options), "");
  EXPECT_EQ(on_paper(options, 0, 12), "F6 | F9 B6 U6 | B9 U9");
  EXPECT_EQ(forward_version(options, StageIndex(0), MinibatchId(9)), WeightVersion(2));
  EXPECT_EQ(forward_version(options, StageIndex(1), MinibatchId(9)), WeightVersion(4));
  options.first_minibatch = MinibatchId(4);
  EXPECT_EQ(
      error_of(options),
      "first_minibatch is 4, and stage 0 of 3 replicas updates once in 3 minibatches; a run starts at a "
      "multiple of every stage's");
  options.first_minibatch = MinibatchId(3);
  EXPECT_EQ(
      error_of(options),
      "first_minibatch is 3, and stage 1 of 2 replicas updates once in 2 minibatches; a run starts at a "
      "multiple of every stage's");
  options.num_microbatches = 6;
  EXPECT_EQ(error_of(options), "") << "each minibatch is a round";
}

TEST(Replicas, ReadWhatTheyWouldHaveReadWhereARunGoesOn) {
  for (const char* schedule : {"pipedream", "vertical_sync", "unstashed", "flush"}) {
    for (const std::int64_t num_microbatches : {1, 2, 3}) {
      ScheduleOptions whole = make_replicated(schedule, {3, 2, 1});
      whole.num_microbatches = num_microbatches;
      ScheduleOptions going_on = whole;
      going_on.first_minibatch = MinibatchId(12);
      going_on.oldest_minibatch = MinibatchId(0);
      for (StageIndex stage; stage.value() < 3; stage = stage.next()) {
        for (MinibatchId minibatch(12); minibatch.value() < 24; minibatch = minibatch.next()) {
          for (MicrobatchIndex index; index.value() < num_microbatches;
               index = MicrobatchIndex(index.value() + 1)) {
            EXPECT_EQ(forward_version(going_on, stage, minibatch, index),
                      forward_version(whole, stage, minibatch, index))
                << schedule << " stage " << stage.value() << " minibatch " << minibatch.value();
            EXPECT_EQ(backward_version(going_on, stage, minibatch, index),
                      backward_version(whole, stage, minibatch, index));
          }
        }
        EXPECT_EQ(oldest_version(going_on, stage), stashes_versions(whole, stage)
                                                       ? forward_version(whole, stage, MinibatchId(12))
                                                       : rounds_of(going_on, stage).first_version());
      }
    }
  }
}

TEST(Replicas, GoOnFromARoundAtEveryStage) {
  ScheduleOptions options = make_replicated("pipedream", {3, 2});
  options.first_minibatch = MinibatchId(12);
  options.oldest_minibatch = MinibatchId(4);
  EXPECT_EQ(
      error_of(options),
      "oldest_minibatch is 4, and stage 0 of 3 replicas updates once in 3 minibatches; a run starts at a "
      "multiple of every stage's");
  options.oldest_minibatch = MinibatchId(6);
  EXPECT_EQ(error_of(options), "");
}

TEST(Replicas, AreRefusedWithWhatIsNotBuiltForThem) {
  ScheduleOptions options = make_replicated("interleaved", {2, 1});
  EXPECT_EQ(error_of(options),
            "schedule is 'interleaved', and a stage has several replicas: it runs one replica of each stage; "
            "use another schedule, or partition(..., straight=True)");
  EXPECT_EQ(
      error_of(make_replicated("data_parallel", {2, 1})),
      "schedule is 'data_parallel', and the plan has 2 stages: it has one stage, with a replica at every "
      "worker; use another schedule, or a plan of one stage");
}

TEST(Replicas, RefuseStalenessThatNoVersionRuleHas) {
  ScheduleOptions options = make_replicated("pipedream", {2, 1});
  options.staleness = -1;
  EXPECT_EQ(error_of(options), "staleness is -1; it must be between 0 and 1048576");
  options = make_replicated("flush", {2, 1});
  options.staleness = 1;
  EXPECT_EQ(
      error_of(options),
      "staleness is 1, and schedule is 'flush': schedule 'pipedream' alone reads older versions for it; "
      "use that, or leave staleness out");
}

TEST(Replicas, OfTwoBwNeedAsManyMicrobatchesOfARoundAsAreInFlightBesideOne) {
  EXPECT_EQ(error_of(make_replicated("2bw", {2, 1}, 1)), "");
  EXPECT_EQ(error_of(make_replicated("2bw", {1, 2, 1}, 4)), "");
  EXPECT_EQ(error_of(make_replicated("2bw", {1, 2, 1}, 3)),
            "num_microbatches is 3 with in_flight 5 at stage 0; schedule \"2bw\" keeps two versions, so an "
            "update needs at least 4 microbatches of each replica: use 4");
}

// With the derived number of microbatches in flight, a refused list would wait for ever. A forward would read
// a version whose update needs backwards that come only after this forward.
TEST(Replicas, OfTwoBwAreRefusedExactlyWhereTheyWouldBeStuck) {
  for (const Counts& plan : kPlans) {
    for (std::int64_t m = 1; m <= 12; ++m) {
      const ScheduleOptions options = make_replicated("2bw", plan, m);
      bool waits = false;
      for (StageIndex stage; stage.value() < static_cast<std::int64_t>(plan.size()); stage = stage.next()) {
        ScheduleOptions as_other = options;
        as_other.schedule = "pipedream";
        const Rounds rounds = rounds_of(as_other, stage);
        const std::int64_t in_flight = options.in_flight[static_cast<std::size_t>(stage.value())];
        // c is the number of a replica's microbatches per round. Its microbatch k reads version floor(k / c)
        // - 1, which needs its first c * (floor(k / c) - 1) backwards. Before the forward of k, k - in_flight
        // + 1 backwards are done.
        for (std::int64_t own = 0; own < 100; ++own) {
          const std::int64_t read = std::max<std::int64_t>(0, own / rounds.own_per_round() - 1);
          waits |= read * rounds.own_per_round() > std::max<std::int64_t>(0, own - in_flight + 1);
        }
      }
      EXPECT_EQ(error_of(options).empty(), !waits) << name_of(options, 40);
      if (waits) continue;
      EXPECT_EQ(replay(options, make_programs(options, 25), 25).error, "") << name_of(options, 25);
    }
  }
}

}  // namespace
}  // namespace pipedream
