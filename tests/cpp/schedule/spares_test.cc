// Tests spares: workers that own shards of a stage as its replicas do, but compute no minibatches.
#include <gtest/gtest.h>

#include <algorithm>
#include <utility>

#include "base/failure.h"
#include "schedule/programs.h"
#include "schedule/validator.h"

namespace pipedream {
namespace {

ScheduleOptions with_spares(const std::string& schedule, const Counts& num_replicas, const Counts& num_spares,
                            std::int64_t num_microbatches = 1, std::int64_t staleness = 0) {
  ScheduleOptions options = make_replicated(schedule, num_replicas, num_microbatches, staleness);
  options.placement = Placement::in_order(num_replicas, num_spares);
  return options;
}

std::string text_of(const Instructions& program) {
  std::string text;
  for (const Instruction& instruction : program) text += to_string(instruction) + '\n';
  return text;
}

const std::vector<std::pair<Counts, Counts>> kSparePlans = {
    {{2, 1}, {1, 0}}, {{1, 2}, {0, 1}}, {{3, 1}, {2, 0}},       {{2, 2}, {1, 2}},
    {{3, 2}, {1, 1}}, {{2, 3}, {0, 3}}, {{2, 1, 1}, {2, 0, 0}}, {{1, 3, 2}, {0, 1, 2}},
};

// Returns the options of every schedule that a plan with these replicas and spares allows.
std::vector<ScheduleOptions> all_with_spares(const Counts& num_replicas, const Counts& num_spares,
                                             std::int64_t num_microbatches) {
  std::vector<ScheduleOptions> all;
  for (const std::string& schedule : kStraightSchedules) {
    all.push_back(with_spares(schedule, num_replicas, num_spares, num_microbatches));
    if (!error_of(all.back()).empty()) all.pop_back();
  }
  for (const std::int64_t staleness : {1, 2, 5}) {
    all.push_back(with_spares("pipedream", num_replicas, num_spares, num_microbatches, staleness));
  }
  return all;
}

std::vector<ScheduleOptions> all_of_all() {
  std::vector<ScheduleOptions> all = {with_spares("data_parallel", {2}, {1}),
                                      with_spares("data_parallel", {3}, {3}, 2)};
  for (const auto& [num_replicas, num_spares] : kSparePlans) {
    for (const std::int64_t num_microbatches : {1, 6}) {
      for (ScheduleOptions& options : all_with_spares(num_replicas, num_spares, num_microbatches)) {
        all.push_back(std::move(options));
      }
    }
  }
  return all;
}

std::string spares_name_of(const ScheduleOptions& options, std::int64_t num_minibatches) {
  return options.schedule + ", " + std::to_string(options.placement.num_ranks()) + " ranks, " +
         std::to_string(options.placement.num_spares()) + " spares, staleness " +
         std::to_string(options.staleness) + ", " + std::to_string(options.num_microbatches) +
         " microbatches, " + std::to_string(num_minibatches) + " minibatches";
}

TEST(Spares, UpdateARoundWhenAllOfItsMembersHavePushedAndSendEveryReplicaWhatTheyMade) {
  const ScheduleOptions options = with_spares("pipedream", {2, 1}, {1, 0});
  EXPECT_EQ(text_of(make_program(options, Rank(3), 3)),
            "RECV push stage 0 to stage 0 replica 2 minibatch 0\n"
            "RECV push stage 0 replica 1 to stage 0 replica 2 minibatch 1\n"
            "UPDATE stage 0 replica 2 minibatch 0 writes version 1\n"
            "SEND pull stage 0 replica 2 to stage 0 minibatch 0\n"
            "SEND pull stage 0 replica 2 to stage 0 replica 1 minibatch 0\n"
            "RECV push stage 0 to stage 0 replica 2 minibatch 2\n"
            "UPDATE stage 0 replica 2 minibatch 2 writes version 2\n"
            "SEND pull stage 0 replica 2 to stage 0 minibatch 2\n"
            "SEND pull stage 0 replica 2 to stage 0 replica 1 minibatch 2\n");
  EXPECT_TRUE(make_program(options, Rank(3), 0).empty());
  const std::string replica = text_of(make_program(options, Rank(0), 3));
  EXPECT_NE(replica.find("SEND push stage 0 to stage 0 replica 2 minibatch 0\n"), std::string::npos);
  EXPECT_NE(replica.find("RECV pull stage 0 replica 2 to stage 0 minibatch 2\n"), std::string::npos);
  EXPECT_EQ(phase_of(options, make_compute_program(options, Rank(3), 3).back(), 3), Phase::kSteady);
}

TEST(Spares, ChangeNothingOfWhatReplicasCompute) {
  for (const ScheduleOptions& options : all_of_all()) {
    ScheduleOptions without = options;
    Counts num_replicas;
    for (StageIndex stage; stage.value() < num_stages(options); stage = stage.next()) {
      num_replicas.push_back(options.placement.num_replicas(stage));
    }
    without.placement = Placement::in_order(num_replicas);
    for (std::int64_t rank = 0; rank < num_workers(without); ++rank) {
      ASSERT_EQ(make_compute_program(options, Rank(rank), 19), make_compute_program(without, Rank(rank), 19))
          << spares_name_of(options, 19) << ", rank " << rank;
    }
  }
}

TEST(Spares, AreAcceptedByTheValidatorInEveryPlanScheduleAndLength) {
  for (const ScheduleOptions& options : all_of_all()) {
    for (const std::int64_t num_minibatches : {0, 1, 3, 7, 12, 31}) {
      const ReplayReport report = replay(options, make_programs(options, num_minibatches), num_minibatches);
      ASSERT_TRUE(report.ok) << spares_name_of(options, num_minibatches) << ": " << report.error;
      for (const auto& [edge, queued_max] : report.edges) {
        if (edge.kind != EdgeKind::kPush && edge.kind != EdgeKind::kPull) continue;
        ASSERT_LE(queued_max, num_versions_kept(options, edge.from.stage) + (edge.kind == EdgeKind::kPull))
            << spares_name_of(options, num_minibatches) << ", " << to_string(edge);
      }
    }
  }
}

// Walks a cursor, which is told the number of minibatches when an engine would learn it. That is when the
// next instruction receives the push of a minibatch that does not exist.
Instructions walk(const ScheduleOptions& options, Rank rank, std::int64_t num_minibatches) {
  ProgramCursor cursor(options, rank);
  Instructions instructions;
  while (const std::optional<Instruction> instruction = cursor.current()) {
    const bool tells = instruction->opcode == Opcode::kRecv && instruction->edge.kind == EdgeKind::kPush;
    if (!cursor.num_minibatches() && tells && instruction->minibatch.value() >= num_minibatches) {
      cursor.set_num_minibatches(num_minibatches);
      continue;
    }
    instructions.push_back(*instruction);
    cursor.advance();
  }
  return instructions;
}

TEST(Spares, WalkTheSameListHoweverLateTheyLearnTheNumberOfMinibatches) {
  for (const ScheduleOptions& options : all_of_all()) {
    const std::int64_t num_ranks = num_workers(options);
    for (std::int64_t rank = num_ranks - options.placement.num_spares(); rank < num_ranks; ++rank) {
      for (const std::int64_t num_minibatches : {0, 1, 2, 3, 4, 5, 6, 7, 19}) {
        ASSERT_EQ(walk(options, Rank(rank), num_minibatches),
                  make_program(options, Rank(rank), num_minibatches))
            << spares_name_of(options, num_minibatches) << ", rank " << rank;
      }
    }
  }
}

// Broken lists.

class BrokenSpares : public testing::Test {
 protected:
  // Removes the first instruction of the spare's program whose text begins with `text`.
  void leave_out(const std::string& text) {
    Instructions& program = programs_.back();
    const auto found = std::find_if(program.begin(), program.end(), [&](const Instruction& instruction) {
      return to_string(instruction).starts_with(text);
    });
    ASSERT_NE(found, program.end()) << text;
    program.erase(found);
  }

