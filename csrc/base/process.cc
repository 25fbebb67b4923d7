#include "base/process.h"

#include <malloc.h>
#include <sys/prctl.h>

#include <csignal>
#include <limits>

namespace pipedream {

void die_with_parent() { prctl(PR_SET_PDEATHSIG, SIGKILL); }

void keep_freed_memory() {
  mallopt(M_MMAP_MAX, 0);
  mallopt(M_TRIM_THRESHOLD, std::numeric_limits<int>::max());
  mallopt(M_TOP_PAD, 64 << 20);
}

}  // namespace pipedream
