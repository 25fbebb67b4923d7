// Facts of options by stage and worker, for the sources of this folder. Pure; any thread. Expects options
// that check_schedule_options() has passed, and positions inside the plan.
#pragma once

#include <cstdint>
#include <vector>

#include "base/ids.h"
#include "schedule/placement.h"
#include "schedule/program.h"

namespace pipedream {

[[nodiscard]] std::int64_t count_stages(const ScheduleOptions& options);
[[nodiscard]] std::int64_t count_workers(const ScheduleOptions& options);
[[nodiscard]] Rank rank_of(const ScheduleOptions& options, StageIndex stage, ReplicaIndex replica = {});
[[nodiscard]] bool is_replicated(const ScheduleOptions& options);
[[nodiscard]] std::int64_t num_replicas_of(const ScheduleOptions& options, StageIndex stage);
[[nodiscard]] bool is_at_spare(const ScheduleOptions& options, StageIndex stage, ReplicaIndex replica);
[[nodiscard]] ReplicaIndex replica_at(const ScheduleOptions& options, Rank rank);
[[nodiscard]] std::vector<StageIndex> stages_at(const ScheduleOptions& options, Rank rank);
[[nodiscard]] std::int64_t in_flight_at(const ScheduleOptions& options, StageIndex stage);
// The fewest minibatches that give every replica of every stage equally many microbatches; more than
// kMinibatchesPerRoundMax stands for anything above.
[[nodiscard]] std::int64_t common_round(const ScheduleOptions& options);

}  // namespace pipedream
