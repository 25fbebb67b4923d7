// Checks the SENDs and RECVs of one worker's list. See validator.h.
#include <algorithm>
#include <iterator>
#include <map>

#include "base/check.h"
#include "schedule/list_checks.h"
#include "schedule/transfers.h"

namespace pipedream {
namespace {

// A Fault is the reason why an instruction is not allowed at its place; empty if it is allowed. The caller
// adds the place in the list.
using Fault = std::string;

// Checks the transfers in one worker's list. An instruction must have received the items that it needs. The
// items that it makes must be sent before the next items of their kind are made.
class TransferChecker {
 public:
  explicit TransferChecker(const ListToCheck& list)
      : options_(list.options),
        edges_(edges_of(options_)),
        rank_(list.rank),
        stages_(list.placement.stages_at(rank_)),
        num_minibatches_(list.num_minibatches),
        replica_(list.placement.places_at(rank_).front().replica),
        rounds_(rounds_of(options_, stages_.front())),
        transfers_(options_, rank_),
        next_round_(rounds_.first_version().value()) {
    transfers_.set_num_minibatches(num_minibatches_);
    for (const StageIndex stage : stages_) num_backwarded_[stage] = 0;
    for (const Edge& edge : edges_) {
      const bool is_version = edge.kind == EdgeKind::kTiedVersion || edge.kind == EdgeKind::kPull;
      if (!is_version || list.placement.rank_of(edge.to.stage, edge.to.replica) != rank_) continue;
      newest_received_[edge] = rounds_of(options_, edge.from.stage).first_version();
    }
    begin_update();
  }

  // Returns the first fault with its place in the list, or an empty text.
  [[nodiscard]] std::string run(const std::vector<Instruction>& program) {
    for (std::size_t position = 0; position < program.size(); ++position) {
      const Fault fault = step(program[position]);
      if (!fault.empty()) return name_position(rank_, program, position) + ": " + fault;
    }
    const Fault fault = missing_at_end();
    return fault.empty() ? fault : name_position(rank_, program, program.size()) + ": " + fault;
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
    if (instruction.edge.kind == EdgeKind::kPush) {
      if (!owed_.empty()) return first_owed();
      if (Fault fault = check_answered(instruction); !fault.empty()) return fault;
    }
    if (std::erase(unsent_, instruction) == 1) return {};
    const bool is_due = std::find(pushes_.begin(), pushes_.end(), instruction) != pushes_.end();
    if (is_due && has_backwards_left(stages_.front())) return "the round still has backwards to do";
    if (std::erase(pushes_, instruction) == 1) return {};
    return "there is nothing to send: it was not made yet, or it was sent already";
  }

  // Checks that the answer to the previous push has been received. An asynchronous shard has room for only
  // one answer to each replica.
  [[nodiscard]] Fault check_answered(const Instruction& push) const {
    if (!options_.asynchronous) return {};
    const WeightVersion answer(rounds_.round_of(push.minibatch));
    for (const auto& [edge, newest] : newest_received_) {
      if (newest < answer) return to_string(due_of(edge, newest)) + " comes first";
    }
    return {};
  }

  // Returns the RECV of the next version over the edge. newest: the version that arrived last.
  [[nodiscard]] Instruction due_of(const Edge& edge, WeightVersion newest) const {
    const MinibatchId first = rounds_of(options_, edge.from.stage).begin_of(newest.value());
    return {Opcode::kRecv, edge.to.stage, first, {}, {}, edge, edge.to.replica};
  }

  [[nodiscard]] Fault receive(const Instruction& instruction) {
    if (newest_received_.contains(instruction.edge)) return receive_version(instruction);
    if (instruction.edge.kind == EdgeKind::kTiedGradient) {
      if (std::erase(owed_, instruction) == 1) return {};
      return "it is added to the owner's own, which its last backward of the minibatch makes";
    }
    for (const Instruction& held : unused_) {
      if (held.edge == instruction.edge) return to_string(held) + " was not used yet";
    }
    unused_.push_back(instruction);
    return {};
  }

