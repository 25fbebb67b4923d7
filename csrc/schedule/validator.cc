// Replay of all workers' programs in memory. See validator.h.
//
// In two steps. What a stage reads, keeps and updates depends on its worker's own list alone, so every
// list is checked by itself (ListChecker). What then remains is whether the lists fit together (Pipeline).
// There the workers form a Kahn network: each has one order of instructions and waits only for queues, so
// whether a deadlock exists does not depend on the workers' speeds, and one replay in any order proves it.
// How long a queue grows does depend on them: when its reader has done j instructions, what was written
// into the queue is most when all other workers have gone as far as they can, so the worst case of all
// queues of one reader is the replay in which that worker moves only when nobody else can. Both steps are
// linear in the number of instructions, the second once per worker.
#include "schedule/validator.h"

#include <algorithm>
#include <sstream>

#include "base/check.h"
#include "base/failure.h"

namespace pipedream {
namespace {

using Programs = std::vector<std::vector<Instruction>>;

// Why an instruction cannot be done, without its place; empty when it can.
using Fault = std::string;

std::size_t index_of(StageIndex stage) { return static_cast<std::size_t>(stage.value()); }

std::size_t index_of(Rank rank) { return static_cast<std::size_t>(rank.value()); }

std::string place(std::size_t worker, const std::vector<Instruction>& program, std::size_t position) {
  return "worker " + std::to_string(worker) + ", position " + std::to_string(position) + ", " +
         (position == program.size() ? "end of the program" : to_string(program[position]));
}

// "minibatch 3 microbatch 0"
std::string name_of(std::int64_t item, std::int64_t num_microbatches) {
  return "minibatch " + std::to_string(item / num_microbatches) + " microbatch " +
         std::to_string(item % num_microbatches);
}

// One stage's part of a list: its counters, and whether an instruction may come next. A microbatch of the
// run has one number here, minibatch * num_microbatches + microbatch: its item.
class StageChecker {
 public:
  StageChecker(const ScheduleOptions& options, StageIndex stage, std::int64_t num_minibatches);

  [[nodiscard]] Fault check(const Instruction& instruction) const;
  void apply(const Instruction& instruction);
  [[nodiscard]] Fault missing_at_end() const;

  // Backwards of this minibatch that are still to be done.
  [[nodiscard]] bool has_backwards_left(std::int64_t minibatch) const {
    return num_backwarded_ < (minibatch + 1) * num_microbatches_;
  }
  [[nodiscard]] StageIndex stage() const { return stage_; }
  [[nodiscard]] std::int64_t versions_live_max() const { return versions_live_max_; }
  [[nodiscard]] std::int64_t num_in_flight_max() const { return num_in_flight_max_; }

 private:
  [[nodiscard]] Fault check_range(const Instruction& instruction) const;
  [[nodiscard]] Fault check_forward(const Instruction& instruction) const;
  [[nodiscard]] Fault check_recompute(const Instruction& instruction) const;
  [[nodiscard]] Fault check_backward(const Instruction& instruction) const;
  [[nodiscard]] Fault check_next_backward(const Instruction& instruction) const;
  [[nodiscard]] Fault check_update(const Instruction& instruction) const;
  [[nodiscard]] Fault check_read(WeightVersion version, WeightVersion rule) const;
  [[nodiscard]] std::int64_t num_versions_live(Opcode opcode) const;
  [[nodiscard]] std::int64_t item_of(const Instruction& instruction) const {
    return instruction.minibatch.value() * num_microbatches_ + instruction.microbatch.value();
  }

  const ScheduleOptions& options_;
  const StageIndex stage_;
  const std::int64_t num_minibatches_;
  const std::int64_t num_microbatches_;
  const std::int64_t window_;
  const std::int64_t num_kept_;
  const bool drains_;
  const bool stashes_;
  const bool recomputes_;

