// Records the gradients that an asynchronous shard has applied. The shard applies every gradient of every
// replica separately, part by part, in the order in which the gradients came. With the record each gradient
// is applied exactly once, and a reference run can apply the gradients in the same order. It holds no
// tensors. Owned by the thread that applies; not thread-safe.
//
// A part is the range that the optimizer updates at once: a chunk, or the whole shard. The parts of one
// replica come in order, round after round. The order between replicas depends on time.
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
  // The most entries of order().
  static constexpr std::size_t kNumOrderedMax = std::size_t{1} << 20;

  // first: the first round of every replica in this run. All earlier rounds count as applied, each with one
  // minibatch of each replica.
  ShardUpdates(std::int64_t num_replicas, std::int64_t num_parts, WeightVersion first);

  // Notes that this part of the replica's gradient is applied now. Returns a failure if the replica does not
  // exist, or if another part of the replica is due.
  [[nodiscard]] std::optional<Failure> apply(ReplicaIndex replica, WeightVersion round, std::int64_t part);

  // The round of the replica's next part.
  [[nodiscard]] WeightVersion round(ReplicaIndex replica) const;
  // The number of gradients applied to the part. Each gradient is from one minibatch.
  [[nodiscard]] std::int64_t num_updates(std::int64_t part) const;
  // The replica of each applied part, in order of time. Empty once it would have more than kNumOrderedMax
  // entries.
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
