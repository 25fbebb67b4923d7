// The preferred CPUs of a thread, which is not bound to them. Two threads that wake each other in turn may
// end up on one CPU while another CPU idles: the scheduler wakes a thread where it ran last, and looks for an
// idle CPU only if the others seem to have little to do. Then each thread computes while the other waits for
// the CPU. Moving a thread back now and then separates them.
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
  // No cpus: it runs wherever the scheduler has it run.
  explicit CpuShare(std::vector<int> cpus) : cpus_(std::move(cpus)) {}

  // Moves this thread to one of the CPUs when it is on another; looks once a period. What the thread may run
  // on stays as it is, so the scheduler may move it away again. The CPU that it was on: empty when it was not
  // moved.
  std::optional<int> come_back(std::int64_t now_ns);

  static constexpr std::int64_t kPeriodNs = 10'000'000;  // some 10 us of moving

 private:
  const std::vector<int> cpus_;
  std::int64_t next_look_ns_ = 0;
};

}  // namespace pipedream
