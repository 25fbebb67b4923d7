// Tells whether the process at the other end of some links is alive. The process counts as alive while
// anything arrives from it on any of its links. A single link cannot tell this: on a slow network a beat may
// wait behind payloads, and data of one link behind data of other links. Runs on the thread that drives the
// transport.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <utility>

#include "base/clock.h"

namespace pipedream {

class PeerLife {
 public:
  // silence_max: a peer counts as silent after this time without any arrival.
  explicit PeerLife(Clock::duration silence_max) : silence_max_(silence_max) {}

  // Notes that a frame has arrived on one of the peer's links.
  void hear_frame() { ++num_frames_; }
  // Notes that the peer counts as alive at `time`: a link has opened, bytes of a frame have arrived, no link
  // waits for the peer, or this side was held up and could not look.
  void hear_at(Deadline time) { deadline_ = std::max(deadline_, time + silence_max_); }

  // When the peer will count as silent if nothing more arrives.
  [[nodiscard]] Deadline deadline() const { return deadline_; }
  // Whether the peer is silent. Frames since the last call count as arriving now, so calls must be frequent.
  [[nodiscard]] bool is_silent(Deadline now) {
    if (std::exchange(num_frames_heard_, num_frames_) != num_frames_) hear_at(now);
    return now >= deadline_;
  }
  // Whether the links of a silent peer must be read once more before it counts as lost, because frames may
  // have arrived while this side was held up. True at the first call after a frame.
  [[nodiscard]] bool must_look() { return std::exchange(num_frames_missed_, num_frames_) != num_frames_; }

 private:
  const Clock::duration silence_max_;
  Deadline deadline_;
  std::uint64_t num_frames_ = 0;
  std::uint64_t num_frames_heard_ = 0;              // num_frames_ at the last is_silent()
  std::optional<std::uint64_t> num_frames_missed_;  // num_frames_ at the last must_look()
};

}  // namespace pipedream
