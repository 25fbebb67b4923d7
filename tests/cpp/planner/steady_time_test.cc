// Times per minibatch by their closed forms. That they are the simulator's, to the bit, of any schedule is
// what tests/python/planning/test_steady_time.py says.
#include "planner/steady_time.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "base/failure.h"
#include "schedule/program.h"

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

TEST(SteadyTime, a_straight_pipeline_takes_as_long_as_its_slowest_stage) {
  const std::vector<StageDurations> stages = {make_stage(1, 2), make_stage(2, 3), make_stage(1, 1)};
  EXPECT_DOUBLE_EQ(steady_ms(make_options("pipedream", {1, 1, 1}), 20, stages, {{}, {}}), 5.0);
}

TEST(SteadyTime, what_drains_pays_a_microbatch_for_every_other_stage) {
  const std::vector<StageDurations> stages(4, make_stage(1, 2));
  for (const char* schedule : {"flush", "gpipe"}) {
    EXPECT_DOUBLE_EQ(steady_ms(make_options(schedule, {1, 1, 1, 1}, 8), 6, stages, {{}, {}, {}}),
                     3.0 * (8 + 4 - 1));
  }
}

TEST(SteadyTime, replicas_push_and_pull_between_their_minibatches) {
  StageDurations stage = make_stage(1, 2);
  stage.update_ms = 0.5;
  stage.push_ms = 2;
  stage.pull_ms = 3;
  stage.sync_latency_ms = 0.25;
  EXPECT_DOUBLE_EQ(steady_ms(make_options("data_parallel", {2}), 12, {stage}, {}),
                   (1 + 2 + 2 + 0.25 + 0.5 + 3 + 0.25) / 2);
}

TEST(SteadyTime, chunks_of_a_shard_are_updated_and_leave_while_others_come) {
  StageDurations stage = make_stage(1, 2);
  stage.update_ms = 2;
  stage.push_ms = stage.pull_ms = 8;
  const ScheduleOptions options = make_options("data_parallel", {2});
  EXPECT_DOUBLE_EQ(steady_ms(options, 20, {stage}, {}, std::nullopt, {}, true), 21.0 / 2);
  stage.num_chunks = 2;  // the link is busy from the push to the end of the pull
  EXPECT_DOUBLE_EQ(steady_ms(options, 20, {stage}, {}, std::nullopt, {}, true), 19.0 / 2);
  stage.updates_whole = true;
  EXPECT_DOUBLE_EQ(steady_ms(options, 20, {stage}, {}, std::nullopt, {}, true), 21.0 / 2);
}

TEST(SteadyTime, what_leaves_by_one_link_waits_for_each_other) {
  // The stage in the middle sends 4 ms downstream and 4 ms upstream of each minibatch.
  const std::vector<StageDurations> stages(3, make_stage(1, 2));
  const std::vector<BoundaryDurations> boundaries(2, {4, 4, 0});
  ScheduleOptions options = make_options("pipedream", {1, 1, 1});
  options.in_flight = {6, 4, 1};
  EXPECT_LT(steady_ms(options, 40, stages, boundaries), 5.0);
  EXPECT_DOUBLE_EQ(steady_ms(options, 40, stages, boundaries, std::nullopt, {}, true), 8.0);
}

TEST(SteadyTime, what_replicas_send_one_worker_comes_by_its_one_link) {
  // Three at once: a minibatch in 3 / 3 ms of compute, and an activation of each in 4 ms.
  StageDurations last = make_stage(0.25, 0.5);
  ScheduleOptions options = make_options("pipedream", {3, 1});
  options.in_flight = {8, 1};
  const std::vector<StageDurations> stages = {make_stage(1, 2), last};
  EXPECT_LT(steady_ms(options, 90, stages, {{4, 0, 0}}), 2.0);
  EXPECT_NEAR(steady_ms(options, 90, stages, {{4, 0, 0}}, std::nullopt, {}, true), 4.0, 1e-9);
}

