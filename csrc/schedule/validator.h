// Replays the programs of all workers in memory, sends and receives included. For the given lists it proves
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
  std::int64_t queued_max = 0;  // the most items that can wait there, whatever the workers' speeds

  friend bool operator==(const EdgeReport&, const EdgeReport&) = default;
};

// A place in a worker's list.
struct ListPosition {
  Rank rank;
  std::size_t position = 0;
};

struct ReplayReport {
  bool ok = true;
  std::string error;                  // names worker, position and instruction at fault; empty when ok
  std::vector<ListPosition> stuck{};  // where workers wait in a deadlock; empty without one
  // By stage, the most versions that are live at once; empty unless ok. Live are the newest version and the
  // versions that will still be read. During an update that does not write in place, the version that is
  // being written is also live.
  std::vector<std::int64_t> versions_live_max;
  std::vector<std::int64_t> activations_live_max;  // microbatches forwarded, not yet backwarded
  std::vector<EdgeReport> edges;                   // as edges_of()
};

// programs: one list per worker, in any order of instructions. The report says whether the lists train up to
// minibatch num_minibatches - 1 as the options say. The rules are:
//
//   - Within a stage forwards go in the order of (minibatch, microbatch), and so do backwards.
//   - The update of a minibatch comes before the next minibatch's backwards,
//     because gradients are added up in one place.
//   - One microbatch at a time is recomputed.
//   - If every minibatch drains, a stage's forwards wait for its update, and a worker's updates wait for the
//     backwards of all its stages.
//   - A RECV stands after the uses of the item that its edge brought before, and before the use of its own
//     item.
//   - A SEND stands before the next item of its kind is made.
//   - Norms are exchanged in the order that transfers.h shows.
//   - A tied version is not overwritten while a minibatch still reads it.
//   - If replicas update by a collective, each replica's update waits for the other
//     replicas' updates.
[[nodiscard]] ReplayReport replay(const ScheduleOptions& options,
                                  const std::vector<std::vector<Instruction>>& programs,
                                  std::int64_t num_minibatches);

}  // namespace pipedream
