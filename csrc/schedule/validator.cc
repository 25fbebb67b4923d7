// Replay of all stages' programs in memory. See validator.h.
//
// The stages form a Kahn network: each has one order of instructions and waits only for queues. So whether
// a deadlock exists, and what each stage reads, does not depend on the stages' speeds, and one replay in
// any order proves it. How long a queue grows does depend on them; the worst case of one queue is the
// replay in which its reader moves only when nobody else can.
#include "schedule/validator.h"

#include <algorithm>
#include <deque>
#include <map>
#include <numeric>
#include <optional>
#include <sstream>

#include "base/check.h"
#include "base/failure.h"

namespace pipedream {
namespace {

// Why an instruction cannot be done, without its place; empty when it can.
using Fault = std::string;

// The weight versions of one stage, in num_kept slots. An update writes into the slot of the oldest
// version that nobody reads.
class VersionWindow {
 public:
  explicit VersionWindow(std::int64_t num_kept) : num_kept_(num_kept) { num_readers_[newest_] = 0; }

  [[nodiscard]] WeightVersion newest() const { return newest_; }
  [[nodiscard]] std::int64_t live_max() const { return live_max_; }

  [[nodiscard]] Fault check_held(WeightVersion version) const {
    if (num_readers_.contains(version)) return {};
    std::ostringstream fault;
    if (version > newest_ || version.value() < 0) {
      fault << "version " << version.value() << " is not written yet; the newest is " << newest_.value();
    } else {
      fault << "version " << version.value() << " was overwritten; held are "
            << num_readers_.begin()->first.value() << " to " << newest_.value() << " in " << num_kept_
            << " slots";
    }
    return fault.str();
  }

  void acquire(WeightVersion version) {
    ++num_readers_.at(version);
    live_max_ = std::max(live_max_, num_live());
  }
  void release(WeightVersion version) { --num_readers_.at(version); }

  [[nodiscard]] Fault update() {
    const bool in_place = num_kept_ == 1;
    // Until it is complete, the update reads the newest version, so both occupy a slot.
    const std::int64_t num_occupied = num_live() + (in_place ? 0 : 1);
    if (static_cast<std::int64_t>(num_readers_.size()) == num_kept_) {
      const auto victim = std::find_if(num_readers_.begin(), num_readers_.end(), [&](const auto& held) {
        return held.second == 0 && (in_place || held.first != newest_);
      });
      if (victim == num_readers_.end()) {
        return "no slot is free to write into: all " + std::to_string(num_kept_) +
               " versions kept are in use";
      }
      num_readers_.erase(victim);
    }
    live_max_ = std::max(live_max_, num_occupied);
    newest_ = newest_.next();
    num_readers_[newest_] = 0;
    return {};
  }

 private:
  [[nodiscard]] std::int64_t num_live() const {
    return std::count_if(num_readers_.begin(), num_readers_.end(),
                         [&](const auto& held) { return held.second > 0 || held.first == newest_; });
  }

  std::int64_t num_kept_;
  std::int64_t live_max_ = 1;
  WeightVersion newest_;
  std::map<WeightVersion, std::int64_t> num_readers_;  // of every version that lies in a slot
};

struct MessageQueue {
  std::deque<MinibatchId> minibatches;
  std::int64_t num_queued_max = 0;

  void push(MinibatchId minibatch) {
    minibatches.push_back(minibatch);
    num_queued_max = std::max(num_queued_max, static_cast<std::int64_t>(minibatches.size()));
  }
};

enum class Progress { kNone, kForwarded, kBackwarded, kUpdated };

struct StageState {
  StageState(std::int64_t num_kept, std::int64_t num_minibatches)
      : versions(num_kept),
        progress(static_cast<std::size_t>(num_minibatches), Progress::kNone),
        version_read(static_cast<std::size_t>(num_minibatches)) {}

  std::size_t position = 0;
  VersionWindow versions;
  std::vector<Progress> progress;           // per minibatch
  std::vector<WeightVersion> version_read;  // per minibatch, by its forward
  std::int64_t num_forwarded = 0;
  std::int64_t num_in_flight = 0;  // forwarded, not yet backwarded
  std::int64_t num_in_flight_max = 0;
};

enum class StepResult { kDone, kWaiting, kOver, kFailed };

class Replay {
 public:
  Replay(const std::vector<StageProgram>& programs, std::int64_t num_minibatches);