  std::int64_t num_forwarded_ = 0;  // items
  std::int64_t num_backwarded_ = 0;
  bool recomputed_ = false;  // the next item to go backward
  std::int64_t newest_ = 0;  // version, and so also the number of updates
  std::int64_t versions_live_max_ = 1;
  std::int64_t num_in_flight_max_ = 0;
};

StageChecker::StageChecker(const ScheduleOptions& options, StageIndex stage, std::int64_t num_minibatches)
    : options_(options),
      stage_(stage),
      num_minibatches_(num_minibatches),
      num_microbatches_(options.num_microbatches),
      window_(num_microbatches_in_flight(options, stage)),
      num_kept_(num_versions_kept(options, stage)),
      drains_(drains_every_minibatch(options)),
      stashes_(stashes_versions(options)),
      recomputes_(!options.recompute.empty() && options.recompute[index_of(stage)]) {}

Fault StageChecker::check(const Instruction& instruction) const {
  if (Fault fault = check_range(instruction); !fault.empty()) return fault;
  switch (instruction.opcode) {
    case Opcode::kForward:
      return check_forward(instruction);
    case Opcode::kRecompute:
      return check_recompute(instruction);
    case Opcode::kBackward:
      return check_backward(instruction);
    case Opcode::kUpdate:
      return check_update(instruction);
  }
  PD_CHECK(false, "opcode " << static_cast<int>(instruction.opcode) << ", stage " << stage_.value());
}

Fault StageChecker::check_range(const Instruction& instruction) const {
  if (instruction.minibatch.value() < 0 || instruction.minibatch.value() >= num_minibatches_) {
    return "the minibatch does not exist; there are " + std::to_string(num_minibatches_);
  }
  const bool is_update = instruction.opcode == Opcode::kUpdate;
  const std::int64_t end = is_update ? 1 : num_microbatches_;
  if (instruction.microbatch.value() >= 0 && instruction.microbatch.value() < end) return {};
  if (is_update) {
    return "an update is of the whole minibatch, not of microbatch " +
           std::to_string(instruction.microbatch.value());
  }
  return "the microbatch does not exist; a minibatch has " + std::to_string(end);
}

Fault StageChecker::check_forward(const Instruction& instruction) const {
  const std::int64_t item = item_of(instruction);
  if (item < num_forwarded_) return "the microbatch was already forwarded";
  if (item > num_forwarded_) {
    return "forwards go in order; the next is " + name_of(num_forwarded_, num_microbatches_);
  }
  if (drains_ && instruction.minibatch.value() != newest_) {
    return "the schedule drains every minibatch, and the update of minibatch " + std::to_string(newest_) +
           " was not done yet";
  }
  if (num_forwarded_ - num_backwarded_ == window_) {
    return "at most " + std::to_string(window_) +
           " microbatches may be in flight at the stage, and as many wait for their backward";
  }
  return check_read(instruction.version, forward_version(options_, stage_, instruction.minibatch));
}

Fault StageChecker::check_recompute(const Instruction& instruction) const {
  if (!recomputes_) return "the options ask for no recompute at the stage";
  if (Fault fault = check_next_backward(instruction); !fault.empty()) return fault;
  if (recomputed_) return "the microbatch was already recomputed";
  return check_read(instruction.version, backward_version(options_, stage_, instruction.minibatch));
}

Fault StageChecker::check_backward(const Instruction& instruction) const {
  if (Fault fault = check_next_backward(instruction); !fault.empty()) return fault;
  if (recomputes_ && !recomputed_) return "the options ask for a recompute first";
  return check_read(instruction.version, backward_version(options_, stage_, instruction.minibatch));
}

// What backward and recompute have in common. Only the next one is recomputed: the activations of more
// than one microbatch would have to be held.
Fault StageChecker::check_next_backward(const Instruction& instruction) const {
  const std::int64_t item = item_of(instruction);
  if (item >= num_forwarded_) return "the microbatch was not forwarded yet";
  if (item < num_backwarded_) return "the backward was already done";
  if (item > num_backwarded_) {
    return "backwards go in order; the next is " + name_of(num_backwarded_, num_microbatches_);
  }
  if (instruction.minibatch.value() == newest_) return {};
  return "the update of minibatch " + std::to_string(newest_) +
         " is due first: gradients of two minibatches would be added up";
}

Fault StageChecker::check_update(const Instruction& instruction) const {
  const std::int64_t minibatch = instruction.minibatch.value();
  if (minibatch < newest_) return "the update was already done";
  const std::int64_t num_done =
      std::clamp<std::int64_t>(num_backwarded_ - minibatch * num_microbatches_, 0, num_microbatches_);
  if (num_done < num_microbatches_) {
    return "the gradient is not complete: the backward of " + std::to_string(num_done) + " of " +
           std::to_string(num_microbatches_) + " microbatches was done";
  }
  if (instruction.version.value() == newest_ + 1) return {};
  return "the newest version is " + std::to_string(newest_) + ", so the update writes version " +
         std::to_string(newest_ + 1);
}

Fault StageChecker::check_read(WeightVersion version, WeightVersion rule) const {
  if (version != rule) return "the rule names version " + std::to_string(rule.value());
  if (version.value() > newest_) {
    return "version " + std::to_string(version.value()) + " is not written yet; the newest is " +
           std::to_string(newest_);
  }
  if (version.value() > newest_ - num_kept_) return {};
  return "version " + std::to_string(version.value()) + " was overwritten; the newest is " +
         std::to_string(newest_) + ", and " + std::to_string(num_kept_) + " are kept";
}

// When the instruction is being done. Reads go in order, so what is still read is one range of versions.
std::int64_t StageChecker::num_versions_live(Opcode opcode) const {
  // The newest, and beside it what an update writes, unless it writes in place.
  std::int64_t num_live = opcode == Opcode::kUpdate && num_kept_ > 1 ? 2 : 1;
  const std::int64_t next_reader = num_backwarded_ / num_microbatches_;
  if (!stashes_ || next_reader >= num_minibatches_) return num_live;
  const auto read_by = [&](std::int64_t minibatch) {
    return forward_version(options_, stage_, MinibatchId(minibatch)).value();
  };
  const std::int64_t first = read_by(next_reader);
  const std::int64_t last = std::min(read_by(num_minibatches_ - 1), newest_ - 1);
  return num_live + std::max<std::int64_t>(0, last - first + 1);
}

void StageChecker::apply(const Instruction& instruction) {
  const std::int64_t num_live = num_versions_live(instruction.opcode);
  // Follows from the rules: an update comes after the last read of the version that it overwrites.
  PD_CHECK(num_live <= num_kept_,
           to_string(instruction) << ": " << num_live << " versions are live, " << num_kept_ << " are kept");
  versions_live_max_ = std::max(versions_live_max_, num_live);
  switch (instruction.opcode) {
    case Opcode::kForward:
      ++num_forwarded_;
      num_in_flight_max_ = std::max(num_in_flight_max_, num_forwarded_ - num_backwarded_);
      return;
    case Opcode::kRecompute:
      recomputed_ = true;
      return;
    case Opcode::kBackward:
      recomputed_ = false;
      ++num_backwarded_;
      return;
    case Opcode::kUpdate:
      ++newest_;
      return;
  }
  PD_CHECK(false, "opcode " << static_cast<int>(instruction.opcode) << ", stage " << stage_.value());
}

Fault StageChecker::missing_at_end() const {
  if (newest_ == num_minibatches_) return {};
  const std::string stage = " stage " + std::to_string(stage_.value()) + ' ';
  if (!has_backwards_left(newest_)) {
    return opcode_name(Opcode::kUpdate) + stage + "minibatch " + std::to_string(newest_) + " is missing";
  }
  const bool is_forwarded = num_backwarded_ < num_forwarded_;
  return opcode_name(is_forwarded ? Opcode::kBackward : Opcode::kForward) + stage +
         name_of(num_backwarded_, num_microbatches_) + " is missing";
}

// One worker's list.
class ListChecker {
 public:
  ListChecker(const ScheduleOptions& options, const Placement& placement, Rank rank,
              std::int64_t num_minibatches)
      : placement_(placement), rank_(rank), drains_(drains_every_minibatch(options)) {
    for (const StageIndex stage : placement.stages_at(rank)) {
      stages_.emplace_back(options, stage, num_minibatches);
    }
  }

