// Tests that every gradient is applied once, and that gradients are applied in the order in which they come.
#include "param_server/shard_updates.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <vector>

namespace pipedream {
namespace {

std::string refusal(ShardUpdates& updates, std::int64_t replica, std::int64_t round, std::int64_t part) {
  const auto failure = updates.apply(ReplicaIndex(replica), WeightVersion(round), part);
  if (!failure) return "";
  EXPECT_EQ(failure->kind, FailureKind::kCorruptFrame);
  return failure->message;
}

TEST(ShardUpdates, CountWhatEachPartHasHadAndInWhichOrder) {
  ShardUpdates updates(2, 2, WeightVersion(0));
  EXPECT_EQ(refusal(updates, 0, 0, 0), "");
  EXPECT_EQ(refusal(updates, 1, 0, 0), "");
  EXPECT_EQ(updates.num_updates(0), 2);
  EXPECT_EQ(updates.num_updates(1), 0);
  EXPECT_EQ(refusal(updates, 1, 0, 1), "");
  EXPECT_EQ(updates.round(ReplicaIndex(1)), WeightVersion(1));
  EXPECT_EQ(refusal(updates, 1, 1, 0), "");  // however late replica 0 is
  EXPECT_EQ(refusal(updates, 0, 0, 1), "");
  EXPECT_EQ(updates.round(ReplicaIndex(0)), WeightVersion(1));
  EXPECT_EQ(updates.order(), (std::vector<std::uint32_t>{0, 1, 1, 1, 0}));
}

TEST(ShardUpdates, BeginWithWhatHasBeenAppliedBefore) {
  ShardUpdates updates(3, 1, WeightVersion(4));
  EXPECT_EQ(updates.num_updates(0), 12);
  EXPECT_EQ(refusal(updates, 2, 4, 0), "");
  EXPECT_EQ(updates.num_updates(0), 13);
}

TEST(ShardUpdates, RefuseWhatWouldBeAppliedTwiceOrPassedOverAndSayWhy) {
  ShardUpdates updates(2, 2, WeightVersion(0));
  EXPECT_EQ(refusal(updates, 2, 0, 0), "the gradient of replica 2, round 0, part 0: there are 2 replicas");
  EXPECT_EQ(refusal(updates, 1, 0, 2), "the gradient of replica 1, round 0, part 2: the shard has 2 parts");
  EXPECT_EQ(refusal(updates, 1, 0, 1),
            "the gradient of replica 1, round 0, part 1: its next is round 0, part 0");
  EXPECT_EQ(refusal(updates, 1, 0, 0), "");
  EXPECT_EQ(refusal(updates, 1, 0, 0),
            "the gradient of replica 1, round 0, part 0: its next is round 0, part 1");
  EXPECT_EQ(refusal(updates, 1, 1, 1),
            "the gradient of replica 1, round 1, part 1: its next is round 0, part 1");
  EXPECT_EQ(updates.num_updates(0), 1);
}

TEST(ShardUpdates, ForgetAnOrderThatHasGrownTooLong) {
  ShardUpdates updates(1, 1, WeightVersion(0));
  for (std::size_t round = 0; round < ShardUpdates::kNumOrderedMax; ++round)
    ASSERT_EQ(refusal(updates, 0, static_cast<std::int64_t>(round), 0), "");
  EXPECT_EQ(updates.order().size(), ShardUpdates::kNumOrderedMax);
  EXPECT_EQ(refusal(updates, 0, ShardUpdates::kNumOrderedMax, 0), "");
  EXPECT_EQ(refusal(updates, 0, ShardUpdates::kNumOrderedMax + 1, 0), "");
  EXPECT_TRUE(updates.order().empty());
  EXPECT_EQ(updates.num_updates(0), static_cast<std::int64_t>(ShardUpdates::kNumOrderedMax) + 2);
}

// Gradients are distinct powers of two, so that a part's sum shows which gradients it has, in any order.
TEST(ShardUpdates, UnderAnyOrderEveryPartHasEachGradientOnce) {
  std::mt19937 random(3);
  for (int trial = 0; trial < 100; ++trial) {
    const auto num_replicas = static_cast<std::int64_t>(1 + random() % 4);
    const auto num_parts = static_cast<std::int64_t>(1 + random() % 3);
    const auto num_rounds = static_cast<std::int64_t>(1 + random() % 5);
    std::vector<std::int64_t> coming;  // by replica, as often as it has a part to come
    for (std::int64_t replica = 0; replica < num_replicas; ++replica)
      coming.insert(coming.end(), static_cast<std::size_t>(num_parts * num_rounds), replica);
    std::ranges::shuffle(coming, random);
    ShardUpdates updates(num_replicas, num_parts, WeightVersion(0));
    std::vector<std::int64_t> num_come(static_cast<std::size_t>(num_replicas), 0);
    std::vector<std::int64_t> sums(static_cast<std::size_t>(num_parts), 0);
    for (const std::int64_t replica : coming) {
      const std::int64_t index = num_come[static_cast<std::size_t>(replica)]++;
      const std::int64_t round = index / num_parts;
      const std::int64_t part = index % num_parts;
      ASSERT_EQ(refusal(updates, replica, round, part), "");
      ASSERT_NE(refusal(updates, replica, round, part), "");  // sent again
      sums[static_cast<std::size_t>(part)] += std::int64_t{1} << (round * num_replicas + replica);
    }
    for (std::int64_t part = 0; part < num_parts; ++part) {
      EXPECT_EQ(sums[static_cast<std::size_t>(part)], (std::int64_t{1} << (num_rounds * num_replicas)) - 1);
      EXPECT_EQ(updates.num_updates(part), num_rounds * num_replicas);
    }
  }
}

}  // namespace
}  // namespace pipedream
