// Records the version of each chunk of a shard, and the replicas whose gradients for the chunk have come, by
// round. It makes sure that every gradient is in exactly one update. It holds no tensors. Owned by the
// stage's compute thread; not thread-safe.
//
// Round t makes version t + 1 of a chunk from version t. Members are the replicas that have a minibatch in
// the round: in the last round of a run perhaps not all, in other rounds all.
//
//   arrive(replica, t, chunk)    called once for each member, in any order; t may also be a later round than
//                                the chunk's present round
//   is_complete(chunk, members)  whether all members' gradients for the chunk's present round have come
//   publish(chunk, members)      called after the update: ends the round, and the chunk has its next version
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
  // Returns the chunk's new version. Aborts when the round is not complete. Aborts also when a replica that
  // is no member has sent a gradient, because the gradient would be lost.
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
