#include "schedule/listed_program.h"

#include <algorithm>
#include <array>
#include <memory>
#include <numeric>
#include <optional>
#include <utility>

#include "base/check.h"
#include "base/failure.h"
#include "schedule/checked_options.h"
#include "schedule/listed_words.h"
#include "schedule/program.h"
#include "schedule/transfers.h"
#include "schedule/validator.h"

namespace pipedream {
namespace {

constexpr std::size_t kListedInstructionsMax = std::size_t{1} << 17;

std::string name_of(Rank rank) { return "worker " + std::to_string(rank.value()); }

std::string name_of(const Place& place) { return to_string(StageReplica{place.stage, place.replica}); }

bool is_at(const Instruction& instruction, const Place& place) {
  return instruction.stage == place.stage && instruction.replica == place.replica;
}

// "1-1-1"
std::string in_row(const std::vector<std::int64_t>& counts) {
  std::string text;
  for (const std::int64_t count : counts) text += (text.empty() ? "" : "-") + std::to_string(count);
  return text;
}

// Returns the placement for these counts, as program.h describes it: one worker for each replica, or several
// stages at each worker. Returns an empty one if the counts allow neither.
Placement placement_for(std::int64_t num_workers, const std::vector<std::int64_t>& num_replicas) {
  const auto num_stages = static_cast<std::int64_t>(num_replicas.size());
  const std::int64_t num_replicas_in_all =
      std::accumulate(num_replicas.begin(), num_replicas.end(), std::int64_t{0});
  if (num_replicas_in_all == num_workers) return Placement::in_order(num_replicas);
  if (num_replicas_in_all > num_stages || num_workers < 2 || num_stages % num_workers != 0) return {};
  std::vector<std::int64_t> ranks;
  for (std::int64_t stage = 0; stage < num_stages; ++stage) ranks.push_back(stage % num_workers);
  return Placement::at_ranks(ranks);
}

// Makes the beginning of a worker's list, up to and including its num_updates-th update, for a run whose
// number of minibatches is unknown.
std::vector<Instruction> begin_of_list(const ScheduleOptions& options, Rank rank, std::int64_t num_updates) {
  ComputeCursor cursor(options, rank);
  std::vector<Instruction> list;
  while (num_updates > 0) {
    list.push_back(*cursor.current());
    if (writes_version(list.back().opcode)) --num_updates;
    cursor.advance();
  }
  return list;
}

// Counts the instructions up to and including the list's num_updates-th update.
std::int64_t length_with_updates(const std::vector<Instruction>& list, std::int64_t num_updates) {
  std::int64_t length = 0;
  for (; num_updates > 0; ++length) {
    if (writes_version(list.at(static_cast<std::size_t>(length)).opcode)) --num_updates;
  }
  return length;
}

Instruction moved_by(Instruction instruction, std::int64_t minibatches, std::int64_t versions) {
  instruction.minibatch = MinibatchId(instruction.minibatch.value() + minibatches);
  instruction.version = WeightVersion(instruction.version.value() + versions);
  return instruction;
}

void check_can_be_listed(const ScheduleOptions& options) {
  const char* what = nullptr;
  if (options.placement.num_spares() > 0) what = "spares";
  if (options.asynchronous) what = "asynchronous shards";
  if (options.staleness > 0) what = "a staleness";
  if (what != nullptr) {
    throw UserError("schedule \"" + options.schedule + "\" has " + what +
                    ", which a program of its own has not; leave that out");
  }
  const std::int64_t in_flight_max = *std::ranges::max_element(options.in_flight);
  const std::int64_t numbers_per_body = minibatches_between_drains(options) * options.num_microbatches;
  if (in_flight_max <= kListedNumberMax && numbers_per_body <= kListedNumberMax) return;
  throw UserError("in_flight is " + std::to_string(in_flight_max) + ", and there are " +
                  std::to_string(numbers_per_body) +
                  " microbatches between two drains; a program of its own has at most " +
                  std::to_string(kListedNumberMax) + " of each");
}

}  // namespace

ScheduleOptions options_of_run(const ListedProgram& program) {
  ScheduleOptions options;
  options.schedule = kListedSchedule;
  options.program = std::shared_ptr<const ListedProgram>(std::shared_ptr<void>(), &program);
  options.num_microbatches = program.num_microbatches();
  options.in_flight = program.in_flight();
  options.placement = program.placement();
  return options;
}

ListedProgram::ListedProgram(std::vector<List> workers, std::int64_t minibatches_per_body)
    : workers_(std::move(workers)), minibatches_per_body_(minibatches_per_body) {
  place_workers();
  count_rounds();
  for (Rank rank; rank.value() < placement_.num_ranks(); rank = rank.next()) check_order(rank);
  for (const Place& place : placement_.places()) check_whole_body(place, versions_per_body(place.stage));
  count_facts();
  check_run();
}

ListedProgram ListedProgram::of(const ScheduleOptions& given) {
  check_schedule_options(given);
  if (given.program != nullptr) return *given.program;
  check_can_be_listed(given);
  ScheduleOptions options = given;
  options.recompute.clear();
  options.ties.clear();
  options.exchanges_norms = false;
  options.uses_allreduce = false;
  options.first_minibatch = MinibatchId(0);
  const std::int64_t minibatches = minibatches_between_drains(options);
  const std::int64_t in_flight_max = *std::ranges::max_element(options.in_flight);
  std::vector<List> workers;
  for (Rank rank; rank.value() < num_workers(options); rank = rank.next()) {
    const Rounds rounds = rounds_of(options, stages_at(options, rank).front());
    const std::int64_t versions = minibatches / rounds.minibatches_per_round;
    const std::int64_t own = versions * rounds.own_per_round();  // a replica's microbatches in one body
    const std::int64_t num_updates = versions * static_cast<std::int64_t>(stages_at(options, rank).size());
    const std::int64_t num_bodies = 6 + 2 * in_flight_max / own;  // so many that the last bodies are alike
    std::vector<Instruction> list = begin_of_list(options, rank, num_bodies * num_updates);
    const std::int64_t last_body = length_with_updates(list, (num_bodies - 1) * num_updates);
    const auto per_body = static_cast<std::int64_t>(list.size()) - last_body;
    // Goes back from the last body as long as each instruction is repeated one body later. The body might
    // begin where this stops. But a body must end with updates, so it begins after the next updates.
    const auto is_end = [&](std::int64_t position) {
      return writes_version(list[position - 1].opcode) && !writes_version(list[position].opcode);
    };
    std::int64_t begin = last_body;
    while (begin > 0 && list[begin - 1 + per_body] == moved_by(list[begin - 1], minibatches, versions))
      --begin;
    while (begin > 0 && !is_end(begin)) ++begin;
    PD_CHECK(begin <= last_body, to_string(list[begin]));
    list.resize(begin + per_body);
    workers.push_back({std::move(list), static_cast<std::size_t>(begin)});
  }
  return {std::move(workers), minibatches};
}

std::vector<std::int64_t> ListedProgram::in_flight() const {
  std::vector<std::int64_t> values;
  for (const Facts& facts : facts_) values.push_back(facts.num_in_flight);
  return values;
}

std::vector<std::int64_t> ListedProgram::versions_kept() const {
  std::vector<std::int64_t> values;
  for (const Facts& facts : facts_) values.push_back(facts.forwards.num_versions_kept);
  return values;
}

Instruction ListedProgram::at(Rank rank, std::int64_t position) const {
  const List& list = list_of(rank);
  const std::int64_t bodies = num_bodies_before(rank, position);
  const auto listed = static_cast<std::size_t>(position - bodies * list.body_length());
  return later_by(list.instructions[listed], bodies);
}

Instruction ListedProgram::later_by(Instruction instruction, std::int64_t bodies) const {
  return moved_by(instruction, bodies * minibatches_per_body_, bodies * versions_per_body(instruction.stage));
}

std::int64_t ListedProgram::num_bodies_before(Rank rank, std::int64_t position) const {
  const List& list = list_of(rank);
  const auto warm_up = static_cast<std::int64_t>(list.num_warm_up);
  return position < warm_up ? 0 : (position - warm_up) / list.body_length();
}

Phase ListedProgram::phase_of(const Instruction& instruction,
                              std::optional<std::int64_t> num_minibatches) const {
  // Lists have no RECOMPUTE. Its phase is the phase of its BACKWARD.
  const auto is_it = [&](Opcode listed) {
    const bool is_beside = traits_of(instruction.opcode).stash == Stash::kRestored;
    return is_beside ? releases_stash(listed) : listed == instruction.opcode;
  };
  const Rank rank = placement_.rank_of(instruction.stage, instruction.replica);
  const List& list = list_of(rank);
  for (std::size_t position = 0; position < list.instructions.size(); ++position) {
    const Instruction& listed = list.instructions[position];
    const std::int64_t later = instruction.minibatch.value() - listed.minibatch.value();
    if (!is_it(listed.opcode) || listed.stage != instruction.stage ||
        listed.microbatch != instruction.microbatch) {
      continue;
    }
    if (position < list.num_warm_up) {
      if (later == 0) return Phase::kWarmUp;
    } else if (later % minibatches_per_body_ == 0) {
      const bool is_whole = !num_minibatches || minibatches_of_one_body(rank) + later <= *num_minibatches;
      return is_whole ? Phase::kSteady : Phase::kCoolDown;
    }
  }
  PD_CHECK(false, to_string(instruction));
}

std::int64_t ListedProgram::minibatches_of_one_body(Rank rank) const {
  std::int64_t minibatches = 0;
  for (const Instruction& instruction : list_of(rank).instructions) {
    minibatches = std::max(minibatches, instruction.minibatch.value() + 1);
  }
  return minibatches;
}

std::int64_t ListedProgram::num_minibatches_listed() const {
  std::int64_t listed = 0;
  for (Rank rank; rank.value() < placement_.num_ranks(); rank = rank.next()) {
    listed = std::max(listed, minibatches_of_one_body(rank));
  }
  return listed;
}

// Finds the placement from the stages that each worker's lines name.
void ListedProgram::place_workers() {
  if (workers_.empty()) throw UserError("the program is empty; it begins with \"worker 0\"");
  std::size_t num_instructions = 0;
  for (const List& list : workers_) num_instructions += list.instructions.size();
  if (num_instructions > kListedInstructionsMax) {
    throw UserError("the program has " + std::to_string(num_instructions) + " instructions; it may have " +
                    std::to_string(kListedInstructionsMax) + ": let a shorter body repeat");
  }
  const auto for_each = [&](auto see) {
    for (std::size_t worker = 0; worker < workers_.size(); ++worker) {
      const Rank rank(static_cast<std::int64_t>(worker));
      std::int64_t position = 0;
      for (const Instruction& instruction : workers_[worker].instructions) see(instruction, rank, position++);
    }
  };
  std::vector<std::int64_t> num_replicas;
  for_each([&](const Instruction& instruction, Rank rank, std::int64_t position) {
    const char* const why = traits_of(instruction.opcode).unlisted_because;
    if (why != nullptr) refuse(rank, position, why);
    const std::int64_t largest =
        std::max({instruction.stage.value(), instruction.replica.value(), instruction.minibatch.value(),
                  instruction.microbatch.value(), instruction.version.value()});
    if (largest > kListedNumberMax) {
      refuse(rank, position,
             "numbers of a program are at most " + std::to_string(kListedNumberMax) +
                 "; the body repeats with larger ones by itself");
    }
    num_microbatches_ = std::max(num_microbatches_, instruction.microbatch.value() + 1);
    const auto stage = static_cast<std::size_t>(instruction.stage.value());
    num_replicas.resize(std::max(num_replicas.size(), stage + 1));
    num_replicas[stage] = std::max(num_replicas[stage], instruction.replica.value() + 1);
  });
  const auto missing = std::find(num_replicas.begin(), num_replicas.end(), 0) - num_replicas.begin();
  for_each([&](const Instruction& instruction, Rank rank, std::int64_t position) {
    if (instruction.stage.value() <= missing) return;
    refuse(rank, position,
           "there is no stage " + std::to_string(missing) + "; stages are counted from 0, without gaps");
  });
  placement_ = placement_for(static_cast<std::int64_t>(workers_.size()), num_replicas);
  if (placement_.empty()) {
    throw UserError("the program has " + in_number(static_cast<std::int64_t>(workers_.size()), "worker") +
                    ", and its lines name " +
                    in_number(static_cast<std::int64_t>(num_replicas.size()), "stage") + ", of replicas " +
                    in_row(num_replicas) +
                    "; write a worker for every replica, stage by stage, or one of each stage and stage s at "
                    "worker s mod W, with as many at each of W workers");
  }
  for_each([&](const Instruction& instruction, Rank rank, std::int64_t position) {
    const Rank due = placement_.rank_of(instruction.stage, instruction.replica);
    if (due != rank) refuse(rank, position, reason_to_move(rank, due));
  });
}

// Returns the error's text for an instruction of worker `due` in the list of worker `rank`.
std::string ListedProgram::reason_to_move(Rank rank, Rank due) const {
  std::string names;
  for (const Place& place : placement_.places_at(rank))
    names += (names.empty() ? "" : " and ") + name_of(place);
  return name_of(rank) + " runs " + names + " alone: write " + names + ", or move the line below \"" +
         name_of(due) + "\"";
}

// Finds the length of each stage's rounds from its number of updates in a body. It is either the shortest
// length that the stage may have, or the length that fits all stages.
void ListedProgram::count_rounds() {
  ScheduleOptions options;
  options.placement = placement_;
  options.in_flight.assign(static_cast<std::size_t>(num_stages()), 1);
  options.num_microbatches = num_microbatches_;
  const std::int64_t of_all = minibatches_between_drains(options);
  for (StageIndex stage; stage.value() < num_stages(); stage = stage.next()) {
    const std::int64_t num_replicas = placement_.num_replicas(stage);
    const std::int64_t shortest = std::lcm(num_microbatches_, num_replicas) / num_microbatches_;
    const std::int64_t num_updates =
        count_in_body({stage, {}, placement_.rank_of(stage)}, traits_of(Opcode::kUpdate));
    const std::int64_t per_round = num_updates * of_all == minibatches_per_body_ ? of_all : shortest;
    if (minibatches_per_body_ % per_round != 0) {
      throw UserError("stage " + std::to_string(stage.value()) + " of " + std::to_string(num_replicas) +
                      " replicas updates once in " + std::to_string(per_round) +
                      " minibatches, and there is \"" + body_title(minibatches_per_body_) +
                      "\": let a body have whole rounds");
    }
    rounds_.push_back({0, num_replicas, per_round, false, num_microbatches_});
  }
}

void ListedProgram::check_whole_body(const Place& place, std::int64_t num_updates) const {
  const Rounds& rounds = rounds_of_stage(place.stage);
  const bool is_alone = placement_.places_at(place.rank).size() == 1;
  for (const OpcodeTraits& traits : kOpcodeTraits) {
    const bool is_counted = traits.stash != Stash::kNone || traits.writes_version;
    if (!is_counted || traits.unlisted_because != nullptr) continue;
    const std::int64_t due = traits.writes_version ? num_updates : num_updates * rounds.own_per_round();
    const std::int64_t listed = count_in_body(place, traits);
    if (listed == due) continue;
    throw UserError(name_of(place.rank) + ": the body has " + in_number(listed, traits.name) +
                    (is_alone ? "" : " of " + name_of(place)) + ", and " +
                    in_number(minibatches_per_body_, "minibatch") + " of " +
                    in_number(num_microbatches_, "microbatch") +
                    (minibatches_per_body_ == 1 ? " needs " : " need ") + std::to_string(due) +
                    (rounds.num_replicas == 1 ? "" : " at each replica") +
                    (listed > due ? "" : "; the next is of " + name_of_next(place, traits)) +
                    ": add or take away lines, or change \"" + body_title(minibatches_per_body_) + "\"");
  }
}

// Names the first microbatch or round of the replica for which the list lacks an instruction of this opcode.
// The instructions of an opcode stand in the order of their microbatches or rounds.
std::string ListedProgram::name_of_next(const Place& place, const OpcodeTraits& traits) const {
  const auto num_listed =
      std::ranges::count_if(list_of(place.rank).instructions, [&](const Instruction& instruction) {
        return &traits_of(instruction.opcode) == &traits && is_at(instruction, place);
      });
  return name_of_item(place, traits, num_listed);
}

// Returns a name such as "minibatch 3 microbatch 0". index: counts the replica's own microbatches, or its
// rounds if the opcode has one instruction per round.
std::string ListedProgram::name_of_item(const Place& place, const OpcodeTraits& traits,
                                        std::int64_t index) const {
  const Rounds& rounds = rounds_of_stage(place.stage);
  const std::int64_t number = number_of_item(place, traits, index);
  const std::string minibatch = "minibatch " + std::to_string(rounds.minibatch_of(number).value());
  if (num_microbatches_ == 1 || traits.scope != Scope::kMicrobatch) return minibatch;
  return minibatch + " microbatch " + std::to_string(rounds.microbatch_of(number).value());
}

// Returns the number of the microbatch with this index, or of the first microbatch of the round with this
// index. index: see name_of_item().
std::int64_t ListedProgram::number_of_item(const Place& place, const OpcodeTraits& traits,
                                           std::int64_t index) const {
  const Rounds& rounds = rounds_of_stage(place.stage);
  if (traits.scope == Scope::kMicrobatch) return rounds.own_number(place.replica, index);
  return rounds.number_of(rounds.begin_of(index), {});
}

// Counts the instructions of an opcode in the replica's body. `traits` are those of the opcode.
std::int64_t ListedProgram::count_in_body(const Place& place, const OpcodeTraits& traits) const {
  return std::ranges::count_if(list_of(place.rank).body(), [&](const Instruction& instruction) {
    const OpcodeTraits& listed = traits_of(instruction.opcode);
    return listed.stash == traits.stash && listed.writes_version == traits.writes_version &&
           is_at(instruction, place);
  });
}

void ListedProgram::check_order(Rank rank) const {
  const std::vector<Instruction>& instructions = list_of(rank).instructions;
  for (const Place& place : placement_.places_at(rank)) {
    const Rounds& rounds = rounds_of_stage(place.stage);
    std::array<std::int64_t, kOpcodeTraits.size()> num_listed{};
    for (std::size_t position = 0; position < instructions.size(); ++position) {
      const Instruction& instruction = instructions[position];
      if (!is_at(instruction, place) || is_of_boundary(instruction.opcode)) continue;
      const std::int64_t index = num_listed.at(static_cast<std::size_t>(instruction.opcode))++;
      const OpcodeTraits& traits = traits_of(instruction.opcode);
      const std::int64_t due = number_of_item(place, traits, index);
      if (rounds.number_of(instruction.minibatch, instruction.microbatch) == due) continue;
      refuse(
          rank, static_cast<std::int64_t>(position),
          std::string(traits.name) + "s go in order; the next is of " + name_of_item(place, traits, index));
    }
  }
}

// Replays a run in which every worker repeats its body. If this run is correct, longer runs are correct,
// because their bodies wait for each other in the same way. Shorter runs are correct too, because no
// instruction waits for a skipped one.
void ListedProgram::check_run() const {
  const std::int64_t length = 2 * (num_minibatches_listed() + minibatches_per_body_);
  const ScheduleOptions options = options_of_run(*this);
  std::vector<std::vector<Instruction>> programs;
  for (Rank rank; rank.value() < placement_.num_ranks(); rank = rank.next()) {
    programs.push_back(make_program(options, rank, length));
  }
  const ReplayReport report = replay(options, programs, length);
  if (!report.ok) refuse_run(report, programs);
}

// Throws the validator's error. That error names places in the run's lists, which have transfers. The thrown
// error names lines of the user's text instead: the line of the wrong instruction, or in a deadlock the lines
// of all waiting instructions. An error that names no instruction of the text is thrown as it is.
void ListedProgram::refuse_run(const ReplayReport& report,
                               const std::vector<std::vector<Instruction>>& programs) const {
  std::string waits;
  for (const auto& [rank, position] : report.stuck) {
    const std::span<const Instruction> program = programs[static_cast<std::size_t>(rank.value())];
    waits += (waits.empty() ? "deadlock: " : "; ") + describe_wait(rank, program.subspan(position));
  }
  if (!waits.empty()) throw UserError(waits);
  for (Rank rank; rank.value() < placement_.num_ranks(); rank = rank.next()) {
    if (!report.error.starts_with(name_of(rank) + ", position ")) continue;
    for (const Instruction& instruction : programs[static_cast<std::size_t>(rank.value())]) {
      const std::string named = ", " + to_string(instruction) + ": ";
      const std::size_t found = report.error.find(named);
      if (found == std::string::npos) continue;
      const auto position = find_position(rank, instruction);
      if (!position) continue;
      refuse(rank, *position, report.error.substr(found + named.size()) + hint_on_backward(rank, *position));
    }
  }
  throw UserError(report.error);
}

// Returns the instruction's position in the worker's list. A transfer has none.
std::optional<std::int64_t> ListedProgram::find_position(Rank rank, const Instruction& instruction) const {
  if (travels(instruction.opcode)) return std::nullopt;
  const std::int64_t num_bodies = 1 + instruction.minibatch.value() / minibatches_per_body_;
  for (std::int64_t position = 0; position < list_of(rank).length(num_bodies); ++position) {
    if (at(rank, position) == instruction) return position;
  }
  return std::nullopt;
}

// Returns text such as "line 4, BACKWARD stage 0 minibatch 0 microbatch 0 waits for the gradient from stage
// 1". rest: the worker's remaining instructions. The first of them is the one that waits.
std::string ListedProgram::describe_wait(Rank rank, std::span<const Instruction> rest) const {
  const auto next = std::ranges::find_if_not(
      rest, [](const Instruction& instruction) { return travels(instruction.opcode); });
  const Edge& edge = rest.front().edge;
  const std::string wait =
      " waits for the " + std::string(edge_kind_name(edge.kind)) + " from " + to_string(edge.from);
  if (next == rest.end()) return name_of(rank) + ", at its end," + wait;
  const auto position = find_position(rank, *next);
  PD_CHECK(position, to_string(*next));
  std::string name = to_string(*next);
  name.resize(name.find(writes_version(next->opcode) ? " writes version" : " reads version"));
  return place_of(rank, *position) + ", " + name + wait;
}

// Returns the end of an error about a backward that reads another version than its forward. It has the
// forward's line and what to write. Empty for other instructions.
std::string ListedProgram::hint_on_backward(Rank rank, std::int64_t position) const {
  const Instruction backward = at(rank, position);
  if (!releases_stash(backward.opcode)) return {};
  const Rounds& rounds = rounds_of_stage(backward.stage);
  const Passes passes = passes_of(backward.stage, rounds.number_of(backward.minibatch, backward.microbatch));
  if (at(rank, passes.forward).version == backward.version) return {};
  return "; the forward is " + place_of(rank, passes.forward) + ": " + how_to_stash(passes);
}

// Throws an error such as "line 13, time 2 of the body: BACKWARD stage 0 ... reads version 1: <why>".
void ListedProgram::refuse(Rank rank, std::int64_t position, const std::string& why) const {
  // at() computes the instructions of later bodies from the rounds, which may not be known yet.
  const bool is_listed = num_bodies_before(rank, position) == 0;
  const Instruction instruction = is_listed ? list_of(rank).instructions[position] : at(rank, position);
  throw UserError(place_of(rank, position) + ": " + to_string(instruction) + ": " + why);
}

// "line 13, time 2 of the body"
std::string ListedProgram::place_of(Rank rank, std::int64_t position) const {
  const List& list = list_of(rank);
  const std::int64_t bodies = num_bodies_before(rank, position);
  const auto listed = static_cast<std::size_t>(position - bodies * list.body_length());
  const std::string place =
      list.lines.empty() ? name_of(rank) : "line " + std::to_string(list.lines.at(listed));
  return place + (bodies == 0 ? "" : ", time " + std::to_string(bodies + 1) + " of the body");
}

}  // namespace pipedream
