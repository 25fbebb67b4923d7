// Declares those checks of the validator (validator.h) that need only one worker's list. Pure; any thread.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/ids.h"
#include "schedule/instruction.h"
#include "schedule/placement.h"
#include "schedule/program.h"

namespace pipedream {

// Names a position in a worker's list for errors: "worker 1, position 3, FORWARD stage 1 ...". The position
// after the last instruction is "worker 1, position 8, end of the program".
[[nodiscard]] std::string name_position(Rank rank, const std::vector<Instruction>& program,
                                        std::size_t position);

// One worker's list, with the options and the number of minibatches of the run for which it was made.
struct ListToCheck {
  const ScheduleOptions& options;
  const Placement& placement;
  Rank rank;
  const std::vector<Instruction>& program;
  std::int64_t num_minibatches = 0;
};

// The most versions, and the most microbatches in flight, at one of the worker's stages.
struct StageCounts {
  StageIndex stage;
  std::int64_t versions_live_max = 0;
  std::int64_t activations_live_max = 0;
};

// check_computed() and check_transfers() return the first fault with its place, or an empty text.

// Checks the instructions that compute. Each must come once and in order, and read or write the version that
// the schedule's rule names. No more versions may be live than the stage keeps. Adds the counts of the
// worker's stages to `counts`.
[[nodiscard]] std::string check_computed(const ListToCheck& list, std::vector<StageCounts>& counts);

// Checks the transfers. An instruction must have received the items that it needs. Every item that it makes
// must be sent once, before the next item of its kind is made.
[[nodiscard]] std::string check_transfers(const ListToCheck& list);

}  // namespace pipedream
