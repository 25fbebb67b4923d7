// Whether the process at the other end of some links lives. It does while anything comes from it, by
// whichever of its links: a beat may wait behind payloads for as long as a slow link takes, and one link for
// as long as the others keep the line busy. On the thread that drives.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <utility>

#include "base/clock.h"

namespace pipedream {

class PeerLife {
 public:
  // silence_max: a peer from which nothing has come for longer is lost.
  explicit PeerLife(Clock::duration silence_max) : silence_max_(silence_max) {}

  // A frame has come by one of its links.
  void hear_frame() { ++num_frames_; }
  // Something had come by then: a link has opened, bytes of a frame have arrived, or nobody could look.
  void hear_at(Deadline time) { deadline_ = std::max(deadline_, time + silence_max_); }

  // When the peer is silent, unless something comes.
  [[nodiscard]] Deadline deadline() const { return deadline_; }
  // A frame is noted here: so much too late at most as this is called.
  [[nodiscard]] bool is_silent(Deadline now) {
    if (std::exchange(num_frames_heard_, num_frames_) != num_frames_) hear_at(now);
    return now >= deadline_;
  }
  // Whether this side has yet to read frames of a silent peer that came while it was held up itself.
  [[nodiscard]] bool must_look() { return std::exchange(num_frames_missed_, num_frames_) != num_frames_; }

 private:
  const Clock::duration silence_max_;
  Deadline deadline_;
  std::uint64_t num_frames_ = 0;
  std::uint64_t num_frames_heard_ = 0;              // when is_silent() last asked
  std::optional<std::uint64_t> num_frames_missed_;  // when must_look() last did
};

}  // namespace pipedream
