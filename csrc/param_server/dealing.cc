#include "param_server/dealing.h"

#include <algorithm>
#include <numeric>
#include <string>

#include "base/failure.h"

namespace pipedream {
namespace {

std::size_t parameter_bytes(const WeightLayout& layout, std::size_t parameter) {
  const ParameterSpec& spec = layout.parameters()[parameter];
  return static_cast<std::size_t>(spec.num_elements) * dtype_bytes(spec.dtype);
}

std::size_t divide_up(std::size_t dividend, std::size_t divisor) {
  return (dividend + divisor - 1) / divisor;
}

// Returns the pieces of parameters that lie in the range. The range begins and ends at multiples of
// kParameterAlignment, so it cuts no element.
std::vector<ShardPiece> pieces_in(const WeightLayout& layout, std::size_t begin_bytes,
                                  std::size_t end_bytes) {
  std::vector<ShardPiece> pieces;
  for (std::size_t parameter = 0; parameter < layout.parameters().size(); ++parameter) {
    const std::size_t offset = layout.offset_bytes(parameter);
    const std::size_t begin = std::max(begin_bytes, offset);
    const std::size_t end = std::min(end_bytes, offset + parameter_bytes(layout, parameter));
    if (begin >= end) continue;
    const std::size_t element_bytes = dtype_bytes(layout.parameters()[parameter].dtype);
    pieces.push_back({parameter, static_cast<std::int64_t>((begin - offset) / element_bytes),
                      static_cast<std::int64_t>((end - begin) / element_bytes)});
  }
  return pieces;
}

using Shares = std::vector<std::size_t>;

std::size_t largest_shard_bytes(const WeightLayout& layout, const Shares& shares) {
  const std::size_t of_all = std::accumulate(shares.begin(), shares.end(), std::size_t{0});
  return divide_up(layout.slot_bytes() * *std::max_element(shares.begin(), shares.end()), of_all);
}

// Deals ranges of the slot to the shards in turns. In each turn every shard gets one chunk, whose size is in
// proportion to the shard's share.
std::vector<ShardChunk> deal_ranges(const WeightLayout& layout, const Shares& shares) {
  const std::size_t num_units = layout.slot_bytes() / kParameterAlignment;
  const std::size_t of_turn = std::accumulate(shares.begin(), shares.end(), std::size_t{0});
  const bool are_equal = std::ranges::all_of(shares, [&](std::size_t share) { return share == shares[0]; });
  const std::size_t shard_bytes = largest_shard_bytes(layout, shares);
  // Shares differ only if there are spares, and then chunks are small: a spare's link has nothing to send
  // until all replicas have sent the spare its first chunk.
  const std::size_t chunk_bytes_max = are_equal ? shard_chunk_bytes_max(shard_bytes) : kShardChunkBytesMin;
  const std::size_t num_turns = std::max<std::size_t>(1, divide_up(shard_bytes, chunk_bytes_max));
  std::vector<ShardChunk> chunks;
  std::size_t dealt = 0;  // the sum of the shares that are dealt so far
  for (std::size_t turn = 0; turn < num_turns; ++turn) {
    for (std::size_t shard = 0; shard < shares.size(); ++shard) {
      const std::size_t begin = num_units * dealt / (num_turns * of_turn) * kParameterAlignment;
      dealt += shares[shard];
      const std::size_t end = num_units * dealt / (num_turns * of_turn) * kParameterAlignment;
      std::vector<ShardPiece> pieces = pieces_in(layout, begin, end);
      if (pieces.empty()) continue;
      chunks.push_back({ShardIndex(static_cast<std::int64_t>(shard)), begin, end, std::move(pieces)});
    }
  }
  return chunks;
}

// Returns each parameter's shard. Deals the largest tensors first, each to the shard that has the fewest
// bytes in relation to its share.
std::vector<std::size_t> shards_of_tensors(const WeightLayout& layout, const Shares& shares) {
  std::vector<std::size_t> in_order(layout.parameters().size());
  std::iota(in_order.begin(), in_order.end(), std::size_t{0});
  std::stable_sort(in_order.begin(), in_order.end(), [&](std::size_t one, std::size_t other) {
    return parameter_bytes(layout, one) > parameter_bytes(layout, other);
  });
  std::vector<std::size_t> dealt_bytes(shares.size());
  std::vector<std::size_t> shard_of(in_order.size());
  std::vector<std::size_t> takers;  // the shards that have a share
  for (std::size_t shard = 0; shard < shares.size(); ++shard) {
    if (shares[shard] > 0) takers.push_back(shard);
  }
  for (const std::size_t parameter : in_order) {
    const std::size_t num_bytes = parameter_bytes(layout, parameter);
    // Each shard is compared as if it had the tensor already. So the first tensor goes to a shard of the
    // largest share, although all shards are still empty.
    const auto least =
        *std::min_element(takers.begin(), takers.end(), [&](std::size_t one, std::size_t other) {
          return (dealt_bytes[one] + num_bytes) * shares[other] <
                 (dealt_bytes[other] + num_bytes) * shares[one];
        });
    dealt_bytes[least] += num_bytes;
    shard_of[parameter] = least;
  }
  return shard_of;
}

std::vector<ShardChunk> deal_tensors(const WeightLayout& layout, const Shares& shares) {
  const std::vector<std::size_t> shard_of = shards_of_tensors(layout, shares);
  const std::size_t chunk_bytes_max = shard_chunk_bytes_max(largest_shard_bytes(layout, shares));
  std::vector<ShardChunk> chunks;
  for (std::size_t parameter = 0; parameter < shard_of.size(); ++parameter) {
    const std::int64_t num_elements = layout.parameters()[parameter].num_elements;
    if (num_elements == 0) continue;
    const ShardIndex shard(static_cast<std::int64_t>(shard_of[parameter]));
    const std::size_t begin = layout.offset_bytes(parameter);
    const std::size_t end =
        divide_up(begin + parameter_bytes(layout, parameter), kParameterAlignment) * kParameterAlignment;
    const bool joins = !chunks.empty() && chunks.back().shard == shard && chunks.back().end_bytes == begin &&
                       end - chunks.back().begin_bytes <= chunk_bytes_max;
    if (!joins) chunks.push_back({shard, begin, end, {}});
    chunks.back().end_bytes = end;
    chunks.back().pieces.push_back({parameter, 0, num_elements});
  }
  return chunks;
}

}  // namespace

std::vector<ShardChunk> deal(const WeightLayout& layout, const std::vector<std::int64_t>& shares,
                             bool whole_tensors) {
  Shares counts;
  for (const std::int64_t share : shares) {
    if (share < 0) throw UserError("a share is " + std::to_string(share) + "; it must be 0 or more");
    counts.push_back(static_cast<std::size_t>(share));
  }
  if (std::all_of(counts.begin(), counts.end(), [](std::size_t share) { return share == 0; })) {
    throw UserError("no shard has a share; one of " + std::to_string(counts.size()) + " must be above 0");
  }
  return whole_tensors ? deal_tensors(layout, counts) : deal_ranges(layout, counts);
}

std::vector<ShardChunk> deal(const WeightLayout& layout, std::int64_t num_shards, bool whole_tensors) {
  if (num_shards < 1)
    throw UserError("num_shards is " + std::to_string(num_shards) + "; it must be 1 or more");
  return deal(layout, std::vector<std::int64_t>(static_cast<std::size_t>(num_shards), 1), whole_tensors);
}

}  // namespace pipedream
