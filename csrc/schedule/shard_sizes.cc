#include "schedule/shard_sizes.h"

#include <algorithm>
#include <string>

#include "base/failure.h"

namespace pipedream {
namespace {

constexpr std::size_t kNumChunksOfShard = 16;

}  // namespace

std::size_t shard_chunk_bytes_max(std::size_t shard_bytes) {
  return std::clamp(shard_bytes / kNumChunksOfShard, kShardChunkBytesMin, kShardChunkBytesMax);
}

std::vector<std::int64_t> shard_shares(std::int64_t num_replicas, std::int64_t num_spares) {
  const bool have_spares_peers = num_spares == 0 || num_replicas > 1;
  if (num_replicas < 1 || num_spares < 0 || num_spares > num_replicas || !have_spares_peers) {
    throw UserError("there are " + std::to_string(num_replicas) + " replicas and " +
                    std::to_string(num_spares) +
                    " spares; there must be 1 replica or more, with spares 2, and no more spares than these");
  }
  const bool replicas_own =
      num_spares == 0 || num_replicas * num_replicas > 2 * num_spares * (num_spares - 1);
  std::vector<std::int64_t> shares(static_cast<std::size_t>(num_replicas), replicas_own ? 1 : 0);
  shares.resize(static_cast<std::size_t>(num_replicas + num_spares), replicas_own ? 2 : 1);
  return shares;
}

}  // namespace pipedream
