// The exact optimum of partition.h's cost model under limits: memory per worker, workers of different speed,
// and boundaries or replica counts that the user gives.
//
// Workers are in the order of their ranks: the first stage has the first ones. A stage is as slow as its
// slowest replica: T = (1/m) max( compute / min speed, sync ) of stage_cost.h, of which a recompute adds its
// forward to the computing. What a replica of stage s has in memory with n_s microbatches in flight, n_{S-1}
// = 1, n_s = 1 + ceil(n_{s+1} r_{s+1} / r_s) (design.md section 4), stage_memory.h says.
//
// Method. For a bound t on the bottleneck, from the last layer back: with which minibatches in flight, all
// replicas together, and with how much memory to spare w workers run layers j.. within t. Without memory
// limits the fewest in flight are never worse upstream, so one number per (j, w) is enough, O(layers^2
// workers^2) in all; with them it takes the few that are not worse in both, by the replicas of the stage that
// begins there. The least t is found as in partition.cc.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "planner/partition.h"
#include "planner/stage_memory.h"

namespace pipedream {

struct PlanLimits {
  std::vector<double> speeds;        // of each worker; empty: all 1
  std::vector<double> memory_bytes;  // of each worker; empty: no limit
  MemoryCosts costs;
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
