// Facts of options by stage and worker, for the sources of this folder. Pure; any thread. Expects options
// that check_schedule_options() has passed, and positions inside the plan.
#pragma once

#include <cstdint>
#include <vector>

#include "base/ids.h"
#include "schedule/microbatch_order.h"
#include "schedule/placement.h"
#include "schedule/program.h"
#include "schedule/rounds.h"

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

[[nodiscard]] Rounds make_rounds(const ScheduleOptions& options, StageIndex stage);
[[nodiscard]] bool drains(const ScheduleOptions& options);
// By which an update stands later than the backward that it needs. Half of the staleness: as long as it may
// wait for the others' gradients, so long may they wait for what it writes.
[[nodiscard]] std::int64_t num_rounds_delayed(const ScheduleOptions& options, StageIndex stage);
[[nodiscard]] MicrobatchOrder order_of(const ScheduleOptions& options);
// The positions of the order, absent ones counted too, as the microbatches of the stage's rounds.
[[nodiscard]] Rounds positions_of(const ScheduleOptions& options, StageIndex stage);
// The most positions of the order that are forwarded and not yet backwarded at the worker.
[[nodiscard]] std::int64_t window_of(const ScheduleOptions& options, Rank rank);
// By which version_of() of forwards and backwards go (program.cc).
[[nodiscard]] VersionRule forward_rule(const ScheduleOptions& options, StageIndex stage);
[[nodiscard]] VersionRule backward_rule(const ScheduleOptions& options, StageIndex stage);

}  // namespace pipedream
