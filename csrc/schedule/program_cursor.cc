// Walks one worker's whole program: what it computes, with the transfers around that. See transfers.h.
#include <algorithm>
#include <cstddef>

#include "base/check.h"
#include "schedule/transfers.h"

namespace pipedream {

ProgramCursor::ProgramCursor(const ScheduleOptions& options, Rank rank)
    : compute_(options, rank), transfers_(options, rank) {
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
  if (computed_) compute_.advance();
  refill();
}

void ProgramCursor::set_num_minibatches(std::int64_t num_minibatches) {
  compute_.set_num_minibatches(num_minibatches);
  transfers_.set_num_minibatches(num_minibatches);
  if (compute_.current() == computed_) return fill();  // the push of one that does not exist falls out
  // Before a forward that does not exist pulls may have been done.
  const auto done = static_cast<std::ptrdiff_t>(position_);
  early_.assign(instructions_.begin(), instructions_.begin() + done);
  refill();
}

void ProgramCursor::refill() {
  position_ = 0;
  computed_ = compute_.current();
  if (!computed_) return refill_at_end();
  fill();
}

// Before what is done of them, and of this, nothing changes: the members of a round are its first replicas.
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

}  // namespace pipedream
