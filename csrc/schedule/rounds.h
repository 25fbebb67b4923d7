// Deals the microbatches of a run to the replicas of one stage, and groups them into rounds. The mean of a
// round's gradients makes one update (program.h). Pure arithmetic; any thread.
//
//   3 replicas, 2 microbatches         minibatch    0     1     2
//   per minibatch, so 3                microbatch   0  1  0  1  0  1
//   minibatches per round              number       0  1  2  3  4  5
//                                      replica      0  1  2  0  1  2
//
// A microbatch's number counts from minibatch 0: with m microbatches per minibatch, microbatch q of minibatch
// i has number i m + q. Microbatches go to the replicas in turn. A round is the smallest number of
// minibatches that gives each replica equally many microbatches; a schedule may need longer rounds.

// Rounds are counted from minibatch 0, and round j makes version j + 1 from version j. With asynchronous
// shards (program.h) each replica's microbatches of a round are a round of their own and make a version of
// their own. Spares (program.h) have no microbatches. Their replica indices come after those of the replicas.
#pragma once

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <optional>

#include "base/ids.h"
#include "schedule/listed_reads.h"

namespace pipedream {

struct Rounds {
  std::int64_t first_minibatch = 0;        // the first minibatch of the run, with which a round begins
  std::int64_t num_replicas = 1;           // r
  std::int64_t minibatches_per_round = 1;  // R, so that R m is a multiple of r
  bool asynchronous = false;
  std::int64_t num_microbatches = 1;  // m, the same for every minibatch

  [[nodiscard]] std::int64_t number_of(MinibatchId minibatch, MicrobatchIndex microbatch) const {
    return minibatch.value() * num_microbatches + microbatch.value();
  }
  [[nodiscard]] MinibatchId minibatch_of(std::int64_t number) const {
    return MinibatchId(number / num_microbatches);
  }
  [[nodiscard]] MicrobatchIndex microbatch_of(std::int64_t number) const {
    return MicrobatchIndex(number % num_microbatches);
  }
  [[nodiscard]] ReplicaIndex replica_of(std::int64_t number) const {
    return ReplicaIndex(number % num_replicas);
  }
  [[nodiscard]] std::int64_t round_of(MinibatchId minibatch) const {
    return minibatch.value() / minibatches_per_round;
  }
  [[nodiscard]] std::int64_t microbatches_per_round() const {
    return minibatches_per_round * num_microbatches;
  }
  [[nodiscard]] MinibatchId begin_of(std::int64_t round) const {
    return MinibatchId(round * minibatches_per_round);
  }
  // Returns the minibatch after the round's last minibatch. As long as num_minibatches is unknown, a round
  // counts as full.
  [[nodiscard]] MinibatchId end_of(std::int64_t round, std::optional<std::int64_t> num_minibatches) const {
    const std::int64_t end = begin_of(round + 1).value();
    return MinibatchId(num_minibatches ? std::min(end, *num_minibatches) : end);
  }
  // Returns whether the replica has a microbatch in the round, if the run has num_minibatches minibatches.
  [[nodiscard]] bool is_member(ReplicaIndex replica, std::int64_t round, std::int64_t num_minibatches) const {
    return !is_spare(replica) && first_number(replica, round) < num_minibatches * num_microbatches;
  }
  [[nodiscard]] bool is_spare(ReplicaIndex replica) const { return replica.value() >= num_replicas; }

  // Returns the version at the start of the run. last_version() is the version of the replica at the end of
  // the run.
  [[nodiscard]] WeightVersion first_version() const {
    return WeightVersion(first_minibatch / minibatches_per_round);
  }
  [[nodiscard]] WeightVersion last_version(ReplicaIndex replica, std::int64_t num_minibatches) const {
    return WeightVersion(num_begun(asynchronous ? replica : ReplicaIndex(0), num_minibatches));
  }

