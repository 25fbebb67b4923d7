// Tests that every gradient is in exactly one update, whatever the order in which gradients come.
#include "param_server/shard_rounds.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <numeric>
#include <random>
#include <set>
#include <tuple>

namespace pipedream {
namespace {

std::vector<ReplicaIndex> first_replicas(std::int64_t count) {
  std::vector<ReplicaIndex> replicas;
  for (std::int64_t replica = 0; replica < count; ++replica) replicas.emplace_back(replica);
  return replicas;
}

std::string refusal(ShardRounds& rounds, std::int64_t replica, std::int64_t round, std::int64_t chunk) {
  const auto failure = rounds.arrive(ReplicaIndex(replica), WeightVersion(round), chunk);
  if (!failure) return "";
  EXPECT_EQ(failure->kind, FailureKind::kCorruptFrame);
  return failure->message;
}

TEST(ShardRounds, ARoundIsCompleteWhenAllItsMembersHaveCome) {
  ShardRounds rounds(3, 1, WeightVersion(0), 2);
  const auto all = first_replicas(3);
  EXPECT_EQ(refusal(rounds, 2, 0, 0), "");
  EXPECT_EQ(refusal(rounds, 0, 0, 0), "");
  EXPECT_FALSE(rounds.is_complete(0, all));
  EXPECT_EQ(refusal(rounds, 1, 0, 0), "");
  ASSERT_TRUE(rounds.is_complete(0, all));
  EXPECT_EQ(rounds.publish(0, all), WeightVersion(1));
  EXPECT_FALSE(rounds.is_complete(0, all));
}

TEST(ShardRounds, TheLastRoundHasFewerMembers) {
  ShardRounds rounds(3, 1, WeightVersion(7), 1);
  EXPECT_EQ(refusal(rounds, 0, 7, 0), "");
  ASSERT_TRUE(rounds.is_complete(0, first_replicas(1)));
  EXPECT_EQ(rounds.publish(0, first_replicas(1)), WeightVersion(8));
}

TEST(ShardRounds, RefusesWhatWouldBeAddedTwiceOrNeverAndSaysWhy) {
  ShardRounds rounds(2, 2, WeightVersion(0), 2);
  EXPECT_EQ(refusal(rounds, 1, 0, 1), "");
  EXPECT_EQ(refusal(rounds, 1, 0, 1), "the gradient of replica 1, round 0, chunk 1: it has come already");
  EXPECT_EQ(refusal(rounds, 2, 0, 0), "the gradient of replica 2, round 0, chunk 0: there are 2 replicas");
  EXPECT_EQ(refusal(rounds, 0, 0, 2), "the gradient of replica 0, round 0, chunk 2: the shard has 2 chunks");
  EXPECT_EQ(refusal(rounds, 0, 2, 0),
            "the gradient of replica 0, round 2, chunk 0: the chunk is at version 0, and at most 2 rounds may"
            " have begun");
  EXPECT_EQ(refusal(rounds, 0, 0, 1), "");
  (void)rounds.publish(1, first_replicas(2));
  EXPECT_EQ(refusal(rounds, 0, 0, 1),
            "the gradient of replica 0, round 0, chunk 1: the chunk is at version 1");
  EXPECT_EQ(rounds.version(0), WeightVersion(0));
}

TEST(ShardRoundsDeathTest, AnUpdateWithoutAMemberOrWithAStrangerAborts) {
  ShardRounds rounds(2, 1, WeightVersion(0), 1);
  EXPECT_EQ(refusal(rounds, 0, 0, 0), "");
  EXPECT_DEATH((void)rounds.publish(0, first_replicas(2)), "not complete");
  EXPECT_EQ(refusal(rounds, 1, 0, 0), "");
  EXPECT_DEATH((void)rounds.publish(0, first_replicas(1)), "2 gradients of chunk 0 from 1 members");
}

// Gradients are distinct powers of two, so that an update's sum shows which gradients it has.
TEST(ShardRounds, UnderAnyReorderingEveryUpdateHasEachOfItsGradientsOnce) {
  std::mt19937 random(3);
  for (int trial = 0; trial < 200; ++trial) {
    const auto num_replicas = static_cast<std::int64_t>(1 + random() % 4);
    const auto num_chunks = static_cast<std::int64_t>(1 + random() % 3);
    const auto num_rounds = static_cast<std::int64_t>(1 + random() % 5);
    const auto num_last = static_cast<std::int64_t>(1 + random() % static_cast<unsigned>(num_replicas));
    const auto members_of = [&](std::int64_t round) {
      return first_replicas(round + 1 == num_rounds ? num_last : num_replicas);
    };
    std::vector<std::tuple<std::int64_t, std::int64_t, std::int64_t>> on_their_way;  // replica, round, chunk
    for (std::int64_t round = 0; round < num_rounds; ++round) {
      for (const ReplicaIndex member : members_of(round)) {
        for (std::int64_t chunk = 0; chunk < num_chunks; ++chunk)
          on_their_way.emplace_back(member.value(), round, chunk);
      }
    }
    std::ranges::shuffle(on_their_way, random);
    ShardRounds rounds(num_replicas, num_chunks, WeightVersion(0), num_rounds);
    std::map<std::pair<std::int64_t, std::int64_t>, std::int64_t> sums;  // of round and chunk
    for (const auto& [replica, round, chunk] : on_their_way) {
      ASSERT_EQ(refusal(rounds, replica, round, chunk), "");
      EXPECT_NE(refusal(rounds, replica, round, chunk), "");  // sent again
      sums[{round, chunk}] += std::int64_t{1} << replica;
      for (;;) {
        const std::int64_t at = rounds.version(chunk).value();
        if (at == num_rounds || !rounds.is_complete(chunk, members_of(at))) break;
        const auto num_members = static_cast<std::int64_t>(members_of(at).size());
        EXPECT_EQ((sums[{at, chunk}]), (std::int64_t{1} << num_members) - 1);
        EXPECT_EQ(rounds.publish(chunk, members_of(at)).value(), at + 1);  // versions only grow
      }
    }
    for (std::int64_t chunk = 0; chunk < num_chunks; ++chunk)
      EXPECT_EQ(rounds.version(chunk).value(), num_rounds);
  }
}

// Tries all orders in which three replicas' gradients of two rounds can come. Each replica's own gradients
// keep their order.
TEST(ShardRounds, AllInterleavingsOfTwoRoundsEndAtVersionTwo) {
  std::vector<std::int64_t> replicas = {0, 0, 1, 1, 2, 2};
  const auto all = first_replicas(3);
  int num_orders = 0;
  do {
    ShardRounds rounds(3, 1, WeightVersion(0), 2);
    std::vector<std::int64_t> next_round(3, 0);
    std::set<std::int64_t> seen_versions;
    for (const std::int64_t replica : replicas) {
      ASSERT_EQ(refusal(rounds, replica, next_round[static_cast<std::size_t>(replica)]++, 0), "");
      while (rounds.is_complete(0, all)) seen_versions.insert(rounds.publish(0, all).value());
    }
    EXPECT_EQ(seen_versions, (std::set<std::int64_t>{1, 2}));
    ++num_orders;
  } while (std::ranges::next_permutation(replicas).found);
  EXPECT_EQ(num_orders, 90);
}

}  // namespace
}  // namespace pipedream