  // The first fault with its place, or empty.
  [[nodiscard]] std::string run(const std::vector<Instruction>& program) {
    const auto worker_index = static_cast<std::size_t>(rank_.value());
    for (std::size_t position = 0; position < program.size(); ++position) {
      const Fault fault = check(program[position]);
      if (!fault.empty()) return place(worker_index, program, position) + ": " + fault;
      stage_of(program[position]).apply(program[position]);
    }
    for (const StageChecker& stage : stages_) {
      const Fault fault = stage.missing_at_end();
      if (!fault.empty()) return place(worker_index, program, program.size()) + ": " + fault;
    }
    return {};
  }

  [[nodiscard]] const std::vector<StageChecker>& stages() const { return stages_; }

 private:
  [[nodiscard]] Fault check(const Instruction& instruction) {
    const std::int64_t stage = instruction.stage.value();
    if (stage < 0 || stage >= placement_.num_stages()) {
      return "the stage does not exist; there are " + std::to_string(placement_.num_stages());
    }
    const Rank rank = placement_.rank_of(instruction.stage);
    if (rank != rank_) return "the stage lies at worker " + std::to_string(rank.value());
    if (Fault fault = stage_of(instruction).check(instruction); !fault.empty()) return fault;
    return instruction.opcode == Opcode::kUpdate ? check_drained(instruction) : Fault();
  }

