// How the minibatches of a run fall on the replicas of one stage, and on the rounds of which each is one
// update (program.h). Pure arithmetic; any thread.
//
//   2 replicas, 7 minibatches      replica 0   0   2   4   6
//   2 a round                      replica 1     1   3   5
//                                  round       0 0 1 1 2 2 3     the last has one member
//
// A replica counts its own minibatches from the start of the run, and rounds are counted from minibatch 0:
// round j makes version j + 1 of j. Where shards are asynchronous a replica's part of a round is a round of
// its own, with versions of its own. Spares, which count on from the replicas, have no minibatches.
#pragma once

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <optional>

#include "base/ids.h"

namespace pipedream {

struct Rounds {
  std::int64_t first_minibatch = 0;        // of the run; begins a round
  std::int64_t num_replicas = 1;           // r
  std::int64_t minibatches_per_round = 1;  // R, a multiple of r
  bool asynchronous = false;

  [[nodiscard]] ReplicaIndex replica_of(MinibatchId minibatch) const {
    return ReplicaIndex(minibatch.value() % num_replicas);
  }
  [[nodiscard]] std::int64_t round_of(MinibatchId minibatch) const {
    return minibatch.value() / minibatches_per_round;
  }
  [[nodiscard]] MinibatchId begin_of(std::int64_t round) const {
    return MinibatchId(round * minibatches_per_round);
  }
  // The minibatch after the round's last one; while their number is unknown, of a whole round.
  [[nodiscard]] MinibatchId end_of(std::int64_t round, std::optional<std::int64_t> num_minibatches) const {
    const std::int64_t end = begin_of(round + 1).value();
    return MinibatchId(num_minibatches ? std::min(end, *num_minibatches) : end);
  }
  // Whether the replica has a minibatch in the round, where the run ends before minibatch num_minibatches.
  [[nodiscard]] bool is_member(ReplicaIndex replica, std::int64_t round, std::int64_t num_minibatches) const {
    return !is_spare(replica) && first_of(replica, round).value() < num_minibatches;
  }
  [[nodiscard]] bool is_spare(ReplicaIndex replica) const { return replica.value() >= num_replicas; }

  // The version that is there at the start, and the one that the replica has at the end.
  [[nodiscard]] WeightVersion first_version() const {
    return WeightVersion(first_minibatch / minibatches_per_round);
  }
  [[nodiscard]] WeightVersion last_version(ReplicaIndex replica, std::int64_t num_minibatches) const {
    return WeightVersion(num_begun(asynchronous ? replica : ReplicaIndex(0), num_minibatches));
  }

  // Of one replica.
  [[nodiscard]] std::int64_t own_per_round() const { return minibatches_per_round / num_replicas; }
  [[nodiscard]] MinibatchId own_minibatch(ReplicaIndex replica, std::int64_t index) const {
    return MinibatchId(first_minibatch + replica.value() + index * num_replicas);
  }
  [[nodiscard]] std::int64_t own_index(MinibatchId minibatch) const {
    return (minibatch.value() - first_minibatch) / num_replicas;
  }
  [[nodiscard]] std::int64_t num_own(ReplicaIndex replica, std::int64_t num_minibatches) const {
    const std::int64_t after = num_minibatches - first_minibatch - replica.value();
    return after <= 0 || is_spare(replica) ? 0 : (after + num_replicas - 1) / num_replicas;
  }
  // Its first minibatch of the round, if there are so many.
  [[nodiscard]] MinibatchId first_of(ReplicaIndex replica, std::int64_t round) const {
    return MinibatchId(begin_of(round).value() + replica.value());
  }
  // The rounds in which it has a minibatch, those before the run's first included.
  [[nodiscard]] std::int64_t num_begun(ReplicaIndex replica, std::int64_t num_minibatches) const {
    const std::int64_t after = num_minibatches - replica.value();
    return after <= 0 || is_spare(replica) ? 0 : (after + minibatches_per_round - 1) / minibatches_per_round;
  }
  // Its minibatches in the round. While their number is unknown, all that a round may have.
  [[nodiscard]] std::int64_t num_own_in(ReplicaIndex replica, std::int64_t round,
                                        std::optional<std::int64_t> num_minibatches) const {
    const std::int64_t after = end_of(round, num_minibatches).value() - first_of(replica, round).value();
    return after <= 0 || is_spare(replica) ? 0 : (after + num_replicas - 1) / num_replicas;
  }
  // Whether the replica that has the minibatch has none of its round after it. As above.
  [[nodiscard]] bool is_last_own(MinibatchId minibatch, std::optional<std::int64_t> num_minibatches) const {
    return minibatch.value() + num_replicas >= end_of(round_of(minibatch), num_minibatches).value();
  }
};

// Which version a minibatch reads: max(lowest, floor((floor(i / unit) - delay) unit / R) - staleness). The
// unit is R, in which the stage counts, but that of the input stage under vertical sync.
struct VersionRule {
  std::int64_t unit = 1;
  std::int64_t delay = 0;
  std::int64_t minibatches_per_round = 1;
  std::int64_t lowest = 0;
  std::int64_t staleness = 0;  // rounds

  [[nodiscard]] WeightVersion version_of(MinibatchId minibatch) const {
    const std::int64_t delayed = (minibatch.value() / unit - delay) * unit;
    return WeightVersion(std::max(lowest, delayed / minibatches_per_round - staleness));
  }
  // From the version that the next backward reads to the one that its update writes. The input stage's rounds
  // begin up to r_0 - gcd minibatches after the stage's.
  [[nodiscard]] std::int64_t num_versions_kept() const {
    const std::int64_t num_between = (delay + 1) * unit - std::gcd(unit, minibatches_per_round);
    return 1 + (num_between + minibatches_per_round - 1) / minibatches_per_round + staleness;
  }
};

}  // namespace pipedream
