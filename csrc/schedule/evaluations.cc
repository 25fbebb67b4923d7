#include "schedule/evaluations.h"

#include <algorithm>

#include "base/check.h"
#include "schedule/schedule_rules.h"

namespace pipedream {

WeightVersion version_at_boundary(const Rounds& rounds, MinibatchId boundary) {
  return rounds.last_version(ReplicaIndex(0), boundary.value());
}

Evaluations::Evaluations(const ScheduleOptions& options, Rank rank) {
  const Placement placement = placement_of(options);
  stages_ = placement.stages_at(rank);
  replica_ = placement.places_at(rank).front().replica;
  rounds_ = rounds_of(options, stages_.front());
  group_size_ = minibatches_between_drains(options);
  may_be_first_ = options.evaluates && drains_every_minibatch(options) && replica_ == ReplicaIndex(0);
  is_early_ = has_replicas(options) || drains_every_minibatch(options);
  num_ahead_ = std::max<std::int64_t>(1, options.in_flight.front() - 1);
  num_chunks_ = static_cast<std::int64_t>(stages_.size());
  group_ = num_chunks_ > 1 ? placement.num_ranks() : 1;
}

void Evaluations::begin(MinibatchId boundary) {
  PD_CHECK(replica_ == ReplicaIndex(0), "replica " << replica_.value());
  PD_CHECK(boundaries_.empty() || boundaries_.back() < boundary,
           boundary.value() << " after " << boundaries_.back().value());
  boundaries_.push_back(boundary);
}

bool Evaluations::may_be_before(const Instruction& forward, WeightVersion newest) const {
  return may_be_first_ && boundaries_.empty() && keeps_stash(forward.opcode) &&
         forward.stage == stages_.front() && forward.microbatch == MicrobatchIndex(0) &&
         forward.minibatch.value() % group_size_ == 0 &&
         newest == version_at_boundary(rounds_, forward.minibatch);
}

bool Evaluations::is_due(const std::optional<Instruction>& next, WeightVersion newest) const {
  if (boundaries_.empty() || newest != version_at_boundary(rounds_, boundaries_.front())) return false;
  if (is_early_ || !next || writes_version(next->opcode)) return true;
  const std::int64_t bound = rounds_.number_of(boundaries_.front(), MicrobatchIndex(num_ahead_));
  return keeps_stash(next->opcode) && rounds_.number_of(next->minibatch, next->microbatch) >= bound;
}

Instruction Evaluations::current() const {
  const MinibatchId boundary = boundaries_.front();
  return {Opcode::kEvaluate,
          stages_[static_cast<std::size_t>(chunk())],
          boundary,
          MicrobatchIndex(item()),
          version_at_boundary(rounds_, boundary),
          {},
          replica_};
}

void Evaluations::advance() {
  const std::int64_t block = group_ * num_chunks_;
  ++index_;
  // Skips EVALUATEs after the last one of each stage. The loop skips fewer than two groups.
  while (last_item_ && item() > *last_item_ && index_ / block * group_ <= *last_item_) ++index_;
  PD_CHECK(last_item_ || item() <= kEvaluatedMinibatchesMax, item() << " validation minibatches");
  if (!last_item_ || item() <= *last_item_) return;
  boundaries_.erase(boundaries_.begin());
  index_ = 0;
  last_item_.reset();
}

void Evaluations::end() {
  PD_CHECK(may_be(true), item() << " after " << *last_item_);
  last_item_ = item();
}

bool Evaluations::may_be(bool is_last) const { return !last_item_ || is_last == (item() == *last_item_); }

}  // namespace pipedream
