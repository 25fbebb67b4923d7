// Computes T(i..j, m), the time per minibatch of a stage with m replicas, by the cost model of partition.h. A
// round is R = lcm(M, m) / M minibatches of M microbatches each. Pure arithmetic; any thread.
//
//   sync     4 (m-1) w / (m B) + 2 (m-1) F / B    time of a round on a link, for both directions together
//   compute  sum T_l + (m-1) P                    a replica also multiplies the other replicas' factors
//   T        max(compute / m, sync / R)
//
// w is the bytes of the parameters whose gradients are pushed dense. F is the bytes of one replica's factors,
// for the R / m minibatches that it trains in a round. P is the time to multiply one replica's factors.
#pragma once

#include <algorithm>
#include <cstdint>
#include <numeric>

#include "planner/factored_weights.h"
#include "planner/partition.h"

namespace pipedream {

// Sums over a stage's layers. They are taken in the order of layers, so that equal stages have equal times to
// the bit.
struct StageCost {
  double compute_s = 0;
  double parameter_bytes = 0;
  FactoredWeights factored;
  std::int64_t num_microbatches = 1;  // M

  // Returns R of the file's head, the number of minibatches in a round.
  [[nodiscard]] double minibatches_per_round(std::int64_t num_replicas) const {
    return static_cast<double>(std::lcm(num_microbatches, num_replicas) / num_microbatches);
  }

  void add(const LayerCost& layer) {
    compute_s += layer.compute_s;
    parameter_bytes += layer.parameter_bytes;
    for (const FactoredWeight& weight : layer.factors) factored.add(weight);
  }

  // Returns the time that a replica takes to multiply the other replicas' factors, in addition to compute_s.
  [[nodiscard]] double products_s(std::int64_t num_replicas) const {
    if (factored.empty()) return 0;
    return static_cast<double>(num_replicas - 1) * factored.of(num_replicas).product_s;
  }

  [[nodiscard]] double sync_s(std::int64_t num_replicas, double bandwidth_bytes_per_s) const {
    const auto replicas = static_cast<double>(num_replicas);
    if (factored.empty()) return 4 * (replicas - 1) * parameter_bytes / (replicas * bandwidth_bytes_per_s);
    const FactoredWeights::Sum sum = factored.of(num_replicas);
    const double dense_bytes = std::max(0.0, parameter_bytes - sum.weight_bytes);
    return 4 * (replicas - 1) * dense_bytes / (replicas * bandwidth_bytes_per_s) +
           2 * (replicas - 1) * (sum.factor_bytes * (minibatches_per_round(num_replicas) / replicas)) /
               bandwidth_bytes_per_s;
  }

  [[nodiscard]] double time_s(std::int64_t num_replicas, double bandwidth_bytes_per_s) const {
    if (num_replicas == 1) return compute_s;  // nothing to synchronise
    const double own_s = compute_s + products_s(num_replicas);
    return std::max(own_s / static_cast<double>(num_replicas),
                    sync_s(num_replicas, bandwidth_bytes_per_s) / minibatches_per_round(num_replicas));
  }
};

}  // namespace pipedream
