// A CpuShare moves a thread back to its preferred CPUs now and then, without binding it to them. The thread
// that is moved owns the object.
//
// Without it, two threads that wake each other in turn may end up on one CPU while another CPU idles. The
// reason is that the kernel's scheduler often wakes a thread on the CPU where it ran last. Then only one of
// the two threads computes at a time.
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

  // Moves the calling thread to one of its preferred CPUs if it is on another CPU. Looks only once per
  // period. The thread's allowed CPUs stay the same, so the scheduler may move it away again. Returns the CPU
  // that the thread was on, or nothing if it was not moved.
  std::optional<int> come_back(std::int64_t now_ns);

  static constexpr std::int64_t kPeriodNs = 10'000'000;  // between two looks; a move takes about 10 us

 private:
  const std::vector<int> cpus_;
  std::int64_t next_look_ns_ = 0;
};

}  // namespace pipedream
