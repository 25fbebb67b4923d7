// Divides a profiled model into replicated stages. Finds the exact optimum by dynamic programming (DP).
//
//   T(i..j, m) = (1/m) max( sum T_l, sum W_l^m )       time of a stage with layers i to j and m replicas
//   W_l^m      = 4 (m-1) w_l / (m B)                   sync of a layer with w_l bytes of parameters
//   C_i        = a_i / B                               a_i bytes of activations after layer i
//   A(j, m)    = min( T(0..j, m),                      least bottleneck of layers 0 to j on m workers
//                     min over i<j, m'<m of max( A(i, m-m'), 2 C_i, T(i+1..j, m') ) )
//
// T_l is a layer's computing time, and B the bandwidth. The optimum uses at most num_workers workers. Among
// equal plans it prefers fewer workers, then fewer stages. Source: PipeDream (SOSP'19), section 3.1.
// stage_cost.h has T for weights whose gradients go as factors, and for several microbatches.

// Method. The question "is there a plan with bottleneck <= t?" needs only a DP over layers: the fewest
// workers that cover layers 0 to j, in O(N^2) for N layers. If t is feasible, every larger t is. Non-negative
// doubles are ordered like their bit patterns, so 64 halvings find the least feasible t exactly.
#pragma once

#include <cstdint>
#include <vector>

#include "planner/factored_weights.h"

namespace pipedream {

struct LayerCost {
  double compute_s = 0;  // forward and backward of one minibatch
  double activation_bytes = 0;
  double parameter_bytes = 0;
  std::vector<FactoredWeight> factors = {};  // one per parameter whose gradient may be pushed as factors
};

struct PlannedStage {
  std::int64_t first_layer = 0;
  std::int64_t last_layer = 0;  // inclusive
  std::int64_t num_replicas = 1;

  friend bool operator==(const PlannedStage&, const PlannedStage&) = default;
};

struct Partition {
  std::vector<PlannedStage> stages;
  double bottleneck_s = 0;
};

// Returns the time of a plan's slowest stage or boundary (2 C_i). The stages cover the model without gaps.
[[nodiscard]] double bottleneck_s(const std::vector<LayerCost>& layers,
                                  const std::vector<PlannedStage>& stages, double bandwidth_bytes_per_s,
                                  std::int64_t num_microbatches = 1);

// Finds the partition. straight: every stage has one replica. There must be at least one layer, and all
// figures must be finite and not negative, as planning/layer_profile.py checks. Throws UserError if
// num_workers is outside 1 to kNumReplicasMax.
[[nodiscard]] Partition partition(const std::vector<LayerCost>& layers, std::int64_t num_workers,
                                  double bandwidth_bytes_per_s, bool straight = false,
                                  std::int64_t num_microbatches = 1);

}  // namespace pipedream
