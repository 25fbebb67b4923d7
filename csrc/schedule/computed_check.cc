// Checks the computing instructions of one worker's list. See validator.h.
#include <algorithm>
#include <array>

#include "base/check.h"
#include "schedule/evaluations.h"
#include "schedule/list_checks.h"

namespace pipedream {
namespace {

// A Fault is the reason why an instruction is not allowed at its place; empty if it is allowed. The caller
// adds the place in the list.
using Fault = std::string;

std::size_t index_of(Opcode opcode) { return static_cast<std::size_t>(opcode); }

std::size_t index_of(StageIndex stage) { return static_cast<std::size_t>(stage.value()); }

// Checks the instructions of one stage in a list, one after the other, and counts what they do. Here an item
// is a microbatch of the replica. An item's number counts the replica's microbatches from the start of the
// run (Rounds::own_index()).
class StageChecker {
 public:
  StageChecker(const ScheduleOptions& options, StageReplica here, std::int64_t num_minibatches);

  [[nodiscard]] Fault check(const Instruction& instruction) const;
  void apply(const Instruction& instruction);
  [[nodiscard]] Fault missing_at_end() const;

  // Returns whether the stage still has backwards of this round to do.
  [[nodiscard]] bool has_backwards_left(std::int64_t round) const {
    return num_backwarded_ < end_of_round(round);
  }
  [[nodiscard]] StageIndex stage() const { return stage_; }
  [[nodiscard]] std::int64_t versions_live_max() const { return versions_live_max_; }
  [[nodiscard]] std::int64_t num_in_flight_max() const { return num_in_flight_max_; }

 private:
  [[nodiscard]] Fault check_range(const Instruction& instruction) const;
  [[nodiscard]] Fault check_boundary(const Instruction& instruction) const;
  [[nodiscard]] Fault check_version_at_boundary(const Instruction& instruction) const;
  [[nodiscard]] Fault check_forward(const Instruction& instruction) const;
  [[nodiscard]] Fault check_order(const Instruction& instruction) const;
  [[nodiscard]] Fault check_behind_forward(const Instruction& instruction) const;
  [[nodiscard]] Fault check_recomputed(const Instruction& instruction) const;
  [[nodiscard]] Fault check_stashed(const Instruction& instruction) const;
  [[nodiscard]] Fault check_update(const Instruction& instruction) const;
  [[nodiscard]] Fault check_read(WeightVersion version, WeightVersion rule) const;
  [[nodiscard]] std::int64_t num_versions_live(Opcode opcode) const;
  [[nodiscard]] std::int64_t newest_coming() const;
  [[nodiscard]] std::int64_t item_of(const Instruction& instruction) const {
    return rounds_.own_index(rounds_.number_of(instruction.minibatch, instruction.microbatch));
  }
  [[nodiscard]] std::string name_of(std::int64_t item) const {  // "minibatch 3 microbatch 0"
    const std::int64_t number = rounds_.own_number(replica_, item);
    return "minibatch " + std::to_string(rounds_.minibatch_of(number).value()) + " microbatch " +
           std::to_string(rounds_.microbatch_of(number).value());
  }
  // Returns how many of the replica's items come before the round. end_of_round() counts those before the
  // next round.
  [[nodiscard]] std::int64_t begin_of_round(std::int64_t round) const {
    return std::min(num_own_, (round - rounds_.first_version().value()) * rounds_.own_per_round());
  }
  [[nodiscard]] std::int64_t end_of_round(std::int64_t round) const { return begin_of_round(round + 1); }

  const ScheduleOptions& options_;
  const StageIndex stage_;
  const ReplicaIndex replica_;
  const Rounds rounds_;
  const std::int64_t num_minibatches_;
  const std::int64_t num_own_;  // how many items the replica has in the run
  const VersionRule rule_;      // the rule of forwards
  const std::int64_t num_microbatches_;
  const std::int64_t window_;
  const std::int64_t num_kept_;
  const std::int64_t num_gradients_kept_;  // number of rounds whose gradients may be held at once
  const bool drains_;
  const bool stashes_;
  const bool recomputes_;

