// Replays the programs of all workers in memory, sends and receives included, and proves, for the given
// lists, that there is no deadlock, every read sees the version that the rule names, no more versions live
// than are kept, every edge carries what its receiver expects next, and no more than is reported can wait on
// it. Pure; any thread.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/ids.h"
#include "schedule/edge.h"
#include "schedule/transfers.h"

namespace pipedream {

struct EdgeReport {
  Edge edge;
  std::int64_t queued_max = 0;  // the most items that can wait there, however the workers' speeds interleave

  friend bool operator==(const EdgeReport&, const EdgeReport&) = default;
};

struct ReplayReport {
  bool ok = true;
  std::string error;  // names worker, position and instruction at fault; empty when ok
  // Empty unless ok. Per stage: the most that was alive at once. Versions: the newest, those that are still
  // to be read (as under vertical sync before their forward), and during an update the one that is being
  // written, except in place.
  std::vector<std::int64_t> versions_live_max;
  std::vector<std::int64_t> activations_live_max;  // microbatches forwarded, not yet backwarded
  std::vector<EdgeReport> edges;                   // as edges_of()
};

// programs: one list per worker. Any list may be given; the report says whether it is one that trains
// up to minibatch num_minibatches - 1 as the options say, in an order that may differ from make_program's.
// Within a stage forwards, and backwards, must go in the order of (minibatch, microbatch); the update of a
// minibatch comes before the next one's backwards (gradients add up in one place), and one microbatch at a
// time is recomputed. Where every minibatch drains, a stage's forwards wait for its update, and a worker's
// updates for the backwards of all its stages. A RECV stands between the uses of the item before it and its
// own, a SEND before the next item of its kind is made, and norms are exchanged as transfers.h draws it. Of a
// tied version nothing is overwritten that a minibatch still reads. Where replicas reduce together, an update
// of one waits for those of the others.
[[nodiscard]] ReplayReport replay(const ScheduleOptions& options,
                                  const std::vector<std::vector<Instruction>>& programs,
                                  std::int64_t num_minibatches);

}  // namespace pipedream
