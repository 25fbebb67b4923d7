// Reads monotonic time. On Linux this is the clock of Python's time.monotonic_ns(), so times of C++ and
// Python can be compared.
#pragma once

#include <chrono>
#include <cstdint>

namespace pipedream {

using Clock = std::chrono::steady_clock;
using Deadline = Clock::time_point;

[[nodiscard]] inline Clock::duration duration_of(double seconds) {
  return std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds));
}
[[nodiscard]] inline std::int64_t nanoseconds_of(Clock::time_point time) {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(time.time_since_epoch()).count();
}

[[nodiscard]] inline std::int64_t now_ns() { return nanoseconds_of(Clock::now()); }

}  // namespace pipedream
