#include "param_server/shard_rounds.h"

#include <algorithm>
#include <string>

#include "base/check.h"

namespace pipedream {
namespace {

bool is_below(std::int64_t value, std::int64_t end) { return 0 <= value && value < end; }

}  // namespace

ShardRounds::ShardRounds(std::int64_t num_replicas, std::int64_t num_chunks, WeightVersion first,
                         std::int64_t num_rounds_max)
    : num_replicas_(num_replicas), num_rounds_max_(num_rounds_max) {
  PD_CHECK(num_replicas >= 1 && num_chunks >= 0 && num_rounds_max >= 1,
           num_replicas << " replicas, " << num_chunks << " chunks, " << num_rounds_max << " rounds");
  chunks_.resize(static_cast<std::size_t>(num_chunks), Chunk{first, {}});
}

const ShardRounds::Chunk& ShardRounds::chunk_at(std::int64_t chunk) const {
  PD_CHECK(is_below(chunk, static_cast<std::int64_t>(chunks_.size())), chunk << " of " << chunks_.size());
  return chunks_[static_cast<std::size_t>(chunk)];
}

std::optional<Failure> ShardRounds::arrive(ReplicaIndex replica, WeightVersion round, std::int64_t chunk) {
  const std::string what = "the gradient of replica " + std::to_string(replica.value()) + ", round " +
                           std::to_string(round.value()) + ", chunk " + std::to_string(chunk);
  const auto refused = [&](const std::string& why) {
    return Failure{FailureKind::kCorruptFrame, what + ": " + why};
  };
  if (!is_below(replica.value(), num_replicas_))
    return refused("there are " + std::to_string(num_replicas_) + " replicas");
  if (!is_below(chunk, static_cast<std::int64_t>(chunks_.size())))
    return refused("the shard has " + std::to_string(chunks_.size()) + " chunks");
  Chunk& arrived = chunks_[static_cast<std::size_t>(chunk)];
  const std::int64_t ahead = round.value() - arrived.version.value();
  if (ahead < 0) return refused("the chunk is at version " + std::to_string(arrived.version.value()));
  if (ahead >= num_rounds_max_)
    return refused("the chunk is at version " + std::to_string(arrived.version.value()) + ", and at most " +
                   std::to_string(num_rounds_max_) + " rounds may have begun");
  while (static_cast<std::int64_t>(arrived.rounds.size()) <= ahead) {
    arrived.rounds.emplace_back(static_cast<std::size_t>(num_replicas_), false);
  }
  Arrived& by_replica = arrived.rounds[static_cast<std::size_t>(ahead)];
  if (by_replica[static_cast<std::size_t>(replica.value())]) return refused("it has come already");
  by_replica[static_cast<std::size_t>(replica.value())] = true;
  return std::nullopt;
}

bool ShardRounds::is_complete(std::int64_t chunk, std::span<const ReplicaIndex> members) const {
  const Chunk& asked = chunk_at(chunk);
  if (asked.rounds.empty()) return members.empty();
  return std::ranges::all_of(members, [&](ReplicaIndex member) {
    return asked.rounds.front().at(static_cast<std::size_t>(member.value()));
  });
}

WeightVersion ShardRounds::publish(std::int64_t chunk, std::span<const ReplicaIndex> members) {
  PD_CHECK(!members.empty() && is_complete(chunk, members), "chunk " << chunk << " is not complete");
  Chunk& published = chunks_[static_cast<std::size_t>(chunk)];
  const auto num_arrived = std::ranges::count(published.rounds.front(), true);
  PD_CHECK(num_arrived == static_cast<std::ptrdiff_t>(members.size()),
           num_arrived << " gradients of chunk " << chunk << " from " << members.size() << " members");
  published.rounds.pop_front();
  return published.version = published.version.next();
}

WeightVersion ShardRounds::version(std::int64_t chunk) const { return chunk_at(chunk).version; }

}  // namespace pipedream