TEST(SteadyTime, an_item_waits_for_its_link_and_not_for_the_latency_of_the_one_before_it) {
  // Of a minibatch at a time, so that everything is waited for.
  const std::vector<StageDurations> stages(2, make_stage(1, 2));
  EXPECT_DOUBLE_EQ(steady_ms(make_options("model_parallel", {1, 1}), 4, stages, {{0.5, 0.75, 0.125}}),
                   6 + 0.5 + 0.75 + 2 * 0.125);
  // Two microbatches one behind the other, then the last forward, both backwards, and one upstream.
  EXPECT_DOUBLE_EQ(steady_ms(make_options("gpipe", {1, 1}, 2), 4, stages, {{4, 0, 1}}),
                   1 + (4 + 4 + 1) + 1 + 2 * 2 + 1 + 2);
}

TEST(SteadyTime, workers_that_share_cores_are_as_fast_as_so_many_at_work) {
  const std::vector<StageDurations> stages(2, make_stage(1, 2));
  const ScheduleOptions options = make_options("pipedream", {1, 1});
  EXPECT_DOUBLE_EQ(steady_ms(options, 20, stages, {{}}, SharedCores{2, {1}}), 3.0);  // a core for each
  EXPECT_DOUBLE_EQ(steady_ms(options, 20, stages, {{}}, SharedCores{1, {2}}), 1.5);  // a machine for each
  // One at a time: always alone.
  EXPECT_DOUBLE_EQ(
      steady_ms(make_options("model_parallel", {1, 1}), 4, stages, {{}}, SharedCores{2, {1.5, 1}}), 6 / 1.5);
}

TEST(SteadyTime, who_waits_wakes_for_its_next_item_of_each_kind) {
  std::vector<StageDurations> stages(2, make_stage(1, 2));
  for (StageDurations& stage : stages) {
    stage.wakings = {{0.25, 0.5, 0}};
  }
  // Both items of each stage come after its wait of 3 ms.
  const ScheduleOptions in_turn = make_options("model_parallel", {1, 1});
  EXPECT_DOUBLE_EQ(steady_ms(in_turn, 8, stages, {{}}, std::nullopt, {2.0}), 6 + 2 * 0.25 + 2 * 0.5);
  EXPECT_DOUBLE_EQ(steady_ms(in_turn, 8, stages, {{}}, SharedCores{2, {1, 1}}, {2.0}),
                   6 + 2 * 0.25 + 2 * 0.5);
  // And what is lost slowly.
  for (StageDurations& stage : stages) stage.wakings.push_back({1, 0, 0});
  EXPECT_DOUBLE_EQ(steady_ms(in_turn, 8, stages, {{}}, std::nullopt, {2.0, 3.0}), 6 + 2 * 1.25 + 2 * 0.5);
}

TEST(SteadyTime, of_too_few_minibatches_it_is_the_mean_of_the_whole_run) {
  const std::vector<StageDurations> stages(2, make_stage(1, 2));
  EXPECT_DOUBLE_EQ(steady_ms(make_options("pipedream", {1, 1}), 1, stages, {{}}), 6.0);
}

TEST(SteadyTime, what_it_does_not_know_is_refused) {
  const std::vector<StageDurations> stages(2, make_stage(1, 2));
  const ScheduleOptions options = make_options("pipedream", {1, 1});
  EXPECT_THROW((void)steady_ms(options, 4, stages, {}), UserError);
  EXPECT_THROW((void)steady_ms(options, 4, {stages[0]}, {{}}), UserError);
  EXPECT_THROW((void)steady_ms(options, 4, stages, {{}}, SharedCores{0, {1}}), UserError);
  EXPECT_THROW((void)steady_ms(options, 4, stages, {{}}, SharedCores{2, {}}), UserError);
  ScheduleOptions spared = make_options("pipedream", {3});
  spared.placement = Placement::in_order({3}, {1});
  EXPECT_THROW((void)steady_ms(spared, 4, {stages[0]}, {}), UserError);
  ScheduleOptions served = make_options("data_parallel", {2});
  served.asynchronous = true;
  EXPECT_THROW((void)steady_ms(served, 4, {stages[0]}, {}), UserError);
}

}  // namespace
}  // namespace pipedream
