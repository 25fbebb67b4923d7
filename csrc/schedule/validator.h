// Replays the programs of all stages in memory and proves, for the given lists, that there is no
// deadlock, every read sees the version that the rule names, no more versions live than are kept, and
// every boundary buffer is bounded. Pure; any thread.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/ids.h"
#include "schedule/program.h"

namespace pipedream {

struct StageProgram {
  ProgramOptions options;
  std::vector<Instruction> instructions;
};

struct ReplayReport {
  bool ok = true;
  std::string error;  // names stage, position and instruction at fault; empty when ok
  // Per stage: the most that was alive at once. Versions: the newest, those still read, and during an
  // update the one that is being written, except in place.
  std::vector<std::int64_t> versions_live_max;
  std::vector<std::int64_t> activations_live_max;  // forwarded, not yet backwarded
  // Per boundary between stage s and s + 1: the most that can wait there, however the stages' speeds
  // interleave.
  std::vector<std::int64_t> activations_queued_max;
  std::vector<std::int64_t> gradients_queued_max;
};

[[nodiscard]] ReplayReport replay(const std::vector<StageProgram>& programs, std::int64_t num_minibatches);

}  // namespace pipedream
