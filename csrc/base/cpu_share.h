// Moves a thread back to its preferred CPUs now and then, without binding it to them. Two threads that wake
// each other in turn may end up on one CPU while another CPU idles: the scheduler wakes a thread where it ran
// last, and looks for an idle CPU only if the others seem to have little to do. Then each thread computes
// while the other waits for the CPU. Moving a thread back now and then separates them.
//
// Owned by the thread that it moves.
#pragma once

#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

namespace pipedream {

class CpuShare {
 public:
  // cpus: if empty, the thread is never moved.
  explicit CpuShare(std::vector<int> cpus) : cpus_(std::move(cpus)) {}

  // Moves this thread to one of its preferred CPUs if it is on another CPU. Looks only once per period. The
  // thread's allowed CPUs stay the same, so the scheduler may move it away again. Returns the CPU that the
  // thread was on; empty if it was not moved.
  std::optional<int> come_back(std::int64_t now_ns);

  static constexpr std::int64_t kPeriodNs = 10'000'000;  // a move takes some 10 us

 private:
  const std::vector<int> cpus_;
  std::int64_t next_look_ns_ = 0;
};

}  // namespace pipedream
