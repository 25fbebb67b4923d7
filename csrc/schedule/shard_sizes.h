// Computes the sizes of the shards of a stage's parameters, and of the chunks in which shards travel. The
// planner uses them for its estimates, and param_server/dealing.h to deal the parameters. Pure; any thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace pipedream {

// The bounds of shard_chunk_bytes_max(). A chunk that is one whole tensor may be larger.
inline constexpr std::size_t kShardChunkBytesMin = std::size_t{1} << 20;
inline constexpr std::size_t kShardChunkBytesMax = std::size_t{4} << 20;
// The number of slots in which a spare receives one replica's chunks. While one chunk is in use, others
// arrive.
inline constexpr std::int64_t kNumSpareSlots = 4;

// Returns the size of the largest chunk of a shard: a sixteenth of shard_bytes, within the bounds above. An
// owner sends its last chunk only when all replicas have pushed it, and its link may be idle until then.
// Small chunks shorten this time. But each chunk costs processor time, so large shards have larger chunks.
[[nodiscard]] std::size_t shard_chunk_bytes_max(std::size_t shard_bytes);

// Returns the relative sizes of the shards of n replicas and k spares, for a stage with M bytes of
// parameters. Let a be a replica's share of M, and b a spare's. In a round a replica sends each other replica
// a M bytes of gradients, for the receiver's shard, and a M bytes of the new version of its own shard. It
// sends each spare b M bytes of gradients. All receivers get equal parts of the link's bandwidth. So all
// finish at the same time if b is 2 a. The last column has the bytes that a link carries in a round:
//
//   a = 1 / (n + 2 k)    b = 2 / (n + 2 k)    2 (n + k - 1) / (n + 2 k) M
//   a = 0                b = 1 / k            n / k M, which is less if n^2 <= 2 k (k - 1)
//
// For k = 1 and k = n these are the shares of BytePS (OSDI'20, section 4.1). For other k the shares of BytePS
// would make flows to spares end later than flows to replicas, because all flows on a link get equal
// bandwidth. Throws UserError for n < 1, k < 0, k > n, and for n = 1 with spares.
[[nodiscard]] std::vector<std::int64_t> shard_shares(std::int64_t num_replicas, std::int64_t num_spares);

}  // namespace pipedream
