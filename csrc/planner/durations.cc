#include "planner/durations.h"

#include <string>

#include "base/failure.h"

namespace pipedream {

void check_timing(const Timing& timing, std::size_t num_stages) {
  if (timing.stages.size() != num_stages) {
    throw UserError("stage_times has " + std::to_string(timing.stages.size()) + " entries for " +
                    std::to_string(num_stages) + " stages: give one per stage");
  }
  const std::size_t num_boundaries = num_stages == 0 ? 0 : num_stages - 1;
  if (timing.boundaries.size() != num_boundaries) {
    throw UserError("transfer_ms has " + std::to_string(timing.boundaries.size()) + " entries for " +
                    std::to_string(num_boundaries) + " boundaries: give one per boundary");
  }
  for (std::size_t index = 0; index < num_stages; ++index) {
    const StageDurations& stage = timing.stages[index];
    if (stage.wakings.size() != timing.waking_after_ms.size()) {
      throw UserError("stage " + std::to_string(index) + " has " + std::to_string(stage.wakings.size()) +
                      " wakings for " + std::to_string(timing.waking_after_ms.size()) +
                      " times: give one for each");
    }
    if (!(stage.num_chunks >= 1)) {
      throw UserError("stage " + std::to_string(index) + " has shards of " +
                      std::to_string(stage.num_chunks) + " chunks: give at least 1");
    }
  }
  if (timing.shared && (timing.shared->num_workers == 0 || timing.shared->speeds.empty())) {
    throw UserError("machines have " + std::to_string(timing.shared->num_workers) + " workers and " +
                    std::to_string(timing.shared->speeds.size()) + " cores: give at least 1 of each");
  }
}

}  // namespace pipedream
