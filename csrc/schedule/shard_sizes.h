// The sizes of the shards of a stage's parameters, and of the chunks in which they travel. The planner counts
// with them, and param_server/dealing.h deals by them. Pure; any thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace pipedream {

// The largest chunk of a shard, unless one tensor is larger, lies between these.
inline constexpr std::size_t kShardChunkBytesMin = std::size_t{1} << 20;
inline constexpr std::size_t kShardChunkBytesMax = std::size_t{4} << 20;
// Slots of a spare for the chunks that one replica pushes there: some come while one is used.
inline constexpr std::int64_t kNumSpareSlots = 4;

// The largest chunk of a shard of so many bytes. A sixteenth: an owner sends its last chunk when it has that
// of all replicas, and until then its link may have nothing to send. A chunk costs processor time, and so
// those of large shards are larger than the least.
[[nodiscard]] std::size_t shard_chunk_bytes_max(std::size_t shard_bytes);

// How large the shards of n replicas and k spares are to be, relative to each other. A replica sends every
// other one what it pushes there and then its own shard, 2 a M of M bytes with a share a, and a spare b M;
// what it sends to several shares its link evenly, so that with b = 2 a nothing waits:
//
//   a = 1 / (n + 2 k)    b = 2 / (n + 2 k)    in 2 (n + k - 1) / (n + 2 k) M
//   a = 0                b = 1 / k            in n / k M, which is less where n^2 <= 2 k (k - 1)
//
// For k = 1 and k = n these are BytePS's (OSDI'20, section 4.1), which between gives spares more than flows
// that share links evenly carry to them. Throws UserError for n < 1, k < 0, k > n, and n = 1 with spares.
[[nodiscard]] std::vector<std::int64_t> shard_shares(std::int64_t num_replicas, std::int64_t num_spares);

}  // namespace pipedream
