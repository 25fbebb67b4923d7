#include "schedule/listed_program.h"

#include <algorithm>
#include <array>
#include <memory>
#include <optional>
#include <sstream>
#include <utility>

#include "base/check.h"
#include "base/failure.h"
#include "schedule/checked_options.h"
#include "schedule/program.h"
#include "schedule/text_lines.h"
#include "schedule/transfers.h"
#include "schedule/validator.h"

namespace pipedream {
namespace {

// Far above any schedule; they keep the replay of a run short.
constexpr std::int64_t kListedNumberMax = std::int64_t{1} << 16;
constexpr std::size_t kListedInstructionsMax = std::size_t{1} << 17;

Rank worker_of(StageIndex stage) { return Rank(stage.value()); }

std::string name_of(Rank rank) { return "worker " + std::to_string(rank.value()); }

std::string in_number(std::int64_t number, const std::string& noun) {
  const bool ends_in_sound = noun.ends_with("ch");
  return std::to_string(number) + " " + noun + (number == 1 ? "" : ends_in_sound ? "es" : "s");
}

std::string body_title(std::int64_t minibatches) {
  return "body every " + in_number(minibatches, "minibatch");
}

Instruction later_by(Instruction instruction, std::int64_t minibatches) {
  instruction.minibatch = MinibatchId(instruction.minibatch.value() + minibatches);
  instruction.version = WeightVersion(instruction.version.value() + minibatches);
  return instruction;
}

// Why the worker's list may not have the instruction; empty where it may.
std::string fault_of(const Instruction& instruction, Rank rank) {
  if (travels(instruction.opcode) || instruction.opcode == Opcode::kRecompute) {
    return "sends, receives and recomputing are added to a program; leave the line out";
  }
  if (instruction.opcode == Opcode::kEvaluate) return "a program of your own has no evaluations";
  if (instruction.replica.value() != 0) return "a program of your own has one replica of each stage";
  const std::string stage = std::to_string(rank.value());
  if (instruction.stage.value() != rank.value()) {
    return "worker " + stage + " runs stage " + stage + " alone: write stage " + stage +
           ", or move the line below \"worker " + std::to_string(instruction.stage.value()) + "\"";
  }
  const std::int64_t largest =
      std::max({instruction.minibatch.value(), instruction.microbatch.value(), instruction.version.value()});
  if (largest <= kListedNumberMax) return {};
  return "numbers of a program are at most " + std::to_string(kListedNumberMax) +
         "; the body repeats with larger ones by itself";
}

// Reads a program's text, line by line.
class Parser {
 public:
  void read(std::string_view line, std::int64_t number) {
    if (line.starts_with("worker")) return begin_worker(line);
    if (workers_.empty()) {
      throw UserError(
          "\"" + std::string(line) +
          "\" stands before the first worker; write \"worker 0\" above, or give the text of a file, "
          "which Program.load() reads");
    }
    if (line == "warm-up") return begin(Section::kWarmUp, line);
    if (line == "cool-down") return begin(Section::kCoolDown, line);
    if (line.starts_with("body")) return begin_body(line);
    add(line, number);
  }

  [[nodiscard]] ListedProgram made() const {
    std::vector<ListedProgram::List> lists;
    for (const Worker& worker : workers_) {
      if (worker.section < Section::kBody) {
        throw UserError("worker " + std::to_string(lists.size()) +
                        " has no body; write \"body every 1 minibatch\" above the part that repeats");
      }
      lists.push_back(worker.list);
    }
    return {std::move(lists), minibatches_per_body_.value_or(1)};
  }
  // The cool-down that the text has of the worker; none where it leaves it out.
  [[nodiscard]] std::optional<std::vector<Instruction>> cool_down(std::size_t worker) const {
    if (workers_[worker].section < Section::kCoolDown) return std::nullopt;
    return workers_[worker].cool_down;
  }

 private:
  enum class Section { kNone, kWarmUp, kBody, kCoolDown };
  struct Worker {
    Section section = Section::kNone;
    ListedProgram::List list;
    std::vector<Instruction> cool_down;
  };

