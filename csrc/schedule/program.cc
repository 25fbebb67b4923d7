// Every schedule as a window over an order of microbatches, and a delay of weight versions. See program.h
// for the table that the switches below spell out.
#include "schedule/program.h"

#include <algorithm>
#include <array>
#include <sstream>
#include <utility>

#include "base/check.h"
#include "base/failure.h"

namespace pipedream {
namespace {

enum class Kind { kPipedream, kVerticalSync, kNaive, k2bw, kFlush, kGpipe, kModelParallel, kInterleaved };

constexpr std::array<std::pair<Kind, std::string_view>, 8> kKinds = {{
    {Kind::kPipedream, "pipedream"},
    {Kind::kVerticalSync, "vertical_sync"},
    {Kind::kNaive, "naive"},
    {Kind::k2bw, "2bw"},
    {Kind::kFlush, "flush"},
    {Kind::kGpipe, "gpipe"},
    {Kind::kModelParallel, "model_parallel"},
    {Kind::kInterleaved, "interleaved"},
}};
constexpr std::string_view kNotBuilt = "data_parallel";

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
  if (schedule == kNotBuilt) {
    message << "schedule \"" << schedule << "\" is not built yet; use one that is:";
  } else {
    message << "unknown schedule \"" << schedule << "\"; known are:";
  }
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

void check_2bw(const ScheduleOptions& options) {
  for (std::size_t stage = 0; stage < options.in_flight.size(); ++stage) {
    if (options.num_microbatches >= options.in_flight[stage]) continue;
    throw UserError("num_microbatches is " + std::to_string(options.num_microbatches) + " with in_flight " +
                    std::to_string(options.in_flight[stage]) + " at stage " + std::to_string(stage) +
                    "; schedule \"2bw\" keeps two versions, so it needs at least as many microbatches");
  }
}

// "stage 1 is at rank 2; it must be at rank 1: " and why.
[[noreturn]] void refuse_rank(StageIndex stage, Rank rank, std::int64_t expected, const std::string& why) {
  throw UserError("stage " + std::to_string(stage.value()) + " is at rank " + std::to_string(rank.value()) +
                  "; it must be at rank " + std::to_string(expected) + ": " + why);
}

void check_whole_stages(const Placement& placement) {
  for (const Place& place : placement.places()) {
    const bool is_replicated = placement.num_replicas(place.stage) > 1;
    if (!is_replicated && placement.num_shards(place.stage) == 1) continue;
    throw UserError("stage " + std::to_string(place.stage.value()) + " has several " +
                    (is_replicated ? "replicas" : "shards") + ", which are not built yet; give it one rank");
  }
}

void check_one_stage_per_worker(const Placement& placement) {
  for (const Place& place : placement.places()) {
    if (place.rank.value() == place.stage.value()) continue;
    const bool is_shared = placement.stages_at(place.rank).size() > 1;
    refuse_rank(place.stage, place.rank, place.stage.value(),
                is_shared ? "only schedule \"interleaved\" runs several stages at a worker"
                          : "stage s lies at rank s");
  }
}

void check_interleaved(const Placement& placement) {
  const std::int64_t stages = placement.num_stages();
  const std::int64_t workers = placement.num_ranks();
  for (const Place& place : placement.places()) {
    const std::int64_t expected = place.stage.value() % workers;
    if (place.rank.value() == expected) continue;
    refuse_rank(place.stage, place.rank, expected,
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
  check_whole_stages(placement);
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

// Everything below expects checked options.

std::int64_t count_stages(const ScheduleOptions& options) {
  return static_cast<std::int64_t>(options.in_flight.size());
}

std::int64_t count_workers(const ScheduleOptions& options) {
  return options.placement.empty() ? count_stages(options) : options.placement.num_ranks();
}

Rank rank_of(const ScheduleOptions& options, StageIndex stage) {
  return options.placement.empty() ? Rank(stage.value()) : options.placement.rank_of(stage);
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
    case Kind::kInterleaved:
      return true;
  }
  PD_CHECK(false, "kind " << static_cast<int>(kind));
}

// Minibatch i reads version max(0, i - delay) in its forward.
std::int64_t forward_delay(const ScheduleOptions& options, StageIndex stage) {
  switch (kind_of(options)) {
    case Kind::kPipedream:
    case Kind::kNaive:
      return in_flight_at(options, stage) - 1;
    case Kind::kVerticalSync:
      return options.in_flight.front() - 1;
    case Kind::k2bw:
      return 1;
    case Kind::kFlush:
    case Kind::kGpipe:
    case Kind::kModelParallel:
    case Kind::kInterleaved:
      return 0;
  }
  PD_CHECK(false, options.schedule);
}

std::int64_t backward_delay(const ScheduleOptions& options, StageIndex stage) {
  return kind_of(options) == Kind::kNaive ? 0 : forward_delay(options, stage);
}

std::int64_t tied_delay(const ScheduleOptions& options) { return forward_delay(options, StageIndex(0)); }

// delay_max: of all reads of these weights, which are kept as long.
WeightVersion delayed_version(const ScheduleOptions& options, MinibatchId minibatch, std::int64_t delay,
                              std::int64_t delay_max) {
  const WeightVersion oldest_kept(options.first_minibatch.value() - delay_max);
  return std::max({oldest_version(options), oldest_kept, WeightVersion(minibatch.value() - delay)});
}

MicrobatchOrder order_of(const ScheduleOptions& options) {
  const std::int64_t workers = count_workers(options);
  const std::int64_t num_chunks = static_cast<std::int64_t>(options.in_flight.size()) / workers;
  return {options.num_microbatches, num_chunks, num_chunks == 1 ? 1 : workers};
}

// The most positions of the order that are forwarded and not yet backwarded at the worker.
std::int64_t window_of(const ScheduleOptions& options, Rank rank) {
  const StageIndex first_stage = stages_at(options, rank).front();
  const std::int64_t num_microbatches = options.num_microbatches;
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
      return std::min(num_microbatches, in_flight);
    case Kind::kGpipe:
      return num_microbatches;
    case Kind::kModelParallel:
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
  if (kind_of(options) == Kind::k2bw) check_2bw(options);
  check_placement(options);
  check_ties(options);
  check_start(options);
  if (options.exchanges_norms && !drains(kind_of(options))) {
    throw UserError("exchanges_norms is set with schedule \"" + options.schedule +
                    "\"; a norm over all stages needs a schedule that drains every minibatch");
  }
}

WeightVersion oldest_version(const ScheduleOptions& options) {
  return options.oldest_version.value_or(WeightVersion(options.first_minibatch.value()));
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
  return backward_delay(options, stage) + 1;
}

WeightVersion forward_version(const ScheduleOptions& options, StageIndex stage, MinibatchId minibatch) {
  check_stage(options, stage);
  check_minibatch(minibatch);
  return delayed_version(options, minibatch, forward_delay(options, stage), backward_delay(options, stage));
}

WeightVersion backward_version(const ScheduleOptions& options, StageIndex stage, MinibatchId minibatch) {
  check_stage(options, stage);
  check_minibatch(minibatch);
  const std::int64_t delay = backward_delay(options, stage);
  return delayed_version(options, minibatch, delay, delay);
}

WeightVersion tied_version(const ScheduleOptions& options, MinibatchId minibatch) {
  check_schedule_options(options);
  check_minibatch(minibatch);
  const std::int64_t delay = tied_delay(options);
  return delayed_version(options, minibatch, delay, delay);
}

std::int64_t num_tied_versions_kept(const ScheduleOptions& options) {
  check_schedule_options(options);
  return tied_delay(options) + 1;
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
  const MicrobatchOrder order = order_of(options);
  const std::int64_t num_warm_up = window_of(options, rank_of(options, instruction.stage)) - 1;
  const std::vector<StageIndex> stages = stages_at(options, rank_of(options, instruction.stage));
  const auto chunk = std::find(stages.begin(), stages.end(), instruction.stage) - stages.begin();
  const MicrobatchOrder::Item item{chunk, instruction.microbatch.value()};
  // A schedule that drains starts anew in every minibatch, the others go on counting.
  const bool starts_anew = drains(kind_of(options));
  const std::int64_t first = options.first_minibatch.value();
  const std::int64_t num_before =
      starts_anew ? 0 : (instruction.minibatch.value() - first) * order.num_positions();
  if (instruction.opcode == Opcode::kForward) {
    return num_before + order.forward_position(item) < num_warm_up ? Phase::kWarmUp : Phase::kSteady;
  }
  // The body pairs this backward with the forward that takes its place in the window, if there is one.
  const std::int64_t position =
      instruction.opcode == Opcode::kUpdate ? order.last_position() : order.backward_position(item);
  const std::int64_t partner = num_before + position + num_warm_up;
  const bool is_paired = starts_anew
                             ? partner <= order.last_position()
                             : !num_minibatches || first + partner / order.num_positions() < *num_minibatches;
  return is_paired ? Phase::kSteady : Phase::kCoolDown;
}

ComputeCursor::ComputeCursor(ScheduleOptions options, Rank rank) : options_(std::move(options)), rank_(rank) {
  check_rank(options_, rank_);
  stages_ = stages_at(options_, rank_);
  const StageIndex first_stage = stages_.front();
  order_ = order_of(options_);
  window_ = window_of(options_, rank_);
  drains_ = drains(kind_of(options_));
  forward_delay_ = forward_delay(options_, first_stage);
  backward_delay_ = backward_delay(options_, first_stage);
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
  PD_CHECK(!num_minibatches_.has_value(), "rank " << rank_.value() << ": num_minibatches was already set to "
                                                  << *num_minibatches_ << ", now " << num_minibatches);
  PD_CHECK(num_minibatches >= options_.first_minibatch.value() + num_started,
           "rank " << rank_.value() << ": num_minibatches " << num_minibatches << " is below the "
                   << num_started << " already forwarded since minibatch "
                   << options_.first_minibatch.value());
  num_minibatches_ = num_minibatches;
}

bool ComputeCursor::is_update_due() const {
  const std::int64_t minibatch = num_updates_ / order_.num_chunks;
  return num_backwarded_ >= (minibatch + 1) * order_.num_positions();
}

bool ComputeCursor::may_forward() const {
  const std::int64_t minibatch = num_forwarded_ / order_.num_positions();
  if (num_forwarded_ - num_backwarded_ >= window_) return false;
  if (num_minibatches_ && options_.first_minibatch.value() + minibatch >= *num_minibatches_) return false;
  return !drains_ || minibatch == num_updates_ / order_.num_chunks;
}

Instruction ComputeCursor::update() const {
  const MinibatchId minibatch(options_.first_minibatch.value() + num_updates_ / order_.num_chunks);
  return {Opcode::kUpdate, stage_of(num_updates_ % order_.num_chunks), minibatch, MicrobatchIndex(0),
          WeightVersion(minibatch.value() + 1)};
}

Instruction ComputeCursor::forward() const {
  const MinibatchId minibatch = minibatch_at(num_forwarded_);
  const MicrobatchOrder::Item item = order_.forward_at(num_forwarded_ % order_.num_positions());
  return {Opcode::kForward, stage_of(item.chunk), minibatch, MicrobatchIndex(item.microbatch),
          delayed_version(options_, minibatch, forward_delay_, backward_delay_)};
}

Instruction ComputeCursor::recompute_or_backward() const {
  const MinibatchId minibatch = minibatch_at(num_backwarded_);
  const MicrobatchOrder::Item item = order_.backward_at(num_backwarded_ % order_.num_positions());
  const StageIndex stage = stage_of(item.chunk);
  const bool recompute_first = must_recompute(stage) && !recomputed_;
  return {recompute_first ? Opcode::kRecompute : Opcode::kBackward, stage, minibatch,
          MicrobatchIndex(item.microbatch),
          delayed_version(options_, minibatch, backward_delay_, backward_delay_)};
}

MinibatchId ComputeCursor::minibatch_at(std::int64_t position) const {
  return MinibatchId(options_.first_minibatch.value() + position / order_.num_positions());
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
