// Writes a written program as text, and reads such a text. See listed_program.h.
#include <algorithm>
#include <optional>
#include <sstream>
#include <utility>

#include "base/failure.h"
#include "schedule/listed_program.h"
#include "schedule/listed_words.h"
#include "schedule/text_lines.h"

namespace pipedream {
namespace {

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
    check_last_has_body();
    for (const Worker& worker : workers_) lists.push_back(worker.list);
    return {std::move(lists), minibatches_per_body_.value_or(1)};
  }
  // Returns the worker's cool-down as the text has it, or nothing if the text has none.
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
    check_last_has_body();
    workers_.emplace_back();
  }

  void check_last_has_body() const {
    if (workers_.empty() || workers_.back().section >= Section::kBody) return;
    throw UserError("worker " + std::to_string(workers_.size() - 1) +
                    " has no body; write \"body every 1 minibatch\" above the part that repeats");
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
    const Instruction instruction = parse_instruction(line, true);
    if (section == Section::kCoolDown) return cool_down.push_back(instruction);
    list.instructions.push_back(instruction);
    list.lines.push_back(number);
    if (section == Section::kWarmUp) ++list.num_warm_up;
  }

  std::vector<Worker> workers_;
  std::optional<std::int64_t> minibatches_per_body_;
};

}  // namespace

ListedProgram ListedProgram::parse(std::string_view text) {
  Parser parser;
  for_each_line(text, [&](std::string_view line, std::int64_t number) { parser.read(line, number); });
  ListedProgram program = parser.made();
  for (Rank rank; static_cast<std::size_t>(rank.value()) < program.workers_.size(); rank = rank.next()) {
    const auto given = parser.cool_down(static_cast<std::size_t>(rank.value()));
    if (!given || *given == program.cool_down(rank)) continue;
    throw UserError(
        "worker " + std::to_string(rank.value()) +
        ": the cool-down is not what is left of the body when the data are over; leave \"cool-down\" "
        "and what follows it out");
  }
  return program;
}

std::string ListedProgram::to_text() const {
  std::ostringstream text;
  for (Rank rank; rank.value() < placement_.num_ranks(); rank = rank.next()) {
    const List& list = list_of(rank);
    text << "worker " << rank.value() << "  # " << comment_on(rank) << '\n';
    for (const StageIndex stage : placement_.stages_at(rank)) {
      if (!stashes(stage)) text << "# " << describe_unstashed(stage, false) << '\n';
    }
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

// Returns a comment on the worker's list, such as "keeps 2 versions; backwards read what their forwards have
// read". If the worker has several stages, it names each: "stage 0 keeps ...".
std::string ListedProgram::comment_on(Rank rank) const {
  const std::vector<StageIndex> stages = placement_.stages_at(rank);
  std::string comment;
  for (const StageIndex stage : stages) {
    if (!comment.empty()) comment += "; ";
    if (stages.size() > 1) comment += "stage " + std::to_string(stage.value()) + ' ';
    comment += "keeps " + in_number(num_versions_kept(stage), "version") + "; backwards read " +
               (stashes(stage) ? "what their forwards have read" : "the newest");
  }
  return comment;
}

std::string ListedProgram::note_on_unstashed() const {
  for (StageIndex stage; stage.value() < num_stages(); stage = stage.next()) {
    if (!stashes(stage)) return describe_unstashed(stage, true);
  }
  return {};
}

// Returns text such as "line 6, time 2 of the body: BACKWARD stage 0 ... reads version 1, and its forward
// (line 8) version 0; ...", with what to write instead at the end.
std::string ListedProgram::describe_unstashed(StageIndex stage, bool names_lines) const {
  const Passes passes = passes_of(stage, *facts_of(stage).first_unstashed);
  const auto& [rank, forward, backward] = passes;
  return (names_lines ? place_of(rank, backward) + ": " : "") + to_string(at(rank, backward)) +
         ", and its forward" + (names_lines ? " (" + place_of(rank, forward) + ")" : "") + " version " +
         std::to_string(at(rank, forward).version.value()) +
         ", as under unstashed; if both are to read one version, " + how_to_stash(passes);
}

// Says what to write so that the microbatch's backward reads what its forward reads.
std::string ListedProgram::how_to_stash(const Passes& passes) const {
  const auto& [rank, forward, backward] = passes;
  const Instruction reader = at(rank, forward);
  const std::int64_t forward_reads_version = reader.version.value();
  const std::int64_t backward_reads_version = at(rank, backward).version.value();
  if (num_bodies_before(rank, backward) == 0) {
    return "let the backward read version " + std::to_string(forward_reads_version);
  }
  std::int64_t newest = 0;  // the newest version when the forward runs
  for (std::int64_t position = 0; position < forward; ++position) {
    const Instruction instruction = at(rank, position);
    if (instruction.stage == reader.stage && writes_version(instruction.opcode)) ++newest;
  }
  if (num_bodies_before(rank, forward) == 0 && newest >= backward_reads_version) {
    return "let the forward read version " + std::to_string(backward_reads_version);
  }
  const std::int64_t last = last_to_warm_up(
      reader.stage, rounds_of_stage(reader.stage).number_of(reader.minibatch, reader.microbatch));
  return "put all of minibatch " + std::to_string(last) +
         (last == 0 ? ", with its update," : " and those before it, with their updates,") +
         " into the warm-up";
}

// Returns the last minibatch that must move from the body into the warm-up. The microbatch's backward can
// then read the version of its forward.
//
// When the body repeats, the backward reads a version that is too new by num_too_new updates. Its line cannot
// name an older version, because in the first body that version would be below 0. So the body must begin
// later, by as many bodies as make num_too_new updates.
std::int64_t ListedProgram::last_to_warm_up(StageIndex stage, std::int64_t number) const {
  const ListedReads& forwards = forward_reads(stage);
  const std::int64_t per_body = forwards.numbers_per_body();
  const std::int64_t steady = number + (forwards.end() / per_body + 1) * per_body;
  const std::int64_t num_too_new = backward_reads(stage).version_of(steady) - forwards.version_of(steady);
  const std::int64_t versions = versions_per_body(stage);
  const std::int64_t num_bodies = std::max<std::int64_t>(1, (num_too_new + versions - 1) / versions);
  std::int64_t last = 0;
  for (const Instruction& instruction : list_of(placement_.rank_of(stage)).body()) {
    if (releases_stash(instruction.opcode)) last = std::max(last, instruction.minibatch.value());
  }
  return last + (num_bodies - 1) * minibatches_per_body_;
}

// Finds the forward and the backward of the stage's microbatch with this number.
ListedProgram::Passes ListedProgram::passes_of(StageIndex stage, std::int64_t number) const {
  const Rounds& rounds = rounds_of_stage(stage);
  Passes passes{.rank = placement_.rank_of(stage, rounds.replica_of(number))};
  for (std::int64_t position = 0;; ++position) {  // ends: every microbatch has a forward and then a backward
    const Instruction instruction = at(passes.rank, position);
    if (instruction.stage != stage ||
        rounds.number_of(instruction.minibatch, instruction.microbatch) != number) {
      continue;
    }
    const Stash stash = traits_of(instruction.opcode).stash;
    if (stash == Stash::kKept) passes.forward = position;
    if (stash != Stash::kReleased) continue;
    passes.backward = position;
    return passes;
  }
}

std::vector<Instruction> ListedProgram::cool_down(Rank rank) const {
  const std::vector<Instruction> whole =
      make_compute_program(options_of_run(*this), rank, minibatches_of_one_body(rank));
  return {whole.begin() + list_of(rank).length(1), whole.end()};
}

}  // namespace pipedream
