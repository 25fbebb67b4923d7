// Walks one worker's whole program: the instructions that it computes, and the transfers around each. See
// transfers.h.
#include <algorithm>
#include <cstddef>
#include <string>

#include "base/check.h"
#include "base/failure.h"
#include "schedule/transfers.h"

namespace pipedream {

ProgramCursor::ProgramCursor(const ScheduleOptions& options, Rank rank)
    : compute_(options, rank), evaluations_(options, rank), transfers_(options, rank) {
  instructions_.reserve(1 + transfers_.num_added_max());
  early_.reserve(transfers_.num_added_max());
  refill();
}

std::optional<Instruction> ProgramCursor::current() const {
  if (position_ == instructions_.size()) return std::nullopt;
  return instructions_[position_];
}

std::optional<Instruction> ProgramCursor::following() const {
  if (position_ + 1 >= instructions_.size()) return std::nullopt;
  return instructions_[position_ + 1];
}

void ProgramCursor::advance() {
  PD_CHECK(position_ < instructions_.size(), "rank " << rank().value() << ": the program is over");
  if (++position_ < instructions_.size()) return;
  if (computed_ && is_of_evaluation(computed_->opcode)) {
    evaluations_.advance();
  } else if (computed_) {
    compute_.advance();
  }
  refill();
}

void ProgramCursor::begin_evaluation(MinibatchId boundary) {
  evaluations_.begin(boundary);
  if (!current()) refill();
}

void ProgramCursor::set_num_minibatches(std::int64_t num_minibatches) {
  compute_.set_num_minibatches(num_minibatches);
  transfers_.set_num_minibatches(num_minibatches);
  if (computed_ && is_of_evaluation(computed_->opcode)) return;
  if (compute_.current() == computed_) return fill();  // again, without RECVs of pushes that will not come
  keep_done();  // the forward turns out not to exist, but RECVs before it may be done
  refill();
}

void ProgramCursor::evaluate_first() {
  evaluations_.begin(computed_->minibatch);
  keep_done();
  refill();
}

void ProgramCursor::keep_done() {
  const auto done = static_cast<std::ptrdiff_t>(position_);
  early_.insert(early_.end(), instructions_.begin(), instructions_.begin() + done);
}

void ProgramCursor::refill() {
  position_ = 0;
  computed_ = compute_.current();
  if (evaluations_.is_due(computed_, compute_.newest_version())) {
    computed_ = evaluations_.current();
    return fill_evaluation(*computed_);
  }
  if (!computed_) return refill_at_end();
  fill();
}

// Fills instructions_ with an EVALUATE and its transfers. Before a boundary's first EVALUATE they include
// RECVs of versions that would otherwise come before later forwards. early_ remembers these RECVs, so that
// the later forwards leave them out. RECVs that an earlier evaluation has done are left out here.
void ProgramCursor::fill_evaluation(const Instruction& evaluate) {
  instructions_.clear();
  // After the RECVs at the program's end (add_final()) all versions have come already.
  if (evaluate.microbatch == MicrobatchIndex(0) && num_finals_ == 0) {
    transfers_.add_versions_of(evaluate, compute_.num_forwarded(), instructions_);
    const std::vector<Instruction> versions = instructions_;
    leave_out_early();
    early_ = versions;
  }
  transfers_.add_before(evaluate, instructions_);
  instructions_.push_back(evaluate);
  transfers_.add_after(evaluate, instructions_);
}

// Fills instructions_ with the computed instruction and its transfers. When the number of minibatches becomes
// known, this is called again for the same instruction. That call drops the RECVs of pushes from replicas
// that are not members of the run's last round. These RECVs come after those of all other pushes, so
// position_ stays right.
void ProgramCursor::fill() {
  if (!computed_) return;
  instructions_.clear();
  transfers_.add_before(*computed_, instructions_);
  instructions_.push_back(*computed_);
  transfers_.add_after(*computed_, instructions_);
  leave_out_early();
}

void ProgramCursor::leave_out_early() {
  std::erase_if(instructions_, [&](const Instruction& instruction) {
    return std::find(early_.begin(), early_.end(), instruction) != early_.end();
  });
}

void ProgramCursor::refill_at_end() {
  const std::int64_t num_minibatches = compute_.num_minibatches().value_or(0);
  instructions_.clear();
  do {
    transfers_.add_final(num_finals_++, num_minibatches, instructions_);
    if (instructions_.empty()) return;
    leave_out_early();
  } while (instructions_.empty());
}

namespace {

// Throws UserError unless the options have evaluations, the boundaries ascend and are those of the run, and
// no evaluation has a negative or too large number of minibatches.
void check_evaluated(const ScheduleOptions& options, std::int64_t num_minibatches,
                     const std::vector<Evaluated>& evaluated) {
  std::int64_t before = options.first_minibatch.value() - 1;
  for (const auto& [boundary, num_evaluated] : evaluated) {
    const std::int64_t group = minibatches_between_drains(options);
    const bool is_boundary = boundary.value() % group == 0 || boundary.value() == num_minibatches;
    if (!options.evaluates || !is_boundary || boundary.value() <= before ||
        boundary.value() > num_minibatches) {
      throw UserError("there is no evaluation before minibatch " + std::to_string(boundary.value()) +
                      "; evaluations ascend up to " + std::to_string(num_minibatches) +
                      ", where the options have them, before multiples of " + std::to_string(group));
    }
    if (num_evaluated < 0 || num_evaluated > kEvaluatedMinibatchesMax) {
      throw UserError("an evaluation of " + std::to_string(num_evaluated) + " validation minibatches");
    }
    before = boundary.value();
  }
}

}  // namespace

std::vector<Instruction> make_program(const ScheduleOptions& options, Rank rank, std::int64_t num_minibatches,
                                      const std::vector<Evaluated>& evaluated) {
  check_num_minibatches(options, num_minibatches);
  check_evaluated(options, num_minibatches, evaluated);
  ProgramCursor cursor(options, rank);
  cursor.set_num_minibatches(num_minibatches);
  const Place here = placement_of(options).places_at(rank).front();
  auto next = evaluated.begin();  // the first evaluation that has not begun
  const auto ends_at = [&](const Instruction& evaluate) {
    const auto is_it = [&](const Evaluated& one) { return one.boundary == evaluate.minibatch; };
    return std::ranges::find_if(evaluated, is_it)->num_minibatches == evaluate.microbatch.value();
  };
  std::vector<Instruction> instructions;
  for (;;) {
    const std::optional<Instruction> instruction = cursor.current();
    const bool evaluates = next != evaluated.end() && here.replica == ReplicaIndex(0);
    const bool begins =
        evaluates &&
        (!instruction || (keeps_stash(instruction->opcode) && instruction->minibatch == next->boundary));
    if (begins) cursor.begin_evaluation((next++)->boundary);
    if (!instruction && !begins) return instructions;
    if (!instruction) continue;
    if (is_of_evaluation(instruction->opcode) && ends_at(*instruction)) cursor.end_evaluation();
    instructions.push_back(*instruction);
    cursor.advance();
  }
}

}  // namespace pipedream