  void begin_worker(std::string_view line) {
    const std::string due = "worker " + std::to_string(workers_.size());
    if (line != due) throw UserError("\"" + std::string(line) + "\" where \"" + due + "\" is due");
    workers_.emplace_back();
  }

  void begin(Section section, std::string_view line) {
    if (workers_.back().section >= section) {
      throw UserError("\"" + std::string(line) +
                      "\" is out of place; a worker has \"warm-up\", \"body every N minibatches\" and "
                      "\"cool-down\", in this order");
    }
    workers_.back().section = section;
  }

  void begin_body(std::string_view line) {
    begin(Section::kBody, line);
    std::istringstream words{std::string(line)};
    std::string body, every, unit, more;
    std::int64_t minibatches = 0;
    words >> body >> every >> minibatches >> unit;
    if (body != "body" || every != "every" || minibatches < 1 || minibatches > kListedNumberMax ||
        (unit != "minibatch" && unit != "minibatches") || words >> more) {
      throw UserError("\"" + std::string(line) +
                      "\" is no beginning of a body; write \"body every 2 minibatches\"");
    }
    if (minibatches_per_body_.value_or(minibatches) != minibatches) {
      throw UserError("\"" + std::string(line) + "\" where other workers have " +
                      std::to_string(*minibatches_per_body_) + "; all bodies are of as many minibatches");
    }
    minibatches_per_body_ = minibatches;
  }

  void add(std::string_view line, std::int64_t number) {
    auto& [section, list, cool_down] = workers_.back();
    if (section == Section::kNone) {
      throw UserError(
          "\"" + std::string(line) +
          "\" stands above the worker's first section; write \"warm-up\" or \"body every 1 "
          "minibatch\" above (lists of a whole run, which trace prints with --minibatches, have none)");
    }
    if (section == Section::kCoolDown) return cool_down.push_back(parse_instruction(line));
    list.instructions.push_back(parse_instruction(line));
    list.lines.push_back(number);
    if (section == Section::kWarmUp) ++list.num_warm_up;
  }

