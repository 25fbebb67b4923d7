// Lets Python's threads wait in the core. The wait releases the GIL, checks for signals, and raises a Python
// exception if it fails.
#pragma once

#include <pybind11/pybind11.h>

#include <algorithm>
#include <chrono>

#include "base/clock.h"
#include "base/failure.h"

namespace pipedream {

inline constexpr double kForeverSeconds = 1e9;
inline constexpr auto kSignalCheckPeriod = std::chrono::milliseconds(100);

// Makes the exception type RunFailure(kind, message). Call it before the first raise().
void bind_run_failure(pybind11::module_& module);
[[noreturn]] void raise(const Failure& failure);

[[nodiscard]] inline Deadline deadline_after(double seconds) {
  return Clock::now() + duration_of(std::min(seconds, kForeverSeconds));
}

inline constexpr Deadline kAtOnce{};  // a deadline in the past

template <class Attempt>
[[nodiscard]] auto at_once(Attempt attempt) {
  auto result = [&] {
    const pybind11::gil_scoped_release release;
    return attempt(kAtOnce);
  }();
  if (!result) raise(result.failure());
  return result;
}

// Calls `attempt(deadline)` without the GIL again and again, until `done` accepts its value or the time is
// over. Returns attempt's last result. Throws if an attempt fails or a signal handler raises.
template <class Attempt, class Done>
[[nodiscard]] auto with_signals(double timeout_s, Attempt attempt, Done done) {
  const Deadline end = deadline_after(timeout_s);
  for (;;) {
    const Deadline slice = std::min<Deadline>(end, Clock::now() + kSignalCheckPeriod);
    auto result = [&] {
      const pybind11::gil_scoped_release release;
      return attempt(slice);
    }();
    if (!result) raise(result.failure());
    if (done(result.value()) || Clock::now() >= end) return result;
    if (PyErr_CheckSignals() != 0) throw pybind11::error_already_set();
  }
}

}  // namespace pipedream
