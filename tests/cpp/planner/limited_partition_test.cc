// Tests the partition within limits: memory, speeds and refusals. Without limits it must equal the plain
// partition. tests/python/planning/test_limits.py enumerates all plans.
#include "planner/limited_partition.h"

#include <gtest/gtest.h>

#include <random>

#include "base/failure.h"

namespace pipedream {
namespace {

std::vector<LayerCost> equal_layers(std::size_t num_layers) {
  return std::vector<LayerCost>(num_layers, {.compute_s = 1, .activation_bytes = 0, .parameter_bytes = 10});
}

std::vector<LayerMemory> saving(std::size_t num_layers, double saved_bytes) {
  return std::vector<LayerMemory>(num_layers, {.saved_bytes = saved_bytes, .forward_s = 0.25});
}

TEST(LimitedPartition, WithoutLimitsItIsThePartition) {
  std::mt19937 random(7);  // NOLINT(cert-msc51-cpp): a fixed seed, so that each run has the same cases
  std::uniform_int_distribution<int> figure(0, 40);
  for (int round = 0; round < 200; ++round) {
    std::vector<LayerCost> layers(1 + static_cast<std::size_t>(figure(random)) % 5);
    for (LayerCost& layer : layers) {
      layer = {.compute_s = figure(random) / 4.0,
               .activation_bytes = 25.0 * figure(random),
               .parameter_bytes = 25.0 * figure(random)};
    }
    const std::int64_t num_workers = 1 + figure(random) % 5;
    const Partition wanted = partition(layers, num_workers, 100);
    const auto found = partition_within(layers, saving(layers.size(), 0), num_workers, 100, {});
    ASSERT_TRUE(found.has_value());
    EXPECT_DOUBLE_EQ(found->bottleneck_s, wanted.bottleneck_s);
    EXPECT_EQ(found->stages.size(), wanted.stages.size());
  }
}

TEST(LimitedPartition, MemoryForbidsWhatDoesNotFit) {
  // One stage needs (1 + 2) * 20 bytes for weights, and 200 saved bytes. With two stages each needs at most
  // (2 + 2) * 10 bytes for weights, and 200 saved bytes.
  PlanLimits limits;
  limits.memory_bytes = {250, 250};
  limits.may_recompute = false;
  limits.num_replicas_max = 1;
  const auto found = partition_within(equal_layers(2), saving(2, 100), 2, 1e9, limits);
  ASSERT_TRUE(found.has_value());
  EXPECT_EQ(found->stages, (std::vector<PlannedStage>{{0, 0, 1}, {1, 1, 1}}));
  EXPECT_EQ(found->memory_bytes, (std::vector<double>{240, 130}));
  limits.memory_bytes = {239, 239};
  EXPECT_FALSE(partition_within(equal_layers(2), saving(2, 100), 2, 1e9, limits).has_value());
  limits.may_recompute = true;
  const auto repeated = partition_within(equal_layers(2), saving(2, 100), 2, 1e9, limits);
  ASSERT_TRUE(repeated.has_value());
  EXPECT_EQ(repeated->recompute, (std::vector<bool>{true, false}));
  EXPECT_DOUBLE_EQ(repeated->bottleneck_s, 1.25);
}

TEST(LimitedPartition, ReplicasHaveWhatTheyExchangeInMemory) {
  // A replica needs (1 + 2) * 20 bytes for weights and 200 saved bytes, as in the test before. For the other
  // replica's shard of 10 bytes it also needs copies of gradients, and slots for pushes and pulls.
  PlanLimits limits;
  limits.memory_bytes = {290, 290};
  limits.num_replicas = {2};
  const auto found = partition_within(equal_layers(2), saving(2, 100), 2, 1e9, limits);
  ASSERT_TRUE(found.has_value());
  EXPECT_EQ(found->memory_bytes, (std::vector<double>{290}));
  limits.memory_bytes = {289, 289};
  limits.may_recompute = false;
  EXPECT_FALSE(partition_within(equal_layers(2), saving(2, 100), 2, 1e9, limits).has_value());
}

TEST(LimitedPartition, WhatCrossesHasSlotsAndGradientsAndDataAreWithTheirReaders) {
  // Besides its weights the first stage has the saved tensors and the data of two minibatches, and four items
  // of its output. The second has the saved tensors and the data of one minibatch, and four items of its
  // input. Each has two items as temporaries of a backward, which are larger than the temporaries of a step.
  std::vector<LayerCost> layers = equal_layers(2);
  layers[0].activation_bytes = 7;
  PlanLimits limits;
  limits.memory_bytes = {1000, 1000};
  limits.num_replicas = {1, 1};
  limits.costs.step_copies = 1;
  limits.costs.data_bytes = 3;
  const auto found = partition_within(layers, saving(2, 100), 2, 1e9, limits);
  ASSERT_TRUE(found.has_value());
  EXPECT_EQ(found->memory_bytes,
            (std::vector<double>{40 + 200 + 2 * 3 + 4 * 7 + 2 * 7, 30 + 100 + 3 + 4 * 7 + 2 * 7}));
  limits.memory_bytes = {287, 1000};
  limits.may_recompute = false;
  EXPECT_FALSE(partition_within(layers, saving(2, 100), 2, 1e9, limits).has_value());
}

TEST(LimitedPartition, AStageIsAsSlowAsItsSlowestWorker) {
  PlanLimits limits;
  limits.speeds = {3, 1};
  const auto found = partition_within(equal_layers(4), saving(4, 0), 2, 1e9, limits);
  ASSERT_TRUE(found.has_value());
  EXPECT_EQ(found->stages, (std::vector<PlannedStage>{{0, 2, 1}, {3, 3, 1}}));
  EXPECT_DOUBLE_EQ(found->bottleneck_s, 1);
}

TEST(LimitedPartition, RefusesAProblemThatIsTooLarge) {
  const auto layers = equal_layers(2);
  EXPECT_THROW(static_cast<void>(partition_within(layers, saving(2, 0), 1 << 20, 1, PlanLimits())),
               UserError);
}

}  // namespace
}  // namespace pipedream
