// Replays the programs of all workers in memory, with their sends and receives. For the given lists it proves
// that
//
//   - there is no deadlock
//   - every read sees the version that the rule names
//   - no more versions live than are kept
//   - every edge carries the item that its receiver expects next
//   - no more items can wait on an edge than the report says
//
// Pure; any thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "base/ids.h"
#include "schedule/edge.h"
#include "schedule/transfers.h"

namespace pipedream {

struct EdgeReport {
  Edge edge;
  std::int64_t queued_max = 0;  // the most items that can wait on the edge, at any speeds of the workers

  friend bool operator==(const EdgeReport&, const EdgeReport&) = default;
};

// A place in a worker's list.
struct ListPosition {
  Rank rank;
  std::size_t position = 0;
};

struct ReplayReport {
  bool ok = true;
  std::string error;                  // names the worker, the position and the instruction; empty if ok
  std::vector<ListPosition> stuck{};  // where each worker waits in a deadlock, otherwise empty
  // By stage, the most versions that are live at once; empty if not ok. The newest version is live, and so
  // are the versions that will still be read. During an update that does not write in place, the version that
  // is being written is live, too.
  std::vector<std::int64_t> versions_live_max;
  std::vector<std::int64_t> activations_live_max;  // microbatches forwarded, not yet backwarded
  std::vector<EdgeReport> edges;                   // in the order of edges_of()
};

// Checks whether the lists train up to minibatch num_minibatches - 1 as the options say. programs: one list
// per worker. Their instructions may stand in any order that keeps these rules:
//
//   - Within a stage forwards go in the order of (minibatch, microbatch), and so do backwards.
//   - The update of a round comes before the backwards of the next round, because gradients are added up in
//     one place. With a staleness there are num_gradients_kept() such places, so the update may come later.
//   - One microbatch at a time is recomputed.
//   - If the schedule drains, a stage's forwards wait for the update of the round before, and a worker's
//     updates wait for the backwards of all its stages.
//   - A RECV stands before the use of its item. Except for versions of parameters, it stands after the use of
//     the item that its edge brought before.
//   - A SEND stands before the next item of its kind is made.
//   - Norms are exchanged in the order that transfers.h shows.
//   - A tied version is not overwritten while a minibatch still reads it.
//   - If replicas update by a collective, each replica's update waits for the other replicas' updates.
[[nodiscard]] ReplayReport replay(const ScheduleOptions& options,
                                  const std::vector<std::vector<Instruction>>& programs,
                                  std::int64_t num_minibatches);

}  // namespace pipedream
