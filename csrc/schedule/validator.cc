// Replay of all workers' programs in memory. See validator.h.
//
// In two steps. What a stage reads, keeps and updates depends on its worker's own list alone, so every
// list is checked by itself: what it computes (ListChecker), and what it receives for that and sends of it
// (TransferChecker). What then remains is whether the lists fit together (check_items, Pipeline).
// There the workers form a Kahn network: each has one order of instructions and waits only for queues, so
// whether a deadlock exists does not depend on the workers' speeds, and one replay in any order proves it.
// How long a queue grows does depend on them: when its reader has done j instructions, what was written
// into the queue is most when all other workers have gone as far as they can, so the worst case of all
// queues of one reader is the replay in which that worker moves only when nobody else can. Both steps are
// linear in the number of instructions, the second once per worker.
#include "schedule/validator.h"

#include <algorithm>
#include <iterator>
#include <map>
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

  std::int64_t num_forwarded_;  // items since minibatch 0
  std::int64_t num_backwarded_;
  bool recomputed_ = false;  // the next item to go backward
  std::int64_t newest_;      // version, and so also the next minibatch to update
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
      recomputes_(!options.recompute.empty() && options.recompute[index_of(stage)]),
      num_forwarded_(options.first_minibatch.value() * options.num_microbatches),
      num_backwarded_(num_forwarded_),
      newest_(options.first_minibatch.value()) {}

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
    case Opcode::kSend:
    case Opcode::kRecv:
      break;
  }
  PD_CHECK(false, "opcode " << static_cast<int>(instruction.opcode) << ", stage " << stage_.value());
}

