// Compares the partition with the best of all plans. Also tests its choice between equal plans, and its
// errors.
#include "planner/partition.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <numeric>
#include <random>
#include <string>
#include <tuple>

#include "base/failure.h"

namespace pipedream {
namespace {

using Layers = std::vector<LayerCost>;
using Stages = std::vector<PlannedStage>;

// Computes a stage's time by the equations of partition.h, written out separately. W_l^m is summed layer by
// layer.
double formula_stage_s(const Layers& layers, const PlannedStage& stage, double bandwidth) {
  const auto replicas = static_cast<double>(stage.num_replicas);
  double compute_s = 0;
  double sync_s = 0;
  for (std::int64_t layer = stage.first_layer; layer <= stage.last_layer; ++layer) {
    const LayerCost& cost = layers[static_cast<std::size_t>(layer)];
    compute_s += cost.compute_s;
    sync_s += 4 * (replicas - 1) * cost.parameter_bytes / (replicas * bandwidth);
  }
  return std::max(compute_s, sync_s) / replicas;
}

double formula_bottleneck_s(const Layers& layers, const Stages& stages, double bandwidth) {
  double slowest_s = 0;
  for (const PlannedStage& stage : stages) {
    slowest_s = std::max(slowest_s, formula_stage_s(layers, stage, bandwidth));
    if (stage.first_layer == 0) continue;
    const LayerCost& upstream = layers[static_cast<std::size_t>(stage.first_layer - 1)];
    slowest_s = std::max(slowest_s, 2 * upstream.activation_bytes / bandwidth);
  }
  return slowest_s;
}

std::int64_t count_workers(const Stages& stages) {
  return std::accumulate(
      stages.begin(), stages.end(), std::int64_t{0},
      [](std::int64_t sum, const PlannedStage& stage) { return sum + stage.num_replicas; });
}

// Calls visit(stages) for every plan of the layers from first_layer on with at most num_workers workers.
template <class Visit>
void for_each_plan(std::int64_t num_layers, std::int64_t num_workers, bool straight, Stages& stages,
                   const Visit& visit) {
  const std::int64_t first_layer = stages.empty() ? 0 : stages.back().last_layer + 1;
  if (first_layer == num_layers) return visit(stages);
  for (std::int64_t last_layer = first_layer; last_layer < num_layers; ++last_layer) {
    for (std::int64_t num_replicas = 1;
         num_replicas <= (straight ? std::min<std::int64_t>(1, num_workers) : num_workers); ++num_replicas) {
      stages.push_back({first_layer, last_layer, num_replicas});
      for_each_plan(num_layers, num_workers - num_replicas, straight, stages, visit);
      stages.pop_back();
    }
  }
}

// Returns (bottleneck, workers, stages) of the best plan. It uses the library's own stage times, so that
// rounding does not decide between equal plans. Another test compares these times with the formula.
std::tuple<double, std::int64_t, std::size_t> brute_force(const Layers& layers, std::int64_t num_workers,
                                                          double bandwidth, bool straight) {
  std::tuple<double, std::int64_t, std::size_t> best{std::numeric_limits<double>::infinity(), 0, 0};
  Stages stages;
  for_each_plan(
      static_cast<std::int64_t>(layers.size()), num_workers, straight, stages, [&](const Stages& plan) {
        best = std::min(
            best, std::make_tuple(bottleneck_s(layers, plan, bandwidth), count_workers(plan), plan.size()));
      });
  return best;
}

void expect_equals_brute_force(const Layers& layers, std::int64_t num_workers, double bandwidth,
                               bool straight) {
  const Partition plan = partition(layers, num_workers, bandwidth, straight);
  const auto [expected_s, expected_workers, expected_stages] =
      brute_force(layers, num_workers, bandwidth, straight);
  EXPECT_EQ(plan.bottleneck_s, expected_s);
  EXPECT_EQ(bottleneck_s(layers, plan.stages, bandwidth), expected_s);
  EXPECT_EQ(count_workers(plan.stages), expected_workers);
  EXPECT_EQ(plan.stages.size(), expected_stages);
  EXPECT_NEAR(formula_bottleneck_s(layers, plan.stages, bandwidth), expected_s, 1e-12 * expected_s);
  if (!straight) return;
  for (const PlannedStage& stage : plan.stages) EXPECT_EQ(stage.num_replicas, 1);
}

// Returns layers with random real figures, or with small integers and zeros. The integers give many equal
// plans.
Layers random_layers(std::mt19937_64& generator, std::int64_t num_layers, bool is_integer) {
  std::uniform_real_distribution<double> real(0, 1);
  std::uniform_int_distribution<int> integer(0, 3);
  const auto figure = [&] { return is_integer ? integer(generator) : real(generator); };
  Layers layers(static_cast<std::size_t>(num_layers));
  for (LayerCost& layer : layers) layer = {figure(), figure(), figure()};
  return layers;
}

TEST(Partition, EqualsBruteForceOnRandomModels) {
  std::mt19937_64 generator(20191027);
  for (int instance = 0; instance < 40; ++instance) {
    for (std::int64_t num_layers = 1; num_layers <= 6; ++num_layers) {
      const Layers layers = random_layers(generator, num_layers, instance % 2 == 0);
      for (const std::int64_t num_workers : {1, 2, 3, 5}) {
        for (const double bandwidth : {0.3, 1.0, 4.0, 30.0}) {
          for (const bool straight : {false, true}) {
            SCOPED_TRACE("instance " + std::to_string(instance) + ", " + std::to_string(num_layers) +
                         " layers, " + std::to_string(num_workers) + " workers, bandwidth " +
                         std::to_string(bandwidth) + (straight ? ", straight" : ""));
            expect_equals_brute_force(layers, num_workers, bandwidth, straight);
          }
        }
      }
      if (HasFailure()) return;
    }
  }
}

TEST(Partition, EqualsBruteForceWithoutParametersOrActivations) {
  std::mt19937_64 generator(2);
  for (int instance = 0; instance < 20; ++instance) {
    Layers no_parameters = random_layers(generator, 5, false);
    Layers no_activations = random_layers(generator, 5, false);
    for (LayerCost& layer : no_parameters) layer.parameter_bytes = 0;
    for (LayerCost& layer : no_activations) layer.activation_bytes = 0;
    expect_equals_brute_force(no_parameters, 5, 1, false);
    expect_equals_brute_force(no_activations, 5, 1, false);
    expect_equals_brute_force(no_activations, 5, 1, true);
  }
}

// The library computes the fewest replicas by a formula. This test tries every number of replicas instead.
TEST(Partition, OneLayerGetsTheBestOfAllReplicaCounts) {
  std::mt19937_64 generator(3);
  std::uniform_real_distribution<double> real(0, 1);
  for (int instance = 0; instance < 300; ++instance) {
    const Layers layers = {{real(generator), 0, real(generator)}};
    const double bandwidth = 0.1 + 10 * real(generator);
    for (const std::int64_t num_workers : {1, 2, 3, 7, 100, 1000}) {
      double expected_s = std::numeric_limits<double>::infinity();
      std::int64_t expected_replicas = 0;
      for (std::int64_t num_replicas = 1; num_replicas <= num_workers; ++num_replicas) {
        const double time_s = bottleneck_s(layers, {{0, 0, num_replicas}}, bandwidth);
        if (time_s >= expected_s) continue;
        expected_s = time_s;
        expected_replicas = num_replicas;
      }
      const Partition plan = partition(layers, num_workers, bandwidth);
      EXPECT_EQ(plan.bottleneck_s, expected_s);
      EXPECT_EQ(plan.stages, (Stages{{0, 0, expected_replicas}}));
    }
  }
}

TEST(Partition, DataParallelismThatSyncMakesSlowerIsAvoided) {
  // With two replicas the sync of a minibatch takes 4 s, which counts as 2 s because two minibatches are
  // synced at once. One worker needs only 1 s.
  const Layers layers = {{1, 0, 2}};
  EXPECT_EQ(bottleneck_s(layers, {{0, 0, 1}}, 1), 1);
  EXPECT_EQ(bottleneck_s(layers, {{0, 0, 2}}, 1), 2);
  const Partition plan = partition(layers, 2, 1);
  EXPECT_EQ(plan.stages, (Stages{{0, 0, 1}}));
  EXPECT_EQ(plan.bottleneck_s, 1);
  // With 16 replicas the sync takes 4 * 15 * 2 / 16 / 16 s per minibatch, which is less than 1 s.
  EXPECT_EQ(partition(layers, 16, 1).stages, (Stages{{0, 0, 16}}));
}

TEST(Partition, WorkersThatDoNotHelpStayIdle) {
  // The second layer sets the pace, so a third worker changes nothing.
  const Layers layers = {{1, 0, 1e9}, {2, 0, 1e9}};
  const Partition plan = partition(layers, 3, 1);
  EXPECT_EQ(plan.stages, (Stages{{0, 0, 1}, {1, 1, 1}}));
  EXPECT_EQ(plan.bottleneck_s, 2);
}

TEST(Partition, OfEqualBottlenecksFewerWorkersThenFewerStagesWin) {
  // The last layer takes as long as the three layers before it. So the plan [0..2] [3] with two workers is
  // best, and more stages do not help.
  const Layers slow_last = {{1, 0, 1e9}, {1, 0, 1e9}, {1, 0, 1e9}, {3, 0, 1e9}};
  EXPECT_EQ(partition(slow_last, 4, 1).stages, (Stages{{0, 2, 1}, {3, 3, 1}}));
  // One stage with two replicas is as fast as two stages, and needs as many workers. So the plan with one
  // stage wins.
  const Layers even = {{1, 0, 0}, {1, 0, 0}};
  EXPECT_EQ(partition(even, 2, 1).stages, (Stages{{0, 1, 2}}));
  // Nothing costs anything: one worker.
  const Layers free_of_cost(4);
  EXPECT_EQ(partition(free_of_cost, 8, 1).stages, (Stages{{0, 3, 1}}));
  EXPECT_EQ(partition(free_of_cost, 8, 1).bottleneck_s, 0);
}

TEST(Partition, AStraightPlanHasOneReplicaPerStageAndAtMostNumWorkersStages) {
  const Layers layers = {{1, 0, 0}, {1, 0, 0}, {1, 0, 0}, {1, 0, 0}};
  const Partition two = partition(layers, 2, 1, true);
  EXPECT_EQ(two.stages, (Stages{{0, 1, 1}, {2, 3, 1}}));
  EXPECT_EQ(two.bottleneck_s, 2);
  EXPECT_EQ(partition(layers, 9, 1, true).stages.size(), 4U);
}

TEST(Partition, ASlowLinkMovesTheCutToTheSmallestActivation) {
  const Layers layers = {{1, 10, 1e9}, {1, 0.1, 1e9}, {1, 10, 1e9}, {1, 0, 1e9}};
  EXPECT_EQ(partition(layers, 4, 1).stages, (Stages{{0, 1, 1}, {2, 3, 1}}));
  // The link is so slow that every boundary takes longer than one worker needs for all layers. So there is no
  // cut.
  EXPECT_EQ(partition(layers, 4, 1e-3).stages, (Stages{{0, 3, 1}}));
}

TEST(Partition, ASinglePlanStageHasNoBoundary) {
  const Layers layers = {{1, 1e9, 0}, {1, 1e9, 0}};
  EXPECT_EQ(bottleneck_s(layers, {{0, 1, 1}}, 1), 2);
  EXPECT_EQ(partition(layers, 2, 1).bottleneck_s, 1);  // two replicas of a single stage
}

TEST(Partition, IsTheSameEveryTime) {
  std::mt19937_64 generator(4);
  const Layers layers = random_layers(generator, 60, true);
  const Partition plan = partition(layers, 24, 3);
  for (int repeat = 0; repeat < 3; ++repeat) EXPECT_EQ(partition(layers, 24, 3).stages, plan.stages);
}

TEST(Partition, ManyWorkersAndTinyOrHugeFiguresStayExact) {
  std::mt19937_64 generator(5);
  for (const double scale : {1e-300, 1e-12, 1e12, 1e300}) {
    Layers layers = random_layers(generator, 4, false);
    for (LayerCost& layer : layers) {
      layer.compute_s *= scale;
      layer.activation_bytes *= scale;
      layer.parameter_bytes *= scale;
    }
    expect_equals_brute_force(layers, 4, 1, false);
  }
  // These times become zero when they are divided among many replicas.
  const Layers denormal = {{std::numeric_limits<double>::denorm_min(), 0, 0}};
  const Partition plan = partition(denormal, std::int64_t{1} << 30, 1);
  EXPECT_EQ(plan.bottleneck_s, 0);
  EXPECT_EQ(plan.stages, (Stages{{0, 0, 2}}));  // half of the smallest double rounds to zero
}

std::string message_of_partition(const Layers& layers, std::int64_t num_workers, double bandwidth) {
  try {
    (void)partition(layers, num_workers, bandwidth);
  } catch (const UserError& error) {
    return error.what();
  }
  return "";
}

TEST(Partition, RefusesNumbersOfWorkersThatCannotBe) {
  const Layers layers = {{1, 1, 1}, {1, 1, 1}};
  for (const std::int64_t num_workers : {std::int64_t{0}, std::int64_t{-3}, std::int64_t{1} << 40}) {
    EXPECT_EQ(message_of_partition(layers, num_workers, 1).find("num_workers is"), 0U) << num_workers;
  }
}

}  // namespace
}  // namespace pipedream
