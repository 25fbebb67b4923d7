// Implements check_schedule_options() and the checks of single numbers of program.h.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <numeric>
#include <optional>
#include <sstream>
#include <string>

#include "base/failure.h"
#include "schedule/checked_options.h"
#include "schedule/exclusions.h"
#include "schedule/listed_program.h"
#include "schedule/schedule_rules.h"

namespace pipedream {
namespace {

void check_schedule(const std::string& schedule) {
  if (find_rules(schedule) != nullptr) return;
  if (schedule == kListedSchedule) throw UserError("schedule \"program\" has no program; give one");
  std::ostringstream message;
  message << "unknown schedule \"" << schedule << "\"; known are:";
  for (const std::string& name : schedule_names())
    message << (name == schedule_names().front() ? " \"" : ", \"") << name << '"';
  throw UserError(message.str());
}

void check_listed(const ScheduleOptions& options) {
  const ListedProgram& program = *options.program;
  if (options.schedule != kListedSchedule) {
    throw UserError("schedule is \"" + options.schedule + "\", and there is a program; give one of the two");
  }
  if (program.num_stages() != num_stages(options)) {
    throw UserError("the program has " + std::to_string(program.num_stages()) + " stages, and the plan " +
                    std::to_string(num_stages(options)) + "; give a plan of as many");
  }
  for (const Place& place : program.placement().places()) {
    const bool is_alike =
        place.replica.value() < num_replicas_of(options, place.stage) &&
        rank_of(options, place.stage, place.replica) == place.rank &&
        num_replicas_of(options, place.stage) == program.placement().num_replicas(place.stage);
    if (is_alike) continue;
    throw UserError("the program has " + to_string(StageReplica{place.stage, place.replica}) + " of " +
                    std::to_string(program.placement().num_replicas(place.stage)) + " at worker " +
                    std::to_string(place.rank.value()) +
                    ", and the plan has not; give a plan of as many replicas and workers");
  }
  if (program.num_microbatches() != options.num_microbatches) {
    throw UserError("num_microbatches is " + std::to_string(options.num_microbatches) +
                    ", and the program has " + std::to_string(program.num_microbatches()) +
                    "; leave the number to the program");
  }
  for (StageIndex stage; stage.value() < num_stages(options); stage = stage.next()) {
    if (in_flight_at(options, stage) == program.num_in_flight(stage)) continue;
    throw UserError("in_flight is " + std::to_string(in_flight_at(options, stage)) + " at stage " +
                    std::to_string(stage.value()) + ", and the program has " +
                    std::to_string(program.num_in_flight(stage)) + "; leave it to the program");
  }
}

void check_counts(const ScheduleOptions& options) {
  if (options.in_flight.empty()) {
    throw UserError("in_flight is empty; it has one number per stage, and at least one stage");
  }
  for (std::size_t stage = 0; stage < options.in_flight.size(); ++stage) {
    if (options.in_flight[stage] >= 1 && options.in_flight[stage] <= kInFlightMax) continue;
    throw UserError("in_flight is " + std::to_string(options.in_flight[stage]) + " at stage " +
                    std::to_string(stage) + "; it must be at least 1 and at most " +
                    std::to_string(kInFlightMax));
  }
  if (options.num_microbatches < 1 || options.num_microbatches > kNumMicrobatchesMax) {
    throw UserError("num_microbatches is " + std::to_string(options.num_microbatches) +
                    "; it must be at least 1 and at most " + std::to_string(kNumMicrobatchesMax));
  }
}

bool has_replicas(const Placement& placement) {
  return std::ranges::any_of(placement.places(),
                             [](const Place& place) { return !place.is_spare && place.replica.value() > 0; });
}

// Refuses two options of the core that exclude each other.
void check_together(const ScheduleOptions& options) {
  const ScheduleRules& rules = rules_of(options);
  const std::string schedule = "schedule is '" + options.schedule + "'";
  std::map<std::string, std::string, std::less<>> said;
  const auto say_if = [&](bool is_there, const char* key, const std::string& text = "") {
    if (is_there) said.emplace(key, text);
  };
  say_if(options.asynchronous, "asp");
  say_if(options.asynchronous, "not_ssp");
  say_if(options.staleness > 0, "staleness", "staleness is " + std::to_string(options.staleness));
  say_if(options.uses_allreduce, "reduced");
  say_if(options.exchanges_norms, "norms");
  say_if(!options.ties.empty(), "ties");
  say_if(options.placement.num_spares() > 0, "spares");
  say_if(has_replicas(options.placement), "replicas");
  say_if(options.in_flight.size() > 1, "several_stages",
         "the plan has " + std::to_string(options.in_flight.size()) + " stages");
  say_if(options.program != nullptr, "program");
  say_if(!rules.may_be_asynchronous, "common_rounds", schedule);
  say_if(!rules.may_be_stale, "newest_versions", schedule);
  say_if(rules.has_one_stage, "one_stage");
  say_if(!rules.has_stage_per_worker, "one_replica");
  say_if(options.evaluates, "validation");
  say_if(options.oldest_minibatch.has_value(), "state");
  check_exclusions(said);
}

void check_length(const char* name, std::size_t length, const ScheduleOptions& options) {
  if (length == 0 || length == options.in_flight.size()) return;
  throw UserError(std::string(name) + " has " + std::to_string(length) + " entries for " +
                  std::to_string(options.in_flight.size()) + " stages; give one per stage, or none");
}

// Throws "stage 1 is at rank 2; it must be at rank 1: " and the reason.
[[noreturn]] void refuse_rank(const Place& place, std::int64_t expected, const std::string& why) {
  throw UserError("stage " + std::to_string(place.stage.value()) + " is at rank " +
                  std::to_string(place.rank.value()) + "; it must be at rank " + std::to_string(expected) +
                  ": " + why);
}

// Checks a placement with one worker for each stage. Placements with replicas need no check, because only
// Placement::in_order() makes them, and it puts them in order.
void check_one_stage_per_worker(const Placement& placement) {
  if (placement.num_ranks() > placement.num_stages()) return;
  for (const Place& place : placement.places()) {
    const std::int64_t expected = place.stage.value();
    if (place.rank.value() == expected) continue;
    refuse_rank(place, expected,
                placement.stages_at(place.rank).size() > 1
                    ? "only schedule \"interleaved\" runs several stages at a worker"
                    : "stages lie at the ranks in order, replica by replica");
  }
}

void check_interleaved(const Placement& placement) {
  const std::int64_t stages = placement.num_stages();
  const std::int64_t workers = placement.num_ranks();
  for (const Place& place : placement.places()) {
    const std::int64_t expected = place.stage.value() % workers;
    if (place.rank.value() == expected) continue;
    refuse_rank(place, expected,
                "schedule \"interleaved\" has stage s at rank s mod " + std::to_string(workers));
  }
  if (workers == 1 && stages > 1) {
    throw UserError("the placement puts all " + std::to_string(stages) +
                    " stages at one worker; schedule \"interleaved\" needs at least 2 workers");
  }
  if (stages % workers != 0) {
    throw UserError("the placement spreads " + std::to_string(stages) + " stages over " +
                    std::to_string(workers) +
                    " workers; schedule \"interleaved\" needs as many stages at every worker");
  }
}

void check_placement(const ScheduleOptions& options) {
  const Placement& placement = options.placement;
  if (placement.empty()) return;
  check_length("placement", static_cast<std::size_t>(placement.num_stages()), options);
  if (options.program != nullptr) return;  // check_listed() compares the placement with the program's
  if (rules_of(options).has_stage_per_worker) {
    check_one_stage_per_worker(placement);
  } else {
    check_interleaved(placement);
  }
}

// "stages 0 and 2"
std::string name_of(const TiedStages& tied) {
  return "stages " + std::to_string(tied.owner.value()) + " and " + std::to_string(tied.user.value());
}

void check_ties(const ScheduleOptions& options) {
  const auto stages = static_cast<std::int64_t>(options.in_flight.size());
  for (std::size_t index = 0; index < options.ties.size(); ++index) {
    const TiedStages& tied = options.ties[index];
    if (tied.owner.value() < 0 || tied.owner >= tied.user || tied.user.value() >= stages) {
      throw UserError("ties has " + name_of(tied) +
                      "; an owner is upstream of its user, and both are among the " + std::to_string(stages) +
                      " stages");
    }
    if (index > 0 && options.ties[index - 1] >= tied) {
      throw UserError("ties has " + name_of(tied) + " after " + name_of(options.ties[index - 1]) +
                      "; give each pair once, ascending");
    }
  }
}

// Returns the first stage whose rounds are too short for 2bw if a minibatch has m microbatches; nothing if
// all are long enough. A replica needs at least n_s - 1 microbatches of a round (program.h).
std::optional<StageIndex> stage_not_covered(const ScheduleOptions& options, std::int64_t m) {
  for (StageIndex stage; stage.value() < num_stages(options); stage = stage.next()) {
    const std::int64_t num_replicas = num_replicas_of(options, stage);
    if (std::lcm(m, num_replicas) / num_replicas < in_flight_at(options, stage) - 1) return stage;
  }
  return std::nullopt;
}

void check_2bw(const ScheduleOptions& options) {
  const std::int64_t m = options.num_microbatches;
  if (const std::optional<StageIndex> stage = stage_not_covered(options, m)) {
    const std::int64_t in_flight = in_flight_at(options, *stage);
    const std::int64_t num_replicas = num_replicas_of(options, *stage);
    throw UserError(
        "num_microbatches is " + std::to_string(m) + " with in_flight " + std::to_string(in_flight) +
        " at stage " + std::to_string(stage->value()) +
        (num_replicas == 1 ? std::string() : " of " + std::to_string(num_replicas) + " replicas") +
        "; schedule \"2bw\" keeps two versions, so an update needs at least " +
        std::to_string(in_flight - 1) + " microbatches of each replica: use " +
        std::to_string((in_flight - 1) * num_replicas));
  }
}

void check_rounds(const ScheduleOptions& options) {
  if (!rules_of(options).drains() || minibatches_between_drains(options) <= kMinibatchesPerRoundMax) return;
  throw UserError(
      "schedule \"" + options.schedule + "\" would update once in more than " +
      std::to_string(kMinibatchesPerRoundMax) +
      " minibatches, in which all replicas have equally many microbatches; give the stages replica"
      " counts that divide each other, or num_microbatches");
}

void check_replicated(const ScheduleOptions& options) {
  if (!has_replicas(options)) return;
  for (StageIndex stage; stage.value() < num_stages(options); stage = stage.next()) {
    const std::int64_t num_replicas = num_replicas_of(options, stage);
    const std::int64_t m = options.num_microbatches;
    const std::int64_t per_round = std::lcm(m, num_replicas) / m;
    const bool starts = options.first_minibatch.value() % per_round == 0;
    const MinibatchId oldest = options.oldest_minibatch.value_or(options.first_minibatch);
    if (starts && oldest.value() % per_round == 0) continue;
    throw UserError((starts ? "oldest_minibatch is " + std::to_string(oldest.value())
                            : "first_minibatch is " + std::to_string(options.first_minibatch.value())) +
                    ", and stage " + std::to_string(stage.value()) + " of " + std::to_string(num_replicas) +
                    " replicas updates once in " + std::to_string(per_round) +
                    " minibatches; a run starts at a multiple of every stage's");
  }
}

void check_staleness(const ScheduleOptions& options) {
  if (options.staleness < 0 || options.staleness > kStalenessMax) {
    throw UserError("staleness is " + std::to_string(options.staleness) + "; it must be between 0 and " +
                    std::to_string(kStalenessMax));
  }
}

void check_spares(const ScheduleOptions& options) {
  const Placement& placement = options.placement;
  if (placement.num_spares() == 0) return;
  for (StageIndex stage; stage.value() < num_stages(options); stage = stage.next()) {
    const std::int64_t num_replicas = placement.num_replicas(stage);
    const std::int64_t num_spares = placement.num_owners(stage) - num_replicas;
    if (num_spares == 0 || (num_replicas > 1 && num_spares <= num_replicas)) continue;
    throw UserError("stage " + std::to_string(stage.value()) + " has " + std::to_string(num_replicas) +
                    " replicas and " + std::to_string(num_spares) +
                    " spares; spares are of a stage with 2 replicas or more, and no more than these");
  }
}

void check_start(const ScheduleOptions& options) {
  const std::int64_t first = options.first_minibatch.value();
  if (first < 0 || first > kNumMinibatchesMax) {
    throw UserError("first_minibatch is " + std::to_string(first) + "; it must be between 0 and " +
                    std::to_string(kNumMinibatchesMax));
  }
  if (!options.oldest_minibatch) return;
  const std::int64_t oldest = options.oldest_minibatch->value();
  if (oldest >= 0 && oldest <= first) return;
  throw UserError("oldest_minibatch is " + std::to_string(oldest) + "; it must be between 0 and " +
                  std::to_string(first) + ", the first minibatch");
}

}  // namespace

void check_schedule_options(const ScheduleOptions& options) {
  if (options.program == nullptr) check_schedule(options.schedule);
  check_counts(options);
  check_together(options);
  check_length("recompute", options.recompute.size(), options);
  check_placement(options);
  if (rules_of(options).is_round_late()) check_2bw(options);
  check_rounds(options);
  check_ties(options);
  check_staleness(options);
  if (options.program != nullptr) check_listed(options);
  check_spares(options);
  check_start(options);
  check_replicated(options);
}

std::int64_t num_microbatches_min(const ScheduleOptions& options) {
  if (!rules_of(options).is_round_late()) return 1;
  std::int64_t enough = 1;
  while (enough < kNumMicrobatchesMax && stage_not_covered(options, enough)) ++enough;
  return enough;
}

void check_num_minibatches(const ScheduleOptions& options, std::int64_t num_minibatches) {
  const std::int64_t first = options.first_minibatch.value();
  if (num_minibatches >= first && num_minibatches <= kNumMinibatchesMax) return;
  throw UserError("num_minibatches is " + std::to_string(num_minibatches) + "; it must be between " +
                  std::to_string(first) + " and " + std::to_string(kNumMinibatchesMax));
}

}  // namespace pipedream
