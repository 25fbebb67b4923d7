// Tests which weights are factored, which means sent as factors, with each number of replicas. Also tests a
// stage's time with factors.
#include "planner/factored_weights.h"

#include <gtest/gtest.h>

#include "base/failure.h"
#include "planner/stage_cost.h"

namespace pipedream {
namespace {

TEST(FactoredWeights, AWeightGoesAsFactorsForAsLongAsTheyAreSmaller) {
  FactoredWeights weights;
  // Sent as factors below 4 replicas, because 4 x 25 = 2 x 50.
  weights.add({.weight_bytes = 50, .factor_bytes = 25, .product_s = 1});
  EXPECT_EQ(weights.of(1).weight_bytes, 0);
  EXPECT_EQ(weights.of(2).weight_bytes, 50);
  EXPECT_EQ(weights.of(3).factor_bytes, 25);
  EXPECT_EQ(weights.of(4).weight_bytes, 0);
  EXPECT_EQ(weights.last_alike(2), 3);
  EXPECT_EQ(weights.last_alike(4), kNumReplicasMax);
}

TEST(FactoredWeights, OneWhoseFactorsAreAsLargeNeverDoes) {
  FactoredWeights weights;
  weights.add({.weight_bytes = 50, .factor_bytes = 50, .product_s = 1});
  EXPECT_TRUE(weights.empty());
}

TEST(FactoredWeights, OneWithoutRowsAlwaysDoes) {
  FactoredWeights weights;
  weights.add({.weight_bytes = 50, .factor_bytes = 0, .product_s = 0});
  EXPECT_EQ(weights.of(kNumReplicasMax).weight_bytes, 50);
}

TEST(FactoredWeights, ThoseAlikeAreOneSum) {
  FactoredWeights weights;
  weights.add({.weight_bytes = 100, .factor_bytes = 25, .product_s = 1});  // factored with up to 7 replicas
  weights.add({.weight_bytes = 50, .factor_bytes = 25, .product_s = 2});   // factored with up to 3 replicas
  weights.add({.weight_bytes = 200, .factor_bytes = 50, .product_s = 4});  // factored with up to 7 replicas
  weights.add({.weight_bytes = 40, .factor_bytes = 10, .product_s = 0});   // factored with up to 7 replicas
  const FactoredWeights::Sum two = weights.of(2);
  EXPECT_EQ(two.weight_bytes, 390);
  EXPECT_EQ(two.factor_bytes, 110);
  EXPECT_EQ(two.product_s, 7);
  EXPECT_EQ(two.largest_weight_bytes, 200);
  EXPECT_EQ(two.largest_factor_bytes, 50);
  EXPECT_EQ(weights.last_alike(2), 3);
  EXPECT_EQ(weights.of(4).product_s, 5);
  EXPECT_EQ(weights.last_alike(4), 7);
  EXPECT_EQ(weights.of(8).weight_bytes, 0);
}

TEST(StageCost, OfFactorsEachReplicaSendsAndMultipliesAll) {
  StageCost cost;
  cost.add({.compute_s = 10, .activation_bytes = 0, .parameter_bytes = 150, .factors = {{100, 20, 2}}});
  EXPECT_EQ(cost.time_s(1, 1), 10);
  // Sync sends 4 (3 - 1) 50 / 3 bytes of dense gradients and 2 (3 - 1) 20 bytes of factors. Each replica
  // computes for 10 s, and the products of two other replicas' factors take 2 s each.
  EXPECT_DOUBLE_EQ(cost.sync_s(3, 10), (4.0 * 2 * 50 / 3 + 2 * 2 * 20) / 10);
  EXPECT_DOUBLE_EQ(cost.time_s(3, 1e9), 14.0 / 3);
  // With 10 replicas dense gradients are as small: 10 x 20 = 2 x 100.
  EXPECT_DOUBLE_EQ(cost.time_s(10, 1e9), 1.0);
}

}  // namespace
}  // namespace pipedream
