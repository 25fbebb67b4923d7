// Counters of one end of a channel. Plain values; any thread.
#pragma once

#include <cstdint>

#include "transport/transport.h"

namespace pipedream {

struct ChannelStats {
  LinkCounters link;  // bytes on the wire with headers and credits, without bytes written into shared memory
  std::uint64_t num_items = 0;  // sent or received
  std::uint64_t num_chunks = 0;
  std::uint64_t tensor_bytes = 0;  // the items' tensors before encoding
  std::uint64_t chunk_bytes = 0;   // sender: the present chunk size; 0 at a receiver
  std::uint64_t placed_bytes = 0;  // bytes that the sender wrote into the receiver's memory
  // Sender: time during which at least one item was between send() and the release of its last byte. Bytes
  // that the system still has to send then do not count. Receiver: time from the first bytes of an item to
  // the last, estimated from its chunks; an item of a single chunk adds nothing.
  std::int64_t transfer_ns = 0;
  // Sender: the part of transfer_ns in which the first item in the queue had no credit.
  std::int64_t credit_wait_ns = 0;
  // Receiver: time during which the compute thread waited for this channel.
  std::int64_t wait_ns = 0;
};

}  // namespace pipedream