  std::vector<Worker> workers_;
  std::optional<std::int64_t> minibatches_per_body_;
};

// The options of a run of the program. not_owned: it outlives them.
ScheduleOptions options_of(const ListedProgram& not_owned) {
  ScheduleOptions options;
  options.schedule = kListedSchedule;
  options.program = std::shared_ptr<const ListedProgram>(std::shared_ptr<void>(), &not_owned);
  options.num_microbatches = not_owned.num_microbatches();
  options.in_flight = not_owned.in_flight();
  return options;
}

// The worker's list of a schedule without an end, up to where it repeats for sure.
std::vector<Instruction> begin_of_list(const ScheduleOptions& options, Rank rank, std::int64_t length) {
  ComputeCursor cursor(options, rank);
  std::vector<Instruction> list;
  for (std::int64_t position = 0; position < length; ++position) {
    list.push_back(*cursor.current());
    cursor.advance();
  }
  return list;
}

}  // namespace

ListedProgram::ListedProgram(std::vector<List> workers, std::int64_t minibatches_per_body)
    : workers_(std::move(workers)), minibatches_per_body_(minibatches_per_body) {
  for (const List& list : workers_) {
    for (const Instruction& instruction : list.instructions) {
      num_microbatches_ = std::max(num_microbatches_, instruction.microbatch.value() + 1);
    }
  }
  check_lists();
  for (Rank rank; rank.value() < num_stages(); rank = rank.next()) facts_.push_back(count_facts(rank));
  check_run();
}

ListedProgram ListedProgram::parse(std::string_view text) {
  Parser parser;
  for_each_line(text, [&](std::string_view line, std::int64_t number) { parser.read(line, number); });
  ListedProgram program = parser.made();
  for (Rank rank; rank.value() < program.num_stages(); rank = rank.next()) {
    const auto given = parser.cool_down(static_cast<std::size_t>(rank.value()));
    if (!given || *given == program.cool_down(rank)) continue;
    throw UserError(
        name_of(rank) +
        ": the cool-down is not what is left of the body when the data are over; leave \"cool-down\" "
        "and what follows it out");
  }
  return program;
}

ListedProgram ListedProgram::of(const ScheduleOptions& given) {
  check_schedule_options(given);
  if (given.program != nullptr) return *given.program;
  if (is_replicated(given) || count_workers(given) < count_stages(given) || !given.ties.empty()) {
    throw UserError(
        "schedule \"" + given.schedule +
        "\" as a program of its own has one stage at each worker, one replica of each, and no ties");
  }
  const std::int64_t in_flight_max = *std::ranges::max_element(given.in_flight);
  if (in_flight_max + given.num_microbatches > kListedNumberMax) {
    throw UserError("in_flight is " + std::to_string(in_flight_max) + " and num_microbatches " +
                    std::to_string(given.num_microbatches) + "; a program of its own has at most " +
                    std::to_string(kListedNumberMax) + " of both");
  }
  ScheduleOptions options = given;
  options.recompute.clear();
  options.first_minibatch = MinibatchId(0);
  const std::int64_t per_body = 2 * options.num_microbatches + 1;
  const std::int64_t num_bodies = 6 + 2 * in_flight_max / options.num_microbatches;
  std::vector<List> workers;
  for (Rank rank; rank.value() < count_workers(options); rank = rank.next()) {
    std::vector<Instruction> list = begin_of_list(options, rank, num_bodies * per_body);
    // It repeats from behind the last instruction that the one a body later does not repeat. A body ends with
    // an update.
    std::int64_t begin = (num_bodies - 1) * per_body;
    while (begin > 0 && list[begin - 1 + per_body] == later_by(list[begin - 1], 1)) --begin;
    while (begin > 0 && list[begin - 1].opcode != Opcode::kUpdate) ++begin;
    PD_CHECK(begin <= (num_bodies - 1) * per_body, to_string(list[begin]));
    list.resize(begin + per_body);
    workers.push_back({std::move(list), static_cast<std::size_t>(begin)});
  }
  return {std::move(workers), 1};
}

std::string ListedProgram::to_text() const {
  std::ostringstream text;
  for (Rank rank; rank.value() < num_stages(); rank = rank.next()) {
    const List& list = list_of(rank);
    const Facts& facts = facts_.at(static_cast<std::size_t>(rank.value()));
    text << name_of(rank) << "  # keeps " << in_number(facts.num_versions_kept, "version")
         << "; backwards read " << (facts.stashes ? "what their forwards have read" : "the newest") << '\n';
    if (list.num_warm_up > 0) text << "warm-up\n";
    for (std::size_t position = 0; position < list.instructions.size(); ++position) {
      if (position == list.num_warm_up) text << body_title(minibatches_per_body_) << '\n';
      text << to_string(list.instructions[position]) << '\n';
    }
    const std::vector<Instruction> left = cool_down(rank);
    if (left.empty()) continue;
    text << "# cool-down, where a run has " << in_number(minibatches_of_one_body(rank), "minibatch") << '\n';
    for (const Instruction& instruction : left) text << "#   " << to_string(instruction) << '\n';
  }
  return text.str();
}

std::vector<std::int64_t> ListedProgram::of_stages(std::int64_t Facts::*fact) const {
  std::vector<std::int64_t> values;
  for (const Facts& facts : facts_) values.push_back(facts.*fact);
  return values;
}

Instruction ListedProgram::at(Rank rank, std::int64_t position) const {
  const List& list = list_of(rank);
  const std::int64_t bodies = num_bodies_before(rank, position);
  const auto listed = static_cast<std::size_t>(position - bodies * list.body_length());
  return later_by(list.instructions[listed], bodies * minibatches_per_body_);
}

std::int64_t ListedProgram::num_bodies_before(Rank rank, std::int64_t position) const {
  const List& list = list_of(rank);
  const auto warm_up = static_cast<std::int64_t>(list.num_warm_up);
  return position < warm_up ? 0 : (position - warm_up) / list.body_length();
}

Phase ListedProgram::phase_of(const Instruction& instruction,
                              std::optional<std::int64_t> num_minibatches) const {
  // A RECOMPUTE, which lists do not have, stands beside its BACKWARD.
  const Opcode opcode = instruction.opcode == Opcode::kRecompute ? Opcode::kBackward : instruction.opcode;
  const Rank rank = worker_of(instruction.stage);
  const List& list = list_of(rank);
  for (std::size_t position = 0; position < list.instructions.size(); ++position) {
    const Instruction& listed = list.instructions[position];
    const std::int64_t later = instruction.minibatch.value() - listed.minibatch.value();
    if (listed.opcode != opcode || listed.microbatch != instruction.microbatch) continue;
    if (position < list.num_warm_up) {
      if (later == 0) return Phase::kWarmUp;
    } else if (later % minibatches_per_body_ == 0) {
      const bool is_whole = !num_minibatches || minibatches_of_one_body(rank) + later <= *num_minibatches;
      return is_whole ? Phase::kSteady : Phase::kCoolDown;
    }
  }
  PD_CHECK(false, to_string(instruction));
}

// These come first: facts and replay rely on them.
void ListedProgram::check_lists() const {
  if (workers_.empty()) throw UserError("the program is empty; it begins with \"worker 0\"");
  std::size_t num_instructions = 0;
  for (const List& list : workers_) num_instructions += list.instructions.size();
  if (num_instructions > kListedInstructionsMax) {
    throw UserError("the program has " + std::to_string(num_instructions) + " instructions; it may have " +
                    std::to_string(kListedInstructionsMax) + ": let a shorter body repeat");
  }
  for (Rank rank; rank.value() < num_stages(); rank = rank.next()) {
    const std::vector<Instruction>& instructions = list_of(rank).instructions;
    for (std::size_t position = 0; position < instructions.size(); ++position) {
      const std::string fault = fault_of(instructions[position], rank);
      if (!fault.empty()) refuse(rank, static_cast<std::int64_t>(position), fault);
    }
    check_order(rank);
    for (const Opcode opcode : {Opcode::kForward, Opcode::kBackward, Opcode::kUpdate}) {
      const std::int64_t due =
          opcode == Opcode::kUpdate ? minibatches_per_body_ : minibatches_per_body_ * num_microbatches_;
      const std::int64_t listed = std::ranges::count(list_of(rank).body(), opcode, &Instruction::opcode);
      if (listed == due) continue;
      throw UserError(name_of(rank) + ": the body has " + in_number(listed, opcode_name(opcode)) + ", and " +
                      in_number(minibatches_per_body_, "minibatch") + " of " +
                      in_number(num_microbatches_, "microbatch") + " need " + std::to_string(due) +
                      ": add or take away lines, or change \"" + body_title(minibatches_per_body_) + "\"");
    }
  }
}

void ListedProgram::check_order(Rank rank) const {
  std::array<std::int64_t, kOpcodeTraits.size()> num_listed{};
  const std::vector<Instruction>& instructions = list_of(rank).instructions;
  for (std::size_t position = 0; position < instructions.size(); ++position) {
    const Instruction& instruction = instructions[position];
    const std::int64_t per_minibatch = traits_of(instruction.opcode).is_of_microbatch ? num_microbatches_ : 1;
    const std::int64_t due = num_listed.at(static_cast<std::size_t>(instruction.opcode))++;
    const std::int64_t number =
        instruction.minibatch.value() * per_minibatch + instruction.microbatch.value();
    if (number == due) continue;
    refuse(rank, static_cast<std::int64_t>(position),
           std::string(opcode_name(instruction.opcode)) + "s go in order; the next is of minibatch " +
               std::to_string(due / per_minibatch) +
               (per_minibatch == 1 ? "" : " microbatch " + std::to_string(due % per_minibatch)));
  }
}

// A run in which every worker's body goes through more than once. Later bodies wait for each other as these
// do, and a shorter run skips instructions that nothing which it has waits for.
void ListedProgram::check_run() const {
  const std::int64_t length = 2 * (num_minibatches_listed() + minibatches_per_body_);
  const ScheduleOptions options = options_of(*this);
  std::vector<std::vector<Instruction>> programs;
  for (Rank rank; rank.value() < num_stages(); rank = rank.next()) {
    programs.push_back(make_program(options, rank, length));
  }
  const ReplayReport report = replay(options, programs, length);
  if (!report.ok) refuse_run(report.error);
}

// The validator names one instruction of a list that is wrong by itself, which is found here again, and
// several of lists that wait for each other.
void ListedProgram::refuse_run(const std::string& error) const {
  for (Rank rank; rank.value() < num_stages(); rank = rank.next()) {
    const std::string worker = name_of(rank) + ", position ";
    if (!error.starts_with(worker)) continue;
    for (std::int64_t position = 0; position < list_of(rank).length(4); ++position) {
      const std::string named = ", " + to_string(at(rank, position)) + ": ";
      const std::size_t found = error.find(named);
      if (found != std::string::npos) refuse(rank, position, error.substr(found + named.size()));
    }
  }
  throw UserError(error);
}

// "line 13, time 2 of the body: BACKWARD stage 0 ... reads version 1: " and why.
void ListedProgram::refuse(Rank rank, std::int64_t position, const std::string& why) const {
  const List& list = list_of(rank);
  const std::int64_t bodies = num_bodies_before(rank, position);
  const auto listed = static_cast<std::size_t>(position - bodies * list.body_length());
  const std::string place =
      list.lines.empty() ? name_of(rank) : "line " + std::to_string(list.lines.at(listed));
  throw UserError(place + (bodies == 0 ? "" : ", time " + std::to_string(bodies + 1) + " of the body") +
                  ": " + to_string(at(rank, position)) + ": " + why);
}

ListedProgram::Facts ListedProgram::count_facts(Rank rank) const {
  Facts facts;
  facts.forwards = reads_by(rank, Opcode::kForward);
  facts.backwards = reads_by(rank, Opcode::kBackward);
  const auto end =
      static_cast<std::int64_t>(std::max(facts.forwards.versions.size(), facts.backwards.versions.size()));
  for (std::int64_t number = 0; number < end + minibatches_per_body_ * num_microbatches_; ++number) {
    if (facts.forwards.version_of(number) != facts.backwards.version_of(number)) facts.stashes = false;
  }
  // Over two bodies: the second is as all after it.
  std::int64_t num_forwarded = 0;
  std::int64_t num_backwarded = 0;
  for (std::int64_t position = 0; position < list_of(rank).length(2); ++position) {
    const Instruction instruction = at(rank, position);
    if (instruction.opcode == Opcode::kForward) ++num_forwarded;
    if (instruction.opcode == Opcode::kBackward) ++num_backwarded;
    facts.num_in_flight = std::max(facts.num_in_flight, num_forwarded - num_backwarded);
    if (instruction.opcode != Opcode::kUpdate) continue;
    const std::int64_t oldest =
        std::min(facts.forwards.oldest_from(num_forwarded), facts.backwards.oldest_from(num_backwarded));
    facts.num_versions_kept = std::max(facts.num_versions_kept, instruction.version.value() - oldest + 1);
  }
  return facts;
}

ListedReads ListedProgram::reads_by(Rank rank, Opcode opcode) const {
  ListedReads reads;
  reads.numbers_per_body = minibatches_per_body_ * num_microbatches_;
  reads.minibatches_per_body = minibatches_per_body_;
  for (const Instruction& instruction : list_of(rank).instructions) {
    if (instruction.opcode == opcode) reads.versions.push_back(instruction.version.value());
  }
  // The bodies after the first read versions that are newer by as much.
  std::int64_t oldest =
      *std::min_element(reads.versions.end() - reads.numbers_per_body, reads.versions.end()) +
      minibatches_per_body_;
  reads.oldest = reads.versions;
  for (auto version = reads.oldest.rbegin(); version != reads.oldest.rend(); ++version) {
    oldest = *version = std::min(oldest, *version);
  }
  return reads;
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
  for (Rank rank; rank.value() < num_stages(); rank = rank.next()) {
    listed = std::max(listed, minibatches_of_one_body(rank));
  }
  return listed;
}

std::vector<Instruction> ListedProgram::cool_down(Rank rank) const {
  const std::vector<Instruction> whole =
      make_compute_program(options_of(*this), rank, minibatches_of_one_body(rank));
  return {whole.begin() + list_of(rank).length(1), whole.end()};
}

}  // namespace pipedream
