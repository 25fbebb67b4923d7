// Records for each round of a shard which replicas' gradients have come for each chunk, and the version of
// each chunk. It makes sure that every gradient is in exactly one update. It holds no tensors. Owned by the
// stage's compute thread; not thread-safe.
//
// Round t makes version t + 1 of a chunk from version t. Its members are the replicas that have a minibatch
// in it: all of them, except perhaps in the last round of a run.
//
//   arrive(replica, t, chunk)    once for each member, in any order; also for rounds later than the chunk's
//   is_complete(chunk, members)  whether all members' gradients have come for the chunk's round
//   publish(chunk, members)      the update is done: the chunk is at the next version, and the round is over
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <optional>
#include <span>
#include <vector>

#include "base/failure.h"
#include "base/ids.h"

namespace pipedream {

class ShardRounds {
 public:
  // num_rounds_max: the most rounds of a chunk that may have gradients at once.
  ShardRounds(std::int64_t num_replicas, std::int64_t num_chunks, WeightVersion first,
              std::int64_t num_rounds_max);

  // Returns a failure if the gradient must not be added: its replica or chunk does not exist, its round is
  // over or cannot have begun, or the same gradient has come before.
  [[nodiscard]] std::optional<Failure> arrive(ReplicaIndex replica, WeightVersion round, std::int64_t chunk);
  [[nodiscard]] bool is_complete(std::int64_t chunk, std::span<const ReplicaIndex> members) const;
  // Returns the chunk's new version. Aborts when the round is not complete, or when a replica that is no
  // member has sent a gradient: that gradient would be lost.
  WeightVersion publish(std::int64_t chunk, std::span<const ReplicaIndex> members);
  [[nodiscard]] WeightVersion version(std::int64_t chunk) const;

 private:
  using Arrived = std::vector<bool>;  // by replica
  struct Chunk {
    WeightVersion version;
    std::deque<Arrived> rounds;  // from the chunk's round to the latest with a gradient
  };

  [[nodiscard]] const Chunk& chunk_at(std::int64_t chunk) const;

  const std::int64_t num_replicas_;
  const std::int64_t num_rounds_max_;
  std::vector<Chunk> chunks_;
};

}  // namespace pipedream
