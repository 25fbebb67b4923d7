// Monotonic time. The same clock as Python's time.monotonic_ns() on Linux, so spans of both sides line up.
#pragma once

#include <chrono>
#include <cstdint>

namespace pipedream {

using Clock = std::chrono::steady_clock;
using Deadline = Clock::time_point;

[[nodiscard]] inline std::int64_t now_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(Clock::now().time_since_epoch()).count();
}

}  // namespace pipedream
