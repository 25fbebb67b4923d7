// A stage's memory, term by term; the search that keeps to it is tested in limited_partition_test.cc.
#include "planner/stage_memory.h"

#include <gtest/gtest.h>

#include "planner/limited_partition.h"

namespace pipedream {
namespace {

constexpr MemoryCosts kNoCopies{.fixed_copies = 0, .step_copies = 0, .data_bytes = 0};

std::vector<double> memory_of_two(std::int64_t first_replicas, std::int64_t last_replicas,
                                  std::vector<std::int64_t> in_flight, double saved_bytes,
                                  std::vector<bool> recompute = {false, false}) {
  const std::vector<LayerCost> layers = {{.compute_s = 1, .activation_bytes = 10, .parameter_bytes = 0},
                                         {.compute_s = 1, .activation_bytes = 0, .parameter_bytes = 0}};
  const std::vector<LayerMemory> memory(2, {.saved_bytes = saved_bytes, .forward_s = 0});
  return memory_of_plan(layers, memory, {{0, 0, first_replicas}, {1, 1, last_replicas}}, in_flight, recompute,
                        kNoCopies);
}

constexpr double kDropped = 2 * 10;  // by a backward

TEST(StageMemory, AStraightPlanHasAnEdgeEachWay) {
  // n (saved + output) and two slots; two slots for the one in flight, its stash, two gradients.
  EXPECT_EQ(memory_of_two(1, 1, {2, 1}, 100),
            (std::vector<double>{2 * 110 + 2 * 10 + kDropped, 2 * 10 + 100 + 2 * 10 + kDropped}));
}

TEST(StageMemory, OfEachReplicaUpstreamThereAreSlotsAndGradientsThatWait) {
  // Two edges of two slots each; of the four in flight upstream one is here, and one is released late.
  EXPECT_EQ(memory_of_two(2, 1, {2, 1}, 100)[1], 4 * 10 + 100 + (3 + 1) * 10 + kDropped);
  // Three edges, six in flight.
  EXPECT_EQ(memory_of_two(3, 1, {2, 1}, 100)[1], 6 * 10 + 100 + (5 + 1) * 10 + kDropped);
}

TEST(StageMemory, OfEachReplicaDownstreamThereAreTwoSlotsForGradients) {
  EXPECT_EQ(memory_of_two(1, 3, {4, 1}, 100)[0], 4 * 110 + 3 * 2 * 10 + kDropped);
  // Of the four in flight upstream each of the three has two at most.
  EXPECT_EQ(memory_of_two(1, 3, {4, 1}, 100)[1], 2 * 10 + 100 + (1 + 1) * 10 + kDropped);
}

TEST(StageMemory, ReplicasWithACommonDivisorHaveFewerNeighbours) {
  EXPECT_EQ(memory_of_two(2, 2, {2, 1}, 100), memory_of_two(1, 1, {2, 1}, 100));
  EXPECT_EQ(memory_of_two(4, 2, {2, 1}, 100), memory_of_two(2, 1, {2, 1}, 100));
  // With none in common every minibatch has another pair: three edges, of which each has one in flight.
  EXPECT_EQ(memory_of_two(3, 2, {2, 1}, 100)[1], 6 * 10 + 100 + (2 + 1) * 10 + kDropped);
}

TEST(StageMemory, GradientsThatAreLargerThanWhatIsKeptWaitInItsPlace) {
  EXPECT_EQ(memory_of_two(1, 1, {2, 1}, 4)[1], 2 * 10 + (2 + 1) * 10 + kDropped);
}

TEST(StageMemory, ARecomputeKeepsOutputsUntilTheyHaveLeftAndGradientsOfAllInFlight) {
  EXPECT_EQ(memory_of_two(1, 1, {3, 1}, 100, {true, true}),
            (std::vector<double>{100 + (3 + 2) * 10 + 2 * 10 + kDropped,
                                 2 * 10 + 100 + 10 + (3 + 1) * 10 + kDropped}));
}

TEST(StageMemory, TheSearchTakesOtherReplicasWhereOneEdgeMoreDoesNotFit) {
  // As quick as two replicas of the first stage would be one of it alone: its second layer is cheap.
  std::vector<LayerCost> layers = {{.compute_s = 4, .activation_bytes = 10, .parameter_bytes = 0},
                                   {.compute_s = 1, .activation_bytes = 0, .parameter_bytes = 0}};
  const std::vector<LayerMemory> memory = {{.saved_bytes = 0, .forward_s = 0},
                                           {.saved_bytes = 100, .forward_s = 0}};
  PlanLimits limits;
  limits.costs = kNoCopies;
  limits.may_recompute = false;
  limits.memory_bytes = {200, 200, 200};
  const auto roomy = partition_within(layers, memory, 3, 1e9, limits);
  ASSERT_TRUE(roomy.has_value());
  EXPECT_EQ(roomy->bottleneck_s, 5.0 / 3);  // all layers at all workers
  limits.last_layers = {0, 1};
  const auto cut = partition_within(layers, memory, 3, 1e9, limits);
  ASSERT_TRUE(cut.has_value());
  EXPECT_EQ(cut->stages, (std::vector<PlannedStage>{{0, 0, 2}, {1, 1, 1}}));
  EXPECT_EQ(cut->memory_bytes[1], 200);
  limits.memory_bytes = {199, 199, 199};
  const auto tight = partition_within(layers, memory, 3, 1e9, limits);
  ASSERT_TRUE(tight.has_value());
  EXPECT_EQ(tight->stages, (std::vector<PlannedStage>{{0, 0, 1}, {1, 1, 1}}));
}

TEST(StageMemory, AsynchronousShardsAreOnceMoreAtTheirOwnerAndForEachOtherReplica) {
  const std::vector<LayerCost> layers = {{.compute_s = 1, .activation_bytes = 0, .parameter_bytes = 60},
                                         {.compute_s = 1, .activation_bytes = 0, .parameter_bytes = 30}};
  const std::vector<LayerMemory> memory(2);
  const auto of = [&](std::int64_t replicas, bool asynchronous) {
    const MemoryCosts costs{
        .fixed_copies = 0, .step_copies = 2, .data_bytes = 0, .asynchronous = asynchronous};
    return memory_of_plan(layers, memory, {{0, 1, replicas}}, {1}, {false}, costs)[0];
  };
  // 90 / 3 at the owner, two copies of them, and a step's temporaries of the largest layer.
  EXPECT_EQ(of(3, true) - of(3, false), 90 + 2 * 60);
  EXPECT_EQ(of(1, true), of(1, false));
}

}  // namespace
}  // namespace pipedream
