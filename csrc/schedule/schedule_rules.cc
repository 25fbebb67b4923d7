#include "schedule/schedule_rules.h"

#include <algorithm>
#include <array>

#include "base/check.h"
#include "schedule/program.h"

namespace pipedream {
namespace {

constexpr std::array<ScheduleRules, 9> kNamed = {{
    {.name = "pipedream",
     .delay = ReadDelay::kOfStage,
     .in_flight = InFlight::kAsPlanned,
     .may_be_stale = true,
     .may_be_asynchronous = true,
     .has_cost_formulas = true},
    {.name = "vertical_sync", .delay = ReadDelay::kOfInput, .in_flight = InFlight::kAsPlanned},
    {.name = "unstashed", .delay = ReadDelay::kOfStage, .in_flight = InFlight::kAsPlanned, .stashes = false},
    {.name = "2bw",
     .delay = ReadDelay::kRound,
     .in_flight = InFlight::kAsPlanned,
     .has_equal_replicas = true},  // as in PipeDream-2BW, section 3.3
    {.name = "flush", .delay = ReadDelay::kNone, .in_flight = InFlight::kAsPlannedOfRound},
    {.name = "gpipe", .delay = ReadDelay::kNone, .in_flight = InFlight::kRound},
    {.name = "model_parallel", .delay = ReadDelay::kNone, .in_flight = InFlight::kOne},
    {.name = "data_parallel",
     .delay = ReadDelay::kNone,
     .in_flight = InFlight::kOne,
     .has_one_stage = true,
     .may_be_asynchronous = true},
    {.name = "interleaved",
     .delay = ReadDelay::kNone,
     .in_flight = InFlight::kOverChunks,
     .has_stage_per_worker = false},
}};

constexpr ScheduleRules kListed = {
    .name = kListedSchedule, .delay = ReadDelay::kListed, .in_flight = InFlight::kListed};

}  // namespace

std::span<const ScheduleRules> named_schedules() { return kNamed; }

const ScheduleRules* find_rules(std::string_view schedule) {
  if (schedule == "naive") schedule = "unstashed";  // the former name of unstashed
  const auto* const found = std::ranges::find(kNamed, schedule, &ScheduleRules::name);
  return found == kNamed.end() ? nullptr : found;
}

const ScheduleRules& rules_of(const ScheduleOptions& options) {
  if (options.program != nullptr) return kListed;
  const ScheduleRules* const rules = find_rules(options.schedule);
  PD_CHECK(rules != nullptr, options.schedule);
  return *rules;
}

}  // namespace pipedream
