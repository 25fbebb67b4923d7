// Counters of one end of a channel. An item is the set of tensors that one work item sends over the channel.
// A chunk is the part of a tensor that one frame carries. Plain values; any thread.
#pragma once

#include <cstdint>

#include "transport/transport.h"

namespace pipedream {

struct ChannelStats {
  LinkCounters link;            // headers and payloads of all frames, also of credits; without placed_bytes
  std::uint64_t num_items = 0;  // sent or received
  std::uint64_t num_chunks = 0;
  std::uint64_t tensor_bytes = 0;  // the items' tensors before encoding
  std::uint64_t chunk_bytes = 0;   // sender: the chunk size on the wire; 0 at a receiver
  std::uint64_t placed_bytes = 0;  // bytes that the sender wrote into the receiver's memory
  // At a sender: the time during which at least one item was between send() and the release of its last byte.
  // Bytes may then still lie in the system's buffers. At a receiver: the sum over items of the time from an
  // item's first bytes to its last bytes, estimated from its chunks. An item of a single chunk adds nothing.
  std::int64_t transfer_ns = 0;
  // At a sender: the part of transfer_ns in which the first queued item waited for a slot of the receiver.
  std::int64_t credit_wait_ns = 0;
  // At a receiver: the time during which the compute thread waited for this channel.
  std::int64_t wait_ns = 0;
};

}  // namespace pipedream