  // Runs every program to its end. Before each step of a later stage in `order`, all earlier ones have
  // gone as far as they can. Returns false and sets error() at the first fault.
  bool run(const std::vector<std::size_t>& order);

  [[nodiscard]] const std::string& error() const { return error_; }
  [[nodiscard]] const std::vector<StageState>& stages() const { return stages_; }
  // Boundary b lies between stage b and b + 1.
  [[nodiscard]] std::int64_t activations_queued_max(std::size_t boundary) const {
    return activations_[boundary].num_queued_max;
  }
  [[nodiscard]] std::int64_t gradients_queued_max(std::size_t boundary) const {
    return gradients_[boundary].num_queued_max;
  }

 private:
  StepResult step(std::size_t stage);
  StepResult fail(std::size_t stage, const Fault& fault);

  [[nodiscard]] Fault check(std::size_t stage, const Instruction& instruction) const;
  [[nodiscard]] Fault check_forward(std::size_t stage, const Instruction& instruction) const;
  [[nodiscard]] Fault check_backward(std::size_t stage, const Instruction& instruction) const;
  [[nodiscard]] Fault check_update(std::size_t stage, const Instruction& instruction) const;

  // The queue that the instruction takes its message from, null when it needs none.
  [[nodiscard]] MessageQueue* incoming(std::size_t stage, Opcode opcode);
  [[nodiscard]] MessageQueue* outgoing(std::size_t stage, Opcode opcode);
  Fault apply(std::size_t stage, const Instruction& instruction);

  bool check_finished();
  [[nodiscard]] std::string describe_deadlock() const;
  [[nodiscard]] std::string place(std::size_t stage) const;

  [[nodiscard]] bool is_last(std::size_t stage) const { return stage + 1 == programs_.size(); }
  [[nodiscard]] bool is_over(std::size_t stage) const {
    return stages_[stage].position == programs_[stage].instructions.size();
  }
  [[nodiscard]] const Instruction& current(std::size_t stage) const {
    return programs_[stage].instructions[stages_[stage].position];
  }
  [[nodiscard]] Progress progress(std::size_t stage, MinibatchId minibatch) const {
    return stages_[stage].progress[static_cast<std::size_t>(minibatch.value())];
  }