  // Receives a version of parameters that another worker updates: of a shard or of tied parameters.
  [[nodiscard]] Fault receive_version(const Instruction& instruction) {
    WeightVersion& newest = newest_received_.at(instruction.edge);
    const StageIndex updater = instruction.edge.from.stage;
    const MinibatchId due = rounds_of(options_, updater).begin_of(newest.value());
    if (instruction.minibatch != due) {
      return "versions come in order; the next is that of minibatch " + std::to_string(due.value());
    }
    if (instruction.edge.kind == EdgeKind::kPull && rounds_.round_of(due) > newest_complete()) {
      return "the round still has backwards to do";
    }
    newest = newest.next();
    if (instruction.edge.kind == EdgeKind::kTiedVersion) {
      return check_overwritten(instruction.stage, newest, tied_rule_of(options_, updater));
    }
    // A stage that does not stash has one slot, and a backward reads whatever version is in it. So only a
    // stage that stashes could overwrite a version that is still needed.
    const VersionRule rule = forward_rule_of(options_, instruction.stage);
    if (stashes_versions(options_, instruction.stage)) {
      if (Fault fault = check_overwritten(instruction.stage, newest, rule); !fault.empty()) return fault;
    }
    return check_tied_overwritten(instruction.stage, newest);
  }

  // Checks that no microbatch still reads the version that `written` overwrites in its slot.
  [[nodiscard]] Fault check_overwritten(StageIndex stage, WeightVersion written,
                                        const VersionRule& rule) const {
    const std::int64_t reader = rounds_.own_number(replica_, num_backwarded_.at(stage));
    const MinibatchId minibatch = rounds_.minibatch_of(reader);
    const std::int64_t overwritten = written.value() - rule.num_versions_kept();
    if (minibatch.value() >= num_minibatches_ || overwritten < rule.oldest_from(reader).value()) return {};
    return "it overwrites version " + std::to_string(overwritten) + ", which minibatch " +
           std::to_string(minibatch.value()) + " still reads";
  }

  // Checks that no microbatch still reads the version of the stage's own tied parameters that `written`
  // overwrites in its slot.
  [[nodiscard]] Fault check_tied_overwritten(StageIndex stage, WeightVersion written) const {
    return owns_ties(stage) ? check_overwritten(stage, written, tied_rule_of(options_, stage)) : Fault();
  }

  [[nodiscard]] bool owns_ties(StageIndex stage) const {
    return std::any_of(options_.ties.begin(), options_.ties.end(),
                       [&](const TiedStages& tied) { return tied.owner == stage; });
  }

  // Returns the newest round of which the replica has made its whole gradient. Once all backwards of the
  // replica are done, it is the run's last round, even if the replica has no microbatch in that round.
  [[nodiscard]] std::int64_t newest_complete() const {
    const std::int64_t num_own = num_backwarded_.at(stages_.front());
    if (num_own == rounds_.num_own(replica_, num_minibatches_)) {
      return rounds_.last_version(replica_, num_minibatches_).value() - 1;
    }
    return rounds_.first_version().value() + num_own / rounds_.own_per_round() - 1;
  }

  // Returns whether the stage still has backwards to do in the round that is updated next.
  [[nodiscard]] bool has_backwards_left(StageIndex stage) const {
    const std::int64_t num_rounds = next_round_ + 1 - rounds_.first_version().value();
    const std::int64_t num_own =
        std::min(rounds_.num_own(replica_, num_minibatches_), num_rounds * rounds_.own_per_round());
    return num_backwarded_.at(stage) < num_own;
  }

  // Checks the next step of the exchange of norms. The steps have one fixed order.
  [[nodiscard]] Fault exchange_norm(const Instruction& instruction) {
    for (const StageIndex stage : stages_) {
      if (!has_backwards_left(stage)) continue;
      return "stage " + std::to_string(stage.value()) + " still has backwards to do";
    }
    if (!owed_.empty()) return first_owed();
    for (const Instruction& due : before_update_) {
      if (due.edge.kind != EdgeKind::kNorm && is_pending(due)) return to_string(due) + " comes first";
    }
    if (num_norms_ == norms_.size()) return "the norms of the minibatch were exchanged already";
    if (instruction != norms_[num_norms_]) return to_string(norms_[num_norms_]) + " comes first";
    ++num_norms_;
    return {};
  }

  [[nodiscard]] Fault first_owed() const { return to_string(owed_.front()) + " comes first"; }

