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

// One stage's part of a list: its counters, and whether an instruction may come next. A microbatch of the
// replica's has one number here, own minibatch * num_microbatches + microbatch: its item.
class StageChecker {
 public:
  StageChecker(const ScheduleOptions& options, StageReplica here, std::int64_t num_minibatches);

  [[nodiscard]] Fault check(const Instruction& instruction) const;
  void apply(const Instruction& instruction);
  [[nodiscard]] Fault missing_at_end() const;

  // Whether backwards of this round are still to be done.
  [[nodiscard]] bool has_backwards_left(std::int64_t round) const {
    return num_backwarded_ < end_of_round(round) * num_microbatches_;
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
  [[nodiscard]] std::int64_t newest_coming() const;
  [[nodiscard]] std::int64_t item_of(const Instruction& instruction) const {
    return rounds_.own_index(instruction.minibatch) * num_microbatches_ + instruction.microbatch.value();
  }
  [[nodiscard]] MinibatchId minibatch_of(std::int64_t item) const {
    return rounds_.own_minibatch(replica_, item / num_microbatches_);
  }
  [[nodiscard]] std::string name_of(std::int64_t item) const {  // "minibatch 3 microbatch 0"
    return "minibatch " + std::to_string(minibatch_of(item).value()) + " microbatch " +
           std::to_string(item % num_microbatches_);
  }
  // Of the replica's own minibatches, those before the round, and those before the next one.
  [[nodiscard]] std::int64_t begin_of_round(std::int64_t round) const {
    return std::min(num_own_, (round - rounds_.first_version().value()) * rounds_.own_per_round());
  }
  [[nodiscard]] std::int64_t end_of_round(std::int64_t round) const { return begin_of_round(round + 1); }

  const ScheduleOptions& options_;
  const StageIndex stage_;
  const ReplicaIndex replica_;
  const Rounds rounds_;
  const std::int64_t num_minibatches_;
  const std::int64_t num_own_;  // minibatches
  const std::int64_t num_microbatches_;
  const std::int64_t window_;
  const std::int64_t num_kept_;
  const std::int64_t num_gradients_kept_;  // of rounds
  const bool drains_;
  const bool stashes_;
  const bool recomputes_;

  std::int64_t num_forwarded_ = 0;  // items
  std::int64_t num_backwarded_ = 0;
  bool recomputed_ = false;  // the next item to go backward
  std::int64_t newest_;      // version, and so also the next round to update
  std::int64_t versions_live_max_ = 1;
  std::int64_t num_in_flight_max_ = 0;
};

StageChecker::StageChecker(const ScheduleOptions& options, StageReplica here, std::int64_t num_minibatches)
    : options_(options),
      stage_(here.stage),
      replica_(here.replica),
      rounds_(rounds_of(options, stage_)),
      num_minibatches_(num_minibatches),
      num_own_(rounds_.num_own(replica_, num_minibatches)),
      num_microbatches_(options.num_microbatches),
      window_(num_microbatches_in_flight(options, stage_)),
      num_kept_(num_versions_kept(options, stage_)),
      num_gradients_kept_(num_gradients_kept(options, stage_)),
      drains_(drains_every_minibatch(options)),
      stashes_(stashes_versions(options)),
      recomputes_(!options.recompute.empty() && options.recompute[index_of(stage_)]),
      newest_(rounds_.first_version().value()) {}

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
  const std::int64_t due = is_update ? rounds_.begin_of(rounds_.round_of(instruction.minibatch)).value()
                                     : instruction.minibatch.value();
  if (instruction.minibatch.value() != due) {
    return "an update is of the round that begins with minibatch " + std::to_string(due);
  }
  if (!is_update && rounds_.replica_of(instruction.minibatch) != replica_) {
    return "the minibatch is replica " + std::to_string(rounds_.replica_of(instruction.minibatch).value()) +
           "'s";
  }
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
    return "forwards go in order; the next is " + name_of(num_forwarded_);
  }
  if (drains_ && rounds_.round_of(instruction.minibatch) != newest_) {
    return "the schedule drains every minibatch, and the update of minibatch " +
           std::to_string(rounds_.begin_of(newest_).value()) + " was not done yet";
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
    return "backwards go in order; the next is " + name_of(num_backwarded_);
  }
  if (rounds_.round_of(instruction.minibatch) < newest_ + num_gradients_kept_) return {};
  return "the update of minibatch " + std::to_string(rounds_.begin_of(newest_).value()) +
         " is due first: gradients of two minibatches would be added up";
}