  const std::vector<StageProgram>& programs_;
  const std::int64_t num_minibatches_;
  std::vector<StageState> stages_;
  std::vector<MessageQueue> activations_;  // per boundary
  std::vector<MessageQueue> gradients_;
  std::string error_;
};

Replay::Replay(const std::vector<StageProgram>& programs, std::int64_t num_minibatches)
    : programs_(programs),
      num_minibatches_(num_minibatches),
      activations_(programs.size() - 1),
      gradients_(programs.size() - 1) {
  stages_.reserve(programs.size());
  for (const StageProgram& program : programs) {
    stages_.emplace_back(num_versions_kept(program.options), num_minibatches);
  }
}

bool Replay::run(const std::vector<std::size_t>& order) {
  std::size_t turn = 0;
  while (turn < order.size()) {
    switch (step(order[turn])) {
      case StepResult::kDone:
        turn = 0;  // it may have sent what an earlier stage waits for
        break;
      case StepResult::kWaiting:
      case StepResult::kOver:
        ++turn;
        break;
      case StepResult::kFailed:
        return false;
    }
  }
  return check_finished();
}

StepResult Replay::step(std::size_t stage) {
  if (is_over(stage)) return StepResult::kOver;
  const Instruction& instruction = current(stage);
  if (const Fault fault = check(stage, instruction); !fault.empty()) return fail(stage, fault);

  if (MessageQueue* queue = incoming(stage, instruction.opcode)) {
    if (queue->minibatches.empty()) return StepResult::kWaiting;
    const MinibatchId received = queue->minibatches.front();
    if (received != instruction.minibatch) {
      return fail(stage, "the next message to arrive is of minibatch " + std::to_string(received.value()));
    }
    queue->minibatches.pop_front();
  }
  if (const Fault fault = apply(stage, instruction); !fault.empty()) return fail(stage, fault);
  if (MessageQueue* queue = outgoing(stage, instruction.opcode)) queue->push(instruction.minibatch);
  ++stages_[stage].position;
  return StepResult::kDone;
}

StepResult Replay::fail(std::size_t stage, const Fault& fault) {
  error_ = place(stage) + ": " + fault;
  return StepResult::kFailed;
}

Fault Replay::check(std::size_t stage, const Instruction& instruction) const {
  if (instruction.minibatch.value() < 0 || instruction.minibatch.value() >= num_minibatches_) {
    return "the minibatch does not exist; there are " + std::to_string(num_minibatches_);
  }
  if (instruction.microbatch.value() != 0) return "the microbatch does not exist; a minibatch has one";
  switch (instruction.opcode) {
    case Opcode::kForward:
      return check_forward(stage, instruction);
    case Opcode::kBackward:
      return check_backward(stage, instruction);
    case Opcode::kUpdate:
      return check_update(stage, instruction);
  }
  PD_CHECK(false, "opcode " << static_cast<int>(instruction.opcode) << ", stage " << stage);
}

Fault check_rule(WeightVersion version, WeightVersion rule) {
  if (version == rule) return {};
  return "the rule names version " + std::to_string(rule.value());
}

Fault Replay::check_forward(std::size_t stage, const Instruction& instruction) const {
  const StageState& state = stages_[stage];
  const ProgramOptions& options = programs_[stage].options;
  if (progress(stage, instruction.minibatch) != Progress::kNone) return "the minibatch was already forwarded";
  if (instruction.minibatch.value() != state.num_forwarded) {
    return "forwards go in order; the next minibatch is " + std::to_string(state.num_forwarded);
  }
  if (state.num_in_flight == options.in_flight) {
    return "in_flight is " + std::to_string(options.in_flight) +
           ", and as many minibatches still wait for their backward";
  }
  if (Fault fault = state.versions.check_held(instruction.version); !fault.empty()) return fault;
  return check_rule(instruction.version, forward_version(options, instruction.minibatch));
}

Fault Replay::check_backward(std::size_t stage, const Instruction& instruction) const {
  if (progress(stage, instruction.minibatch) == Progress::kNone) return "the minibatch was not forwarded yet";
  if (progress(stage, instruction.minibatch) != Progress::kForwarded) return "the backward was already done";
  const ProgramOptions& options = programs_[stage].options;
  if (Fault fault = stages_[stage].versions.check_held(instruction.version); !fault.empty()) return fault;
  return check_rule(instruction.version, backward_version(options, instruction.minibatch));
}

Fault Replay::check_update(std::size_t stage, const Instruction& instruction) const {
  if (progress(stage, instruction.minibatch) == Progress::kUpdated) return "the update was already done";
  if (progress(stage, instruction.minibatch) != Progress::kBackwarded) {
    return "there is no gradient: the backward of the minibatch was not done yet";
  }
  const WeightVersion newest = stages_[stage].versions.newest();
  if (instruction.minibatch.value() != newest.value()) {
    return "updates go in order; the next minibatch is " + std::to_string(newest.value());
  }
  if (instruction.version != newest.next()) {
    return "the newest version is " + std::to_string(newest.value()) + ", so the update writes version " +
           std::to_string(newest.next().value());
  }
  return {};
}

MessageQueue* Replay::incoming(std::size_t stage, Opcode opcode) {
  if (opcode == Opcode::kForward && stage > 0) return &activations_[stage - 1];
  if (opcode == Opcode::kBackward && !is_last(stage)) return &gradients_[stage];
  return nullptr;
}

MessageQueue* Replay::outgoing(std::size_t stage, Opcode opcode) {
  if (opcode == Opcode::kForward && !is_last(stage)) return &activations_[stage];
  if (opcode == Opcode::kBackward && stage > 0) return &gradients_[stage - 1];
  return nullptr;
}

Fault Replay::apply(std::size_t stage, const Instruction& instruction) {
  StageState& state = stages_[stage];
  const auto minibatch_index = static_cast<std::size_t>(instruction.minibatch.value());
  switch (instruction.opcode) {
    case Opcode::kForward:
      state.versions.acquire(instruction.version);
      state.version_read[minibatch_index] = instruction.version;
      state.progress[minibatch_index] = Progress::kForwarded;
      ++state.num_forwarded;
      state.num_in_flight_max = std::max(state.num_in_flight_max, ++state.num_in_flight);
      return {};
    case Opcode::kBackward:
      state.versions.release(state.version_read[minibatch_index]);
      state.progress[minibatch_index] = Progress::kBackwarded;
      --state.num_in_flight;
      return {};
    case Opcode::kUpdate:
      state.progress[minibatch_index] = Progress::kUpdated;
      return state.versions.update();
  }
  PD_CHECK(false, "opcode " << static_cast<int>(instruction.opcode) << ", stage " << stage);
}

bool Replay::check_finished() {
  // A list that ends too early explains a deadlock upstream, so it is looked for first.
  for (std::size_t stage = 0; stage < stages_.size(); ++stage) {
    if (!is_over(stage)) continue;
    for (std::int64_t minibatch = 0; minibatch < num_minibatches_; ++minibatch) {
      const Progress done = progress(stage, MinibatchId(minibatch));
      if (done == Progress::kUpdated) continue;
      const Opcode missing = done == Progress::kNone        ? Opcode::kForward
                             : done == Progress::kForwarded ? Opcode::kBackward
                                                            : Opcode::kUpdate;
      fail(stage,
           std::string(opcode_name(missing)) + " minibatch " + std::to_string(minibatch) + " is missing");
      return false;
    }
  }
  for (std::size_t stage = 0; stage < stages_.size(); ++stage) {
    if (is_over(stage)) continue;
    error_ = describe_deadlock();
    return false;
  }
  return true;
}

std::string Replay::describe_deadlock() const {
  std::ostringstream text;
  text << "deadlock";
  for (std::size_t stage = 0; stage < stages_.size(); ++stage) {
    if (is_over(stage)) continue;
    const bool is_forward = current(stage).opcode == Opcode::kForward;
    text << "; " << place(stage) << ": waits for the " << (is_forward ? "activation" : "gradient")
         << " from stage " << (is_forward ? stage - 1 : stage + 1);
  }
  return text.str();
}

std::string Replay::place(std::size_t stage) const {
  std::ostringstream text;
  text << "stage " << stage << ", position " << stages_[stage].position << ", "
       << (is_over(stage) ? "end of the program" : to_string(current(stage)));
  return text.str();
}

std::string check_programs(const std::vector<StageProgram>& programs, std::int64_t num_minibatches) {
  if (programs.empty()) return "there are no programs; a plan has at least one stage";
  if (num_minibatches < 0)
    return "num_minibatches is " + std::to_string(num_minibatches) + "; it must be 0 or more";
  for (std::size_t stage = 0; stage < programs.size(); ++stage) {
    const ProgramOptions& options = programs[stage].options;
    const auto num_stages = static_cast<std::int64_t>(programs.size());
    if (options.stage.value() != static_cast<std::int64_t>(stage) || options.num_stages != num_stages) {
      return "program " + std::to_string(stage) + " of " + std::to_string(num_stages) + " is for stage " +
             std::to_string(options.stage.value()) + " of " + std::to_string(options.num_stages);
    }
    try {
      check_program_options(options);
    } catch (const UserError& error) {
      return error.what();
    }
  }
  return {};
}

// All stages, the slowest last.
std::vector<std::size_t> order_with_slowest(std::size_t num_stages, std::size_t slowest) {
  std::vector<std::size_t> order(num_stages);
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::rotate(order.begin() + static_cast<std::ptrdiff_t>(slowest),
              order.begin() + static_cast<std::ptrdiff_t>(slowest) + 1, order.end());
  return order;
}

}  // namespace

ReplayReport replay(const std::vector<StageProgram>& programs, std::int64_t num_minibatches) {
  ReplayReport report;
  report.error = check_programs(programs, num_minibatches);
  if (!report.error.empty()) {
    report.ok = false;
    return report;
  }
  const std::size_t num_stages = programs.size();
  report.activations_queued_max.resize(num_stages - 1);
  report.gradients_queued_max.resize(num_stages - 1);
  // One replay per stage that reads the queues: stage s reads activations of boundary s - 1 and gradients
  // of boundary s.
  for (std::size_t slowest = 0; slowest < num_stages; ++slowest) {
    Replay replay(programs, num_minibatches);
    if (!replay.run(order_with_slowest(num_stages, slowest))) {
      PD_CHECK(slowest == 0, "the outcome depends on the stages' speeds: " << replay.error());
      report.ok = false;
      report.error = replay.error();
      return report;
    }
    if (slowest > 0) report.activations_queued_max[slowest - 1] = replay.activations_queued_max(slowest - 1);
    if (slowest + 1 < num_stages) report.gradients_queued_max[slowest] = replay.gradients_queued_max(slowest);
    if (slowest > 0) continue;
    for (const StageState& state : replay.stages()) {
      report.versions_live_max.push_back(state.versions.live_max());
      report.activations_live_max.push_back(state.num_in_flight_max);
    }
  }
  return report;
}

}  // namespace pipedream
