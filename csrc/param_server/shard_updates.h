// An asynchronous shard's record of what it has applied: every gradient of every replica by itself, part by
// part, in the order in which they came. So that each is applied once, and that a reference can apply them
// again in the same order. Bookkeeping only, no memory of tensors. Owned by who applies; not thread-safe.
//
// A part is what the optimizer updates at once: a chunk, or the whole shard. A replica's parts come in their
// order, round after round; what is between those of different replicas, time says.
//
//   replica 0, round 0    part 0           part 1
//   replica 1, round 0          part 0 part 1
//   order                 0     1     1    0             part 0 has 2 updates, part 1 too
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "base/failure.h"
#include "base/ids.h"

namespace pipedream {

class ShardUpdates {
 public:
  // How many entries order() has at most.
  static constexpr std::size_t kNumOrderedMax = std::size_t{1} << 20;

  // first: the round with which each replica begins, of num_replicas minibatches each; those before have been
  // applied.
  ShardUpdates(std::int64_t num_replicas, std::int64_t num_parts, WeightVersion first);

  // Notes that the part of the replica's gradient of the round is applied now. The failure of one that must
  // not be: of a replica that is not there, or any other than the replica's next.
  [[nodiscard]] std::optional<Failure> apply(ReplicaIndex replica, WeightVersion round, std::int64_t part);

  // The round of which the next part of the replica's is to come.
  [[nodiscard]] WeightVersion round(ReplicaIndex replica) const;
  // How many gradients the part has had, each of a minibatch.
  [[nodiscard]] std::int64_t num_updates(std::int64_t part) const;
  // By replica, whose next part it was. Empty once there have been more than kNumOrderedMax.
  [[nodiscard]] const std::vector<std::uint32_t>& order() const { return order_; }

 private:
  struct Next {
    WeightVersion round;
    std::int64_t part = 0;
  };

  [[nodiscard]] bool has(ReplicaIndex replica) const;
  void note_order(ReplicaIndex replica);

  std::vector<Next> next_of_;              // by replica
  std::vector<std::int64_t> num_updates_;  // by part
  std::vector<std::uint32_t> order_;
  bool keeps_order_ = true;
};

}  // namespace pipedream