  // The number of instructions so far, by opcode.
  std::array<std::int64_t, kOpcodeTraits.size()> num_done_{};
  std::int64_t num_forwarded_ = 0;  // items
  std::int64_t num_backwarded_ = 0;
  bool recomputed_ = false;  // whether the RECOMPUTE before the next BACKWARD is done
  // By opcode: the last boundary so far that has such instructions, and how many it has had.
  struct AtBoundary {
    MinibatchId minibatch{-1};
    std::int64_t num_done = 0;
  };
  std::array<AtBoundary, kOpcodeTraits.size()> at_boundary_{};
  std::int64_t newest_;  // the number of the newest version and of the next round to update
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
      rule_(forward_rule_of(options, stage_)),
      num_microbatches_(options.num_microbatches),
      window_(num_microbatches_in_flight(options, stage_)),
      num_kept_(num_versions_kept(options, stage_)),
      num_gradients_kept_(num_gradients_kept(options, stage_)),
      drains_(drains_every_minibatch(options)),
      stashes_(stashes_versions(options, stage_)),
      recomputes_(!options.recompute.empty() && options.recompute[index_of(stage_)]),
      newest_(rounds_.first_version().value()) {}

Fault StageChecker::check(const Instruction& instruction) const {
  if (Fault fault = check_range(instruction); !fault.empty()) return fault;
  const OpcodeTraits& traits = traits_of(instruction.opcode);
  switch (traits.scope) {
    case Scope::kRound:
      return check_update(instruction);
    case Scope::kBoundary:
      return check_version_at_boundary(instruction);
    case Scope::kMicrobatch:
      if (Fault fault = check_order(instruction); !fault.empty()) return fault;
      return traits.follows ? check_behind_forward(instruction) : check_forward(instruction);
  }
  PD_CHECK(false, to_string(instruction));
}

Fault StageChecker::check_range(const Instruction& instruction) const {
  const std::int64_t first = options_.first_minibatch.value();
  if (is_of_boundary(instruction.opcode)) return check_boundary(instruction);
  if (instruction.minibatch.value() >= 0 && instruction.minibatch.value() < first) {
    return "the minibatch is before the first, " + std::to_string(first);
  }
  if (instruction.minibatch.value() < 0 || instruction.minibatch.value() >= num_minibatches_) {
    return "the minibatch does not exist; there are " + std::to_string(num_minibatches_);
  }
  const bool is_update = writes_version(instruction.opcode);
  const std::int64_t due = is_update ? rounds_.begin_of(rounds_.round_of(instruction.minibatch)).value()
                                     : instruction.minibatch.value();
  if (instruction.minibatch.value() != due) {
    return "an update is of the round that begins with minibatch " + std::to_string(due);
  }
  const std::int64_t end = is_update ? 1 : num_microbatches_;
  if (instruction.microbatch.value() < 0 || instruction.microbatch.value() >= end) {
    if (is_update) {
      return "an update is of the whole minibatch, not of microbatch " +
             std::to_string(instruction.microbatch.value());
    }
    return "the microbatch does not exist; a minibatch has " + std::to_string(end);
  }
  const ReplicaIndex owner =
      rounds_.replica_of(rounds_.number_of(instruction.minibatch, instruction.microbatch));
  if (is_update || owner == replica_) return {};
  return std::string(num_microbatches_ == 1 ? "the minibatch" : "the microbatch") + " is replica " +
         std::to_string(owner.value()) + "'s";
}

Fault StageChecker::check_boundary(const Instruction& instruction) const {
  const std::string meaning = traits_of(instruction.opcode).meaning;
  const std::int64_t boundary = instruction.minibatch.value();
  const std::int64_t group = minibatches_between_drains(options_);
  if (replica_ != ReplicaIndex(0)) return "replica 0 of a stage does " + meaning + "s";
  const bool is_boundary = boundary % group == 0 || boundary == num_minibatches_;
  if (boundary < options_.first_minibatch.value() || boundary > num_minibatches_ || !is_boundary) {
    return meaning + "s are before a multiple of " + std::to_string(group) +
           " minibatches from the first, or at the end of " + std::to_string(num_minibatches_);
  }
  const auto& [last_boundary, num_done] = at_boundary_.at(index_of(instruction.opcode));
  const std::int64_t due = instruction.minibatch == last_boundary ? num_done : 0;
  if (instruction.minibatch >= last_boundary && instruction.microbatch.value() == due) return {};
  return meaning + "s go in order; the next of the boundary is number " + std::to_string(due);
}

// Checks that the instruction reads the boundary's version, and that this is the newest version now.
Fault StageChecker::check_version_at_boundary(const Instruction& instruction) const {
  const WeightVersion version = version_at_boundary(rounds_, instruction.minibatch);
  if (instruction.version != version) {
    return "the version before the minibatch is " + std::to_string(version.value());
  }
  if (version.value() == newest_) return {};
  return "the newest version is " + std::to_string(newest_);
}

// Checks that the instructions of one opcode go through the microbatches in order, and that a recompute or a
// backward comes after its forward.
Fault StageChecker::check_order(const Instruction& instruction) const {
  const OpcodeTraits& traits = traits_of(instruction.opcode);
  const std::int64_t item = item_of(instruction);
  const std::int64_t due = num_done_.at(index_of(instruction.opcode));
  if (item < due) return "the microbatch's " + std::string(traits.meaning) + " was already done";
  if (traits.follows && item >= num_done_.at(index_of(*traits.follows))) {
    return "the microbatch's " + std::string(traits_of(*traits.follows).meaning) + " was not done yet";
  }
  if (item == due) return {};
  return std::string(traits.meaning) + "s go in order; the next is " + name_of(due);
}

Fault StageChecker::check_forward(const Instruction& instruction) const {
  if (drains_ && rounds_.round_of(instruction.minibatch) != newest_) {
    return "the schedule drains every minibatch, and the update of minibatch " +
           std::to_string(rounds_.begin_of(newest_).value()) + " was not done yet";
  }
  if (num_forwarded_ - num_backwarded_ == window_) {
    return "at most " + std::to_string(window_) +
           " microbatches may be in flight at the stage, and as many wait for their backward";
  }
  return check_read(instruction.version,
                    forward_version(options_, stage_, instruction.minibatch, instruction.microbatch));
}

// Checks the rules that recompute and backward share.
Fault StageChecker::check_behind_forward(const Instruction& instruction) const {
  if (rounds_.round_of(instruction.minibatch) >= newest_ + num_gradients_kept_) {
    return "the update of minibatch " + std::to_string(rounds_.begin_of(newest_).value()) +
           " is due first: gradients of two minibatches would be added up";
  }
  if (Fault fault = check_recomputed(instruction); !fault.empty()) return fault;
  const WeightVersion rule =
      backward_version(options_, stage_, instruction.minibatch, instruction.microbatch);
  if (Fault fault = check_read(instruction.version, rule); !fault.empty()) return fault;
  return check_stashed(instruction);
}

// Checks that each backward has a recompute before it if the options ask for that, and none otherwise. Only
// one microbatch at a time may be recomputed, because the stage has memory for one microbatch's activations.
Fault StageChecker::check_recomputed(const Instruction& instruction) const {
  if (traits_of(instruction.opcode).stash != Stash::kRestored) {
    return recomputes_ && !recomputed_ ? "the options ask for a recompute first" : "";
  }
  if (!recomputes_) return "the options ask for no recompute at the stage";
  if (!recomputed_) return {};
  return "the microbatch before waits for its backward: only the next one is recomputed";
}

// If a stage keeps several versions, a recompute or backward must read its forward's version. The tensors
// that the forward has saved lie in that version's slot.
Fault StageChecker::check_stashed(const Instruction& instruction) const {
  const WeightVersion forwarded =
      forward_version(options_, stage_, instruction.minibatch, instruction.microbatch);
  if (instruction.version == forwarded || num_kept_ == 1) return {};
  return "its forward has read version " + std::to_string(forwarded.value()) + ", and the stage keeps " +
         std::to_string(num_kept_) + ": where several are kept a backward reads its forward's";
}

Fault StageChecker::check_update(const Instruction& instruction) const {
  const std::int64_t round = rounds_.round_of(instruction.minibatch);
  if (round < newest_) return "the update was already done";
  const std::int64_t before = begin_of_round(round);
  const std::int64_t num_needed = end_of_round(round) - before;
  const std::int64_t num_done = std::clamp<std::int64_t>(num_backwarded_ - before, 0, num_needed);
  if (num_done < num_needed) {
    return "the gradient is not complete: the backward of " + std::to_string(num_done) + " of " +
           std::to_string(num_needed) + " microbatches was done";
  }
  // The backwards of this round may be done although an earlier update is missing. That happens with a
  // staleness, or if the replica has no microbatch in this round, as a spare or in a short last round.
  if (round > newest_) {
    return "the update of minibatch " + std::to_string(rounds_.begin_of(newest_).value()) + " is due first";
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
  if (!stashes_ && version < rounds_.first_version()) return {};  // the worker itself holds such old versions
  return "version " + std::to_string(version.value()) + " was overwritten; the newest is " +
         std::to_string(newest_) + ", and " + std::to_string(num_kept_) + " are kept";
}

// Returns the number of versions that are live while an instruction with this opcode runs. Live are the
// newest version, the one that an update writes, and older ones that will still be read.
//
// A slot holds the replica's own shard and the shards that other replicas update. These may have different
// versions, so the larger of the two counts is returned.
std::int64_t StageChecker::num_versions_live(Opcode opcode) const {
  // An update that does not write in place has two versions at once: the newest one, and the one that it
  // writes.
  const std::int64_t num_newest = writes_version(opcode) && num_kept_ > 1 ? 2 : 1;
  if (!stashes_ || num_backwarded_ >= num_own_) return num_newest;
  if (options_.program != nullptr) {  // a written program may read versions in any order
    const std::int64_t oldest = rule_.oldest_from(rounds_.own_number(replica_, num_backwarded_)).value();
    const std::int64_t num_own_shard = num_newest + std::max<std::int64_t>(0, newest_ - oldest);
    return rounds_.num_replicas == 1 ? num_own_shard : std::max(num_own_shard, newest_coming() - oldest + 1);
  }
  const auto read_by = [&](std::int64_t item) {
    const std::int64_t number = rounds_.own_number(replica_, item);
    return forward_version(options_, stage_, rounds_.minibatch_of(number), rounds_.microbatch_of(number))
        .value();
  };
  const std::int64_t first = read_by(num_backwarded_);
  const std::int64_t last = std::min(read_by(num_own_ - 1), newest_ - 1);
  const std::int64_t num_own_shard = num_newest + std::max<std::int64_t>(0, last - first + 1);
  if (rounds_.num_replicas == 1) return num_own_shard;
  return std::max(num_own_shard, newest_coming() - first + 1);
}

// Returns the newest version that other replicas may have written. They may have updated every round whose
// backwards this replica has done.
std::int64_t StageChecker::newest_coming() const {
  return rounds_.first_version().value() + num_backwarded_ / rounds_.own_per_round();
}

void StageChecker::apply(const Instruction& instruction) {
  const std::int64_t num_live = num_versions_live(instruction.opcode);
  // The checks of check() imply this, because an update comes after the last read of the version that it
  // overwrites.
  PD_CHECK(num_live <= num_kept_,
           to_string(instruction) << ": " << num_live << " versions are live, " << num_kept_ << " are kept");
  versions_live_max_ = std::max(versions_live_max_, num_live);
  const OpcodeTraits& traits = traits_of(instruction.opcode);
  PD_CHECK(!traits.travels, to_string(instruction));
  ++num_done_.at(index_of(instruction.opcode));
  if (traits.stash == Stash::kKept) ++num_forwarded_;
  num_in_flight_max_ = std::max(num_in_flight_max_, num_forwarded_ - num_backwarded_);
  if (traits.stash == Stash::kReleased) {
    ++num_backwarded_;
    recomputed_ = false;
  }
  if (traits.stash == Stash::kRestored) recomputed_ = true;
  if (traits.writes_version) ++newest_;
  if (traits.scope == Scope::kBoundary) {
    at_boundary_.at(index_of(instruction.opcode)) = {instruction.minibatch,
                                                     instruction.microbatch.value() + 1};
  }
}

Fault StageChecker::missing_at_end() const {
  if (newest_ == rounds_.last_version(replica_, num_minibatches_).value()) return {};
  const std::string stage = ' ' + to_string(StageReplica{stage_, replica_}) + ' ';
  if (!has_backwards_left(newest_)) {
    return opcode_name(Opcode::kUpdate) + stage + "minibatch " +
           std::to_string(rounds_.begin_of(newest_).value()) + " is missing";
  }
  const bool is_forwarded = num_backwarded_ < num_forwarded_;
  return opcode_name(is_forwarded ? Opcode::kBackward : Opcode::kForward) + stage + name_of(num_backwarded_) +
         " is missing";
}
class ListChecker {
 public:
  explicit ListChecker(const ListToCheck& list)
      : placement_(list.placement),
        rank_(list.rank),
        drains_(drains_every_minibatch(list.options)),
        rounds_(rounds_of(list.options, placement_.stages_at(rank_).front())) {
    for (const Place& place : placement_.places_at(rank_)) {
      stages_.emplace_back(list.options, StageReplica{place.stage, place.replica}, list.num_minibatches);
    }
  }

  // Returns the first fault with its place in the list, or an empty text.
  [[nodiscard]] std::string run(const std::vector<Instruction>& program) {
    for (std::size_t position = 0; position < program.size(); ++position) {
      if (travels(program[position].opcode)) continue;
      const Fault fault = check(program[position]);
      if (!fault.empty()) return name_position(rank_, program, position) + ": " + fault;
      stage_of(program[position]).apply(program[position]);
    }
    for (const StageChecker& stage : stages_) {
      const Fault fault = stage.missing_at_end();
      if (!fault.empty()) return name_position(rank_, program, program.size()) + ": " + fault;
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
    const std::int64_t num_owners = placement_.num_owners(instruction.stage);
    if (instruction.replica.value() < 0 || instruction.replica.value() >= num_owners) {
      return "the replica does not exist; the stage has " + std::to_string(num_owners);
    }
    const Rank rank = placement_.rank_of(instruction.stage, instruction.replica);
    if (rank != rank_) {
      return (num_owners > 1 ? "the replica" : "the stage") + std::string(" lies at worker ") +
             std::to_string(rank.value());
    }
    if (Fault fault = stage_of(instruction).check(instruction); !fault.empty()) return fault;
    return writes_version(instruction.opcode) ? check_drained(instruction) : Fault();
  }

  // If the schedule drains, no update may come before all backwards of its round, at all stages of the
  // worker. The reason is that a norm over all stages may be taken before the first update.
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
  const Rounds rounds_;               // the same at all stages of the worker
  std::vector<StageChecker> stages_;  // ascending
};
}  // namespace

std::string check_computed(const ListToCheck& list, std::vector<StageCounts>& counts) {
  ListChecker checker(list);
  std::string error = checker.run(list.program);
  for (const StageChecker& stage : checker.stages()) {
    counts.push_back({stage.stage(), stage.versions_live_max(), stage.num_in_flight_max()});
  }
  return error;
}

}  // namespace pipedream
