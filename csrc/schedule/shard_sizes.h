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

// Returns the relative sizes of the shards of n replicas and k spares. Throws UserError for n < 1, k < 0,
// k > n, and for n = 1 with spares.
//
// The stage has M bytes of parameters, a replica's shard a M bytes, and a spare's shard b M bytes. In a round
// a replica sends each other replica a M bytes of gradients and a M bytes of its own shard's new version. It
// sends each spare b M bytes of gradients. All flows on a link get equal bandwidth, so they end at the same
// time if b = 2 a. With many spares it is better that they own everything. The bytes on a link in a round:
//
//   a = 1 / (n + 2 k)    b = 2 / (n + 2 k)    2 (n + k - 1) / (n + 2 k) M
//   a = 0                b = 1 / k            n / k M, used if n^2 <= 2 k (k - 1), where it is not more
//
// For k = 1 and k = n these are the shares of BytePS (OSDI'20, section 4.1). With BytePS's shares for other k
// the flows to spares would end later than the flows to replicas.
[[nodiscard]] std::vector<std::int64_t> shard_shares(std::int64_t num_replicas, std::int64_t num_spares);

}  // namespace pipedream
