// Tests a stage's memory, term by term. limited_partition_test.cc tests the search for plans that fit.
#include "planner/stage_memory.h"

#include <gtest/gtest.h>

#include "planner/limited_partition.h"

namespace pipedream {
namespace {

constexpr MemoryCosts kNoCopies{.model_copies = 0};

std::vector<double> memory_of_two(std::int64_t first_replicas, std::int64_t last_replicas,
                                  std::vector<std::int64_t> in_flight, double saved_bytes,
                                  std::vector<bool> recompute = {false, false},
                                  const MemoryCosts& costs = kNoCopies) {
  const std::vector<LayerCost> layers = {{.compute_s = 1, .activation_bytes = 10, .parameter_bytes = 0},
                                         {.compute_s = 1, .activation_bytes = 0, .parameter_bytes = 0}};
  const std::vector<LayerMemory> memory(2, {.saved_bytes = saved_bytes, .forward_s = 0});
  const std::vector<StageCopies> copies = {StageCopies::stashing(first_replicas, in_flight[0], 1),
                                           StageCopies::stashing(last_replicas, in_flight[1], 1)};
  return memory_of_plan(layers, memory, {{0, 0, first_replicas}, {1, 1, last_replicas}}, copies, recompute,
                        costs);
}

constexpr double kDropped = 2 * 10;  // the temporaries of a backward: two items of 10 bytes

// Returns the memory of each stage of a straight plan, with three microbatches in flight at the first stage.
// Each stage has 60 bytes of parameters. A minibatch has 40 bytes at the boundary, 80 saved bytes, and 16
// bytes of data.
std::vector<double> memory_with_microbatches(std::int64_t m) {
  const std::vector<LayerCost> layers = {{.compute_s = 1, .activation_bytes = 40, .parameter_bytes = 60},
                                         {.compute_s = 1, .activation_bytes = 0, .parameter_bytes = 60}};
  const std::vector<LayerMemory> memory(2, {.saved_bytes = 80, .forward_s = 0});
  const MemoryCosts costs{.model_copies = 0, .data_bytes = 16, .num_microbatches = m};
  return memory_of_plan(layers, memory, {{0, 0, 1}, {1, 1, 1}},
                        {StageCopies::stashing(1, 3, m), StageCopies::stashing(1, 1, m)}, {false, false},
                        costs);
}

TEST(StageMemory, WhatIsInFlightIsOfMicrobatches) {
  // The terms are versions and gradients, data, kept activations, two slots, and a backward's temporaries.
  // With several microbatches the temporaries include a layer's gradients.
  EXPECT_EQ(memory_with_microbatches(1)[0], (3 + 1) * 60 + 3 * 16 + 3 * (80 + 40) + 2 * 40 + 2 * 40);
  EXPECT_EQ(memory_with_microbatches(2)[0], (2 + 1) * 60 + 2 * 16 + 3 * (40 + 20) + 2 * 20 + (2 * 20 + 60));
  EXPECT_EQ(memory_with_microbatches(4)[0], (2 + 1) * 60 + 2 * 16 + 3 * (20 + 10) + 2 * 10 + (2 * 10 + 60));
  // The terms of 10 bytes are two slots, the kept input of one microbatch, the gradients of two more that are
  // in flight upstream, and one gradient that is released late. The saved tensors do not count the input
  // again.
  EXPECT_EQ(memory_with_microbatches(4)[1], (1 + 1) * 60 + 16 + (20 - 10) + (2 + 3 + 1) * 10 + (2 * 10 + 60));
}

TEST(StageMemory, ReplicasKeepTheVersionsOfTheirRounds) {
  // Five microbatches are in flight at 3 replicas. c is the number of microbatches that a replica contributes
  // to an update. It is 1, 2 and 4 for minibatches of 1, 6 and 12 microbatches.
  EXPECT_EQ(StageCopies::stashing(3, 5, 1).num_versions, 5);
  EXPECT_EQ(StageCopies::stashing(3, 5, 6).num_versions, 3);
  EXPECT_EQ(StageCopies::stashing(3, 5, 12).num_versions, 2);
  EXPECT_EQ(StageCopies::stashing(3, 1, 4).num_versions, 1);
}

TEST(StageMemory, AStraightPlanHasAnEdgeEachWay) {
  // The first stage has the saved tensors and the output of each minibatch in flight, and two slots. The
  // second has two slots, the saved tensors of its one minibatch in flight, and two gradients.
  EXPECT_EQ(memory_of_two(1, 1, {2, 1}, 100),
            (std::vector<double>{2 * 110 + 2 * 10 + kDropped, 2 * 10 + 100 + 2 * 10 + kDropped}));
}

TEST(StageMemory, OfEachReplicaUpstreamThereAreSlotsAndGradientsThatWait) {
  // There are two edges with two slots each. Four microbatches are in flight upstream. One of them is at this
  // stage, which leaves three gradients. One more gradient is released late.
  EXPECT_EQ(memory_of_two(2, 1, {2, 1}, 100)[1], 4 * 10 + 100 + (3 + 1) * 10 + kDropped);
  // Three edges, six in flight.
  EXPECT_EQ(memory_of_two(3, 1, {2, 1}, 100)[1], 6 * 10 + 100 + (5 + 1) * 10 + kDropped);
}

TEST(StageMemory, OfEachReplicaDownstreamThereAreTwoSlotsForGradients) {
  EXPECT_EQ(memory_of_two(1, 3, {4, 1}, 100)[0], 4 * 110 + 3 * 2 * 10 + kDropped);
  // Each of the three replicas has at most two of the four microbatches in flight upstream.
  EXPECT_EQ(memory_of_two(1, 3, {4, 1}, 100)[1], 2 * 10 + 100 + (1 + 1) * 10 + kDropped);
}

TEST(StageMemory, ReplicasWithACommonDivisorHaveFewerNeighbours) {
  EXPECT_EQ(memory_of_two(2, 2, {2, 1}, 100), memory_of_two(1, 1, {2, 1}, 100));
  EXPECT_EQ(memory_of_two(4, 2, {2, 1}, 100), memory_of_two(2, 1, {2, 1}, 100));
  // Without a common divisor, consecutive minibatches go over different pairs of replicas. So a replica has
  // three edges, each with one microbatch in flight.
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

// Returns the bytes that codecs add to each stage of a plan of two stages. The boundary has 10 bytes. As
// activations they are encoded to 5 bytes, and as gradients to 2 bytes, with a residual of 10.
std::vector<double> encoded_of_two(std::int64_t first_replicas, std::int64_t last_replicas,
                                   std::vector<std::int64_t> in_flight, bool stages_apart) {
  const MemoryCosts costs{.model_copies = 0,
                          .activations = {.wire = 0.5},
                          .gradients = {.wire = 0.2, .residual = 1},
                          .stages_apart = stages_apart};
  const std::vector<double> without = memory_of_two(first_replicas, last_replicas, in_flight, 100);
  std::vector<double> added =
      memory_of_two(first_replicas, last_replicas, in_flight, 100, {false, false}, costs);
  for (std::size_t stage = 0; stage < added.size(); ++stage) added[stage] -= without[stage];
  return added;
}

TEST(StageMemory, EncodedItemsWaitInEverySlotAndUntilTheyHaveLeft) {
  // With two microbatches in flight upstream, 2 * 2 + 4 items may be unsent. Each direction has two slots.
  EXPECT_EQ(encoded_of_two(1, 1, {2, 1}, false), (std::vector<double>{8 * 5 + 2 * 2, 2 * 5 + 8 * 2 + 10}));
  // There are three channels each way. With four microbatches in flight upstream, 2 * 4 + 4 items may be
  // unsent on each.
  EXPECT_EQ(encoded_of_two(1, 3, {4, 1}, false)[0], 3 * (12 * 5 + 2 * 2));
  EXPECT_EQ(encoded_of_two(3, 1, {2, 1}, false)[1], 3 * (2 * 5 + 8 * 2 + 10));
}

TEST(StageMemory, ADeviceThatEncodesHasOneItemPerChannel) {
  EXPECT_EQ(encoded_of_two(1, 1, {2, 1}, true), (std::vector<double>{5 + 2, 5 + 2 + 10}));
  EXPECT_EQ(encoded_of_two(1, 3, {4, 1}, true)[0], 3 * (5 + 2));
}

TEST(StageMemory, TheBoundForAnyStageUpstreamHoldsWithCodecs) {
  for (const bool apart : {false, true}) {
    const MemoryCosts costs{.activations = {.wire = 0.5, .residual = 2},
                            .gradients = {.wire = 0.2, .residual = 1},
                            .stages_apart = apart};
    for (std::int64_t replicas = 1; replicas <= 5; ++replicas) {
      for (std::int64_t in_flight = 1; in_flight <= 6; ++in_flight) {
        for (std::int64_t above = 1; above <= 6; ++above) {
          const auto copies = StageCopies::stashing(replicas, in_flight, 1);
          const std::int64_t upstream = 1 + (in_flight * replicas + above - 1) / above;
          EXPECT_LE(crossing_bytes(10, copies, StageCopies::stashing(above, upstream, 1), costs),
                    crossing_bytes_max(10, copies, replicas + above, costs));
        }
      }
    }
  }
}

TEST(StageMemory, TheSearchTakesOtherReplicasWhereOneEdgeMoreDoesNotFit) {
  // With less memory the first stage must have one replica, because the second stage then has one edge less.
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
  EXPECT_EQ(roomy->bottleneck_s, 5.0 / 3);  // one stage with three replicas
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

// Returns the weights' memory at each of r replicas. A version has 90 bytes, in two layers of 60 and 30.
double weights_of(std::int64_t replicas, const MemoryCosts& costs) {
  const std::vector<LayerCost> layers = {{.compute_s = 1, .activation_bytes = 0, .parameter_bytes = 60},
                                         {.compute_s = 1, .activation_bytes = 0, .parameter_bytes = 30}};
  return memory_of_plan(layers, std::vector<LayerMemory>(2), {{0, 1, replicas}}, {{replicas, 1, 1}}, {false},
                        costs)[0];
}

TEST(StageMemory, AReplicaHasTheStateOfItsShardAndGradientsAndSlotsForTheOthers) {
  MemoryCosts costs{.model_copies = 1, .state_copies = 2};
  EXPECT_EQ(weights_of(1, costs), 90 + 90 + 90 + 2 * 90);  // a version, the model, gradients, state
  // The last four terms are copies of gradients for two other replicas, state for a third of the weights,
  // slots for two replicas' pushes, and slots for pulls.
  EXPECT_EQ(weights_of(3, costs), 3 * 90 + 60 + 2 * 30 + 2 * 30 + 60);
  costs.posts_versions = true;
  EXPECT_EQ(weights_of(3, costs), 3 * 90 + 60 + 2 * 30 + 2 * 30);
}

TEST(StageMemory, ShardsOfWholeTensorsAreUnequal) {
  const MemoryCosts even{.model_copies = 0, .state_copies = 1, .posts_versions = true};
  MemoryCosts whole = even;
  whole.whole_tensors = true;
  // A shard may begin just before the largest tensor. Two thirds of that tensor are more than a third of all
  // parameters, so a shard may have 30 + 60 * 2 / 3 bytes. All gradients may need copies for other replicas.
  // For each other replica there are slots for a shard and for one more largest tensor. An update has the
  // mean of the whole shard at once.
  const double shard = 30 + 60 * 2 / 3.0;
  EXPECT_DOUBLE_EQ(weights_of(3, whole), 2 * 90 + 90 + shard + 2 * (shard + 60) + shard);
  EXPECT_EQ(weights_of(3, even), 2 * 90 + 60 + 30 + 2 * 30);
  EXPECT_EQ(weights_of(1, whole), weights_of(1, even));
}

TEST(StageMemory, StalenessKeepsVersionsAndEverySecondRoundGradients) {
  const auto with = [](std::int64_t replicas, std::int64_t staleness) {
    return weights_of(replicas, {.model_copies = 0, .posts_versions = true, .staleness = staleness});
  };
  const double gradients = 90 + 45;  // gradients and their copies
  EXPECT_EQ(with(2, 1) - with(2, 0), 90 + gradients);
  EXPECT_EQ(with(2, 2) - with(2, 0), 2 * 90 + gradients);
  EXPECT_EQ(with(2, 3) - with(2, 0), 3 * 90 + 2 * gradients);
  EXPECT_EQ(with(1, 3) - with(1, 0), 3 * 90);
}

TEST(StageMemory, WhoReducesTogetherHasNoShards) {
  const MemoryCosts costs{.model_copies = 0, .state_copies = 2, .reduces_together = true};
  EXPECT_EQ(weights_of(3, costs), 90 + 2 * 90 + 2 * 90);
}

TEST(StageMemory, BesideSparesAReplicaMayOwnNothingAndWaitForThem) {
  const MemoryCosts costs{.model_copies = 0, .posts_versions = true, .has_spares = true};
  EXPECT_EQ(weights_of(3, costs), 90 + 90 + 90 + 2 * 30);  // a version, gradients, their copies, and slots
  const double with_two = replica_weight_bytes({.all = 90}, 3, 2, {.most = 1 / 3.0}, costs);
  EXPECT_DOUBLE_EQ(with_two, 2 * 90 + 2 * (90 + 90) + 2 * 30);
}

TEST(StageMemory, WhereRoundsAreLongAChunkHasAMeanOfItsOwn) {
  EXPECT_EQ(weights_of(3, {.drains = true}) - weights_of(3, {}), 30);
  EXPECT_EQ(weights_of(1, {.drains = true}), weights_of(1, {}));
}

TEST(StageMemory, AsynchronousShardsAreOnceMoreAtTheirOwnerAndForEachOtherReplica) {
  const auto of = [&](std::int64_t replicas, bool asynchronous) {
    return weights_of(replicas, {.model_copies = 0, .step_copies = 2, .asynchronous = asynchronous});
  };
  // Asynchronous shards add three terms: 90 / 3 for the owner's shard, two copies of the shard, and a step's
  // temporaries for the largest layer.
  EXPECT_EQ(of(3, true) - of(3, false), 90 + 2 * 60);
  EXPECT_EQ(of(1, true), of(1, false));
}

}  // namespace
}  // namespace pipedream
