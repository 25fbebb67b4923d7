#include "schedule/placement.h"

#include <gtest/gtest.h>

#include <string>

#include "base/failure.h"

namespace pipedream {
namespace {

using Stages = std::vector<StageIndex>;

Place at(std::int64_t stage, std::int64_t replica, std::int64_t rank) {
  return {StageIndex(stage), ReplicaIndex(replica), Rank(rank)};
}

std::string error_at_ranks(const std::vector<std::int64_t>& rank_of_stage) {
  try {
    const Placement placement = Placement::at_ranks(rank_of_stage);
    return "";
  } catch (const UserError& error) {
    return error.what();
  }
}

TEST(Placement, OfAStraightPipelineHasStageSAtRankS) {
  const Placement placement = Placement::in_order({1, 1, 1});
  EXPECT_EQ(placement.num_stages(), 3);
  EXPECT_EQ(placement.num_ranks(), 3);
  for (std::int64_t stage = 0; stage < 3; ++stage) {
    EXPECT_EQ(placement.rank_of(StageIndex(stage)), Rank(stage));
    EXPECT_EQ(placement.stages_at(Rank(stage)), Stages{StageIndex(stage)});
  }
  EXPECT_EQ(placement, Placement::at_ranks({0, 1, 2}));
}

TEST(Placement, OfReplicasGivesEachTheNextRank) {
  const Placement placement = Placement::in_order({3, 1, 2});
  EXPECT_EQ(placement.num_ranks(), 6);
  EXPECT_EQ(placement.num_replicas(StageIndex(0)), 3);
  EXPECT_EQ(placement.num_replicas(StageIndex(1)), 1);
  EXPECT_EQ(placement.rank_of(StageIndex(0), ReplicaIndex(2)), Rank(2));
  EXPECT_EQ(placement.rank_of(StageIndex(1)), Rank(3));
  EXPECT_EQ(placement.rank_of(StageIndex(2), ReplicaIndex(1)), Rank(5));
  EXPECT_EQ(placement.places_at(Rank(5)), std::vector<Place>{at(2, 1, 5)});
}

TEST(Placement, OfSparesGivesEachARankAfterThoseOfAllReplicas) {
  const Placement placement = Placement::in_order({3, 1, 2}, {2, 0, 1});
  EXPECT_EQ(placement.num_ranks(), 9);
  EXPECT_EQ(placement.num_spares(), 3);
  EXPECT_EQ(placement.num_replicas(StageIndex(0)), 3);
  EXPECT_EQ(placement.num_owners(StageIndex(0)), 5);
  EXPECT_EQ(placement.num_owners(StageIndex(1)), 1);
  EXPECT_EQ(placement.rank_of(StageIndex(2), ReplicaIndex(1)), Rank(5));
  EXPECT_EQ(placement.rank_of(StageIndex(0), ReplicaIndex(4)), Rank(7));
  EXPECT_EQ(placement.rank_of(StageIndex(2), ReplicaIndex(2)), Rank(8));
  EXPECT_EQ(placement.stages_at(Rank(8)), Stages{StageIndex(2)});
  EXPECT_TRUE(placement.places_at(Rank(6)).front().is_spare);
  EXPECT_FALSE(placement.places_at(Rank(5)).front().is_spare);
  EXPECT_EQ(Placement::in_order({2, 1}, {0, 0}), Placement::in_order({2, 1}));
}

TEST(Placement, RefusesImpossibleNumbersOfSpares) {
  EXPECT_THROW((void)Placement::in_order({2, 1}, {1}), UserError);
  EXPECT_THROW((void)Placement::in_order({2, 1}, {-1, 0}), UserError);
}

TEST(Placement, OfSeveralStagesAtARankListsThemInOrder) {
  const Placement placement = Placement::at_ranks({0, 1, 0, 1, 0});
  EXPECT_EQ(placement.num_ranks(), 2);
  EXPECT_EQ(placement.stages_at(Rank(0)), (Stages{StageIndex(0), StageIndex(2), StageIndex(4)}));
  EXPECT_EQ(placement.stages_at(Rank(1)), (Stages{StageIndex(1), StageIndex(3)}));
  EXPECT_EQ(placement.stages_at(Rank(2)), Stages());
}

TEST(Placement, OfNothingIsEmpty) {
  EXPECT_TRUE(Placement().empty());
  EXPECT_EQ(Placement().num_ranks(), 0);
  EXPECT_EQ(Placement::in_order({}), Placement());
}

TEST(Placement, RefusesRanksWithAGap) {
  EXPECT_EQ(error_at_ranks({0, 2}),
            "nothing is placed at rank 1, and stage 1 replica 0 is at rank 2; ranks have no gaps");
  EXPECT_EQ(error_at_ranks({1}),
            "nothing is placed at rank 0, and stage 0 replica 0 is at rank 1; ranks have no gaps");
}

TEST(Placement, RefusesNumbersOutOfRange) {
  EXPECT_EQ(error_at_ranks({0, -1}),
            "stage 1 replica 0 is at rank -1; ranks are counted from 0, to 1073741823");
  EXPECT_NE(error_at_ranks({std::int64_t{1} << 30}), "");
  EXPECT_THROW((void)Placement::in_order({1, 0}), UserError);
  EXPECT_THROW((void)Placement::in_order({std::int64_t{1} << 40}), UserError);
}

TEST(Placement, RefusesToFindWhatItDoesNotHave) {
  const Placement placement = Placement::in_order({2, 1});
  EXPECT_THROW((void)placement.rank_of(StageIndex(2)), UserError);
  EXPECT_THROW((void)placement.rank_of(StageIndex(-1)), UserError);
  EXPECT_THROW((void)placement.rank_of(StageIndex(0), ReplicaIndex(2)), UserError);
  EXPECT_THROW((void)placement.rank_of(StageIndex(1), ReplicaIndex(-1)), UserError);
  EXPECT_THROW((void)placement.num_replicas(StageIndex(2)), UserError);
}

}  // namespace
}  // namespace pipedream