Fault StageChecker::check_update(const Instruction& instruction) const {
  const std::int64_t round = rounds_.round_of(instruction.minibatch);
  if (round < newest_) return "the update was already done";
  const std::int64_t before = begin_of_round(round) * num_microbatches_;
  const std::int64_t num_needed = end_of_round(round) * num_microbatches_ - before;
  const std::int64_t num_done = std::clamp<std::int64_t>(num_backwarded_ - before, 0, num_needed);
  if (num_done < num_needed) {
    return "the gradient is not complete: the backward of " + std::to_string(num_done) + " of " +
           std::to_string(num_needed) + " microbatches was done";
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

// When the instruction is being done. Reads go in order, so what is still read is one range of versions. A
// replica's own shard and those that others update are kept in the same slots, each at versions of its own.
std::int64_t StageChecker::num_versions_live(Opcode opcode) const {
  // The newest, and beside it what an update writes, unless it writes in place.
  const std::int64_t num_newest = opcode == Opcode::kUpdate && num_kept_ > 1 ? 2 : 1;
  const std::int64_t next_reader = num_backwarded_ / num_microbatches_;
  if (!stashes_ || next_reader >= num_own_) return num_newest;
  const auto read_by = [&](std::int64_t own_index) {
    return forward_version(options_, stage_, rounds_.own_minibatch(replica_, own_index)).value();
  };
  const std::int64_t first = read_by(next_reader);
  const std::int64_t last = std::min(read_by(num_own_ - 1), newest_ - 1);
  const std::int64_t num_own_shard = num_newest + std::max<std::int64_t>(0, last - first + 1);
  if (rounds_.num_replicas == 1) return num_own_shard;
  return std::max(num_own_shard, newest_coming() - first + 1);
}

// The newest that other replicas may have written: it is as new as the rounds whose backwards are done here.
std::int64_t StageChecker::newest_coming() const {
  return rounds_.first_version().value() + num_backwarded_ / num_microbatches_ / rounds_.own_per_round();
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
  if (newest_ == rounds_.last_version(num_minibatches_).value()) return {};
  const std::string stage = ' ' + to_string(StageReplica{stage_, replica_}) + ' ';
  if (!has_backwards_left(newest_)) {
    return opcode_name(Opcode::kUpdate) + stage + "minibatch " +
           std::to_string(rounds_.begin_of(newest_).value()) + " is missing";
  }
  const bool is_forwarded = num_backwarded_ < num_forwarded_;
  return opcode_name(is_forwarded ? Opcode::kBackward : Opcode::kForward) + stage + name_of(num_backwarded_) +
         " is missing";
}

// One worker's list.
class ListChecker {
 public:
  ListChecker(const ScheduleOptions& options, const Placement& placement, Rank rank,
              std::int64_t num_minibatches)
      : placement_(placement),
        rank_(rank),
        drains_(drains_every_minibatch(options)),
        rounds_(rounds_of(options, placement.stages_at(rank).front())) {
    for (const Place& place : placement.places_at(rank)) {
      stages_.emplace_back(options, StageReplica{place.stage, place.replica}, num_minibatches);
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
    const std::int64_t num_replicas = placement_.num_replicas(instruction.stage);
    if (instruction.replica.value() < 0 || instruction.replica.value() >= num_replicas) {
      return "the replica does not exist; the stage has " + std::to_string(num_replicas);
    }
    const Rank rank = placement_.rank_of(instruction.stage, instruction.replica);
    if (rank != rank_) {
      return (num_replicas > 1 ? "the replica" : "the stage") + std::string(" lies at worker ") +
             std::to_string(rank.value());
    }
    if (Fault fault = stage_of(instruction).check(instruction); !fault.empty()) return fault;
    return instruction.opcode == Opcode::kUpdate ? check_drained(instruction) : Fault();
  }

  // Where every minibatch drains, a norm over all stages is taken before the first update.
  [[nodiscard]] Fault check_drained(const Instruction& update) const {
    if (!drains_) return {};
    for (const StageChecker& stage : stages_) {
      if (!stage.has_backwards_left(rounds_.round_of(update.minibatch))) continue;
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
  const Rounds rounds_;               // of all stages here
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
        replica_(placement.places_at(rank).front().replica),
        rounds_(rounds_of(options, stages_.front())),
        transfers_(options, rank),
        next_round_(rounds_.first_version().value()) {
    transfers_.set_num_minibatches(num_minibatches);
    for (const StageIndex stage : stages_) num_backwarded_[stage] = 0;
    for (const Edge& edge : edges_) {
      const bool is_version = edge.kind == EdgeKind::kTiedVersion || edge.kind == EdgeKind::kPull;
      if (!is_version || placement.rank_of(edge.to.stage, edge.to.replica) != rank) continue;
      newest_received_[edge] = rounds_.first_version();
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
    const StageReplica& end = instruction.opcode == Opcode::kSend ? edge.from : edge.to;
    const bool is_here =
        std::find(stages_.begin(), stages_.end(), end.stage) != stages_.end() && end.replica == replica_;
    if (is_here && StageReplica{instruction.stage, instruction.replica} == end) return {};
    return to_string(end) + " is at another worker";
  }

  [[nodiscard]] Fault send(const Instruction& instruction) {
    if (std::erase(unsent_, instruction) == 1) return {};
    const bool is_due = std::find(pushes_.begin(), pushes_.end(), instruction) != pushes_.end();
    if (is_due && has_backwards_left(stages_.front())) return "the round still has backwards to do";
    if (std::erase(pushes_, instruction) == 1) return {};
    return "there is nothing to send: it was not made yet, or it was sent already";
  }

  [[nodiscard]] Fault receive(const Instruction& instruction) {
    if (newest_received_.contains(instruction.edge)) return receive_version(instruction);
    for (const Instruction& held : unused_) {
      if (held.edge == instruction.edge) return to_string(held) + " was not used yet";
    }
    unused_.push_back(instruction);
    return {};
  }

  // Versions of what another worker updates.
  [[nodiscard]] Fault receive_version(const Instruction& instruction) {
    WeightVersion& newest = newest_received_.at(instruction.edge);
    const MinibatchId due = rounds_.begin_of(newest.value());
    if (instruction.minibatch != due) {
      return "versions come in order; the next is that of minibatch " + std::to_string(due.value());
    }
    const std::int64_t next_reader = num_backwarded_.at(instruction.stage) / options_.num_microbatches;
    if (instruction.edge.kind == EdgeKind::kPull && rounds_.round_of(due) > newest_complete()) {
      return "the round still has backwards to do";
    }
    newest = newest.next();
    const bool is_tied = instruction.edge.kind == EdgeKind::kTiedVersion;
    const std::int64_t num_kept =
        is_tied ? num_tied_versions_kept(options_) : num_versions_kept(options_, instruction.stage);
    const std::int64_t overwritten = newest.value() - num_kept;
    const MinibatchId reader = rounds_.own_minibatch(replica_, next_reader);
    const bool is_read = reader.value() < num_minibatches_ && (is_tied || num_kept > 1);
    if (!is_read || overwritten < version_read(instruction.edge, reader).value()) return {};
    return "it overwrites version " + std::to_string(overwritten) + ", which minibatch " +
           std::to_string(reader.value()) + " still reads";
  }

  // The newest round whose gradient the replica has made, or is not a member of.
  [[nodiscard]] std::int64_t newest_complete() const {
    const std::int64_t num_own = num_backwarded_.at(stages_.front()) / options_.num_microbatches;
    if (num_own == rounds_.num_own(replica_, num_minibatches_)) {
      return rounds_.last_version(num_minibatches_).value() - 1;
    }
    return rounds_.first_version().value() + num_own / rounds_.own_per_round() - 1;
  }

  [[nodiscard]] WeightVersion version_read(const Edge& edge, MinibatchId minibatch) const {
    return edge.kind == EdgeKind::kTiedVersion ? tied_version(options_, minibatch)
                                               : forward_version(options_, edge.to.stage, minibatch);
  }

  // Of the round that is to be updated next.
  [[nodiscard]] bool has_backwards_left(StageIndex stage) const {
    const std::int64_t num_rounds = next_round_ + 1 - rounds_.first_version().value();
    const std::int64_t num_own =
        std::min(rounds_.num_own(replica_, num_minibatches_), num_rounds * rounds_.own_per_round());
    return num_backwarded_.at(stage) < num_own * options_.num_microbatches;
  }

  // The exchange that is under way, in the one order that it has.
  [[nodiscard]] Fault exchange_norm(const Instruction& instruction) {
    for (const StageIndex stage : stages_) {
      if (!has_backwards_left(stage)) continue;
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
    std::erase_if(unsent_, [](const Instruction& due) { return due.opcode == Opcode::kRecv; });
    if (instruction.opcode == Opcode::kBackward) ++num_backwarded_.at(instruction.stage);
    if (instruction.opcode == Opcode::kUpdate && ++num_updated_ == stages_.size()) {
      ++next_round_;
      begin_update();
    }
    return {};
  }

  [[nodiscard]] Fault take_received(const Instruction& instruction) {
    std::vector<Instruction> needed;
    transfers_.add_before(instruction, needed);
    for (const Instruction& due : needed) {
      if (due.edge.kind == EdgeKind::kNorm || newest_received_.contains(due.edge)) continue;
      const bool is_sent =
          due.opcode == Opcode::kSend && std::find(pushes_.begin(), pushes_.end(), due) == pushes_.end();
      if (!is_sent && std::erase(unused_, due) == 0) return to_string(due) + " comes first";
    }
    if (instruction.opcode == Opcode::kUpdate && num_norms_ < norms_.size()) {
      return to_string(norms_[num_norms_]) + " comes first";
    }
    return check_received(instruction);
  }

  // What is read has come.
  [[nodiscard]] Fault check_received(const Instruction& instruction) const {
    if (instruction.opcode == Opcode::kUpdate) return {};
    for (const auto& [edge, newest] : newest_received_) {
      const bool is_tied = edge.kind == EdgeKind::kTiedVersion;
      if (edge.to.stage != instruction.stage || (is_tied && instruction.opcode != Opcode::kForward)) continue;
      const WeightVersion read =
          is_tied ? tied_version(options_, instruction.minibatch) : instruction.version;
      if (read <= newest) continue;
      return "RECV " + to_string(edge) + " minibatch " +
             std::to_string(rounds_.begin_of(read.value() - 1).value()) + " comes first";
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
      case EdgeKind::kPull:
        return opcode == Opcode::kUpdate;
      case EdgeKind::kPush:
        return opcode == Opcode::kBackward;
      case EdgeKind::kNorm:
        return false;
    }
    PD_CHECK(false, "edge kind " << static_cast<int>(kind));
  }

  [[nodiscard]] bool is_unused(const Instruction& received) const {
    return std::find(unused_.begin(), unused_.end(), received) != unused_.end();
  }

  // Of the worker's stages, those of round next_round_.
  void begin_update() {
    num_updated_ = num_norms_ = 0;
    before_update_.clear();
    norms_.clear();
    pushes_.clear();
    const MinibatchId minibatch = rounds_.begin_of(next_round_);
    if (minibatch.value() >= num_minibatches_) return;
    transfers_.add_before({Opcode::kUpdate, stages_.front(), minibatch, {}, {}, {}, replica_},
                          before_update_);
    std::copy_if(before_update_.begin(), before_update_.end(), std::back_inserter(norms_),
                 [](const Instruction& due) { return due.edge.kind == EdgeKind::kNorm; });
    std::copy_if(before_update_.begin(), before_update_.end(), std::back_inserter(pushes_),
                 [](const Instruction& due) {
                   return due.opcode == Opcode::kSend && due.edge.kind == EdgeKind::kPush;
                 });
  }

  [[nodiscard]] Fault missing_at_end() const {
    if (!unsent_.empty()) return to_string(unsent_.front()) + " is missing";
    if (!unused_.empty()) return "nothing needs what " + to_string(unused_.front()) + " received";
    for (const auto& [edge, newest] : newest_received_) {
      if (newest == rounds_.last_version(num_minibatches_)) continue;
      return "RECV " + to_string(edge) + " minibatch " +
             std::to_string(rounds_.begin_of(newest.value()).value()) + " is missing";
    }
    return {};
  }

  const ScheduleOptions& options_;
  const std::vector<Edge> edges_;
  const Rank rank_;
  const std::vector<StageIndex> stages_;
  const std::int64_t num_minibatches_;
  const ReplicaIndex replica_;  // of the only stage, where it has several
  const Rounds rounds_;         // of all stages here
  Transfers transfers_;

  std::vector<Instruction> unsent_;                    // SENDs of what was made
  std::vector<Instruction> unused_;                    // RECVs of what nothing has used yet
  std::map<Edge, WeightVersion> newest_received_;      // of what others update
  std::map<StageIndex, std::int64_t> num_backwarded_;  // microbatches of the replica's own
  std::int64_t next_round_;
  std::vector<Instruction> pushes_;         // SENDs that are due before its update
  std::size_t num_updated_ = 0;             // stages, of this round
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
    text << "; " << place(worker, programs_[worker], positions_[worker]) << ": waits for "
         << to_string(instruction.edge.from);
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
  report.versions_live_max.assign(options.in_flight.size(), 0);
  report.activations_live_max.assign(options.in_flight.size(), 0);
  const Placement placement = placement_of(options);
  for (std::size_t worker = 0; worker < programs.size(); ++worker) {
    ListChecker checker(options, placement, Rank(static_cast<std::int64_t>(worker)), num_minibatches);
    if (std::string error = checker.run(programs[worker]); !error.empty()) return error;
    for (const StageChecker& stage : checker.stages()) {
      std::int64_t& versions = report.versions_live_max[index_of(stage.stage())];
      std::int64_t& activations = report.activations_live_max[index_of(stage.stage())];
      versions = std::max(versions, stage.versions_live_max());
      activations = std::max(activations, stage.num_in_flight_max());
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
