// What a schedule does in time: the workers' instruction lists, replayed with given durations. The lists are
// those that the runtime follows, so a picture or a bubble from here is one of the schedule that runs.
//
//   list          durations           lane of its edge            replay
//   FORWARD   --> work takes time
//   SEND      --------------------->  leaves at once, keeps link
//   RECV      <---------------------  waits for the next item --> timeline, transfers --> summary
//
// A worker does its instructions in order, one at a time: a RECV is done as soon as its item has arrived, a
// SEND at once. What is sent queues for the link to the other worker, which carries one item at a time in
// each direction, whatever the edge; what replicas push and pull queues for the one line that the worker has
// for all of them. With one_link all of that is one line, which what a worker sends at once shares evenly,
// and what other stages send a worker queues there for its line in, which carries one item at a time, first
// sent first. What replicas exchange shares that line evenly, as all of them send each other as much at once;
// an item of another stage that comes meanwhile takes its time of the next that they send. Of an edge items
// arrive in the order in which they are sent. A shard of several chunks is pushed from when its first one is
// made, and its owner updates and sends on one while others come. What is pushed and no list receives is to
// an asynchronous shard, which updates beside its worker's own work and answers by a pull.
//
// Pure; any thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "planner/durations.h"
#include "planner/lanes.h"
#include "planner/timeline.h"
#include "schedule/program.h"

namespace pipedream {

struct SimulatedRun {
  Timeline timeline;                // as the lists
  std::vector<Transfer> transfers;  // in the order in which they were sent
};

// Throws UserError for lists that wait for each other, naming who waits for what, for an instruction that is
// there twice, a backward before its forward, a stage that is at two workers or none, for figures of the
// wrong number, and for a stage with leads of fewer owners than it has.
[[nodiscard]] SimulatedRun simulate(const std::vector<std::vector<Instruction>>& programs,
                                    const Timing& timing);

// The stages of the lists, up to the last one that has an instruction.
[[nodiscard]] std::size_t num_stages_of(const std::vector<std::vector<Instruction>>& programs);

// Milliseconds per minibatch of the schedule's lists in the steady state, as summarize() has them of
// simulate(): for a search that asks it of thousands of plans. Throws UserError as simulate() and
// make_program().
[[nodiscard]] double steady_ms(const ScheduleOptions& options, std::int64_t num_minibatches,
                               const Timing& timing);

}  // namespace pipedream