  // Where every minibatch drains, a norm over all stages is taken before the first update.
  [[nodiscard]] Fault check_drained(const Instruction& update) const {
    if (!drains_) return {};
    for (const StageChecker& stage : stages_) {
      if (!stage.has_backwards_left(update.minibatch.value())) continue;
      return "the schedule drains every minibatch, and stage " + std::to_string(stage.stage().value()) +
             " still has backwards to do";
    }
    return {};
  }

  [[nodiscard]] StageChecker& stage_of(const Instruction& instruction) {
    return *std::find_if(stages_.begin(), stages_.end(),
                         [&](const StageChecker& stage) { return stage.stage() == instruction.stage; });
  }

  const Placement& placement_;
  const Rank rank_;
  const bool drains_;
  std::vector<StageChecker> stages_;  // ascending
};

// Messages come in the order in which they are asked for (the lists were checked), so counting is enough.
struct Queue {
  std::size_t reader = 0;  // worker
  std::int64_t num_queued = 0;
  std::int64_t num_queued_max = 0;
};

// All workers at work on lists that are right by themselves.
class Pipeline {
 public:
  Pipeline(const ScheduleOptions& options, const Programs& programs);

  // Runs every program as far as it goes; `slowest` moves only when no other worker can.
  void run(std::size_t slowest);

  [[nodiscard]] bool is_finished() const;
  [[nodiscard]] std::string describe_deadlock() const;
  // Boundary b lies between stage b and b + 1.
  [[nodiscard]] const std::vector<Queue>& activations() const { return activations_; }
  [[nodiscard]] const std::vector<Queue>& gradients() const { return gradients_; }

 private:
  // Null where the instruction needs, or makes, no message.
  [[nodiscard]] Queue* incoming(const Instruction& instruction);
  [[nodiscard]] Queue* outgoing(const Instruction& instruction);
  bool step(std::size_t worker);
  void run_others(std::size_t slowest);

  [[nodiscard]] bool is_over(std::size_t worker) const {
    return positions_[worker] == programs_[worker].size();
  }

