#include "param_server/shard_updates.h"

#include <string>

#include "base/check.h"

namespace pipedream {

ShardUpdates::ShardUpdates(std::int64_t num_replicas, std::int64_t num_parts, WeightVersion first) {
  PD_CHECK(num_replicas >= 1 && num_parts >= 0, num_replicas << " replicas, " << num_parts << " parts");
  next_of_.resize(static_cast<std::size_t>(num_replicas), Next{first});
  num_updates_.resize(static_cast<std::size_t>(num_parts), first.value() * num_replicas);
}

std::optional<Failure> ShardUpdates::apply(ReplicaIndex replica, WeightVersion round, std::int64_t part) {
  const std::string what = "the gradient of replica " + std::to_string(replica.value()) + ", round " +
                           std::to_string(round.value()) + ", part " + std::to_string(part);
  const auto refused = [&](const std::string& why) {
    return Failure{FailureKind::kCorruptFrame, what + ": " + why};
  };
  if (!has(replica)) return refused("there are " + std::to_string(next_of_.size()) + " replicas");
  const auto num_parts = static_cast<std::int64_t>(num_updates_.size());
  if (part < 0 || part >= num_parts) return refused("the shard has " + std::to_string(num_parts) + " parts");
  Next& next = next_of_[static_cast<std::size_t>(replica.value())];
  if (round != next.round || part != next.part) {
    return refused("its next is round " + std::to_string(next.round.value()) + ", part " +
                   std::to_string(next.part));
  }
  if (++next.part == num_parts) next = {next.round.next(), 0};
  ++num_updates_[static_cast<std::size_t>(part)];
  note_order(replica);
  return std::nullopt;
}

void ShardUpdates::note_order(ReplicaIndex replica) {
  if (!keeps_order_) return;
  keeps_order_ = order_.size() < kNumOrderedMax;
  if (keeps_order_) {
    order_.push_back(static_cast<std::uint32_t>(replica.value()));
  } else {
    order_ = {};
  }
}

WeightVersion ShardUpdates::round(ReplicaIndex replica) const {
  PD_CHECK(has(replica), replica.value() << " of " << next_of_.size());
  return next_of_[static_cast<std::size_t>(replica.value())].round;
}

std::int64_t ShardUpdates::num_updates(std::int64_t part) const {
  PD_CHECK(part >= 0 && part < static_cast<std::int64_t>(num_updates_.size()),
           part << " of " << num_updates_.size());
  return num_updates_[static_cast<std::size_t>(part)];
}

bool ShardUpdates::has(ReplicaIndex replica) const {
  return replica.value() >= 0 && replica.value() < static_cast<std::int64_t>(next_of_.size());
}

}  // namespace pipedream
