// Finds the best partition by partition.h's cost model under limits. Limits are the memory and the speed of
// each worker, a largest number of replicas, and cuts or replica counts that the user gives. The optimum is
// exact.
//
// Stages get workers in the order of ranks, from the first stage on. A stage is as slow as its slowest
// replica: T = max( compute / (m * min speed), sync / R ), with m replicas and with compute, sync and R of
// stage_cost.h. A stage that recomputes adds its forward to compute. stage_memory.h says how much memory a
// replica of stage s needs with n_s microbatches in flight. With S stages and r_s replicas of stage s,
// n_{S-1} = 1 and n_s = 1 + ceil(n_{s+1} r_{s+1} / r_s).

// Method. The search asks again and again: is there a plan with bottleneck <= t? It answers from the last
// layer back. For each layer j and number of workers w it finds plans that run the layers from j on within t.
//
// For a stage upstream two figures of such a plan matter: the microbatches in flight at its first stage, and
// the memory that this stage has left. Without memory limits the plan with the fewest microbatches is best,
// and the search takes O(layers^2 workers^2). With memory limits it keeps, for each number of replicas of the
// first stage, the plans that no other plan beats in both figures. The least t is found as in partition.cc.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "planner/partition.h"
#include "planner/stage_memory.h"

namespace pipedream {

struct PlanLimits {
  std::vector<double> speeds;        // one per worker; empty: all are 1
  std::vector<double> memory_bytes;  // one per worker; empty: no limit
  MemoryCosts costs;
  bool may_recompute = true;                // a stage may recompute if it does not fit without
  std::vector<std::int64_t> last_layers;    // the last layer of each stage; empty: the search chooses
  std::vector<std::int64_t> num_replicas;   // one per stage; empty: the search chooses
  std::int64_t num_replicas_max = 1 << 30;  // of any stage
};

struct LimitedPartition {
  std::vector<PlannedStage> stages;
  std::vector<bool> recompute;       // one entry per stage
  std::vector<double> memory_bytes;  // one entry per stage: bytes of one replica
  double bottleneck_s = 0;
};

// Finds the partition, or nothing if no plan fits. Among equal plans it prefers fewer workers, then fewer
// stages. memory: one entry per layer. The limits must fit the layers and workers, as planning/limits.py
// checks. Throws UserError for a problem that is too large: layers^2 workers^2 above 2e9, or layers^2
// workers^3 if the workers differ.
[[nodiscard]] std::optional<LimitedPartition> partition_within(const std::vector<LayerCost>& layers,
                                                               const std::vector<LayerMemory>& memory,
                                                               std::int64_t num_workers,
                                                               double bandwidth_bytes_per_s,
                                                               const PlanLimits& limits);

}  // namespace pipedream
