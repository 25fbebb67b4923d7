// When an item of a channel was under way, as its two ends know it, for the timeline of a run. Plain values;
// any thread. Times are now_ns().
#pragma once

#include <cstdint>

#include "base/ids.h"

namespace pipedream {

//   queued -> started ------> copied
//                    -> framed -----> released
//
// Chunks leave while later ones are still copied, so that copied is not always before framed.
struct SentTransfer {
  MinibatchId minibatch;
  MicrobatchIndex microbatch;
  std::uint64_t wire_bytes = 0;  // of its tensors as they travel
  std::int64_t queued_ns = 0;    // send()
  std::int64_t started_ns = 0;   // it had a slot of the receiver
  std::int64_t copied_ns = 0;    // its last chunk lay in staging or in the receiver's memory; 0: not copied
  std::int64_t framed_ns = 0;    // its first chunk was given to the link
  std::int64_t released_ns = 0;  // the transport no longer read it; the system may have kept it for longer
};

struct ReceivedTransfer {
  MinibatchId minibatch;
  MicrobatchIndex microbatch;
  std::uint64_t wire_bytes = 0;
  // Its first chunk was noticed: on one host that is when the receiver looked (frame_rings.h).
  std::int64_t arrived_ns = 0;
  std::int64_t complete_ns = 0;  // its last chunk was; copies to the device may follow
};

}  // namespace pipedream
