// Maps memory, advises huge pages and touches every page. The first touch of a fresh page costs 10 to 100 us
// on virtual machines, so all pages are touched here, before the first minibatch.
#include "device/host/host_memory.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <limits>

#include "base/bytes.h"
#include "base/check.h"
#include "base/failure.h"
#include "device/host/control_group.h"

namespace pipedream {
namespace {

constexpr std::size_t kHugePageBytes = std::size_t{2} << 20;

// MADV_POPULATE_WRITE of linux/mman.h. Headers before Linux 5.14 do not have it, for instance those of
// manylinux_2_28.
constexpr int kMadvPopulateWrite = 23;
#ifdef MADV_POPULATE_WRITE
static_assert(kMadvPopulateWrite == MADV_POPULATE_WRITE);
#endif

std::size_t round_up(std::size_t num_bytes, std::size_t multiple) {
  return (num_bytes + multiple - 1) / multiple * multiple;
}

// Returns MemAvailable of /proc/meminfo in bytes, or the largest size if it cannot be read.
std::size_t mem_available_bytes() {
  std::ifstream meminfo("/proc/meminfo");
  std::string line;
  while (std::getline(meminfo, line)) {
    unsigned long long num_kib = 0;
    if (std::sscanf(line.c_str(), "MemAvailable: %llu kB", &num_kib) == 1) {
      return static_cast<std::size_t>(num_kib) * 1024;
    }
  }
  return std::numeric_limits<std::size_t>::max();
}

// Maps memory. Memory of at least one huge page begins at a huge page's boundary, so that the kernel can use
// huge pages from the first byte. Returns null if the kernel refuses.
std::byte* map_aligned(std::size_t mapped_bytes) {
  const std::size_t slack_bytes = mapped_bytes >= kHugePageBytes ? kHugePageBytes : 0;
  void* const mapping =
      ::mmap(nullptr, mapped_bytes + slack_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (mapping == MAP_FAILED) return nullptr;
  auto* const begin = static_cast<std::byte*>(mapping);
  if (slack_bytes == 0) return begin;

  const auto address = reinterpret_cast<std::uintptr_t>(begin);
  const std::size_t head_bytes = round_up(address, kHugePageBytes) - address;
  const std::size_t tail_bytes = slack_bytes - head_bytes;
  if (head_bytes > 0) ::munmap(begin, head_bytes);
  if (tail_bytes > 0) ::munmap(begin + head_bytes + mapped_bytes, tail_bytes);
  return begin + head_bytes;
}

}  // namespace

std::size_t page_bytes() {
  const long num_bytes = ::sysconf(_SC_PAGESIZE);
  PD_CHECK(num_bytes > 0, "page size " << num_bytes);
  return static_cast<std::size_t>(num_bytes);
}

bool touch_pages(std::byte* data, std::size_t num_bytes) {
  // Huge pages are only advised. A kernel without huge pages refuses the advice, and uses small pages.
  (void)::madvise(data, num_bytes, MADV_HUGEPAGE);
  if (::madvise(data, num_bytes, kMadvPopulateWrite) == 0) return true;
  if (errno == ENOMEM || errno == EFAULT) return false;
  // A kernel before 5.14 does not know kMadvPopulateWrite. Then each page is touched by an atomic addition of
  // 0, because another process may write there already.
  const std::size_t page = page_bytes();
  for (std::size_t offset = 0; offset < num_bytes; offset += page) {
    reinterpret_cast<std::atomic<std::uint8_t>*>(data + offset)->fetch_add(0, std::memory_order_relaxed);
  }
  return true;
}

void throw_not_enough_memory(std::size_t num_bytes, const std::string& what, const std::string& why) {
  throw UserError("cannot allocate " + format_bytes(num_bytes) + " (" + std::to_string(num_bytes) +
                  " bytes) of " + what + ": " + why +
                  "; use smaller minibatches, more stages or more memory");
}

std::size_t host_memory_available_bytes() {
  return std::min(mem_available_bytes(), control_group_available_bytes());
}

HostMemory::HostMemory(std::size_t num_bytes, const std::string& what) : size_bytes_(num_bytes) {
  PD_CHECK(num_bytes > 0, "0 bytes of " << what);
  // The available memory is checked first, because a kernel that overcommits would accept the mapping now and
  // kill the process when it touches the pages.
  const std::size_t available_bytes = host_memory_available_bytes();
  if (num_bytes > available_bytes) {
    throw_not_enough_memory(num_bytes, what, format_bytes(available_bytes) + " are available");
  }
  mapped_bytes_ = round_up(num_bytes, page_bytes());
  data_ = map_aligned(mapped_bytes_);
  if (data_ == nullptr) throw_not_enough_memory(num_bytes, what, std::strerror(errno));
  if (!touch_pages(data_, mapped_bytes_)) {
    ::munmap(data_, mapped_bytes_);
    throw_not_enough_memory(num_bytes, what, "the kernel ran out of pages");
  }
}

HostMemory::~HostMemory() {
  if (::munmap(data_, mapped_bytes_) != 0) {
    std::fprintf(stderr, "pipedream: munmap of %zu bytes failed: %s\n", mapped_bytes_, std::strerror(errno));
  }
}

}  // namespace pipedream
