// Replays the programs of all workers in memory and proves, for the given lists, that there is no
// deadlock, every read sees the version that the rule names, no more versions live than are kept, and
// every boundary buffer is bounded. Pure; any thread.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/ids.h"
#include "schedule/program.h"

namespace pipedream {

struct ReplayReport {
  bool ok = true;
  std::string error;  // names worker, position and instruction at fault; empty when ok
  // Empty unless ok. Per stage: the most that was alive at once. Versions: the newest, those that are still
  // to be read (as under vertical sync before their forward), and during an update the one that is being
  // written, except in place.
  std::vector<std::int64_t> versions_live_max;
  std::vector<std::int64_t> activations_live_max;  // microbatches forwarded, not yet backwarded
  // Per boundary between stage s and s + 1: the most microbatches that can wait there, however the workers'
  // speeds interleave.
  std::vector<std::int64_t> activations_queued_max;
  std::vector<std::int64_t> gradients_queued_max;
};

// programs: one list per worker. Any list may be given; the report says whether it is one that trains
// num_minibatches minibatches as the options say, in an order that may differ from make_program's. Within a
// stage forwards, and backwards, must go in the order of (minibatch, microbatch); the update of a minibatch
// comes before the next one's backwards (gradients add up in one place), and one microbatch at a time is
// recomputed. Where every minibatch drains, a stage's forwards wait for its update, and a worker's updates
// for the backwards of all its stages.
[[nodiscard]] ReplayReport replay(const ScheduleOptions& options,
                                  const std::vector<std::vector<Instruction>>& programs,
                                  std::int64_t num_minibatches);

}  // namespace pipedream
