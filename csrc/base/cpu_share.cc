#include "base/cpu_share.h"

#include <sched.h>

#include <algorithm>

namespace pipedream {

std::optional<int> CpuShare::come_back(std::int64_t now_ns) {
  if (cpus_.empty() || now_ns < next_look_ns_) return std::nullopt;
  next_look_ns_ = now_ns + kPeriodNs;
  const int cpu = ::sched_getcpu();
  if (cpu < 0 || std::ranges::find(cpus_, cpu) != cpus_.end()) return std::nullopt;
  cpu_set_t allowed;
  if (::sched_getaffinity(0, sizeof(allowed), &allowed) != 0) return std::nullopt;
  cpu_set_t own;
  CPU_ZERO(&own);
  for (const int own_cpu : cpus_) {
    if (own_cpu < CPU_SETSIZE && CPU_ISSET(own_cpu, &allowed)) CPU_SET(own_cpu, &own);
  }
  // The kernel refuses if none of the preferred CPUs is allowed any more. Then the thread stays on its CPU.
  if (::sched_setaffinity(0, sizeof(own), &own) != 0) return std::nullopt;
  static_cast<void>(::sched_setaffinity(0, sizeof(allowed), &allowed));
  return cpu;
}

}  // namespace pipedream
