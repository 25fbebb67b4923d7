// How long a minibatch takes in the steady state of a schedule: its own lists, replayed with given durations.
//
// The arithmetic of planning/simulator.py, shared_cores.py and waking.py, operation by operation and so to
// the bit, for a search that asks it of thousands of plans and wants no timeline. A worker does its list in
// order: work takes its time, a SEND leaves at once and keeps its link, a RECV waits for the edge's next
// item. So a worker's times depend on what it receives alone, and the order in which the workers are visited
// changes nothing but where senders share a receiver's line: there they send in the order of time.
//
// Pure; any thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
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
  std::vector<WakingDurations> wakings = {};
};

// Between a stage and the next one, of a microbatch.
struct BoundaryDurations {
  double activation_ms = 0;
  double gradient_ms = 0;
  double latency_ms = 0;  // besides, in which the link may carry the next item
};

// Machines whose workers share cores, in the order of their ranks.
struct SharedCores {
  std::size_t num_workers = 1;  // of a machine
  // Of each of 1, 2, ... cores of a machine that are at work at once; as many as it has.
  std::vector<double> speeds = {1.0};
};

// Milliseconds per minibatch between two updates everywhere that no warm-up or cool-down is between
// (Simulation in planning/simulator.py has the window); of so few minibatches that there is none, of the
// whole run. stages, boundaries: one per stage, and one per boundary between neighbours. shared: none where
// no worker shares cores. waking_after_ms: of each of the stages' wakings, from which wait on
// an item pays all of it; 0: none does. one_link: a worker has one link to all others, as a host has one
// network interface, by which also what they send it comes (Network in planning/lanes.py). Else it has one to
// each other worker, and one for all that it exchanges with replicas. Throws UserError as make_program(), for
// another number of durations, for machines without workers or cores, for spares and asynchronous shards, and
// for lists that deadlock.
[[nodiscard]] double steady_ms(const ScheduleOptions& options, std::int64_t num_minibatches,
                               const std::vector<StageDurations>& stages,
                               const std::vector<BoundaryDurations>& boundaries,
                               const std::optional<SharedCores>& shared = std::nullopt,
                               const std::vector<double>& waking_after_ms = {}, bool one_link = false);

}  // namespace pipedream
