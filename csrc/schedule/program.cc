// Every schedule as a window over an order of microbatches, and a delay of weight versions. See program.h
// for the table that the switches below spell out.
#include "schedule/program.h"

#include <algorithm>
#include <array>
#include <numeric>
#include <sstream>
#include <utility>

#include "base/check.h"
#include "base/failure.h"

namespace pipedream {
namespace {

enum class Kind {
  kPipedream,
  kVerticalSync,
  kNaive,
  k2bw,
  kFlush,
  kGpipe,
  kModelParallel,
  kDataParallel,
  kInterleaved,
};

constexpr std::array<std::pair<Kind, std::string_view>, 9> kKinds = {{
    {Kind::kPipedream, "pipedream"},
    {Kind::kVerticalSync, "vertical_sync"},
    {Kind::kNaive, "naive"},
    {Kind::k2bw, "2bw"},
    {Kind::kFlush, "flush"},
    {Kind::kGpipe, "gpipe"},
    {Kind::kModelParallel, "model_parallel"},
    {Kind::kDataParallel, "data_parallel"},
    {Kind::kInterleaved, "interleaved"},
}};

// Far above any cluster; keeps n_s r_s, at most twice the sum of the r_s, inside 64 bits.
constexpr std::int64_t kNumReplicasMax = std::int64_t{1} << 30;

std::optional<Kind> find_kind(std::string_view schedule) {
  for (const auto& [kind, name] : kKinds) {
    if (name == schedule) return kind;
  }
  return std::nullopt;
}

Kind kind_of(const ScheduleOptions& options) {
  const std::optional<Kind> kind = find_kind(options.schedule);
  PD_CHECK(kind.has_value(), options.schedule);
  return *kind;
}

// What check_schedule_options is made of.

void check_schedule(const std::string& schedule) {
  if (find_kind(schedule)) return;
  std::ostringstream message;
  message << "unknown schedule \"" << schedule << "\"; known are:";
  for (const auto& [kind, name] : kKinds)
    message << (kind == kKinds.front().first ? " \"" : ", \"") << name << '"';
  throw UserError(message.str());
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

void check_length(const char* name, std::size_t length, const ScheduleOptions& options) {
  if (length == 0 || length == options.in_flight.size()) return;
  throw UserError(std::string(name) + " has " + std::to_string(length) + " entries for " +
                  std::to_string(options.in_flight.size()) + " stages; give one per stage, or none");
}

// "stage 1 is at rank 2; it must be at rank 1: " and why; of a replica other than the first "stage 1 replica
// 1 is".
[[noreturn]] void refuse_rank(const Place& place, std::int64_t expected, const std::string& why) {
  const std::int64_t replica = place.replica.value();
  throw UserError("stage " + std::to_string(place.stage.value()) +
                  (replica == 0 ? std::string() : " replica " + std::to_string(replica)) + " is at rank " +
                  std::to_string(place.rank.value()) + "; it must be at rank " + std::to_string(expected) +
                  ": " + why);
}

void check_whole_replicas(const Placement& placement) {
  for (const Place& place : placement.places()) {
    if (place.shard.value() == 0) continue;
    throw UserError("stage " + std::to_string(place.stage.value()) +
                    " has several shards, which are not built yet; give each replica one rank");
  }
}

void check_one_stage_per_worker(const Placement& placement) {
  std::int64_t expected = 0;
  for (const Place& place : placement.places()) {
    if (place.rank.value() != expected) {
      const bool is_shared = placement.stages_at(place.rank).size() > 1;
      refuse_rank(place, expected,
                  is_shared ? "only schedule \"interleaved\" runs several stages at a worker"
                            : "stages lie at the ranks in order, replica by replica");
    }
    ++expected;
  }
}

void check_interleaved(const Placement& placement) {
  const std::int64_t stages = placement.num_stages();
  const std::int64_t workers = placement.num_ranks();
  for (const Place& place : placement.places()) {
    const std::int64_t expected = place.stage.value() % workers;
    if (place.replica.value() > 0) {
      throw UserError("stage " + std::to_string(place.stage.value()) +
                      " has several replicas; schedule \"interleaved\" runs one of each stage");
    }
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
  check_whole_replicas(placement);
  if (kind_of(options) == Kind::kInterleaved) {
    check_interleaved(placement);
  } else {
    check_one_stage_per_worker(placement);
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

// Everything below expects checked options.

std::int64_t count_stages(const ScheduleOptions& options) {
  return static_cast<std::int64_t>(options.in_flight.size());
}

std::int64_t count_workers(const ScheduleOptions& options) {
  return options.placement.empty() ? count_stages(options) : options.placement.num_ranks();
}

Rank rank_of(const ScheduleOptions& options, StageIndex stage, ReplicaIndex replica = {}) {
  return options.placement.empty() ? Rank(stage.value()) : options.placement.rank_of(stage, replica);
}

bool is_replicated(const ScheduleOptions& options) { return count_workers(options) > count_stages(options); }

std::int64_t num_replicas_of(const ScheduleOptions& options, StageIndex stage) {
  return options.placement.empty() ? 1 : options.placement.num_replicas(stage);
}

ReplicaIndex replica_at(const ScheduleOptions& options, Rank rank) {
  return options.placement.empty() ? ReplicaIndex() : options.placement.places_at(rank).front().replica;
}

std::vector<StageIndex> stages_at(const ScheduleOptions& options, Rank rank) {
  if (options.placement.empty()) return {StageIndex(rank.value())};
  return options.placement.stages_at(rank);
}

void check_stage(const ScheduleOptions& options, StageIndex stage) {
  check_schedule_options(options);
  if (stage.value() >= 0 && stage.value() < count_stages(options)) return;
  throw UserError("stage " + std::to_string(stage.value()) + " is outside the plan of " +
                  std::to_string(count_stages(options)) + " stages, which are counted from 0");
}

void check_rank(const ScheduleOptions& options, Rank rank) {
  check_schedule_options(options);
  const std::int64_t workers = count_workers(options);
  if (rank.value() >= 0 && rank.value() < workers) return;
  throw UserError("rank " + std::to_string(rank.value()) + " is outside the plan of " +
                  std::to_string(workers) + " workers, which are counted from 0");
}

void check_minibatch(MinibatchId minibatch) {
  if (minibatch.value() >= 0 && minibatch.value() < kNumMinibatchesMax) return;
  throw UserError("minibatch " + std::to_string(minibatch.value()) + " is not between 0 and " +
                  std::to_string(kNumMinibatchesMax - 1));
}

void check_replica(const Rounds& rounds, ReplicaIndex replica) {
  if (replica.value() >= 0 && replica.value() < rounds.num_replicas) return;
  throw UserError("replica " + std::to_string(replica.value()) + " is not one of the stage's " +
                  std::to_string(rounds.num_replicas) + ", which are counted from 0");
}

void check_microbatch(const ScheduleOptions& options, MicrobatchIndex microbatch) {
  if (microbatch.value() >= 0 && microbatch.value() < options.num_microbatches) return;
  throw UserError("microbatch " + std::to_string(microbatch.value()) + " is not one of the " +
                  std::to_string(options.num_microbatches) + " of a minibatch, which are counted from 0");
}

std::int64_t in_flight_at(const ScheduleOptions& options, StageIndex stage) {
  return options.in_flight[static_cast<std::size_t>(stage.value())];
}

bool drains(Kind kind) {
  switch (kind) {
    case Kind::kPipedream:
    case Kind::kVerticalSync:
    case Kind::kNaive:
    case Kind::k2bw:
      return false;
    case Kind::kFlush:
    case Kind::kGpipe:
    case Kind::kModelParallel:
    case Kind::kDataParallel:
    case Kind::kInterleaved:
      return true;
  }
  PD_CHECK(false, "kind " << static_cast<int>(kind));
}

// Of all stages' replica counts; more than kMinibatchesPerRoundMax stands for anything above.
std::int64_t common_round(const ScheduleOptions& options) {
  std::int64_t common = 1;
  for (StageIndex stage; stage.value() < count_stages(options); stage = stage.next()) {
    common = std::lcm(common, num_replicas_of(options, stage));
    if (common > kMinibatchesPerRoundMax) break;
  }
  return common;
}

Rounds make_rounds(const ScheduleOptions& options, StageIndex stage) {
  const std::int64_t num_replicas = num_replicas_of(options, stage);
  return {options.first_minibatch.value(), num_replicas,
          drains(kind_of(options)) ? common_round(options) : num_replicas};
}

// By how many rounds of the unit, the stage's or under vertical sync the input stage's, a forward's version
// is older than the newest that there could be.
std::int64_t forward_delay(const ScheduleOptions& options, StageIndex stage) {
  switch (kind_of(options)) {
    case Kind::kPipedream:
    case Kind::kNaive:
      return in_flight_at(options, stage) - 1 + options.staleness;
    case Kind::kVerticalSync:
      return options.in_flight.front() - 1;
    case Kind::k2bw:
      return 1;
    case Kind::kFlush:
    case Kind::kGpipe:
    case Kind::kModelParallel:
    case Kind::kDataParallel:
    case Kind::kInterleaved:
      return 0;
  }
  PD_CHECK(false, options.schedule);
}

std::int64_t backward_delay(const ScheduleOptions& options, StageIndex stage) {
  return kind_of(options) == Kind::kNaive ? 0 : forward_delay(options, stage);
}

// delay_max: of all reads of these weights, which are kept as long.
VersionRule make_rule(const ScheduleOptions& options, StageIndex stage, std::int64_t delay,
                      std::int64_t delay_max) {
  const Rounds rounds = make_rounds(options, stage);
  const bool is_by_input = kind_of(options) == Kind::kVerticalSync;
  const std::int64_t first = rounds.first_version().value();
  const std::int64_t oldest = options.oldest_version.value_or(rounds.first_version()).value();
  return {is_by_input ? num_replicas_of(options, StageIndex(0)) : rounds.minibatches_per_round, delay,
          rounds.minibatches_per_round, std::max(oldest, first - delay_max)};
}

VersionRule forward_rule(const ScheduleOptions& options, StageIndex stage) {
  return make_rule(options, stage, forward_delay(options, stage), backward_delay(options, stage));
}

VersionRule backward_rule(const ScheduleOptions& options, StageIndex stage) {
  const std::int64_t delay = backward_delay(options, stage);
  return make_rule(options, stage, delay, delay);
}

// Where forward and backward read alike.
VersionRule tied_rule(const ScheduleOptions& options) {
  const std::int64_t delay = forward_delay(options, StageIndex(0));
  return make_rule(options, StageIndex(0), delay, delay);
}

// By which an update stands later than the backward that it needs. Half of the staleness: as long as it may
// wait for the others' gradients, so long may they wait for what it writes.
std::int64_t num_rounds_delayed(const ScheduleOptions& options, StageIndex stage) {
  return num_replicas_of(options, stage) > 1 ? (options.staleness + 1) / 2 : 0;
}

// Checks of replicas.

void check_data_parallel(const ScheduleOptions& options) {
  if (options.in_flight.size() == 1) return;
  throw UserError("the plan has " + std::to_string(options.in_flight.size()) +
                  " stages; schedule \"data_parallel\" has one, with a replica at every worker");
}

void check_2bw(const ScheduleOptions& options) {
  std::int64_t upstream_replicas = num_replicas_of(options, StageIndex(0));
  for (StageIndex stage; stage.value() < count_stages(options); stage = stage.next()) {
    const std::int64_t in_flight = in_flight_at(options, stage);
    const std::int64_t num_replicas = num_replicas_of(options, stage);
    if (in_flight > options.num_microbatches / num_replicas) {
      throw UserError(
          "num_microbatches is " + std::to_string(options.num_microbatches) + " with in_flight " +
          std::to_string(in_flight) + " at stage " + std::to_string(stage.value()) +
          (num_replicas == 1 ? std::string() : " of " + std::to_string(num_replicas) + " replicas") +
          "; schedule \"2bw\" keeps two versions, so it needs at least as many microbatches");
    }
    const bool rises = stage.value() > 0 && in_flight > in_flight_at(options, StageIndex(stage.value() - 1));
    if (is_replicated(options) && (rises || (in_flight > 1 && upstream_replicas % num_replicas != 0))) {
      throw UserError("stage " + std::to_string(stage.value()) + " has " + std::to_string(num_replicas) +
                      " replicas with in_flight " + std::to_string(in_flight) + " below a stage of " +
                      std::to_string(upstream_replicas) + " with " +
                      std::to_string(in_flight_at(options, StageIndex(stage.value() - 1))) +
                      "; schedule \"2bw\", which counts microbatches in flight, would deadlock: use schedule "
                      "\"pipedream\", or as many replicas at every stage");
    }
    upstream_replicas = num_replicas;
  }
}

void check_rounds(const ScheduleOptions& options) {
  if (!drains(kind_of(options)) || common_round(options) <= kMinibatchesPerRoundMax) return;
  throw UserError("the stages' replica counts have a least common multiple above " +
                  std::to_string(kMinibatchesPerRoundMax) + ", and schedule \"" + options.schedule +
                  "\" updates once in so many minibatches; give the stages counts that divide each other");
}

void check_replicated(const ScheduleOptions& options) {
  if (!is_replicated(options)) return;
  if (!options.ties.empty()) {
    throw UserError("ties has " + name_of(options.ties.front()) +
                    ", and the plan has replicated stages; parameters that stages share need a straight "
                    "plan: partition(..., straight=True)");
  }
  if (options.oldest_version) {
    throw UserError("oldest_version is set, and the plan has replicated stages; they start from one version");
  }
  for (StageIndex stage; stage.value() < count_stages(options); stage = stage.next()) {
    const std::int64_t num_replicas = num_replicas_of(options, stage);
    if (options.first_minibatch.value() % num_replicas == 0) continue;
    throw UserError("first_minibatch is " + std::to_string(options.first_minibatch.value()) + ", and stage " +
                    std::to_string(stage.value()) + " has " + std::to_string(num_replicas) +
                    " replicas; a run starts at a multiple of every stage's");
  }
}

void check_staleness(const ScheduleOptions& options) {
  if (options.staleness < 0 || options.staleness > kStalenessMax) {
    throw UserError("staleness is " + std::to_string(options.staleness) + "; it must be between 0 and " +
                    std::to_string(kStalenessMax));
  }
  if (options.staleness == 0 || kind_of(options) == Kind::kPipedream) return;
  throw UserError("staleness is " + std::to_string(options.staleness) + " with schedule \"" +
                  options.schedule + "\"; only schedule \"pipedream\" reads older versions for it");
}

void check_start(const ScheduleOptions& options) {
  const std::int64_t first = options.first_minibatch.value();
  if (first < 0 || first > kNumMinibatchesMax) {
    throw UserError("first_minibatch is " + std::to_string(first) + "; it must be between 0 and " +
                    std::to_string(kNumMinibatchesMax));
  }
  if (!options.oldest_version) return;
  const std::int64_t oldest = options.oldest_version->value();
  if (oldest >= 0 && oldest <= first) return;
  throw UserError("oldest_version is " + std::to_string(oldest) + "; it must be between 0 and " +
                  std::to_string(first) + ", which the first minibatch starts from");
}

MicrobatchOrder order_of(const ScheduleOptions& options) {
  const std::int64_t workers = count_workers(options);
  const std::int64_t num_chunks = std::max<std::int64_t>(1, count_stages(options) / workers);
  return {options.num_microbatches, num_chunks, num_chunks == 1 ? 1 : workers};
}

// The most positions of the order that are forwarded and not yet backwarded at the worker.
std::int64_t window_of(const ScheduleOptions& options, Rank rank) {
  const StageIndex first_stage = stages_at(options, rank).front();
  const std::int64_t num_microbatches = options.num_microbatches;
  const std::int64_t num_in_round = num_microbatches * make_rounds(options, first_stage).own_per_round();
  const std::int64_t in_flight = in_flight_at(options, first_stage);
  const std::int64_t num_downstream = count_workers(options) - rank.value() - 1;
  switch (kind_of(options)) {
    case Kind::kPipedream:
    case Kind::kVerticalSync:
    case Kind::kNaive:
      return (in_flight - 1) * num_microbatches + 1;
    case Kind::k2bw:
      return in_flight;
    case Kind::kFlush:
      return std::min(num_in_round,
                      is_replicated(options) ? (in_flight - 1) * num_microbatches + 1 : in_flight);
    case Kind::kGpipe:
      return num_in_round;
    case Kind::kModelParallel:
    case Kind::kDataParallel:
      return 1;
    case Kind::kInterleaved: {
      const MicrobatchOrder order = order_of(options);
      if (order.num_chunks == 1) return std::min(num_microbatches, num_downstream + 1);
      return 2 * num_downstream + (order.num_chunks - 1) * order.group_size + 1;
    }
  }
  PD_CHECK(false, options.schedule);
}

// The most of one stage among what the worker's window holds.
std::int64_t count_in_flight_at_chunk(const ScheduleOptions& options, StageIndex stage) {
  ComputeCursor cursor(options, rank_of(options, stage));
  cursor.set_num_minibatches(options.first_minibatch.value() + 1);
  std::int64_t num_in_flight = 0;
  std::int64_t num_in_flight_max = 0;
  for (auto instruction = cursor.current(); instruction; instruction = cursor.current()) {
    if (instruction->stage == stage && instruction->opcode == Opcode::kForward) ++num_in_flight;
    if (instruction->stage == stage && instruction->opcode == Opcode::kBackward) --num_in_flight;
    num_in_flight_max = std::max(num_in_flight_max, num_in_flight);
    cursor.advance();
  }
  return num_in_flight_max;
}

}  // namespace

void check_schedule_options(const ScheduleOptions& options) {
  check_schedule(options.schedule);
  check_counts(options);
  check_length("recompute", options.recompute.size(), options);
  check_placement(options);
  if (kind_of(options) == Kind::k2bw) check_2bw(options);
  if (kind_of(options) == Kind::kDataParallel) check_data_parallel(options);
  check_rounds(options);
  check_ties(options);
  check_staleness(options);
  check_start(options);
  check_replicated(options);
}

WeightVersion oldest_version(const ScheduleOptions& options, StageIndex stage) {
  check_stage(options, stage);
  return options.oldest_version.value_or(make_rounds(options, stage).first_version());
}

void check_num_minibatches(const ScheduleOptions& options, std::int64_t num_minibatches) {
  const std::int64_t first = options.first_minibatch.value();
  if (num_minibatches >= first && num_minibatches <= kNumMinibatchesMax) return;
  throw UserError("num_minibatches is " + std::to_string(num_minibatches) + "; it must be between " +
                  std::to_string(first) + " and " + std::to_string(kNumMinibatchesMax));
}

const std::vector<std::string>& schedule_names() {
  static const std::vector<std::string> names = [] {
    std::vector<std::string> made;
    made.reserve(kKinds.size());
    for (const auto& [kind, name] : kKinds) made.emplace_back(name);
    return made;
  }();
  return names;
}

std::int64_t num_stages(const ScheduleOptions& options) {
  check_schedule_options(options);
  return static_cast<std::int64_t>(options.in_flight.size());
}

std::int64_t num_workers(const ScheduleOptions& options) {
  check_schedule_options(options);
  return count_workers(options);
}

Placement placement_of(const ScheduleOptions& options) {
  check_schedule_options(options);
  if (!options.placement.empty()) return options.placement;
  return Placement::in_order(std::vector<std::int64_t>(options.in_flight.size(), 1));
}

bool has_replicas(const ScheduleOptions& options) {
  check_schedule_options(options);
  return is_replicated(options);
}

Rounds rounds_of(const ScheduleOptions& options, StageIndex stage) {
  check_stage(options, stage);
  return make_rounds(options, stage);
}

bool drains_every_minibatch(const ScheduleOptions& options) {
  check_schedule_options(options);
  return drains(kind_of(options));
}

bool stashes_versions(const ScheduleOptions& options) {
  check_schedule_options(options);
  return kind_of(options) != Kind::kNaive;
}

std::int64_t num_versions_kept(const ScheduleOptions& options, StageIndex stage) {
  check_stage(options, stage);
  // From the version that the next backward reads to the newest.
  const VersionRule rule = backward_rule(options, stage);
  // The input stage's rounds begin up to r_0 - gcd minibatches after the stage's.
  const std::int64_t num_between =
      (rule.delay + 1) * rule.unit - std::gcd(rule.unit, rule.minibatches_per_round);
  return 1 + (num_between + rule.minibatches_per_round - 1) / rule.minibatches_per_round;
}

WeightVersion forward_version(const ScheduleOptions& options, StageIndex stage, MinibatchId minibatch) {
  check_stage(options, stage);
  check_minibatch(minibatch);
  return forward_rule(options, stage).version_of(minibatch);
}

VersionRule forward_rule_of(const ScheduleOptions& options, StageIndex stage) {
  check_stage(options, stage);
  return forward_rule(options, stage);
}

WeightVersion backward_version(const ScheduleOptions& options, StageIndex stage, MinibatchId minibatch) {
  check_stage(options, stage);
  check_minibatch(minibatch);
  return backward_rule(options, stage).version_of(minibatch);
}

WeightVersion tied_version(const ScheduleOptions& options, MinibatchId minibatch) {
  check_schedule_options(options);
  check_minibatch(minibatch);
  return tied_rule(options).version_of(minibatch);
}

std::int64_t num_tied_versions_kept(const ScheduleOptions& options) {
  check_schedule_options(options);
  return tied_rule(options).delay + 1;
}

std::int64_t num_gradients_kept(const ScheduleOptions& options, StageIndex stage) {
  check_stage(options, stage);
  return 1 + num_rounds_delayed(options, stage);
}

std::int64_t num_microbatches_in_flight(const ScheduleOptions& options, StageIndex stage) {
  check_stage(options, stage);
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
  check_stage(options, instruction.stage);
  check_minibatch(instruction.minibatch);
  check_microbatch(options, instruction.microbatch);
  const Rounds rounds = make_rounds(options, instruction.stage);
  check_replica(rounds, instruction.replica);
  const MicrobatchOrder order = order_of(options);
  const Rank rank = rank_of(options, instruction.stage, instruction.replica);
  const std::int64_t num_warm_up = window_of(options, rank) - 1;
  const std::vector<StageIndex> stages = stages_at(options, rank);
  const auto chunk = std::find(stages.begin(), stages.end(), instruction.stage) - stages.begin();
  const MicrobatchOrder::Item item{chunk, instruction.microbatch.value()};
  // Positions of the replica's own minibatches. A schedule that drains starts anew in every round, the others
  // go on counting.
  const bool starts_anew = drains(kind_of(options));
  const std::int64_t num_own =
      rounds.num_own(instruction.replica, num_minibatches.value_or(kNumMinibatchesMax));
  const std::int64_t round = rounds.round_of(instruction.minibatch) - rounds.first_version().value();
  const std::int64_t first_of_round = round * rounds.own_per_round();
  const std::int64_t end_of_round = std::min(num_own, first_of_round + rounds.own_per_round());
  const std::int64_t origin = starts_anew ? first_of_round : 0;
  std::int64_t own_index = rounds.own_index(instruction.minibatch);
  std::int64_t position = order.backward_position(item);
  if (instruction.opcode == Opcode::kForward) {
    const std::int64_t forwarded =
        (own_index - origin) * order.num_positions() + order.forward_position(item);
    return forwarded < num_warm_up ? Phase::kWarmUp : Phase::kSteady;
  }
  if (instruction.opcode == Opcode::kUpdate) {
    // As the backward that it follows.
    const std::int64_t num_delayed = num_rounds_delayed(options, instruction.stage) * rounds.own_per_round();
    own_index = std::min(num_own, first_of_round + rounds.own_per_round() + num_delayed) - 1;
    position = order.last_position();
  }
  // The body pairs this backward with the forward that takes its place in the window, if there is one.
  const std::int64_t partner = (own_index - origin) * order.num_positions() + position + num_warm_up;
  const bool is_paired =
      starts_anew ? partner <= (end_of_round - 1 - origin) * order.num_positions() + order.last_position()
                  : !num_minibatches || partner / order.num_positions() < num_own;
  return is_paired ? Phase::kSteady : Phase::kCoolDown;
}

ComputeCursor::ComputeCursor(ScheduleOptions options, Rank rank) : options_(std::move(options)), rank_(rank) {
  check_rank(options_, rank_);
  stages_ = stages_at(options_, rank_);
  const StageIndex first_stage = stages_.front();
  replica_ = replica_at(options_, rank_);
  order_ = order_of(options_);
  rounds_ = make_rounds(options_, first_stage);
  forward_rule_ = forward_rule(options_, first_stage);
  backward_rule_ = backward_rule(options_, first_stage);
  window_ = window_of(options_, rank_);
  drains_ = drains(kind_of(options_));
  num_delayed_ = num_rounds_delayed(options_, first_stage);
}

std::optional<Instruction> ComputeCursor::current() const {
  if (is_update_due()) return update();
  if (may_forward()) return forward();
  if (num_backwarded_ < num_forwarded_) return recompute_or_backward();
  return std::nullopt;
}

void ComputeCursor::advance() {
  const std::optional<Instruction> instruction = current();
  PD_CHECK(instruction.has_value(),
           "rank " << rank_.value() << ": the program is over after " << num_updates_ << " updates");
  switch (instruction->opcode) {
    case Opcode::kForward:
      ++num_forwarded_;
      break;
    case Opcode::kRecompute:
      recomputed_ = true;
      break;
    case Opcode::kBackward:
      recomputed_ = false;
      ++num_backwarded_;
      break;
    case Opcode::kUpdate:
      ++num_updates_;
      break;
    case Opcode::kSend:
    case Opcode::kRecv:
      PD_CHECK(false, to_string(*instruction) << " is not computed");
  }
  pass_over_absent();
}

void ComputeCursor::set_num_minibatches(std::int64_t num_minibatches) {
  const std::int64_t num_positions = order_.num_positions();
  const std::int64_t num_started = (num_forwarded_ + num_positions - 1) / num_positions;
  const std::int64_t first = options_.first_minibatch.value();
  PD_CHECK(!num_minibatches_.has_value(), "rank " << rank_.value() << ": num_minibatches was already set to "
                                                  << *num_minibatches_ << ", now " << num_minibatches);
  PD_CHECK(num_minibatches >= first && rounds_.num_own(replica_, num_minibatches) >= num_started,
           "rank " << rank_.value() << ": num_minibatches " << num_minibatches << " is below the "
                   << num_started << " already forwarded since minibatch " << first);
  num_minibatches_ = num_minibatches;
}

std::int64_t ComputeCursor::num_own() const {
  return rounds_.num_own(replica_, num_minibatches_.value_or(2 * kNumMinibatchesMax));
}

bool ComputeCursor::is_update_due() const {
  const std::int64_t round = num_updates_ / order_.num_chunks;  // since the start
  const std::int64_t version = rounds_.first_version().value() + round;
  if (num_minibatches_ && version >= rounds_.last_version(*num_minibatches_).value()) return false;
  const std::int64_t num_needed = (round + 1 + num_delayed_) * rounds_.own_per_round();
  return num_backwarded_ >= std::min(num_needed, num_own()) * order_.num_positions();
}

bool ComputeCursor::may_forward() const {
  const std::int64_t own_index = num_forwarded_ / order_.num_positions();
  if (num_forwarded_ - num_backwarded_ >= window_ || own_index >= num_own()) return false;
  return !drains_ || own_index / rounds_.own_per_round() == num_updates_ / order_.num_chunks;
}

Instruction ComputeCursor::update() const {
  const std::int64_t version = rounds_.first_version().value() + num_updates_ / order_.num_chunks;
  return {Opcode::kUpdate,
          stage_of(num_updates_ % order_.num_chunks),
          rounds_.begin_of(version),
          MicrobatchIndex(0),
          WeightVersion(version + 1),
          {},
          replica_};
}

Instruction ComputeCursor::forward() const {
  const MinibatchId minibatch = minibatch_at(num_forwarded_);
  const MicrobatchOrder::Item item = order_.forward_at(num_forwarded_ % order_.num_positions());
  return {Opcode::kForward,
          stage_of(item.chunk),
          minibatch,
          MicrobatchIndex(item.microbatch),
          forward_rule_.version_of(minibatch),
          {},
          replica_};
}

Instruction ComputeCursor::recompute_or_backward() const {
  const MinibatchId minibatch = minibatch_at(num_backwarded_);
  const MicrobatchOrder::Item item = order_.backward_at(num_backwarded_ % order_.num_positions());
  const StageIndex stage = stage_of(item.chunk);
  const bool recompute_first = must_recompute(stage) && !recomputed_;
  return {recompute_first ? Opcode::kRecompute : Opcode::kBackward,
          stage,
          minibatch,
          MicrobatchIndex(item.microbatch),
          backward_rule_.version_of(minibatch),
          {},
          replica_};
}

MinibatchId ComputeCursor::minibatch_at(std::int64_t position) const {
  return rounds_.own_minibatch(replica_, position / order_.num_positions());
}

StageIndex ComputeCursor::stage_of(std::int64_t chunk) const {
  return stages_[static_cast<std::size_t>(chunk)];
}

bool ComputeCursor::must_recompute(StageIndex stage) const {
  return !options_.recompute.empty() && options_.recompute[static_cast<std::size_t>(stage.value())];
}

// Bounded by the positions of a minibatch: its first forward, and its update, always exist.
void ComputeCursor::pass_over_absent() {
  const std::int64_t num_positions = order_.num_positions();
  while (!is_update_due()) {
    if (may_forward()) {
      if (order_.exists(order_.forward_at(num_forwarded_ % num_positions))) return;
      ++num_forwarded_;
    } else {
      if (num_backwarded_ == num_forwarded_) return;
      if (order_.exists(order_.backward_at(num_backwarded_ % num_positions))) return;
      ++num_backwarded_;
    }
  }
}

std::vector<Instruction> make_compute_program(const ScheduleOptions& options, Rank rank,
                                              std::int64_t num_minibatches) {
  check_schedule_options(options);
  check_num_minibatches(options, num_minibatches);
  ComputeCursor cursor(options, rank);
  cursor.set_num_minibatches(num_minibatches);
  std::vector<Instruction> instructions;
  for (auto instruction = cursor.current(); instruction; instruction = cursor.current()) {
    instructions.push_back(*instruction);
    cursor.advance();
  }
  return instructions;
}

}  // namespace pipedream
