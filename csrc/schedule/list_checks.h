// Parts of the validator: checks of one worker's list by itself. Pure; any thread.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/ids.h"
#include "schedule/instruction.h"
#include "schedule/placement.h"
#include "schedule/program.h"

namespace pipedream {

// "worker 1, position 3, FORWARD stage 1 ..."; "end of the program" behind the last.
[[nodiscard]] std::string name_position(Rank rank, const std::vector<Instruction>& program,
                                        std::size_t position);

// One worker's list and what it is for; a run of the options up to minibatch num_minibatches - 1.
struct ListToCheck {
  const ScheduleOptions& options;
  const Placement& placement;
  Rank rank;
  const std::vector<Instruction>& program;
  std::int64_t num_minibatches = 0;
};

// The most that was alive at once at one of the worker's stages (validator.h).
struct StageCounts {
  StageIndex stage;
  std::int64_t versions_live_max = 0;
  std::int64_t activations_live_max = 0;
};

// Both return the first fault with its place, or empty.

// Checks what is computed: in order, each once, at the versions of the rule, and no more versions than are
// kept. Adds the counts of the worker's stages.
[[nodiscard]] std::string check_computed(const ListToCheck& list, std::vector<StageCounts>& counts);

// Checks what travels: every computation has received what it needs, and what it makes is sent, once, before
// more is made.
[[nodiscard]] std::string check_transfers(const ListToCheck& list);

}  // namespace pipedream
