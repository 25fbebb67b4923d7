// How long what a schedule does takes, by stage and boundary. Pure; any thread.
#pragma once

#include <cstddef>
#include <utility>
#include <vector>

#include "schedule/program.h"

namespace pipedream {

// Besides, of an item after a long wait.
struct WakingDurations {
  double forward_ms = 0;
  double backward_ms = 0;
  double update_ms = 0;
};

// Of a microbatch, and of an update; what replicas push to one other and pull from it.
struct StageDurations {
  double forward_ms = 0;
  double later_forward_ms = 0;  // of all microbatches of a minibatch but the first
  double backward_ms = 0;
  double later_backward_ms = 0;
  double recompute_ms = 0;
  double update_ms = 0;
  double push_ms = 0;
  double pull_ms = 0;
  double sync_latency_ms = 0;
  double num_chunks = 1;  // of a shard: one is updated, and leaves for the others, while the next come
  // By its owner, how long before the end of the last backward the first and the last chunk of a shard are
  // pushed; none: after it.
  std::vector<std::pair<double, double>> push_leads_ms = {};
  bool updates_whole = false;  // an update waits for all chunks, as where norms are measured
  std::vector<WakingDurations> wakings = {};
};

// Between a stage and the next one, of a microbatch.
struct BoundaryDurations {
  double activation_ms = 0;
  double gradient_ms = 0;
  double latency_ms = 0;  // besides, in which the link may carry the next item
};

// Throws UserError where they are not of as many stages, boundaries, replicas and wakings as the schedule
// has.
void check_durations(const ScheduleOptions& options, const std::vector<StageDurations>& stages,
                     const std::vector<BoundaryDurations>& boundaries, std::size_t num_wakings);

}  // namespace pipedream
