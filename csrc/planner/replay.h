// Replays the workers' instruction lists with given durations, and returns when each instruction runs. A real
// run follows the same lists, so pictures and bubbles from here show the schedule that really runs. Pure; any
// thread.
//
//   list          durations           lane of its edge            replay
//   FORWARD   --> work takes time
//   SEND      --------------------->  leaves at once, keeps link
//   RECV      <---------------------  waits for the next item --> timeline, transfers --> summary

// A worker does its instructions in order, one at a time. A RECV is done as soon as its item has arrived; a
// SEND is done at once. Items of one edge arrive in the order in which they are sent. Items travel over these
// links:
//
//   by default      a link to each other worker, which carries one item at a time in each direction, and one
//                   link for all pushes and pulls of the worker
//   with one_link   one link for everything. Items that a worker sends at once share it evenly. Items from
//                   other stages arrive one at a time, in the order of sending. Pushes and pulls may arrive
//                   at the same time, and share the link evenly

// A shard of several chunks is pushed from the time when its first chunk is made. Its owner updates a chunk
// and sends it on while other chunks arrive. A push that no list receives goes to an asynchronous shard. That
// shard makes its update at the same time as its worker's own work, and answers by a pull.
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
  Timeline timeline;                // one list per worker, in the order of its instructions
  std::vector<Transfer> transfers;  // in no order of time; those of one edge in the order of sending
};

// Throws UserError for
//   - lists that wait for each other; the error names what each worker waits for
//   - an instruction that appears twice, a recompute or backward before its forward
//   - a replica at two workers, a stage or the end of an edge at none
//   - the wrong number of durations, and push leads for fewer owners than a stage has.
[[nodiscard]] SimulatedRun simulate(const std::vector<std::vector<Instruction>>& programs,
                                    const Timing& timing);

// Returns the number of stages in the lists: one more than the highest stage that has an instruction.
[[nodiscard]] std::size_t num_stages_of(const std::vector<std::vector<Instruction>>& programs);

// Returns milliseconds per minibatch of the schedule's lists in the steady state, as simulate() and
// summarize() would. It serves a search over thousands of plans, so it neither checks the lists nor records
// transfers. Throws the UserErrors of make_program(), and those of simulate() about waits and durations.
[[nodiscard]] double steady_ms(const ScheduleOptions& options, std::int64_t num_minibatches,
                               const Timing& timing);

}  // namespace pipedream
