// A shard's record of each round: which replica's gradient of which chunk has come, and which version each
// chunk is at. So that every gradient is in exactly one update. Bookkeeping only, no memory of tensors. Owned
// by the stage's compute thread; not thread-safe.
//
// Round t makes version t + 1 of a chunk from version t. Its members are the replicas that have a minibatch
// in it, all of them but in the last round of a run.
//
//   arrive(replica, t, chunk)    once for each member, in any order; rounds later than the chunk's too
//   is_complete(chunk, members)  all of them have come for the chunk's round
//   publish(chunk, members)      its update is done: the chunk is at the next version, and the round is over
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
  // num_rounds_max: how many rounds of a chunk may have gradients at once.
  ShardRounds(std::int64_t num_replicas, std::int64_t num_chunks, WeightVersion first,
              std::int64_t num_rounds_max);

  // The failure of a gradient that must not be added: of a replica or a chunk that is not there, of a round
  // that is over, that has come before, or of a round that nobody can have begun.
  [[nodiscard]] std::optional<Failure> arrive(ReplicaIndex replica, WeightVersion round, std::int64_t chunk);
  [[nodiscard]] bool is_complete(std::int64_t chunk, std::span<const ReplicaIndex> members) const;
  // Returns the version that the chunk is at now. Aborts when the round is not complete, or has the gradient
  // of one that is no member: it would be lost.
  WeightVersion publish(std::int64_t chunk, std::span<const ReplicaIndex> members);
  [[nodiscard]] WeightVersion version(std::int64_t chunk) const;

 private:
  using Arrived = std::vector<bool>;  // by replica
  struct Chunk {
    WeightVersion version;
    std::deque<Arrived> rounds;  // from the version's on, those that have begun
  };

  [[nodiscard]] const Chunk& chunk_at(std::int64_t chunk) const;

  const std::int64_t num_replicas_;
  const std::int64_t num_rounds_max_;
  std::vector<Chunk> chunks_;
};

}  // namespace pipedream