  // Returns how many microbatches of a round one replica has. In the functions below, `index` counts the
  // microbatches of one replica from the start of the run. `number` counts the microbatches of all replicas
  // from minibatch 0.
  [[nodiscard]] std::int64_t own_per_round() const { return microbatches_per_round() / num_replicas; }
  [[nodiscard]] std::int64_t own_number(ReplicaIndex replica, std::int64_t index) const {
    return first_minibatch * num_microbatches + replica.value() + index * num_replicas;
  }
  [[nodiscard]] std::int64_t own_index(std::int64_t number) const {
    return (number - first_minibatch * num_microbatches) / num_replicas;
  }
  [[nodiscard]] std::int64_t num_own(ReplicaIndex replica, std::int64_t num_minibatches) const {
    return count_from(replica, first_minibatch * num_microbatches + replica.value(),
                      num_minibatches * num_microbatches);
  }
  // Returns whether the microbatch is the first, or the last, that its replica has of its minibatch.
  [[nodiscard]] bool is_first_of_minibatch(MicrobatchIndex microbatch) const {
    return microbatch.value() < num_replicas;
  }
  [[nodiscard]] bool is_last_of_minibatch(MicrobatchIndex microbatch) const {
    return microbatch.value() + num_replicas >= num_microbatches;
  }
  // Returns the minibatch of the replica's first microbatch in the round, if the run is long enough to have
  // one.
  [[nodiscard]] MinibatchId first_of(ReplicaIndex replica, std::int64_t round) const {
    return minibatch_of(first_number(replica, round));
  }
  // Returns the number of rounds in which the replica has a microbatch, counted from minibatch 0 on.
  [[nodiscard]] std::int64_t num_begun(ReplicaIndex replica, std::int64_t num_minibatches) const {
    const std::int64_t after = num_minibatches * num_microbatches - replica.value();
    return after <= 0 || is_spare(replica)
               ? 0
               : (after + microbatches_per_round() - 1) / microbatches_per_round();
  }
  // Returns the number of the replica's microbatches in the round. As long as num_minibatches is unknown, a
  // round counts as full.
  [[nodiscard]] std::int64_t num_own_in(ReplicaIndex replica, std::int64_t round,
                                        std::optional<std::int64_t> num_minibatches) const {
    return count_from(replica, first_number(replica, round),
                      end_of(round, num_minibatches).value() * num_microbatches);
  }
  // Returns whether the replica has no microbatch of this round after the minibatch. As long as
  // num_minibatches is unknown, a round counts as full.
  [[nodiscard]] bool is_over_after(ReplicaIndex replica, MinibatchId minibatch,
                                   std::optional<std::int64_t> num_minibatches) const {
    const std::int64_t end = end_of(round_of(minibatch), num_minibatches).value() * num_microbatches;
    const std::int64_t after = number_of(minibatch.next(), MicrobatchIndex(0));
    const std::int64_t next = after + (replica.value() + num_replicas - after % num_replicas) % num_replicas;
    return next >= end;
  }
  // Returns whether the microbatch is the first, or the last, that its replica has of its round. As long as
  // num_minibatches is unknown, a round counts as full.
  [[nodiscard]] bool is_first_own(std::int64_t number) const {
    return number % microbatches_per_round() < num_replicas;
  }
  [[nodiscard]] bool is_last_own(std::int64_t number, std::optional<std::int64_t> num_minibatches) const {
    const std::int64_t end = end_of(round_of(minibatch_of(number)), num_minibatches).value();
    return number + num_replicas >= end * num_microbatches;
  }

