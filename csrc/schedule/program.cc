// Computes a schedule's facts: the version that a microbatch reads, the versions kept, the phase of an
// instruction. program.h has the table of formulas, schedule_rules.h the row of each schedule.
#include "schedule/program.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "base/check.h"
#include "base/failure.h"
#include "schedule/checked_options.h"
#include "schedule/listed_program.h"
#include "schedule/schedule_rules.h"

namespace pipedream {
namespace {

// The largest number of replicas. It is far above any cluster, and keeps n_s r_s, which is at most twice the
// sum of the r_s, inside 64 bits.
constexpr std::int64_t kNumReplicasMax = std::int64_t{1} << 30;

// Returns how many microbatches late the weights of a forward are (ReadDelay). It counts microbatches of one
// replica of the stage, or under vertical sync of one replica of the input stage.
std::int64_t forward_delay(const ScheduleOptions& options, StageIndex stage) {
  switch (rules_of(options).delay) {
    case ReadDelay::kNone:
      return 0;
    case ReadDelay::kOfStage:
      return in_flight_at(options, stage) - 1;
    case ReadDelay::kOfInput:
      return options.in_flight.front() - 1;
    case ReadDelay::kRound:
      return rounds_of(options, stage).own_per_round();
    case ReadDelay::kListed:
      break;  // a written program has no formula
  }
  PD_CHECK(false, options.schedule);
}

std::int64_t backward_delay(const ScheduleOptions& options, StageIndex stage) {
  return rules_of(options).stashes ? forward_delay(options, stage) : 0;
}

// Returns the version that the stage's weights had when the pipeline began.
std::int64_t begun_with(const ScheduleOptions& options, const Rounds& rounds) {
  return rounds.round_of(options.oldest_minibatch.value_or(options.first_minibatch));
}

// Makes the rule of a stage. counted: the stage that gives r and c in the formula of VersionRule.
VersionRule make_rule(const ScheduleOptions& options, StageIndex stage, StageIndex counted,
                      std::int64_t delay) {
  const Rounds rounds = rounds_of(options, stage);
  const Rounds counting = rounds_of(options, counted);
  return {counting.num_replicas,           counting.own_per_round(),    delay,
          rounds.microbatches_per_round(), begun_with(options, rounds), options.staleness};
}

StageIndex counted_at(const ScheduleOptions& options, StageIndex stage) {
  return rules_of(options).delay == ReadDelay::kOfInput ? StageIndex(0) : stage;
}

VersionRule listed_rule(const ScheduleOptions& options, StageIndex stage, const ListedReads& reads) {
  const Rounds rounds = rounds_of(options, stage);
  VersionRule rule;
  rule.lowest = rounds.first_version().value();
  rule.microbatches_per_round = rounds.microbatches_per_round();
  rule.listed = &reads;
  rule.first_number = options.first_minibatch.value() * options.num_microbatches;
  return rule;
}

}  // namespace

VersionRule forward_rule_of(const ScheduleOptions& options, StageIndex stage) {
  if (options.program != nullptr) return listed_rule(options, stage, options.program->forward_reads(stage));
  return make_rule(options, stage, counted_at(options, stage), forward_delay(options, stage));
}

VersionRule backward_rule(const ScheduleOptions& options, StageIndex stage) {
  if (options.program != nullptr) return listed_rule(options, stage, options.program->backward_reads(stage));
  return make_rule(options, stage, counted_at(options, stage), backward_delay(options, stage));
}

namespace {

std::int64_t number_of(const ScheduleOptions& options, MinibatchId minibatch, MicrobatchIndex microbatch) {
  return minibatch.value() * options.num_microbatches + microbatch.value();
}

Phase listed_phase_of(const ScheduleOptions& options, Instruction instruction,
                      std::optional<std::int64_t> num_minibatches) {
  const std::int64_t first = options.first_minibatch.value();
  instruction.minibatch = MinibatchId(instruction.minibatch.value() - first);
  if (num_minibatches) *num_minibatches -= first;
  return options.program->phase_of(instruction, num_minibatches);
}

// Counts, in the worker's list of the first minibatch, the most microbatches that are in flight at this
// stage. The worker has several stages.
std::int64_t count_in_flight_at_chunk(const ScheduleOptions& options, StageIndex stage) {
  ComputeCursor cursor(options, rank_of(options, stage));
  cursor.set_num_minibatches(options.first_minibatch.value() + 1);
  std::int64_t num_in_flight = 0;
  std::int64_t num_in_flight_max = 0;
  for (auto instruction = cursor.current(); instruction; instruction = cursor.current()) {
    if (instruction->stage == stage && keeps_stash(instruction->opcode)) ++num_in_flight;
    if (instruction->stage == stage && releases_stash(instruction->opcode)) --num_in_flight;
    num_in_flight_max = std::max(num_in_flight_max, num_in_flight);
    cursor.advance();
  }
  return num_in_flight_max;
}

}  // namespace

WeightVersion oldest_version(const ScheduleOptions& options, StageIndex stage) {
  const Rounds rounds = rounds_of(options, stage);
  if (!stashes_versions(options, stage)) return rounds.first_version();
  return forward_rule_of(options, stage)
      .oldest_from(options.first_minibatch.value() * options.num_microbatches);
}

const std::vector<std::string>& schedule_names() {
  static const std::vector<std::string> names = [] {
    std::vector<std::string> made;
    for (const ScheduleRules& rules : named_schedules()) made.emplace_back(rules.name);
    return made;
  }();
  return names;
}

Placement placement_of(const ScheduleOptions& options) {
  if (!options.placement.empty()) return options.placement;
  return Placement::in_order(std::vector<std::int64_t>(options.in_flight.size(), 1));
}

std::vector<Rounds> rounds_of_stages(const ScheduleOptions& options) {
  std::vector<Rounds> rounds;
  for (StageIndex stage; stage.value() < num_stages(options); stage = stage.next()) {
    rounds.push_back(rounds_of(options, stage));
  }
  return rounds;
}

bool stashes_versions(const ScheduleOptions& options, StageIndex stage) {
  if (options.program != nullptr) return options.program->stashes(stage);
  return rules_of(options).stashes;
}

std::int64_t num_versions_kept(const ScheduleOptions& options, StageIndex stage) {
  return backward_rule(options, stage).num_versions_kept();
}

WeightVersion forward_version(const ScheduleOptions& options, StageIndex stage, MinibatchId minibatch,
                              MicrobatchIndex microbatch) {
  return forward_rule_of(options, stage).version_of(number_of(options, minibatch, microbatch));
}

double mean_delay(const ScheduleOptions& options, StageIndex stage) {
  return forward_rule_of(options, stage).mean_delay();
}

WeightVersion backward_version(const ScheduleOptions& options, StageIndex stage, MinibatchId minibatch,
                               MicrobatchIndex microbatch) {
  return backward_rule(options, stage).version_of(number_of(options, minibatch, microbatch));
}

WeightVersion tied_version(const ScheduleOptions& options, StageIndex owner, MinibatchId minibatch,
                           MicrobatchIndex microbatch) {
  return tied_rule_of(options, owner).version_of(number_of(options, minibatch, microbatch));
}

VersionRule tied_rule_of(const ScheduleOptions& options, StageIndex owner) {
  if (options.program != nullptr) return listed_rule(options, owner, options.program->tied_reads(owner));
  if (rules_of(options).delay != ReadDelay::kOfStage) return forward_rule_of(options, owner);
  return make_rule(options, owner, StageIndex(0), options.in_flight.front() - 1);
}

std::int64_t num_tied_versions_kept(const ScheduleOptions& options, StageIndex owner) {
  return tied_rule_of(options, owner).num_versions_kept();
}

std::int64_t num_tied_versions_ahead(const ScheduleOptions& options, const TiedStages& tied) {
  const VersionRule rule = tied_rule_of(options, tied.owner);
  const std::int64_t rounds_between =
      (num_replicas_of(options, tied.user) + rule.microbatches_per_round - 1) / rule.microbatches_per_round;
  return rule.num_versions_kept() + rounds_between;
}

std::int64_t num_gradients_kept(const ScheduleOptions& options, StageIndex stage) {
  return 1 + num_rounds_delayed(options, stage);
}

std::int64_t num_microbatches_in_flight(const ScheduleOptions& options, StageIndex stage) {
  if (options.program != nullptr) return options.program->num_in_flight(stage);
  if (order_of(options).num_chunks == 1) return window_of(options, rank_of(options, stage));
  return count_in_flight_at_chunk(options, stage);
}

std::vector<std::int64_t> derive_in_flight(const std::vector<std::int64_t>& num_replicas) {
  if (num_replicas.empty()) throw UserError("num_replicas is empty; a plan has at least one stage");
  for (std::size_t stage = 0; stage < num_replicas.size(); ++stage) {
    if (num_replicas[stage] >= 1 && num_replicas[stage] <= kNumReplicasMax) continue;
    throw UserError("stage " + std::to_string(stage) + " has " + std::to_string(num_replicas[stage]) +
                    " replicas; it must have between 1 and " + std::to_string(kNumReplicasMax));
  }
  std::vector<std::int64_t> in_flight(num_replicas.size(), 1);
  for (std::size_t stage = num_replicas.size() - 1; stage-- > 0;) {
    const std::int64_t downstream = in_flight[stage + 1] * num_replicas[stage + 1];
    in_flight[stage] = 1 + (downstream + num_replicas[stage] - 1) / num_replicas[stage];
  }
  return in_flight;
}

const char* phase_name(Phase phase) {
  switch (phase) {
    case Phase::kWarmUp:
      return "warm-up";
    case Phase::kSteady:
      return "steady";
    case Phase::kCoolDown:
      return "cool-down";
  }
  PD_CHECK(false, "phase " << static_cast<int>(phase));
}

Phase phase_of(const ScheduleOptions& options, const Instruction& instruction,
               std::optional<std::int64_t> num_minibatches) {
  if (is_of_boundary(instruction.opcode)) return Phase::kSteady;
  if (options.program != nullptr) return listed_phase_of(options, instruction, num_minibatches);
  if (is_at_spare(options, instruction.stage, instruction.replica)) return Phase::kSteady;
  const MicrobatchOrder order = order_of(options);
  const Rank rank = rank_of(options, instruction.stage, instruction.replica);
  const std::int64_t num_warm_up = window_of(options, rank) - 1;
  const std::vector<StageIndex> stages = stages_at(options, rank);
  const auto chunk = std::find(stages.begin(), stages.end(), instruction.stage) - stages.begin();
  const MicrobatchOrder::Item item{chunk, instruction.microbatch.value()};
  // A schedule that drains goes through all three phases in every round, so its positions count from the
  // round's first position. Those of other schedules count from the start of the run.
  const Rounds positions = positions_of(options, instruction.stage);
  const bool starts_anew = rules_of(options).drains();
  const std::int64_t num_own =
      positions.num_own(instruction.replica, num_minibatches.value_or(kNumMinibatchesMax));
  const std::int64_t round = positions.round_of(instruction.minibatch) - positions.first_version().value();
  const std::int64_t first_of_round = round * positions.own_per_round();
  const std::int64_t num_absent_at_end = order.num_positions() - 1 - order.last_position();
  const std::int64_t origin = starts_anew ? first_of_round : 0;
  const auto own_index = [&](std::int64_t position) {
    return positions.own_index(positions.number_of(instruction.minibatch, MicrobatchIndex(position)));
  };
  if (keeps_stash(instruction.opcode)) {
    return own_index(order.forward_position(item)) - origin < num_warm_up ? Phase::kWarmUp : Phase::kSteady;
  }
  std::int64_t backward = 0;
  if (writes_version(instruction.opcode)) {  // an update is in the phase of the backward before it
    const std::int64_t num_delayed =
        num_rounds_delayed(options, instruction.stage) * positions.own_per_round();
    backward =
        std::min(num_own, first_of_round + positions.own_per_round() + num_delayed) - 1 - num_absent_at_end;
  } else {
    backward = own_index(order.backward_position(item));
  }
  // In the steady phase a backward comes after the forward with index `partner`, which has filled the window.
  // A backward that has no such forward is in the cool-down.
  const std::int64_t partner = backward + num_warm_up;
  const std::int64_t end_of_round = std::min(num_own, first_of_round + positions.own_per_round());
  const bool is_paired =
      starts_anew ? partner < end_of_round - num_absent_at_end : !num_minibatches || partner < num_own;
  return is_paired ? Phase::kSteady : Phase::kCoolDown;
}

}  // namespace pipedream
