// Figures of one end of a channel. Plain values; any thread.
#pragma once

#include <cstdint>

#include "transport/transport.h"

namespace pipedream {

struct ChannelStats {
  LinkCounters link;            // on the wire, headers and credits included; what was placed is not
  std::uint64_t num_items = 0;  // sent or received
  std::uint64_t num_chunks = 0;
  std::uint64_t tensor_bytes = 0;  // of the items' tensors, as they are without a codec
  std::uint64_t chunk_bytes = 0;   // sender: as it cuts its tensors now; 0 at a receiver
  std::uint64_t placed_bytes = 0;  // of what was written into the receiver's memory
  // Sender: time in which at least one item was under way, from send() until its last byte was handed over
  // (the system may keep it for longer). Receiver: time from items' first bytes to their last, as far as
  // chunks tell; that of a single chunk counts nothing.
  std::int64_t transfer_ns = 0;
  // Sender: of that, time in which the first item in the queue had no credit.
  std::int64_t credit_wait_ns = 0;
  // Receiver: time in which the compute thread waited for this channel.
  std::int64_t wait_ns = 0;
};

}  // namespace pipedream