 private:
  [[nodiscard]] std::int64_t first_number(ReplicaIndex replica, std::int64_t round) const {
    return begin_of(round).value() * num_microbatches + replica.value();
  }
  // Counts the replica's microbatches from `number`, which is one of them, up to but not including `end`.
  [[nodiscard]] std::int64_t count_from(ReplicaIndex replica, std::int64_t number, std::int64_t end) const {
    return end <= number || is_spare(replica) ? 0 : (end - number + num_replicas - 1) / num_replicas;
  }
};

// A VersionRule says which version a microbatch reads at a stage:
//
//   max(lowest, floor(floor((floor(number / r) - delay) / c) r c / M) - staleness)
//
// `number` is the microbatch's number in the run, and M the microbatches of a round. `delay` says how many
// microbatches of its replica the version is late. Usually r is the stage's number of replicas and c the
// microbatches of a round that each of them has, so that r c = M. Under vertical sync r and c are those of
// the input stage. For example, with r = 1, c = M = 2 and delay = 1 microbatches 0 to 5 read versions 0 0 0 1
// 1 2.
//
// For a program that the user has written, `listed` has each version, and the formula is not used.
struct VersionRule {
  std::int64_t num_replicas = 1;            // r
  std::int64_t own_per_round = 1;           // c
  std::int64_t delay = 0;                   // number of microbatches of one replica
  std::int64_t microbatches_per_round = 1;  // M
  std::int64_t lowest = 0;                  // the oldest version that exists
  std::int64_t staleness = 0;               // number of rounds
  const ListedReads* listed = nullptr;      // the reads of a written program, else null; outlives the rule
  // For written programs only: the number of the run's first microbatch. The run starts with version
  // `lowest`.
  std::int64_t first_number = 0;

  [[nodiscard]] std::int64_t microbatches_counted() const { return num_replicas * own_per_round; }
  [[nodiscard]] WeightVersion version_of(std::int64_t number) const {
    if (listed != nullptr) return WeightVersion(lowest + listed->version_of(number - first_number));
    const std::int64_t delayed = (number / num_replicas - delay) / own_per_round * microbatches_counted();
    return WeightVersion(std::max(lowest, delayed / microbatches_per_round - staleness));
  }
  // Returns the oldest version that this microbatch or a later microbatch reads.
  [[nodiscard]] WeightVersion oldest_from(std::int64_t number) const {
    if (listed != nullptr) return WeightVersion(lowest + listed->oldest_from(number - first_number));
    return version_of(number);  // later microbatches never read older versions
  }
  // Returns the newest version that this microbatch or an earlier microbatch reads.
  [[nodiscard]] WeightVersion newest_until(std::int64_t number) const {
    if (listed != nullptr) return WeightVersion(lowest + listed->newest_until(number - first_number));
    return version_of(number);
  }
  // Returns an upper bound on the growth of newest_until() over num_numbers microbatches, in versions.
  [[nodiscard]] std::int64_t num_new_max(std::int64_t num_numbers) const {
    if (listed != nullptr) return listed->num_new_max(num_numbers);
    return 2 + (num_numbers + microbatches_counted()) / microbatches_per_round;
  }
  // Returns the number of versions kept. They go from the version that the next backward reads to the version
  // that the update after it writes. Under vertical sync the input stage has rounds of r c microbatches. A
  // round there begins up to r c - gcd(r c, M) microbatches after a round of this stage.
  [[nodiscard]] std::int64_t num_versions_kept() const {
    if (listed != nullptr) return listed->num_versions_kept;
    const std::int64_t num_between = delay * num_replicas + microbatches_counted() -
                                     std::gcd(microbatches_counted(), microbatches_per_round);
    return 1 + (num_between + microbatches_per_round - 1) / microbatches_per_round + staleness;
  }
  // Returns how many updates older, on average, the version that a microbatch reads is than the version that
  // its round updates. The mean is over microbatches long after the start.
  [[nodiscard]] double mean_delay() const {
    if (listed != nullptr) return listed->mean_delay(microbatches_per_round);
    // On average, with g = gcd(r c, M), there are
    //   - (r c - 1) / 2 microbatches from the last multiple of r c to a microbatch
    //   - (M - g) / 2 from the beginning of a round to that multiple
    //   - (M - 1) / 2 from the beginning of the microbatch's own round to the microbatch.
    // The first two less the third are (r c - g) / 2, which is added to the delay.
    const std::int64_t num_late_twice = 2 * delay * num_replicas + microbatches_counted() -
                                        std::gcd(microbatches_counted(), microbatches_per_round);
    return static_cast<double>(num_late_twice) / static_cast<double>(2 * microbatches_per_round) +
           static_cast<double>(staleness);
  }
};

}  // namespace pipedream
