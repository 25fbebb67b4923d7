// Generates the list of what one worker computes, one instruction at a time, for every schedule. program.h
// draws the lists. One thread.
#include <algorithm>
#include <utility>

#include "base/check.h"
#include "schedule/checked_options.h"
#include "schedule/listed_program.h"
#include "schedule/program.h"

namespace pipedream {

ComputeCursor::ComputeCursor(ScheduleOptions options, Rank rank) : options_(std::move(options)), rank_(rank) {
  PD_CHECK(rank_.value() >= 0 && rank_.value() < num_workers(options_), "rank " << rank_.value());
  stages_ = stages_at(options_, rank_);
  const StageIndex first_stage = stages_.front();
  replica_ = replica_at(options_, rank_);
  order_ = order_of(options_);
  rounds_ = rounds_of(options_, first_stage);
  positions_ = positions_of(options_, first_stage);
  forward_rule_ = forward_rule_of(options_, first_stage);
  backward_rule_ = backward_rule(options_, first_stage);
  window_ = window_of(options_, rank_);
  drains_ = drains_every_minibatch(options_);
  num_delayed_ = num_rounds_delayed(options_, first_stage);
}

std::optional<Instruction> ComputeCursor::current() const {
  if (options_.program != nullptr) return listed();
  if (is_update_due()) return update();
  if (may_forward()) return forward();
  if (num_backwarded_ < num_forwarded_) return recompute_or_backward();
  return std::nullopt;
}

void ComputeCursor::advance() {
  const std::optional<Instruction> instruction = current();
  PD_CHECK(instruction.has_value(),
           "rank " << rank_.value() << ": the program is over after " << num_updates_ << " updates");
  const OpcodeTraits& traits = traits_of(instruction->opcode);
  PD_CHECK(!traits.travels && !is_of_evaluation(instruction->opcode),
           to_string(*instruction) << " is not computed by a schedule");
  const bool is_counted = instruction->stage == stages_.front() || options_.program == nullptr;
  if (traits.stash == Stash::kKept && is_counted) ++num_forwarded_;
  if (traits.stash == Stash::kReleased) {
    ++num_backwarded_;
    recomputed_ = false;
  }
  if (traits.writes_version) ++num_updates_;
  if (traits.stash == Stash::kRestored) recomputed_ = true;
  if (options_.program == nullptr) return pass_over_absent();
  if (traits.stash == Stash::kRestored) return;  // the BACKWARD after a RECOMPUTE has the same position
  ++position_;
  pass_over_absent_of_list();
}

void ComputeCursor::set_num_minibatches(std::int64_t num_minibatches) {
  PD_CHECK(!num_minibatches_.has_value(), "rank " << rank_.value() << ": num_minibatches was already set to "
                                                  << *num_minibatches_ << ", now " << num_minibatches);
  PD_CHECK(may_set_num_minibatches(num_minibatches),
           "rank " << rank_.value() << ": num_minibatches " << num_minibatches << " is below the "
                   << num_forwarded_ << " microbatches already forwarded since minibatch "
                   << options_.first_minibatch.value());
  num_minibatches_ = num_minibatches;
  if (options_.program != nullptr) pass_over_absent_of_list();
}

bool ComputeCursor::may_set_num_minibatches(std::int64_t num_minibatches) const {
  return !num_minibatches_ && num_minibatches >= options_.first_minibatch.value() &&
         num_minibatches <= kNumMinibatchesMax &&
         positions_.num_own(replica_, num_minibatches) >= num_forwarded_;
}

// Returns the next instruction of a written program, with the run's numbers of minibatch and version; nothing
// after the run's last update. If the stage recomputes, a RECOMPUTE comes before each backward.
std::optional<Instruction> ComputeCursor::listed() const {
  const std::int64_t first_version = rounds_.first_version().value();
  if (num_minibatches_) {
    const std::int64_t num_rounds = rounds_.last_version(replica_, *num_minibatches_).value() - first_version;
    if (num_updates_ == num_rounds * static_cast<std::int64_t>(stages_.size())) return std::nullopt;
  }
  Instruction instruction = options_.program->at(rank_, position_);
  instruction.minibatch = MinibatchId(instruction.minibatch.value() + options_.first_minibatch.value());
  instruction.version = WeightVersion(instruction.version.value() + first_version);
  if (traits_of(instruction.opcode).follows && must_recompute(instruction.stage) && !recomputed_) {
    instruction.opcode = Opcode::kRecompute;
  }
  return instruction;
}

// Skips instructions of minibatches that the run does not have. The loop ends at the next instruction whose
// minibatch the run has. After the run's last update it ends because listed() returns nothing.
void ComputeCursor::pass_over_absent_of_list() {
  if (!num_minibatches_) return;
  for (auto next = listed(); next && next->minibatch.value() >= *num_minibatches_; next = listed()) {
    ++position_;
  }
}

std::int64_t ComputeCursor::num_own() const {
  return positions_.num_own(replica_, num_minibatches_.value_or(2 * kNumMinibatchesMax));
}

bool ComputeCursor::is_update_due() const {
  const std::int64_t round = num_updates_ / order_.num_chunks;  // counted from the start of the run
  const std::int64_t version = rounds_.first_version().value() + round;
  if (num_minibatches_ && version >= rounds_.last_version(replica_, *num_minibatches_).value()) return false;
  return num_backwarded_ >= std::min((round + 1 + num_delayed_) * positions_.own_per_round(), num_own());
}

bool ComputeCursor::may_forward() const {
  if (num_forwarded_ - num_backwarded_ >= window_ || num_forwarded_ >= num_own()) return false;
  return !drains_ || num_forwarded_ / positions_.own_per_round() == num_updates_ / order_.num_chunks;
}

Instruction ComputeCursor::update() const {
  const std::int64_t version = rounds_.first_version().value() + num_updates_ / order_.num_chunks;
  return {Opcode::kUpdate,
          stage_of(num_updates_ % order_.num_chunks),
          rounds_.begin_of(version),
          MicrobatchIndex(0),
          WeightVersion(version + 1),
          {},
          replica_};
}

Instruction ComputeCursor::forward() const {
  const std::int64_t number = positions_.own_number(replica_, num_forwarded_);
  const MicrobatchOrder::Item item = order_.forward_at(positions_.microbatch_of(number).value());
  return pass(Opcode::kForward, positions_.minibatch_of(number), item, forward_rule_);
}

Instruction ComputeCursor::recompute_or_backward() const {
  const std::int64_t number = positions_.own_number(replica_, num_backwarded_);
  const MicrobatchOrder::Item item = order_.backward_at(positions_.microbatch_of(number).value());
  const bool recompute_first = must_recompute(stage_of(item.chunk)) && !recomputed_;
  const Opcode opcode = recompute_first ? Opcode::kRecompute : Opcode::kBackward;
  return pass(opcode, positions_.minibatch_of(number), item, backward_rule_);
}

// Makes the FORWARD, RECOMPUTE or BACKWARD of the item's microbatch. It reads the version that `rule` gives.
Instruction ComputeCursor::pass(Opcode opcode, MinibatchId minibatch, const MicrobatchOrder::Item& item,
                                const VersionRule& rule) const {
  const MicrobatchIndex microbatch(item.microbatch);
  const WeightVersion version = rule.version_of(rounds_.number_of(minibatch, microbatch));
  return {opcode, stage_of(item.chunk), minibatch, microbatch, version, {}, replica_};
}

StageIndex ComputeCursor::stage_of(std::int64_t chunk) const {
  return stages_[static_cast<std::size_t>(chunk)];
}

bool ComputeCursor::must_recompute(StageIndex stage) const {
  return !options_.recompute.empty() && options_.recompute[static_cast<std::size_t>(stage.value())];
}

// Skips positions whose microbatch does not exist (microbatch_order.h). The loop ends within one minibatch,
// because its first forward and its update always exist.
void ComputeCursor::pass_over_absent() {
  if (order_.num_chunks == 1) return;  // with one stage every position has a microbatch
  const auto item_is_there = [&](std::int64_t index, bool is_forward) {
    const std::int64_t position = positions_.microbatch_of(positions_.own_number(replica_, index)).value();
    return order_.exists(is_forward ? order_.forward_at(position) : order_.backward_at(position));
  };
  while (!is_update_due()) {
    if (may_forward()) {
      if (item_is_there(num_forwarded_, true)) return;
      ++num_forwarded_;
    } else {
      if (num_backwarded_ == num_forwarded_ || item_is_there(num_backwarded_, false)) return;
      ++num_backwarded_;
    }
  }
}

std::vector<Instruction> make_compute_program(const ScheduleOptions& options, Rank rank,
                                              std::int64_t num_minibatches) {
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
