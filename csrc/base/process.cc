#include "base/process.h"

#include <malloc.h>
#include <pthread.h>
#include <sys/prctl.h>
#include <unistd.h>

#include <csignal>
#include <limits>

#include "base/check.h"

namespace pipedream {

void die_with_parent(int parent_pid) {
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (getppid() != parent_pid) _exit(1);
}

void keep_freed_memory() {
  mallopt(M_MMAP_MAX, 0);
  mallopt(M_TRIM_THRESHOLD, std::numeric_limits<int>::max());
  mallopt(M_TOP_PAD, 64 << 20);
}

std::atomic<int> HomeProcess::num_forks_here{0};

HomeProcess::HomeProcess() : num_forks_(num_forks_here.load()) {
  static const int registered = pthread_atfork(nullptr, nullptr, [] { num_forks_here.fetch_add(1); });
  PD_CHECK(registered == 0, "pthread_atfork");
}

}  // namespace pipedream