Fault StageChecker::check_range(const Instruction& instruction) const {
  const std::int64_t first = options_.first_minibatch.value();
  if (instruction.minibatch.value() >= 0 && instruction.minibatch.value() < first) {
    return "the minibatch is before the first, " + std::to_string(first);
  }
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
    case Opcode::kSend:
    case Opcode::kRecv:
      break;
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
      if (travels(program[position].opcode)) continue;
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

// One worker's transfers: what is computed has what it needs, and what it makes is sent before more is made.
class TransferChecker {
 public:
  TransferChecker(const ScheduleOptions& options, const Placement& placement, Rank rank,
                  std::int64_t num_minibatches)
      : options_(options),
        edges_(edges_of(options)),
        rank_(rank),
        stages_(placement.stages_at(rank)),
        num_minibatches_(num_minibatches),
        transfers_(options, rank),
        next_update_(options.first_minibatch) {
    for (const StageIndex stage : stages_) {
      num_backwarded_[stage] = options.first_minibatch.value() * options.num_microbatches;
    }
    for (const Edge& edge : edges_) {
      if (edge.kind != EdgeKind::kTiedVersion || placement.rank_of(edge.to.stage) != rank) continue;
      newest_tied_[edge] = WeightVersion(options.first_minibatch.value());
    }
    begin_update();
  }

  // The first fault with its place, or empty.
  [[nodiscard]] std::string run(const std::vector<Instruction>& program) {
    const auto worker_index = static_cast<std::size_t>(rank_.value());
    for (std::size_t position = 0; position < program.size(); ++position) {
      const Fault fault = step(program[position]);
      if (!fault.empty()) return place(worker_index, program, position) + ": " + fault;
    }
    const Fault fault = missing_at_end();
    return fault.empty() ? fault : place(worker_index, program, program.size()) + ": " + fault;
  }

 private:
  [[nodiscard]] Fault step(const Instruction& instruction) {
    if (!travels(instruction.opcode)) return compute(instruction);
    if (Fault fault = check_edge(instruction); !fault.empty()) return fault;
    if (instruction.edge.kind == EdgeKind::kNorm) return exchange_norm(instruction);
    return instruction.opcode == Opcode::kSend ? send(instruction) : receive(instruction);
  }

  [[nodiscard]] Fault check_edge(const Instruction& instruction) const {
    if (!std::binary_search(edges_.begin(), edges_.end(), instruction.edge)) {
      return "there is no such edge in the schedule";
    }
    const Edge& edge = instruction.edge;
    const StageIndex end = instruction.opcode == Opcode::kSend ? edge.from.stage : edge.to.stage;
    const bool is_here = std::find(stages_.begin(), stages_.end(), end) != stages_.end();
    if (is_here && instruction.stage == end) return {};
    return "stage " + std::to_string(end.value()) + " is at another worker";
  }

  [[nodiscard]] Fault send(const Instruction& instruction) {
    if (std::erase(unsent_, instruction) == 1) return {};
    return "there is nothing to send: it was not made yet, or it was sent already";
  }

  [[nodiscard]] Fault receive(const Instruction& instruction) {
    if (instruction.edge.kind == EdgeKind::kTiedVersion) return receive_version(instruction);
    for (const Instruction& held : unused_) {
      if (held.edge == instruction.edge) return to_string(held) + " was not used yet";
    }
    unused_.push_back(instruction);
    return {};
  }

  [[nodiscard]] Fault receive_version(const Instruction& instruction) {
    WeightVersion& newest = newest_tied_.at(instruction.edge);
    const std::int64_t due = newest.value();
    if (instruction.minibatch.value() != due) {
      return "versions come in order; the next is that of minibatch " + std::to_string(due);
    }
    newest = newest.next();
    const std::int64_t overwritten = newest.value() - num_tied_versions_kept(options_);
    const MinibatchId reader(num_backwarded_.at(instruction.stage) / options_.num_microbatches);
    if (reader.value() >= num_minibatches_ || overwritten < tied_version(options_, reader).value()) return {};
    return "it overwrites version " + std::to_string(overwritten) + ", which minibatch " +
           std::to_string(reader.value()) + " still reads";
  }

  // The exchange that is under way, in the one order that it has.
  [[nodiscard]] Fault exchange_norm(const Instruction& instruction) {
    for (const StageIndex stage : stages_) {
      if (num_backwarded_.at(stage) >= (next_update_.value() + 1) * options_.num_microbatches) continue;
      return "stage " + std::to_string(stage.value()) + " still has backwards to do";
    }
    for (const Instruction& due : before_update_) {
      if (due.edge.kind != EdgeKind::kNorm && !is_unused(due)) return to_string(due) + " comes first";
    }
    if (num_norms_ == norms_.size()) return "the norms of the minibatch were exchanged already";
    if (instruction != norms_[num_norms_]) return to_string(norms_[num_norms_]) + " comes first";
    ++num_norms_;
    return {};
  }

  [[nodiscard]] Fault compute(const Instruction& instruction) {
    if (Fault fault = take_received(instruction); !fault.empty()) return fault;
    for (const Instruction& due : unsent_) {
      if (due.stage == instruction.stage && is_made_by(due.edge.kind, instruction.opcode)) {
        return to_string(due) + " comes first";
      }
    }
    transfers_.add_after(instruction, unsent_);
    if (instruction.opcode == Opcode::kBackward) ++num_backwarded_.at(instruction.stage);
    if (instruction.opcode == Opcode::kUpdate && ++num_updated_ == stages_.size()) {
      next_update_ = next_update_.next();
      begin_update();
    }
    return {};
  }

  [[nodiscard]] Fault take_received(const Instruction& instruction) {
    std::vector<Instruction> needed;
    transfers_.add_before(instruction, needed);
    for (const Instruction& due : needed) {
      if (due.edge.kind == EdgeKind::kNorm || due.edge.kind == EdgeKind::kTiedVersion) continue;
      if (std::erase(unused_, due) == 0) return to_string(due) + " comes first";
    }
    if (instruction.opcode == Opcode::kUpdate && num_norms_ < norms_.size()) {
      return to_string(norms_[num_norms_]) + " comes first";
    }
    if (instruction.opcode != Opcode::kForward) return {};
    for (const auto& [edge, newest] : newest_tied_) {
      const WeightVersion read = tied_version(options_, instruction.minibatch);
      if (edge.to.stage != instruction.stage || read <= newest) continue;
      return "RECV " + to_string(edge) + " minibatch " + std::to_string(read.value() - 1) + " comes first";
    }
    return {};
  }

  [[nodiscard]] static bool is_made_by(EdgeKind kind, Opcode opcode) {
    switch (kind) {
      case EdgeKind::kActivation:
        return opcode == Opcode::kForward;
      case EdgeKind::kGradient:
      case EdgeKind::kTiedGradient:
        return opcode == Opcode::kBackward;
      case EdgeKind::kTiedVersion:
        return opcode == Opcode::kUpdate;
      case EdgeKind::kNorm:
        return false;
    }
    PD_CHECK(false, "edge kind " << static_cast<int>(kind));
  }

  [[nodiscard]] bool is_unused(const Instruction& received) const {
    return std::find(unused_.begin(), unused_.end(), received) != unused_.end();
  }

  // Of the worker's stages, those of minibatch next_update_.
  void begin_update() {
    num_updated_ = num_norms_ = 0;
    before_update_.clear();
    norms_.clear();
    transfers_.add_before({Opcode::kUpdate, stages_.front(), next_update_, {}, {}, {}}, before_update_);
    std::copy_if(before_update_.begin(), before_update_.end(), std::back_inserter(norms_),
                 [](const Instruction& due) { return due.edge.kind == EdgeKind::kNorm; });
  }

  [[nodiscard]] Fault missing_at_end() const {
    if (!unsent_.empty()) return to_string(unsent_.front()) + " is missing";
    if (!unused_.empty()) return "nothing needs what " + to_string(unused_.front()) + " received";
    for (const auto& [edge, newest] : newest_tied_) {
      if (newest.value() == num_minibatches_) continue;
      return "RECV " + to_string(edge) + " minibatch " + std::to_string(newest.value()) + " is missing";
    }
    return {};
  }

  const ScheduleOptions& options_;
  const std::vector<Edge> edges_;
  const Rank rank_;
  const std::vector<StageIndex> stages_;
  const std::int64_t num_minibatches_;
  const Transfers transfers_;

  std::vector<Instruction> unsent_;                    // SENDs of what was made
  std::vector<Instruction> unused_;                    // RECVs of what nothing has used yet
  std::map<Edge, WeightVersion> newest_tied_;          // received
  std::map<StageIndex, std::int64_t> num_backwarded_;  // microbatches since minibatch 0
  MinibatchId next_update_;
  std::size_t num_updated_ = 0;             // stages, of this minibatch
  std::vector<Instruction> before_update_;  // of the first of them
  std::vector<Instruction> norms_;          // of these
  std::size_t num_norms_ = 0;               // done
};

constexpr std::size_t kNoEdge = static_cast<std::size_t>(-1);

// Items come in the order in which they are asked for (check_items), so counting is enough.
struct Queue {
  std::size_t reader = 0;  // worker
  std::int64_t num_queued = 0;
  std::int64_t num_queued_max = 0;
};

// All workers at work on lists that are right by themselves.
class Pipeline {
 public:
  Pipeline(const Placement& placement, const std::vector<Edge>& edges, const Programs& programs);

  // Runs every program as far as it goes, from the start; `slowest` moves only when no other worker can.
  void run(std::size_t slowest);

  [[nodiscard]] bool is_finished() const;
  [[nodiscard]] std::string describe_deadlock() const;
  [[nodiscard]] const std::vector<Queue>& queues() const { return queues_; }  // by edge

 private:
  bool step(std::size_t worker);
  void run_others(std::size_t slowest);

  [[nodiscard]] bool is_over(std::size_t worker) const {
    return positions_[worker] == programs_[worker].size();
  }

  const Programs& programs_;
  std::vector<std::vector<std::size_t>> edge_indices_;  // per worker and instruction; kNoEdge: it computes
  std::vector<std::size_t> positions_;                  // per worker
  std::vector<Queue> queues_;
  std::vector<std::size_t> awake_;  // workers that may be able to move; the slowest is passed over
};

Pipeline::Pipeline(const Placement& placement, const std::vector<Edge>& edges, const Programs& programs)
    : programs_(programs) {
  for (const std::vector<Instruction>& program : programs) {
    std::vector<std::size_t>& indices = edge_indices_.emplace_back();
    indices.reserve(program.size());
    for (const Instruction& instruction : program) {
      const auto edge = std::lower_bound(edges.begin(), edges.end(), instruction.edge);
      indices.push_back(travels(instruction.opcode) ? static_cast<std::size_t>(edge - edges.begin())
                                                    : kNoEdge);
    }
  }
  for (const Edge& edge : edges) {
    queues_.push_back({index_of(placement.rank_of(edge.to.stage, edge.to.replica)), 0, 0});
  }
}

void Pipeline::run(std::size_t slowest) {
  positions_.assign(programs_.size(), 0);
  for (Queue& queue : queues_) queue.num_queued = queue.num_queued_max = 0;
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

// Does the worker's next instruction, if it can, and wakes the one that was waiting for its item.
bool Pipeline::step(std::size_t worker) {
  if (is_over(worker)) return false;
  const std::size_t position = positions_[worker];
  const std::size_t edge = edge_indices_[worker][position];
  if (edge != kNoEdge) {
    Queue& queue = queues_[edge];
    if (programs_[worker][position].opcode == Opcode::kRecv) {
      if (queue.num_queued == 0) return false;
      --queue.num_queued;
    } else {
      if (++queue.num_queued == 1) awake_.push_back(queue.reader);
      queue.num_queued_max = std::max(queue.num_queued_max, queue.num_queued);
    }
  }
  ++positions_[worker];
  return true;
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
    text << "; " << place(worker, programs_[worker], positions_[worker]) << ": waits for stage "
         << instruction.edge.from.stage.value();
  }
  return text.str();
}

std::string check_shape(const ScheduleOptions& options, const Programs& programs,
                        std::int64_t num_minibatches) {
  try {
    check_schedule_options(options);
    check_num_minibatches(options, num_minibatches);
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

// The transfers of every list by itself; returns the first fault.
std::string check_transfers(const ScheduleOptions& options, const Programs& programs,
                            std::int64_t num_minibatches) {
  const Placement placement = placement_of(options);
  for (std::size_t worker = 0; worker < programs.size(); ++worker) {
    TransferChecker checker(options, placement, Rank(static_cast<std::int64_t>(worker)), num_minibatches);
    if (std::string error = checker.run(programs[worker]); !error.empty()) return error;
  }
  return {};
}

// What an edge carries, item by item, as its sender and its receiver have it; returns the first difference.
std::string check_items(const Programs& programs) {
  std::map<Edge, std::vector<const Instruction*>> sent;
  for (const std::vector<Instruction>& program : programs) {
    for (const Instruction& instruction : program) {
      if (instruction.opcode == Opcode::kSend) sent[instruction.edge].push_back(&instruction);
    }
  }
  std::map<Edge, std::size_t> num_received;
  for (std::size_t worker = 0; worker < programs.size(); ++worker) {
    for (std::size_t position = 0; position < programs[worker].size(); ++position) {
      const Instruction& received = programs[worker][position];
      if (received.opcode != Opcode::kRecv) continue;
      const std::vector<const Instruction*>& items = sent[received.edge];
      const std::size_t index = num_received[received.edge]++;
      const bool is_sent = index < items.size() && items[index]->minibatch == received.minibatch &&
                           items[index]->microbatch == received.microbatch;
      if (is_sent) continue;
      return place(worker, programs[worker], position) +
             (index < items.size() ? ": the edge's next is " + to_string(*items[index])
                                   : std::string(": the edge carries no more"));
    }
  }
  for (const auto& [edge, items] : sent) {
    if (items.size() > num_received[edge])
      return to_string(*items[num_received[edge]]) + " is never received";
  }
  return {};
}

// All lists together. Fills in what is known per edge; returns the deadlock, if there is one.
std::string check_together(const ScheduleOptions& options, const Programs& programs, ReplayReport& report) {
  const std::vector<Edge> edges = edges_of(options);
  for (const Edge& edge : edges) report.edges.push_back({edge, 0});
  Pipeline pipeline(placement_of(options), edges, programs);
  for (std::size_t slowest = 0; slowest < programs.size(); ++slowest) {
    pipeline.run(slowest);
    if (!pipeline.is_finished()) {
      PD_CHECK(slowest == 0, "the outcome depends on the speeds: " << pipeline.describe_deadlock());
      return pipeline.describe_deadlock();
    }
    for (std::size_t edge = 0; edge < edges.size(); ++edge) {
      const Queue& queue = pipeline.queues()[edge];
      if (queue.reader == slowest) report.edges[edge].queued_max = queue.num_queued_max;
    }
  }
  return {};
}

}  // namespace

ReplayReport replay(const ScheduleOptions& options, const Programs& programs, std::int64_t num_minibatches) {
  ReplayReport report;
  report.error = check_shape(options, programs, num_minibatches);
  if (report.error.empty()) report.error = check_lists(options, programs, num_minibatches, report);
  if (report.error.empty()) report.error = check_transfers(options, programs, num_minibatches);
  if (report.error.empty()) report.error = check_items(programs);
  if (report.error.empty()) report.error = check_together(options, programs, report);
  if (!report.error.empty()) return {false, report.error, {}, {}, {}};  // what was counted is partial
  return report;
}

}  // namespace pipedream
