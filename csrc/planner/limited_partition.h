// The exact optimum of partition.h's cost model under limits: what a worker's memory holds, workers of
// different speed, boundaries and replicas that are given.
//
// Workers are in the order of their ranks: the first stage has the first ones. A stage is as slow as its
// slowest replica: T = (1/m) max( sum T_l / min speed, sum W_l^m ). In memory a replica of stage s with n_s
// minibatches in flight, n_{S-1} = 1, n_s = 1 + ceil(n_{s+1} r_{s+1} / r_s) (design.md section 4), has
//
//   (n_s + fixed_copies) |w|          versions, and what there is of the weights besides
//   + (1 + 2 (r - 1) / r) |w|         with r > 1 replicas: gradients that have not left, and slots for what
//                                     the others push and pull
//   + n_s saved                       of its layers
//   + (n_s + 3) input                 what crosses before it: slots, and gradients that have not left. At
//                                     the first stage n_s minibatches of the data instead
//   + (n_s + 2) output                what crosses behind it: what is made of it, and slots for its
//   gradients.
//                                     At the last stage a minibatch of the data instead
//   + max(2 widest, step_copies largest)    what a backward or a step makes and drops: gradients of what
//                                     crosses between layers, temporaries of a layer's parameters
//
// and with recompute, which adds its forward to its time, saved + input + 4 output in the place of n_s saved
// and (n_s + 2) output. It is what budget/memory.py will find, or a little more.
//
// Method. For a bound t on the bottleneck, from the last layer back: the fewest minibatches in flight, all
// replicas together, with which w workers run layers j.. within t. Fewer are never worse upstream, so one
// number per (j, w) is enough: O(layers^2 workers^2). The least t is found as in partition.cc.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "planner/partition.h"

namespace pipedream {

struct LayerMemory {
  double saved_bytes = 0;  // of a minibatch, for its backward
  double forward_s = 0;    // what a recompute adds
};

struct PlanLimits {
  std::vector<double> speeds;               // of each worker; empty: all 1
  std::vector<double> memory_bytes;         // of each worker; empty: no limit
  double fixed_copies = 2;                  // of the weights: the model as given, gradients, optimizer state
  double step_copies = 0;                   // of a layer's parameters, that a step makes and drops
  double data_bytes = 0;                    // of a minibatch
  bool may_recompute = true;                // where it does not fit without
  std::vector<std::int64_t> last_layers;    // of all stages, the last one's included; empty: free
  std::vector<std::int64_t> num_replicas;   // of all stages; empty: free
  std::int64_t num_replicas_max = 1 << 30;  // of a stage
};

struct LimitedPartition {
  std::vector<PlannedStage> stages;
  std::vector<bool> recompute;       // per stage
  std::vector<double> memory_bytes;  // of a replica, per stage
  double bottleneck_s = 0;
};

// Empty: nothing fits. Ties: fewer workers, then fewer stages. memory: one per layer. Throws UserError for
// limits of another length than layers, workers or stages, for figures that cannot be, for more than the
// search can do (layers^2 workers^2 above 2e9), and as partition().
[[nodiscard]] std::optional<LimitedPartition> partition_within(const std::vector<LayerCost>& layers,
                                                               const std::vector<LayerMemory>& memory,
                                                               std::int64_t num_workers,
                                                               double bandwidth_bytes_per_s,
                                                               const PlanLimits& limits);

}  // namespace pipedream
