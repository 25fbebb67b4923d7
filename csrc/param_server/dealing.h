// Deals the parts of a stage's parameters to shards. Every replica computes the same result from the same
// layout. Pure; any thread.
//
//   flat slot   | conv.weight | conv.bias |         fc.weight          | fc.bias |
//   chunks      |     0     |      1     |      2     |      3        |     ..    |
//   shard             0            1            0            1
//
// A chunk is a range of the slot that travels as one item. It is at most a sixteenth of a shard, or 1 MiB if
// that is more, and at most 4 MiB (shard_chunk_bytes_max()). Every shard has the same number of chunks, whose
// sizes differ by at most 64 bytes, so the shards are about equal. Neighbouring chunks go to different
// shards: a backward makes gradients from the slot's end to its beginning, and so keeps all shards busy.
//
// Spares are workers that own shards but have no minibatches, and so no gradients of their own. They take
// larger shards, and replicas take smaller ones or none (shard_shares()). Chunks are then at most 1 MiB.
//
// Some optimizers need whole tensors, because they use a tensor's norm or its rows. Then a chunk is one
// tensor, or several neighbouring tensors of a shard, and shards are as equal as the tensors allow.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "base/ids.h"
#include "schedule/shard_sizes.h"
#include "weights/weight_layout.h"

namespace pipedream {

// The position among the stage's owners of shards: the replicas, then the spares.
using ShardIndex = StrongId<struct ShardIndexTag>;

// Consecutive elements of a parameter.
struct ShardPiece {
  std::size_t parameter_index = 0;
  std::int64_t first_element = 0;
  std::int64_t num_elements = 0;

  friend bool operator==(const ShardPiece&, const ShardPiece&) = default;
};

struct ShardChunk {
  ShardIndex shard;
  std::size_t begin_bytes = 0;  // in the flat slot of a version
  std::size_t end_bytes = 0;
  std::vector<ShardPiece> pieces;  // the parameters' elements in the range, in order; at least one piece

  friend bool operator==(const ShardChunk&, const ShardChunk&) = default;
};

// The chunks in the order of the slot. Each element of each parameter is in exactly one chunk. shares: the
// relative size of each shard; a shard with share 0 gets nothing. Throws UserError for no shard, a negative
// share, and if all shares are 0.
[[nodiscard]] std::vector<ShardChunk> deal(const WeightLayout& layout,
                                           const std::vector<std::int64_t>& shares, bool whole_tensors);
// Deals equal shards. Throws UserError for fewer than one shard.
[[nodiscard]] std::vector<ShardChunk> deal(const WeightLayout& layout, std::int64_t num_shards,
                                           bool whole_tensors);

}  // namespace pipedream