  const Programs& programs_;
  const std::size_t num_boundaries_;
  std::vector<std::size_t> positions_;  // per worker
  std::vector<Queue> activations_;      // per boundary
  std::vector<Queue> gradients_;
  std::vector<std::size_t> awake_;  // workers that may be able to move; the slowest is passed over
};

Pipeline::Pipeline(const ScheduleOptions& options, const Programs& programs)
    : programs_(programs),
      num_boundaries_(static_cast<std::size_t>(num_stages(options)) - 1),
      positions_(programs.size(), 0),
      activations_(num_boundaries_),
      gradients_(num_boundaries_) {
  const Placement placement = placement_of(options);
  for (std::size_t boundary = 0; boundary < num_boundaries_; ++boundary) {
    const StageIndex upstream(static_cast<std::int64_t>(boundary));
    activations_[boundary].reader = index_of(placement.rank_of(upstream.next()));
    gradients_[boundary].reader = index_of(placement.rank_of(upstream));
  }
}

void Pipeline::run(std::size_t slowest) {
  for (std::size_t worker = programs_.size(); worker-- > 0;) awake_.push_back(worker);
  do {
    run_others(slowest);
  } while (step(slowest));
}

void Pipeline::run_others(std::size_t slowest) {
  while (!awake_.empty()) {
    const std::size_t worker = awake_.back();
    awake_.pop_back();
    while (worker != slowest && step(worker)) continue;
  }
}

// Does the worker's next instruction, if it can, and wakes the one that was waiting for its message.
bool Pipeline::step(std::size_t worker) {
  if (is_over(worker)) return false;
  const Instruction& instruction = programs_[worker][positions_[worker]];
  if (Queue* queue = incoming(instruction)) {
    if (queue->num_queued == 0) return false;
    --queue->num_queued;
  }
  if (Queue* queue = outgoing(instruction)) {
    if (++queue->num_queued == 1) awake_.push_back(queue->reader);
    queue->num_queued_max = std::max(queue->num_queued_max, queue->num_queued);
  }
  ++positions_[worker];
  return true;
}

Queue* Pipeline::incoming(const Instruction& instruction) {
  const std::size_t stage = index_of(instruction.stage);
  if (instruction.opcode == Opcode::kForward && stage > 0) return &activations_[stage - 1];
  if (instruction.opcode == Opcode::kBackward && stage < num_boundaries_) return &gradients_[stage];
  return nullptr;
}

Queue* Pipeline::outgoing(const Instruction& instruction) {
  const std::size_t stage = index_of(instruction.stage);
  if (instruction.opcode == Opcode::kForward && stage < num_boundaries_) return &activations_[stage];
  if (instruction.opcode == Opcode::kBackward && stage > 0) return &gradients_[stage - 1];
  return nullptr;
}

bool Pipeline::is_finished() const {
  for (std::size_t worker = 0; worker < programs_.size(); ++worker) {
    if (!is_over(worker)) return false;
  }
  return true;
}

std::string Pipeline::describe_deadlock() const {
  std::ostringstream text;
  text << "deadlock";
  for (std::size_t worker = 0; worker < programs_.size(); ++worker) {
    if (is_over(worker)) continue;
    const Instruction& instruction = programs_[worker][positions_[worker]];
    const bool is_forward = instruction.opcode == Opcode::kForward;
    text << "; " << place(worker, programs_[worker], positions_[worker]) << ": waits for the "
         << (is_forward ? "activation" : "gradient") << " from stage "
         << instruction.stage.value() + (is_forward ? -1 : 1);
  }
  return text.str();
}

std::string check_shape(const ScheduleOptions& options, const Programs& programs,
                        std::int64_t num_minibatches) {
  try {
    check_schedule_options(options);
    check_num_minibatches(num_minibatches);
  } catch (const UserError& error) {
    return error.what();
  }
  const auto workers = static_cast<std::size_t>(num_workers(options));
  if (programs.size() == workers) return {};
  return "there are " + std::to_string(programs.size()) + " programs; the plan has " +
         std::to_string(workers) + " workers";
}

// Every list by itself. Fills in what is known per stage; returns the first fault.
std::string check_lists(const ScheduleOptions& options, const Programs& programs,
                        std::int64_t num_minibatches, ReplayReport& report) {
  report.versions_live_max.resize(options.in_flight.size());
  report.activations_live_max.resize(options.in_flight.size());
  const Placement placement = placement_of(options);
  for (std::size_t worker = 0; worker < programs.size(); ++worker) {
    ListChecker checker(options, placement, Rank(static_cast<std::int64_t>(worker)), num_minibatches);
    if (std::string error = checker.run(programs[worker]); !error.empty()) return error;
    for (const StageChecker& stage : checker.stages()) {
      report.versions_live_max[index_of(stage.stage())] = stage.versions_live_max();
      report.activations_live_max[index_of(stage.stage())] = stage.num_in_flight_max();
    }
  }
  return {};
}

// All lists together. Fills in what is known per boundary; returns the deadlock, if there is one.
std::string check_together(const ScheduleOptions& options, const Programs& programs, ReplayReport& report) {
  const std::size_t num_boundaries = options.in_flight.size() - 1;
  report.activations_queued_max.resize(num_boundaries);
  report.gradients_queued_max.resize(num_boundaries);
  for (std::size_t slowest = 0; slowest < programs.size(); ++slowest) {
    Pipeline pipeline(options, programs);
    pipeline.run(slowest);
    if (!pipeline.is_finished()) {
      PD_CHECK(slowest == 0, "the outcome depends on the speeds: " << pipeline.describe_deadlock());
      return pipeline.describe_deadlock();
    }
    for (std::size_t boundary = 0; boundary < num_boundaries; ++boundary) {
      const Queue& activations = pipeline.activations()[boundary];
      const Queue& gradients = pipeline.gradients()[boundary];
      if (activations.reader == slowest) report.activations_queued_max[boundary] = activations.num_queued_max;
      if (gradients.reader == slowest) report.gradients_queued_max[boundary] = gradients.num_queued_max;
    }
  }
  return {};
}

}  // namespace

ReplayReport replay(const ScheduleOptions& options, const Programs& programs, std::int64_t num_minibatches) {
  ReplayReport report;
  report.error = check_shape(options, programs, num_minibatches);
  if (report.error.empty()) report.error = check_lists(options, programs, num_minibatches, report);
  if (report.error.empty()) report.error = check_together(options, programs, report);
  if (!report.error.empty()) return {false, report.error, {}, {}, {}, {}};  // what was counted is partial
  return report;
}

}  // namespace pipedream