  [[nodiscard]] Fault compute(const Instruction& instruction) {
    if (Fault fault = take_received(instruction); !fault.empty()) return fault;
    const OpcodeTraits& traits = traits_of(instruction.opcode);
    const bool adds_up = traits.stash == Stash::kReleased || traits.writes_version;
    if (adds_up && !owed_.empty() && owed_.front().stage == instruction.stage) return first_owed();
    for (const Instruction& due : unsent_) {
      if (due.stage == instruction.stage && is_made_by(due.edge.kind, traits)) {
        return to_string(due) + " comes first";
      }
    }
    if (traits.writes_version) {
      Fault fault = check_tied_overwritten(instruction.stage, instruction.version);
      if (!fault.empty()) return fault;
    }
    transfers_.add_after(instruction, unsent_);
    std::copy_if(unsent_.begin(), unsent_.end(), std::back_inserter(owed_), [](const Instruction& due) {
      return due.opcode == Opcode::kRecv && due.edge.kind == EdgeKind::kTiedGradient;
    });
    std::erase_if(unsent_, [](const Instruction& due) { return due.opcode == Opcode::kRecv; });
    if (traits.stash == Stash::kReleased) ++num_backwarded_.at(instruction.stage);
    if (traits.writes_version && ++num_updated_ == stages_.size()) {
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
    if (writes_version(instruction.opcode) && num_norms_ < norms_.size()) {
      return to_string(norms_[num_norms_]) + " comes first";
    }
    return check_received(instruction);
  }

  // Checks that the versions that the instruction reads have all come.
  [[nodiscard]] Fault check_received(const Instruction& instruction) const {
    if (writes_version(instruction.opcode)) return {};
    const bool evaluates = is_of_boundary(instruction.opcode);
    const bool forwards = keeps_stash(instruction.opcode);
    for (const auto& [edge, newest] : newest_received_) {
      const bool is_tied = edge.kind == EdgeKind::kTiedVersion;
      if (edge.to.stage != instruction.stage || (is_tied && !evaluates && !forwards)) continue;
      WeightVersion read = instruction.version;
      // At a stage that owns tied parameters, a pull also brings the new version of those parameters.
      if (evaluates) {
        read = version_at_boundary(rounds_of(options_, edge.from.stage), instruction.minibatch);
      } else if (is_tied || (forwards && owns_ties(instruction.stage))) {
        const WeightVersion tied =
            tied_version(options_, edge.from.stage, instruction.minibatch, instruction.microbatch);
        read = is_tied ? tied : std::max(read, tied);
      }
      if (read <= newest) continue;
      const MinibatchId first = rounds_of(options_, edge.from.stage).begin_of(read.value() - 1);
      return "RECV " + to_string(edge) + " minibatch " + std::to_string(first.value()) + " comes first";
    }
    return {};
  }

  [[nodiscard]] static bool is_made_by(EdgeKind kind, const OpcodeTraits& traits) {
    switch (kind) {
      case EdgeKind::kTiedGradient:
      case EdgeKind::kPush:
        return traits.stash == Stash::kReleased;
      case EdgeKind::kTiedVersion:
      case EdgeKind::kPull:
        return traits.writes_version;
      case EdgeKind::kActivation:
      case EdgeKind::kGradient:
      case EdgeKind::kEvaluation:
      case EdgeKind::kNorm:
        return traits.makes == kind;
    }
    PD_CHECK(false, "edge kind " << static_cast<int>(kind));
  }

  [[nodiscard]] bool is_unused(const Instruction& received) const {
    return std::find(unused_.begin(), unused_.end(), received) != unused_.end();
  }

  // Returns whether the transfer is still to be done before the update.
  [[nodiscard]] bool is_pending(const Instruction& due) const {
    if (due.opcode == Opcode::kRecv) return !is_unused(due);
    return std::find(pushes_.begin(), pushes_.end(), due) != pushes_.end();
  }

  // Prepares the checks of the next round's update.
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
      if (newest == rounds_of(options_, edge.from.stage).last_version(replica_, num_minibatches_)) continue;
      return to_string(due_of(edge, newest)) + " is missing";
    }
    return {};
  }

  const ScheduleOptions& options_;
  const std::vector<Edge> edges_;
  const Rank rank_;
  const std::vector<StageIndex> stages_;
  const std::int64_t num_minibatches_;
  const ReplicaIndex replica_;  // the worker's replica of its only stage; 0 if it has several stages
  const Rounds rounds_;         // the same at all stages of the worker
  Transfers transfers_;

  std::vector<Instruction> unsent_;                // SENDs of items that are made and not sent yet
  std::vector<Instruction> unused_;                // RECVs whose items are not used yet
  std::vector<Instruction> owed_;                  // RECVs of tied gradients that must follow a backward
  std::map<Edge, WeightVersion> newest_received_;  // the newest version that has come over each edge
  // How many of this replica's microbatches are backwarded.
  std::map<StageIndex, std::int64_t> num_backwarded_;
  std::int64_t next_round_;
  std::vector<Instruction> pushes_;         // SENDs of pushes that must come before the round's update
  std::size_t num_updated_ = 0;             // how many stages have updated in this round
  std::vector<Instruction> before_update_;  // all transfers before the round's first UPDATE
  std::vector<Instruction> norms_;          // the transfers of norms in before_update_
  std::size_t num_norms_ = 0;               // how many of norms_ are done
};
}  // namespace

std::string check_transfers(const ListToCheck& list) { return TransferChecker(list).run(list.program); }

}  // namespace pipedream
