// The schedules' differences, a row for each; program.h has the formulas, and pictures of the lists that come
// of them. All other sources read a schedule's row, and none asks for its name. Pure; any thread.
#pragma once

#include <optional>
#include <span>
#include <string_view>

namespace pipedream {

struct ScheduleOptions;

// By how many microbatches a forward's version is older than the newest that there could be.
enum class ReadDelay {
  kNone,     // the schedule drains before every round
  kOfStage,  // as many as are in flight beside it at the stage
  kOfInput,  // at the input stage: all stages read what that has seen
  kRound,    // a whole round
  kListed,   // the program says it
};

// How many microbatches may be forwarded and not yet backwarded.
enum class InFlight {
  kAsPlanned,         // n_s
  kAsPlannedOfRound,  // n_s, of a replica's microbatches of a round
  kRound,             // all of these
  kOne,
  kOverChunks,  // of several stages at a worker together, as Megatron-LM counts them
  kListed,      // the program says it
};

struct ScheduleRules {
  std::string_view name;
  ReadDelay delay = ReadDelay::kNone;
  InFlight in_flight = InFlight::kAsPlanned;
  bool stashes = true;  // a backward reads what its forward has read
  bool has_stage_per_worker = true;
  bool has_one_stage = false;
  bool may_be_stale = false;         // read versions that are older by a given number of rounds
  bool may_be_asynchronous = false;  // have shards that update with every gradient that comes
  // For planning: the paper's cost model says how long the schedule takes, and whether its own planner gives
  // all stages as many replicas.
  bool has_cost_formulas = false;
  bool has_equal_replicas = false;

  // Every round is finished at all stages before the next one starts at any.
  [[nodiscard]] constexpr bool drains() const { return delay == ReadDelay::kNone; }
  // Every forward reads the version before the newest, so that a round must cover what is in flight.
  [[nodiscard]] constexpr bool is_round_late() const { return delay == ReadDelay::kRound; }
  // A minibatch of one microbatch would leave the schedule nothing to overlap, or too short a round.
  [[nodiscard]] constexpr bool needs_microbatches() const {
    return is_round_late() || (drains() && in_flight != InFlight::kOne);
  }
  // Workers do the same work in the same order, whatever versions it reads.
  [[nodiscard]] constexpr bool works_as(const ScheduleRules& other) const {
    return in_flight == other.in_flight && drains() == other.drains();
  }
};

// Those that have a name, in the order of program.h's table.
[[nodiscard]] std::span<const ScheduleRules> named_schedules();
// By a name, old ones included.
[[nodiscard]] const ScheduleRules* find_rules(std::string_view schedule);
// Expects options that check_schedule_options() has passed.
[[nodiscard]] const ScheduleRules& rules_of(const ScheduleOptions& options);

}  // namespace pipedream
