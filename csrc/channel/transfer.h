// The times of one item's transfer through a channel, as the sender and the receiver measured them. An item
// is the set of tensors that one work item sends. The timeline of a run shows these times. Plain values; any
// thread. Times are now_ns().
#pragma once

#include <cstdint>

#include "base/ids.h"

namespace pipedream {

//   queued -> started ------> copied
//                    -> framed -----> released
//
// The first chunks leave while later ones are still being copied, so `framed` can be earlier than `copied`.
struct SentTransfer {
  MinibatchId minibatch;
  MicrobatchIndex microbatch;
  std::uint64_t wire_bytes = 0;  // the item's tensors, encoded if the channel has a codec
  std::int64_t queued_ns = 0;    // send() was called
  std::int64_t started_ns = 0;   // the item got a slot of the receiver
  std::int64_t copied_ns = 0;    // the last chunk was copied to staging or to the receiver; 0: no copy
  std::int64_t framed_ns = 0;    // the first chunk was given to the link
  std::int64_t released_ns = 0;  // the transport stopped reading; the system may still have had bytes to send
};

struct ReceivedTransfer {
  MinibatchId minibatch;
  MicrobatchIndex microbatch;
  std::uint64_t wire_bytes = 0;
  // When the receiver noticed the first chunk. Between processes of one host the chunk may have arrived
  // earlier, because the receiver does not look at every moment (frame_rings.h).
  std::int64_t arrived_ns = 0;
  std::int64_t complete_ns = 0;  // the receiver had the last chunk; copies to the device may follow
};

}  // namespace pipedream
