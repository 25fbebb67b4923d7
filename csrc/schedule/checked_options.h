// Derives facts about each stage and worker from the schedule's options. Only sources of this folder include
// it; facts that others need are in program.h. It expects options that check_schedule_options() has accepted,
// and stages and ranks of the plan. Pure; any thread.
#pragma once

#include <cstdint>
#include <vector>

#include "base/ids.h"
#include "schedule/microbatch_order.h"
#include "schedule/placement.h"
#include "schedule/program.h"
#include "schedule/rounds.h"

namespace pipedream {

[[nodiscard]] Rank rank_of(const ScheduleOptions& options, StageIndex stage, ReplicaIndex replica = {});
[[nodiscard]] std::int64_t num_replicas_of(const ScheduleOptions& options, StageIndex stage);
[[nodiscard]] bool is_at_spare(const ScheduleOptions& options, StageIndex stage, ReplicaIndex replica);
[[nodiscard]] ReplicaIndex replica_at(const ScheduleOptions& options, Rank rank);
[[nodiscard]] std::vector<StageIndex> stages_at(const ScheduleOptions& options, Rank rank);
[[nodiscard]] std::int64_t in_flight_at(const ScheduleOptions& options, StageIndex stage);

// Returns the number of rounds by which an update comes later than the last backward that it needs. At a
// stage with one replica it is 0. At a replicated stage it is half of the staleness, rounded up, which is the
// time for other replicas' gradients to arrive.
[[nodiscard]] std::int64_t num_rounds_delayed(const ScheduleOptions& options, StageIndex stage);
[[nodiscard]] MicrobatchOrder order_of(const ScheduleOptions& options);
// Returns the stage's rounds, but with positions (microbatch_order.h) in place of microbatches. Positions
// without a microbatch count too.
[[nodiscard]] Rounds positions_of(const ScheduleOptions& options, StageIndex stage);
// Returns the largest number of positions (microbatch_order.h) that the worker may have forwarded and not yet
// backwarded.
[[nodiscard]] std::int64_t window_of(const ScheduleOptions& options, Rank rank);
// Returns the rule for the versions that backwards read (program.cc).
[[nodiscard]] VersionRule backward_rule(const ScheduleOptions& options, StageIndex stage);

}  // namespace pipedream
