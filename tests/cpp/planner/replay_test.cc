// Compares times per minibatch with formulas, and tests which lists of instructions are refused.
// tests/python/planning tests whole timelines.
#include "planner/replay.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/failure.h"
#include "schedule/program.h"
#include "schedule/transfers.h"

namespace pipedream {
namespace {

ScheduleOptions make_options(const std::string& schedule, const std::vector<std::int64_t>& num_replicas,
                             std::int64_t num_microbatches = 1) {
  ScheduleOptions options;
  options.schedule = schedule;
  options.in_flight = derive_in_flight(num_replicas);
  options.num_microbatches = num_microbatches;
  options.placement = Placement::in_order(num_replicas);
  return options;
}

StageDurations make_stage(double forward_ms, double backward_ms) {
  StageDurations stage;
  stage.forward_ms = stage.later_forward_ms = forward_ms;
  stage.backward_ms = stage.later_backward_ms = backward_ms;
  return stage;
}

std::vector<std::vector<Instruction>> programs_of(const ScheduleOptions& options,
                                                  std::int64_t num_minibatches) {
  std::vector<std::vector<Instruction>> programs;
  for (std::int64_t rank = 0; rank < num_workers(options); ++rank) {
    programs.push_back(make_program(options, Rank(rank), num_minibatches));
  }
  return programs;
}

std::string error_of(const std::vector<std::vector<Instruction>>& programs, const Timing& timing) {
  try {
    (void)simulate(programs, timing);
  } catch (const UserError& error) {
    return error.what();
  }
  return "";
}

TEST(Replay, a_straight_pipeline_takes_as_long_as_its_slowest_stage) {
  const std::vector<StageDurations> stages = {make_stage(1, 2), make_stage(2, 3), make_stage(1, 1)};
  EXPECT_DOUBLE_EQ(steady_ms(make_options("pipedream", {1, 1, 1}), 20, Timing{stages, {{}, {}}}), 5.0);
}

TEST(Replay, what_drains_pays_a_microbatch_for_every_other_stage) {
  const std::vector<StageDurations> stages(4, make_stage(1, 2));
  for (const char* schedule : {"flush", "gpipe"}) {
    EXPECT_DOUBLE_EQ(steady_ms(make_options(schedule, {1, 1, 1, 1}, 8), 6, Timing{stages, {{}, {}, {}}}),
                     3.0 * (8 + 4 - 1));
  }
}

TEST(Replay, replicas_push_and_pull_between_their_minibatches) {
  StageDurations stage = make_stage(1, 2);
  stage.update_ms = 0.5;
  stage.push_ms = 2;
  stage.pull_ms = 3;
  stage.sync_latency_ms = 0.25;
  EXPECT_DOUBLE_EQ(steady_ms(make_options("data_parallel", {2}), 12, Timing{{stage}, {}}),
                   (1 + 2 + 2 + 0.25 + 0.5 + 3 + 0.25) / 2);
}

TEST(Replay, chunks_of_a_shard_are_updated_and_leave_while_others_come) {
  StageDurations stage = make_stage(1, 2);
  stage.update_ms = 2;
  stage.push_ms = stage.pull_ms = 8;
  const ScheduleOptions options = make_options("data_parallel", {2});
  EXPECT_DOUBLE_EQ(steady_ms(options, 20, Timing{{stage}, {}, std::nullopt, {}, true}), 21.0 / 2);
  stage.num_chunks = 2;  // the link is busy from the start of the push to the end of the pull
  EXPECT_DOUBLE_EQ(steady_ms(options, 20, Timing{{stage}, {}, std::nullopt, {}, true}), 19.0 / 2);
  stage.updates_whole = true;
  EXPECT_DOUBLE_EQ(steady_ms(options, 20, Timing{{stage}, {}, std::nullopt, {}, true}), 21.0 / 2);
}

TEST(Replay, what_leaves_by_one_link_waits_for_each_other) {
  // For each minibatch the middle stage sends 4 ms downstream and 4 ms upstream.
  const std::vector<StageDurations> stages(3, make_stage(1, 2));
  const std::vector<BoundaryDurations> boundaries(2, {4, 4, 0});
  ScheduleOptions options = make_options("pipedream", {1, 1, 1});
  options.in_flight = {6, 4, 1};
  EXPECT_LT(steady_ms(options, 40, Timing{stages, boundaries}), 5.0);
  EXPECT_DOUBLE_EQ(steady_ms(options, 40, Timing{stages, boundaries, std::nullopt, {}, true}), 8.0);
}

TEST(Replay, what_replicas_send_one_worker_comes_by_its_one_link) {
  // Three replicas compute at once, so a minibatch takes 3 / 3 ms of compute. Each activation takes 4 ms on
  // the link.
  StageDurations last = make_stage(0.25, 0.5);
  ScheduleOptions options = make_options("pipedream", {3, 1});
  options.in_flight = {8, 1};
  const std::vector<StageDurations> stages = {make_stage(1, 2), last};
  EXPECT_LT(steady_ms(options, 90, Timing{stages, {{4, 0, 0}}}), 2.0);
  EXPECT_NEAR(steady_ms(options, 90, Timing{stages, {{4, 0, 0}}, std::nullopt, {}, true}), 4.0, 1e-9);
}

TEST(Replay, an_item_waits_for_its_link_and_not_for_the_latency_of_the_one_before_it) {
  // With one minibatch at a time the workers wait for every item.
  const std::vector<StageDurations> stages(2, make_stage(1, 2));
  EXPECT_DOUBLE_EQ(steady_ms(make_options("model_parallel", {1, 1}), 4, Timing{stages, {{0.5, 0.75, 0.125}}}),
                   6 + 0.5 + 0.75 + 2 * 0.125);
  // Two microbatches arrive one behind the other. Then come the last forward, both backwards, the last
  // gradient's way upstream, and its backward there.
  EXPECT_DOUBLE_EQ(steady_ms(make_options("gpipe", {1, 1}, 2), 4, Timing{stages, {{4, 0, 1}}}),
                   1 + (4 + 4 + 1) + 1 + 2 * 2 + 1 + 2);
}

TEST(Replay, workers_that_share_cores_are_as_fast_as_so_many_at_work) {
  const std::vector<StageDurations> stages(2, make_stage(1, 2));
  const ScheduleOptions options = make_options("pipedream", {1, 1});
  EXPECT_DOUBLE_EQ(steady_ms(options, 20, Timing{stages, {{}}, SharedCores{2, {1}}}),
                   3.0);  // a core for each
  EXPECT_DOUBLE_EQ(steady_ms(options, 20, Timing{stages, {{}}, SharedCores{1, {2}}}),
                   1.5);  // a machine for each
  // One at a time: always alone.
  EXPECT_DOUBLE_EQ(
      steady_ms(make_options("model_parallel", {1, 1}), 4, Timing{stages, {{}}, SharedCores{2, {1.5, 1}}}),
      6 / 1.5);
}

TEST(Replay, who_waits_wakes_for_its_next_item_of_each_kind) {
  std::vector<StageDurations> stages(2, make_stage(1, 2));
  for (StageDurations& stage : stages) {
    stage.wakings = {{0.25, 0.5, 0}};
  }
  // Between two forwards, and between two backwards, each worker waits for more than 3 ms.
  const ScheduleOptions in_turn = make_options("model_parallel", {1, 1});
  EXPECT_DOUBLE_EQ(steady_ms(in_turn, 8, Timing{stages, {{}}, std::nullopt, {2.0}}), 6 + 2 * 0.25 + 2 * 0.5);
  EXPECT_DOUBLE_EQ(steady_ms(in_turn, 8, Timing{stages, {{}}, SharedCores{2, {1, 1}}, {2.0}}),
                   6 + 2 * 0.25 + 2 * 0.5);
  // This extra time applies in full after waits of 3 ms or more.
  for (StageDurations& stage : stages) stage.wakings.push_back({1, 0, 0});
  EXPECT_DOUBLE_EQ(steady_ms(in_turn, 8, Timing{stages, {{}}, std::nullopt, {2.0, 3.0}}),
                   6 + 2 * 1.25 + 2 * 0.5);
}

TEST(Replay, of_too_few_minibatches_it_is_the_mean_of_the_whole_run) {
  const std::vector<StageDurations> stages(2, make_stage(1, 2));
  EXPECT_DOUBLE_EQ(steady_ms(make_options("pipedream", {1, 1}), 1, Timing{stages, {{}}}), 6.0);
}

TEST(Replay, what_it_does_not_know_is_refused) {
  const std::vector<StageDurations> stages(2, make_stage(1, 2));
  const ScheduleOptions options = make_options("pipedream", {1, 1});
  EXPECT_THROW((void)steady_ms(options, 4, Timing{stages, {}}), UserError);
  EXPECT_THROW((void)steady_ms(options, 4, Timing{{stages[0]}, {{}}}), UserError);
  EXPECT_THROW((void)steady_ms(options, 4, Timing{stages, {{}}, SharedCores{0, {1}}}), UserError);
  EXPECT_THROW((void)steady_ms(options, 4, Timing{stages, {{}}, SharedCores{2, {}}}), UserError);
}

TEST(Replay, spares_and_asynchronous_shards_answer_beside_the_lists) {
  StageDurations stage = make_stage(1, 2);
  stage.update_ms = 0.5;
  stage.push_ms = stage.pull_ms = 2;
  ScheduleOptions served = make_options("data_parallel", {2});
  served.asynchronous = true;
  // One update takes 7.5 ms: 3 for forward and backward, 2 for the push, 0.5 for the owner's update and 2 for
  // the answer. The replica's own update runs meanwhile.
  EXPECT_DOUBLE_EQ(steady_ms(served, 24, Timing{{stage}, {}}), 7.5 / 2);
  stage.num_replicas = 3;
  stage.spare_push_ms = 4;
  stage.spare_pull_ms = 1;
  stage.spare_update_ms = 0.25;
  ScheduleOptions spared = make_options("pipedream", {3});
  spared.placement = Placement::in_order({3}, {1});
  // Each replica pushes to two other replicas and to the spare, one after the other. Then it waits for the
  // spare's answer. A spare owns a shard but computes no minibatches.
  EXPECT_GT(steady_ms(spared, 30, Timing{{stage}, {}}), (3.0 + 2 + 2 + 4) / 3);
}

TEST(Replay, each_worker_draws_from_decks_of_its_own_and_the_means_hold) {
  const std::vector<StageDurations> stages(2, make_stage(1, 2));
  Timing timing{stages, {{}}};
  std::vector<std::pair<std::size_t, Opcode>> asked;
  timing.spread.factors[Opcode::kForward] = {0.5, 1.5};
  timing.spread.shuffled = [&](std::size_t worker, Opcode opcode) {
    asked.emplace_back(worker, opcode);
    return std::vector<double>{0.5, 1.5};  // drawn from the end: 1.5 first
  };
  const std::vector<std::vector<Instruction>> programs =
      programs_of(make_options("model_parallel", {1, 1}), 4);
  const SimulatedRun run = simulate(programs, timing);
  EXPECT_EQ(asked,
            (std::vector<std::pair<std::size_t, Opcode>>{
                {0, Opcode::kForward}, {0, Opcode::kForward}, {1, Opcode::kForward}, {1, Opcode::kForward}}));
  EXPECT_DOUBLE_EQ(run.timeline[0][0].end_ms, 1.5);
  EXPECT_DOUBLE_EQ(summarize(run.timeline).makespan_ms, 4 * 6);
}

TEST(Replay, lists_that_cannot_be_are_refused_by_name) {
  const Timing timing{std::vector<StageDurations>(2, make_stage(1, 2)), {{}}};
  const auto programs = programs_of(make_options("pipedream", {1, 1}), 2);
  auto twice = programs;
  twice[0].push_back(twice[0].front());
  EXPECT_EQ(error_of(twice, timing), "FORWARD stage 0 minibatch 0 microbatch 0 is in the lists twice");
  auto without = programs;
  without[0].erase(without[0].begin());
  EXPECT_EQ(error_of(without, timing), "BACKWARD stage 0 minibatch 0 microbatch 0 comes before its forward");
  EXPECT_EQ(error_of({programs[0], programs[0]}, timing), "stage 0 is at worker 0 and at worker 1");
  EXPECT_EQ(error_of({programs[1]}, timing), "stage 0 has no instructions, but stage 1 has");
  auto silent = programs;
  std::erase_if(silent[0], [](const Instruction& step) { return step.opcode == Opcode::kSend; });
  EXPECT_EQ(error_of(silent, timing),
            "the lists deadlock: worker 0 at position 2 (RECV gradient stage 1 to stage 0 minibatch 0 "
            "microbatch 0) waits for stage 1 at worker 1; worker 1 at position 0 (RECV activation stage 0 to "
            "stage 1 minibatch 0 microbatch 0) waits for stage 0 at worker 0");
}

}  // namespace
}  // namespace pipedream
