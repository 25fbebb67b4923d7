// Describes the differences between the schedules, in a table with one row for each schedule. program.h has
// the formulas and pictures of the lists. All other sources read a schedule's row, and none tests its name.
// Pure; any thread.
#pragma once

#include <optional>
#include <span>
#include <string_view>

namespace pipedream {

struct ScheduleOptions;

// How late the weights of a forward are, in microbatches of one replica. With delay d, the replica's
// microbatch k reads the version that its microbatch k - d would read if the schedule drained.
enum class ReadDelay {
  kNone,     // 0, because the schedule drains before every round
  kOfStage,  // n_s - 1, the number of other microbatches in flight at the stage
  kOfInput,  // n_0 - 1; all stages read the version that the input stage reads
  kRound,    // the number of a replica's microbatches in one round
  kListed,   // what the written program says
};

// Rules for the number of microbatches that may be forwarded and not yet backwarded.
enum class InFlight {
  kAsPlanned,         // n_s
  kAsPlannedOfRound,  // n_s, but at most a replica's microbatches of one round
  kRound,             // all of a replica's microbatches of one round
  kOne,
  kOverChunks,  // counted over all stages of a worker, as Megatron-LM does
  kListed,      // what the written program says
};

struct ScheduleRules {
  std::string_view name;
  ReadDelay delay = ReadDelay::kNone;
  InFlight in_flight = InFlight::kAsPlanned;
  bool stashes = true;  // a backward reads the version that its forward has read
  bool has_stage_per_worker = true;
  bool has_one_stage = false;
  bool may_be_stale = false;         // versions may be older by the staleness
  bool may_be_asynchronous = false;  // shards may be updated with every gradient that comes
  // For planning: whether the paper's cost model covers the schedule, and whether the schedule's own planner
  // gives all stages equally many replicas.
  bool has_cost_formulas = false;
  bool has_equal_replicas = false;

  // Returns whether every round is finished at all stages before the next round starts at any stage.
  [[nodiscard]] constexpr bool drains() const { return delay == ReadDelay::kNone; }
  // Returns whether, after the first round, every forward of round j reads version j - 1, as under 2bw. Then
  // a replica must have at least n_s - 1 microbatches of a round, where n_s is the number in flight.
  [[nodiscard]] constexpr bool is_round_late() const { return delay == ReadDelay::kRound; }
  // Returns whether a minibatch should have several microbatches. With only one, a schedule that drains would
  // have nothing to overlap, and the rounds of 2bw would be too short.
  [[nodiscard]] constexpr bool needs_microbatches() const {
    return is_round_late() || (drains() && in_flight != InFlight::kOne);
  }
  // Returns whether workers do the same work in the same order under both schedules. The versions that they
  // read may still differ.
  [[nodiscard]] constexpr bool works_as(const ScheduleRules& other) const {
    return in_flight == other.in_flight && drains() == other.drains();
  }
};

// Returns the named schedules, in the order of program.h's table.
[[nodiscard]] std::span<const ScheduleRules> named_schedules();
// Finds a schedule's row by its name or a former name; null for an unknown name.
[[nodiscard]] const ScheduleRules* find_rules(std::string_view schedule);
// Expects options that check_schedule_options() has accepted.
[[nodiscard]] const ScheduleRules& rules_of(const ScheduleOptions& options);

}  // namespace pipedream
