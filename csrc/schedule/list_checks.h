// Declares the validator's checks of one worker's list by itself (validator.h). Pure; any thread.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/ids.h"
#include "schedule/instruction.h"
#include "schedule/placement.h"
#include "schedule/program.h"

namespace pipedream {

// Names a position of a worker's list for errors: "worker 1, position 3, FORWARD stage 1 ...". The position
// after the last instruction is "worker 1, position 8, end of the program".
[[nodiscard]] std::string name_position(Rank rank, const std::vector<Instruction>& program,
                                        std::size_t position);

// One worker's list, and the run for which it was made: its options, and its number of minibatches.
struct ListToCheck {
  const ScheduleOptions& options;
  const Placement& placement;
  Rank rank;
  const std::vector<Instruction>& program;
  std::int64_t num_minibatches = 0;
};

// The most versions, and the most microbatches in flight, at one of the worker's stages (validator.h).
struct StageCounts {
  StageIndex stage;
  std::int64_t versions_live_max = 0;
  std::int64_t activations_live_max = 0;
};

// check_computed() and check_transfers() return the first fault with its place, or an empty text.

// Checks the instructions that compute: each comes once and in order, and reads or writes the version that
// the rule names. No more versions may be live than the stage keeps. Adds the counts of the worker's stages
// to `counts`.
[[nodiscard]] std::string check_computed(const ListToCheck& list, std::vector<StageCounts>& counts);

// Checks the transfers: an instruction has received the items that it needs, and every item that it makes is
// sent once, before the next item of its kind is made.
[[nodiscard]] std::string check_transfers(const ListToCheck& list);

}  // namespace pipedream
