// Refuses positions outside a plan. Pure; any thread.
#pragma once

#include "base/ids.h"
#include "schedule/program.h"
#include "schedule/rounds.h"

namespace pipedream {

// Each function throws a UserError of one line if the position is outside the options' plan. check_stage()
// and check_rank() call check_schedule_options() first.
void check_stage(const ScheduleOptions& options, StageIndex stage);
void check_rank(const ScheduleOptions& options, Rank rank);
void check_minibatch(MinibatchId minibatch);
void check_replica(const Rounds& rounds, ReplicaIndex replica);
void check_microbatch(const ScheduleOptions& options, MicrobatchIndex microbatch);

}  // namespace pipedream
