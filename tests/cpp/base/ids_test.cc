// Tests identifiers: each kind is a type of its own, ordered, hashable, and as small as the integer inside.
#include "base/ids.h"

#include <gtest/gtest.h>

#include <type_traits>
#include <unordered_set>

namespace pipedream {
namespace {

static_assert(!std::is_convertible_v<int, StageIndex>);
static_assert(!std::is_convertible_v<StageIndex, WeightVersion>);
static_assert(!std::is_constructible_v<MinibatchId, MicrobatchIndex>);
static_assert(sizeof(StageIndex) == sizeof(std::int64_t));

TEST(StrongId, IsZeroUntilSetAndCountsUp) {
  EXPECT_EQ(MinibatchId().value(), 0);
  EXPECT_EQ(MinibatchId(41).next(), MinibatchId(42));
}

TEST(StrongId, OrdersLikeItsValue) {
  EXPECT_LT(WeightVersion(3), WeightVersion(4));
  EXPECT_GT(WeightVersion(5), WeightVersion(4));
  EXPECT_EQ(WeightVersion(4), WeightVersion(4));
}

TEST(StrongId, IsAKeyOfHashedContainers) {
  const std::unordered_set<MinibatchId> seen = {MinibatchId(1), MinibatchId(2), MinibatchId(1)};
  EXPECT_EQ(seen.size(), 2u);
  EXPECT_TRUE(seen.contains(MinibatchId(2)));
}

}  // namespace
}  // namespace pipedream
