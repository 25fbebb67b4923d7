#include "planner/durations.h"

#include <cstdint>
#include <string>

#include "base/failure.h"

namespace pipedream {

void check_durations(const ScheduleOptions& options, const std::vector<StageDurations>& of_stages,
                     const std::vector<BoundaryDurations>& boundaries, std::size_t num_wakings) {
  const auto stages = static_cast<std::size_t>(num_stages(options));
  if (of_stages.size() != stages || boundaries.size() + 1 != stages) {
    throw UserError("durations of " + std::to_string(of_stages.size()) + " stages and " +
                    std::to_string(boundaries.size()) + " boundaries for " + std::to_string(stages) +
                    " stages: give one per stage, and one per boundary");
  }
  const Placement placement = placement_of(options);
  for (std::size_t index = 0; index < stages; ++index) {
    const StageDurations& stage = of_stages[index];
    const auto replicas =
        static_cast<std::size_t>(placement.num_replicas(StageIndex(static_cast<std::int64_t>(index))));
    if (stage.wakings.size() != num_wakings) {
      throw UserError("stage " + std::to_string(index) + " has " + std::to_string(stage.wakings.size()) +
                      " wakings for " + std::to_string(num_wakings) + " times: give one for each");
    }
    if (!(stage.num_chunks >= 1)) {
      throw UserError("stage " + std::to_string(index) + " has shards of " +
                      std::to_string(stage.num_chunks) + " chunks: give at least 1");
    }
    if (!stage.push_leads_ms.empty() && stage.push_leads_ms.size() < replicas) {
      throw UserError("stage " + std::to_string(index) + " has " +
                      std::to_string(stage.push_leads_ms.size()) + " push leads for " +
                      std::to_string(replicas) + " replicas: give one for each");
    }
  }
}

}  // namespace pipedream
