// Decides whether a step is larger than the caches. See tensor_ranges.h.
#include "weights/tensor_ranges.h"

#include <unistd.h>

namespace pipedream {
namespace {

// Returns the cache size that the system reports, or a usual size if it reports none.
std::size_t last_level_cache_bytes() {
  constexpr std::size_t kUsualBytes = std::size_t{32} << 20;
#if defined(_SC_LEVEL3_CACHE_SIZE)
  const long num_bytes = sysconf(_SC_LEVEL3_CACHE_SIZE);
  if (num_bytes > 0) return static_cast<std::size_t>(num_bytes);
#endif
  return kUsualBytes;
}

}  // namespace

bool worth_streaming(std::size_t num_bytes) {
  static const std::size_t cache_bytes = last_level_cache_bytes();
  return num_bytes > cache_bytes;
}

}  // namespace pipedream
