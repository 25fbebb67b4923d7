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

// What of the parameters lies in the range. Its ends are multiples of kParameterAlignment, which no element
// straddles.
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

std::vector<ShardChunk> deal_ranges(const WeightLayout& layout, std::size_t num_shards) {
  const std::size_t num_units = layout.slot_bytes() / kParameterAlignment;
  const std::size_t chunks_per_shard =
      std::max<std::size_t>(1, divide_up(layout.slot_bytes(), num_shards * kShardChunkBytesMax));
  const std::size_t num_chunks = num_shards * chunks_per_shard;
  std::vector<ShardChunk> chunks;
  for (std::size_t chunk = 0; chunk < num_chunks; ++chunk) {
    const std::size_t begin = num_units * chunk / num_chunks * kParameterAlignment;
    const std::size_t end = num_units * (chunk + 1) / num_chunks * kParameterAlignment;
    std::vector<ShardPiece> pieces = pieces_in(layout, begin, end);
    if (pieces.empty()) continue;
    chunks.push_back(
        {ShardIndex(static_cast<std::int64_t>(chunk % num_shards)), begin, end, std::move(pieces)});
  }
  return chunks;
}

// The largest first, each to the shard that has least.
std::vector<std::size_t> shards_of_tensors(const WeightLayout& layout, std::size_t num_shards) {
  std::vector<std::size_t> in_order(layout.parameters().size());
  std::iota(in_order.begin(), in_order.end(), std::size_t{0});
  std::stable_sort(in_order.begin(), in_order.end(), [&](std::size_t one, std::size_t other) {
    return parameter_bytes(layout, one) > parameter_bytes(layout, other);
  });
  std::vector<std::size_t> dealt_bytes(num_shards);
  std::vector<std::size_t> shard_of(in_order.size());
  for (const std::size_t parameter : in_order) {
    const auto least = std::min_element(dealt_bytes.begin(), dealt_bytes.end());
    *least += parameter_bytes(layout, parameter);
    shard_of[parameter] = static_cast<std::size_t>(least - dealt_bytes.begin());
  }
  return shard_of;
}

std::vector<ShardChunk> deal_tensors(const WeightLayout& layout, std::size_t num_shards) {
  const std::vector<std::size_t> shard_of = shards_of_tensors(layout, num_shards);
  std::vector<ShardChunk> chunks;
  for (std::size_t parameter = 0; parameter < shard_of.size(); ++parameter) {
    const std::int64_t num_elements = layout.parameters()[parameter].num_elements;
    if (num_elements == 0) continue;
    const ShardIndex shard(static_cast<std::int64_t>(shard_of[parameter]));
    const std::size_t begin = layout.offset_bytes(parameter);
    const std::size_t end =
        divide_up(begin + parameter_bytes(layout, parameter), kParameterAlignment) * kParameterAlignment;
    const bool joins = !chunks.empty() && chunks.back().shard == shard && chunks.back().end_bytes == begin &&
                       end - chunks.back().begin_bytes <= kShardChunkBytesMax;
    if (!joins) chunks.push_back({shard, begin, end, {}});
    chunks.back().end_bytes = end;
    chunks.back().pieces.push_back({parameter, 0, num_elements});
  }
  return chunks;
}

}  // namespace

std::vector<ShardChunk> deal(const WeightLayout& layout, std::int64_t num_shards, bool whole_tensors) {
  if (num_shards < 1)
    throw UserError("num_shards is " + std::to_string(num_shards) + "; it must be 1 or more");
  const auto count = static_cast<std::size_t>(num_shards);
  return whole_tensors ? deal_tensors(layout, count) : deal_ranges(layout, count);
}

}  // namespace pipedream
