// Who is where: the rank of every shard of every replica of every stage, and what a rank holds. The one place
// that computes a rank from a stage. Plain value; any thread.
//
//   straight                2-1 replicas            interleaved, 2 workers
//   stage    0  1  2        stage    0     1        stage    0  1  2  3
//   rank     0  1  2        rank     0  1  2        rank     0  1  0  1
//
// Minibatch i goes to replica i mod r of a stage with r replicas (design.md, section 4). A shard is a part of
// what one replica of a stage holds; an unsharded stage has one.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "base/ids.h"

namespace pipedream {

using ShardIndex = StrongId<struct ShardIndexTag>;  // local to its replica

struct Place {
  StageIndex stage;
  ReplicaIndex replica;
  ShardIndex shard;
  Rank rank;

  friend bool operator==(const Place&, const Place&) = default;
};

class Placement {
 public:
  Placement() = default;  // of no stage
  // In any order. Throws UserError naming stage, replica, shard and rank for: a negative number, a place that
  // is given twice or is missing (stages, the replicas of each and the shards of each of them are counted
  // from 0, without gaps, and all replicas of a stage have as many shards), two replicas of a stage at one
  // rank, and a rank without a place below one that has one.
  explicit Placement(std::vector<Place> places);
  // One replica of each stage, unsharded, at these ranks.
  [[nodiscard]] static Placement at_ranks(const std::vector<std::int64_t>& rank_of_stage);
  // Stage by stage, and in it replica by replica, each at the next rank.
  [[nodiscard]] static Placement in_order(const std::vector<std::int64_t>& num_replicas);

  [[nodiscard]] bool empty() const { return places_.empty(); }
  [[nodiscard]] std::int64_t num_stages() const { return static_cast<std::int64_t>(stages_.size()); }
  [[nodiscard]] std::int64_t num_ranks() const { return num_ranks_; }
  // These throw UserError for what the placement does not have.
  [[nodiscard]] std::int64_t num_replicas(StageIndex stage) const;
  [[nodiscard]] std::int64_t num_shards(StageIndex stage) const;
  [[nodiscard]] Rank rank_of(StageIndex stage, ReplicaIndex replica = {}, ShardIndex shard = {}) const;

  // In the order of stage, replica, shard; none for a rank that is not in use.
  [[nodiscard]] std::vector<Place> places_at(Rank rank) const;
  [[nodiscard]] std::vector<StageIndex> stages_at(Rank rank) const;
  [[nodiscard]] const std::vector<Place>& places() const { return places_; }

  friend bool operator==(const Placement& one, const Placement& other) {
    return one.places_ == other.places_;
  }

 private:
  struct Stage {
    std::size_t first_place = 0;
    std::int64_t num_replicas = 0;
    std::int64_t num_shards = 0;
  };

  void count_stages();
  void check_grid() const;
  void check_ranks() const;
  [[nodiscard]] const Stage& stage_at(StageIndex stage) const;

  std::vector<Place> places_;  // by stage, replica, shard: each stage is a grid without gaps
  std::vector<Stage> stages_;
  std::int64_t num_ranks_ = 0;
};

}  // namespace pipedream