  const ScheduleOptions options_ = with_spares("pipedream", {2, 1}, {1, 0});
  Programs programs_ = make_programs(options_, 4);
};

TEST_F(BrokenSpares, UpdateBeforeAPush) {
  leave_out("RECV push stage 0 replica 1");
  EXPECT_EQ(replay(options_, programs_, 4).error,
            "worker 3, position 1, UPDATE stage 0 replica 2 minibatch 0 writes version 1: RECV push stage 0 "
            "replica 1 to stage 0 replica 2 minibatch 1 comes first");
}

TEST_F(BrokenSpares, KeepAVersionToThemselves) {
  leave_out("SEND pull stage 0 replica 2 to stage 0 replica 1");
  EXPECT_EQ(replay(options_, programs_, 4).error,
            "worker 3, position 6, UPDATE stage 0 replica 2 minibatch 2 writes version 2: SEND pull stage 0 "
            "replica 2 to stage 0 replica 1 minibatch 0 comes first");
}

TEST_F(BrokenSpares, MissARound) {
  Instructions& program = programs_.back();
  program.resize(program.size() / 2);
  EXPECT_EQ(replay(options_, programs_, 4).error,
            "worker 3, position 5, end of the program: UPDATE stage 0 replica 2 minibatch 2 is missing");
}

TEST_F(BrokenSpares, TakeAMinibatch) {
  programs_.back().push_back(make_compute_program(options_, Rank(0), 4).front());
  programs_.back().back().replica = ReplicaIndex(2);
  const std::string error = replay(options_, programs_, 4).error;
  EXPECT_TRUE(error.ends_with("the minibatch is replica 0's")) << error;
}

TEST(Spares, AreRefusedWhereTheyHaveNoReplicasToServeOrWithWhatTheyKnowNothingOf) {
  const std::string why = "; spares are of a stage with 2 replicas or more, and no more than these";
  EXPECT_EQ(error_of(with_spares("pipedream", {2, 1}, {0, 1})), "stage 1 has 1 replicas and 1 spares" + why);
  EXPECT_EQ(error_of(with_spares("pipedream", {2, 1}, {3, 0})), "stage 0 has 2 replicas and 3 spares" + why);
  ScheduleOptions options = with_spares("pipedream", {2, 1}, {1, 0});
  options.asynchronous = true;
  EXPECT_EQ(
      error_of(options),
      "the plan has spare shards, and sync is 'asp': spares push and pull by rounds, which asp does not "
      "have; use sync='bsp', or use a plan without num_spare_shards");
  options = with_spares("pipedream", {2, 1}, {1, 0});
  options.exchanges_norms = true;
  EXPECT_NE(error_of(options).find("norms of gradients"), std::string::npos);
  options = with_spares("pipedream", {2, 1}, {1, 0});
  options.uses_allreduce = true;
  EXPECT_NE(error_of(options).find("by a collective"), std::string::npos);
  options = with_spares("pipedream", {2, 1}, {1, 0});
  options.ties = {{StageIndex(0), StageIndex(1)}};
  EXPECT_NE(error_of(options).find("stages share a parameter"), std::string::npos);
}

}  // namespace
}  // namespace pipedream
