// Sends ("pushes") one replica's gradients of a round to the owners of the shards. Each owner gets the chunks
// of its shard in a fixed order. A chunk is sent as soon as all its gradients are given and the chunks before
// it are sent.
//
//   one gradient fills the chunk        the chunk is sent from the gradient's own memory
//   several gradients share the chunk   they are copied to the round's push slot, and sent from there
//   a gradient is missing               a flag says so; if it would fill the chunk, the chunk is sent empty
//                                       (with the codec topk zeros are sent like a gradient)
//
// Owned by the stage's compute thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "base/clock.h"
#include "base/failure.h"
#include "channel/tensor.h"
#include "param_server/exchange_spec.h"
#include "param_server/item_carrier.h"

namespace pipedream {

// Divides a push slot into three areas, in this order: zeros, which are sent for missing gradients if the
// codec is topk; the copies of all chunks that no single gradient fills; the flags of all chunks. topk needs
// zeros, because it adds to every gradient the values that it has not sent before.
class PushLayout {
 public:
  explicit PushLayout(const Codec& codec) : codec_(codec) {}

  struct Chunk {
    std::optional<std::size_t> copy_bytes;  // offset of its copy in the area of copies; none without a copy
    std::size_t first_flag = 0;             // position among all flags
  };
  Chunk add(const ExchangeShard& shard, const ExchangeChunk& chunk);
  // Whether a missing gradient of the shard is sent as zeros, as topk needs it.
  [[nodiscard]] bool feeds_back(const ExchangeShard& shard) const {
    return codec_for(codec_, shard.push_dtype).kind == CodecKind::kTopK;
  }
  [[nodiscard]] std::size_t copies_offset_bytes() const { return zero_bytes_; }
  [[nodiscard]] std::size_t flags_offset_bytes() const { return zero_bytes_ + copied_bytes_; }
  [[nodiscard]] std::size_t num_flags() const { return num_flags_; }
  [[nodiscard]] std::size_t slot_bytes() const { return flags_offset_bytes() + num_flags_; }

 private:
  Codec codec_;
  std::size_t zero_bytes_ = 0;
  std::size_t copied_bytes_ = 0;
  std::size_t num_flags_ = 0;
};

class ShardPushes {
 public:
  // spec and carrier outlive this object.
  ShardPushes(const ExchangeSpec& spec, ItemCarrier& carrier);

  // Gives the parameter's gradient of the round. A gradient without data counts as missing.
  void give(std::size_t parameter_index, Gradient gradient);
  [[nodiscard]] bool has(std::size_t parameter_index) const;
  // Sends each owner's next chunks, up to the first chunk with a gradient that is not given. num_summed: the
  // number of microbatches whose gradients are summed in the round.
  [[nodiscard]] Result<bool> send_complete(std::int64_t num_summed, Deadline deadline);
  // Ends the round, after all its chunks are sent, and returns the gradients by parameter.
  [[nodiscard]] std::vector<Gradient> end_round();

 private:
  struct Receiver {
    const ExchangePeer* peer = nullptr;
    std::vector<PushLayout::Chunk> places;  // where each chunk lies, by the chunk's index
    std::size_t num_sent = 0;               // how many chunks of this round are sent
  };

  [[nodiscard]] Result<bool> send(const Receiver& to, std::int64_t num_summed, Deadline deadline);
  [[nodiscard]] TensorView flags_of(const ExchangeChunk& chunk, std::size_t first_flag, bool feeds_back);
  [[nodiscard]] TensorView content_of(const ExchangeChunk& chunk, const PushLayout::Chunk& place, DType dtype,
                                      bool feeds_back);
  [[nodiscard]] std::byte* slot() const { return slots_[slot_index_]; }

  ItemCarrier& carrier_;
  PushLayout layout_;
  const std::vector<std::byte*> slots_;
  std::vector<Receiver> receivers_;
  std::vector<std::vector<std::byte>> flags_;   // the flags that each push slot has now
  std::size_t slot_index_ = 0;                  // the push slot of this round
  std::vector<std::optional<Gradient>> given_;  // by parameter
  std::vector<TensorView> item_;
};

}  // namespace pipedream
