// Describes the exchange of gradients and weight versions between the owners of a stage's shards: the chunks
// of each owner, the channels between owners, and the memory for versions and pushed chunks. A round is the
// minibatches whose gradients make one update (schedule/rounds.h). Plain values; any thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "base/ids.h"
#include "channel/tensor.h"
#include "codec/codec.h"
#include "schedule/rounds.h"

namespace pipedream {

struct ExchangePiece {
  std::size_t parameter_index = 0;
  std::int64_t first_element = 0;
  std::int64_t num_elements = 0;
  std::size_t begin_bytes = 0;  // offset in its chunk
  DType dtype = DType::kFloat32;

  [[nodiscard]] std::size_t num_bytes() const {
    return static_cast<std::size_t>(num_elements) * dtype_bytes(dtype);
  }
};

struct ExchangeChunk {
  std::size_t begin_bytes = 0;  // in the slot of a version
  std::size_t num_bytes = 0;
  bool is_tied = false;  // other stages use its parameters, too; it lies in tied_slots
  std::vector<ExchangePiece> pieces;
};

// A shard. Its chunks are listed in the order in which they are sent.
struct ExchangeShard {
  std::vector<ExchangeChunk> chunks;
  DType push_dtype = DType::kUInt8;  // the dtype of its gradients on the wire
};

// Another owner of shards, and the names of the channels that join this owner to it. A name is empty if there
// is no such channel. For example, a spare (a worker that owns a shard but has no minibatches) pushes no
// gradients and pulls no versions.
struct ExchangePeer {
  ExchangeShard shard;
  std::string push_to;
  std::string push_from;
  std::string factors_to;  // carries one item per round: gradients as sufficient factors, before the chunks
  std::string factors_from;
  std::string pull_to;
  std::string pull_from;
  bool is_posted = false;  // chunks of its versions land directly in the version's slot
};

struct ExchangeSpec {
  Rounds rounds;
  ReplicaIndex replica;               // this owner
  std::vector<ExchangeChunk> chunks;  // of this owner's shard, in the order in which they are sent
  std::map<ReplicaIndex, ExchangePeer> peers;
  std::vector<std::byte*> own_slots;  // memory of the stage's version slots
  // The slot of each version at the start. Empty: there is one version, in slot 0.
  std::map<WeightVersion, SlotIndex> slot_of{};
  // Memory for chunks of tied parameters: version v lies in slot (v - first version) mod the number of slots.
  std::vector<std::byte*> tied_slots;
  std::vector<std::byte*> push_slots;  // zeroed memory of PushLayout::slot_bytes(); a round uses one of them
  Codec push_codec{};
  bool keeps_gradients = false;  // the optimizer may keep received gradients, so no mean overwrites them
  // Whether the tensors are in host memory. Then this exchange makes the means of gradients itself, if there
  // is a place for them and is_aggregated() is true for their dtype.
  bool on_host = true;
  // Whether this owner sends another replica the chunks of a new version only after it has sent that replica
  // all pushed chunks. All channels of a link get equal parts of the bandwidth. So versions would slow down
  // the pushes to spares, although everybody waits longest for the spares' shards.
  bool holds_versions = false;
  // Whether places are posted in begin_push_from(), as early as possible, or only in begin_version().
  bool posts_early = true;
};

// A parameter's gradient of a round, as a flat tensor. If `content` has no data, the parameter has no
// gradient.
struct Gradient {
  TensorView content;
  std::shared_ptr<void> owner;

  // The part of the gradient that belongs to the piece; without data if there is no gradient.
  [[nodiscard]] TensorView piece(const ExchangePiece& piece) const;
};

[[nodiscard]] TensorView flat_view(DType dtype, std::byte* data, std::size_t num_bytes);

}  // namespace pipedream
