// A schedule in time: the workers' instruction lists, replayed with given durations. The lists are
// those that the runtime follows, so a picture or a bubble from here is one of the schedule that runs.
//
//   list          durations           lane of its edge            replay
//   FORWARD   --> work takes time
//   SEND      --------------------->  leaves at once, keeps link
//   RECV      <---------------------  waits for the next item --> timeline, transfers --> summary
//
// A worker does its instructions in order, one at a time: a RECV is done as soon as its item has arrived, a
// SEND at once. An item that is sent queues for the link to the other worker, which carries one item at a
// time in each direction, whatever the edge. Pushes and pulls between replicas queue for one line that a
// worker has for all of them. Items of an edge arrive in the order in which they are sent.
//
// With one_link all of these are one line. Items that a worker sends at once share it evenly. Items that
// other stages send a worker queue there for its line in, which carries one at a time, first sent first.
// Pushes and pulls share the line in evenly, as all replicas send each other as much at once; an item of
// another stage that comes meanwhile takes its time of the next push or pull.
//
// A shard of several chunks is pushed from when its first chunk is made, and its owner updates and sends on
// one chunk while others come. A push that no list receives goes to an asynchronous shard, which updates
// beside its worker's own work and answers by a pull.
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
  Timeline timeline;                // by worker, in the order of its list
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
