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
#include <vector>

#include "planner/durations.h"
#include "schedule/program.h"

namespace pipedream {

// Machines whose workers slow each other, in the order of their ranks. Each worker has a core.
struct SharedCores {
  std::size_t num_workers = 1;  // of a machine
  // Of each of 1, 2, ... workers of a machine that are at work at once; of more, the last one's.
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
