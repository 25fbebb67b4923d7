// Interposes malloc and its relatives. In every library of the process the functions here are called in place
// of the C library's functions, and call those. See the header for the threads.
#include "support/allocation_counter.h"

#include <dlfcn.h>
#include <execinfo.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <sstream>

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define PD_SANITIZER_HAS_THE_ALLOCATOR 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer)
#define PD_SANITIZER_HAS_THE_ALLOCATOR 1
#endif
#endif

namespace pipedream {
namespace {

std::atomic<std::uint64_t> num_allocations{0};
thread_local std::uint64_t num_allocations_of_thread = 0;

// These describe the first allocation since the current counter was made.
constexpr int kNumFramesMax = 24;
std::atomic<bool> first_is_awaited{false};
std::size_t first_bytes = 0;
int num_first_frames = 0;
std::array<void*, kNumFramesMax> first_frames{};
std::atomic<bool> first_is_there{false};

[[maybe_unused]] void count(std::size_t num_bytes) {
  num_allocations.fetch_add(1, std::memory_order_relaxed);
  ++num_allocations_of_thread;
  if (!first_is_awaited.load(std::memory_order_relaxed) || !first_is_awaited.exchange(false)) return;
  first_bytes = num_bytes;
  num_first_frames = ::backtrace(first_frames.data(), kNumFramesMax);
  first_is_there.store(true);
}

}  // namespace

AllocationCounter::AllocationCounter() {
  std::array<void*, 1> frame{};
  ::backtrace(frame.data(), 1);  // the first call loads a library, which allocates
  first_is_there = false;
  num_on_this_thread_before_ = num_allocations_of_thread;
  num_in_all_before_ = num_allocations.load();
  first_is_awaited = true;
}

AllocationCounter::~AllocationCounter() { first_is_awaited = false; }

std::uint64_t AllocationCounter::num_in_all() const { return num_allocations.load() - num_in_all_before_; }

std::uint64_t AllocationCounter::num_on_this_thread() const {
  return num_allocations_of_thread - num_on_this_thread_before_;
}

std::string AllocationCounter::first() const {
  if (!first_is_there) return "nothing was allocated";
  std::ostringstream text;
  text << "the first allocation, " << first_bytes << " bytes:";
  char** const symbols = ::backtrace_symbols(first_frames.data(), num_first_frames);
  for (int frame = 0; symbols != nullptr && frame < num_first_frames; ++frame)
    text << "\n  " << symbols[frame];
  std::free(symbols);
  return text.str();
}

#ifdef PD_SANITIZER_HAS_THE_ALLOCATOR

bool AllocationCounter::counts() { return false; }

#else

bool AllocationCounter::counts() { return true; }

namespace {

struct Allocator {
  void* (*malloc)(std::size_t num_bytes) = nullptr;
  void* (*calloc)(std::size_t num_items, std::size_t item_bytes) = nullptr;
  void* (*realloc)(void* data, std::size_t num_bytes) = nullptr;
  void (*free)(void* data) = nullptr;
  void* (*aligned_alloc)(std::size_t alignment, std::size_t num_bytes) = nullptr;
  void* (*memalign)(std::size_t alignment, std::size_t num_bytes) = nullptr;
  int (*posix_memalign)(void** data, std::size_t alignment, std::size_t num_bytes) = nullptr;
};

// Memory for allocations that happen while the C library's functions are looked up. It is never freed. The
// look-up runs before main(), when there is one thread.
alignas(std::max_align_t) std::array<std::byte, 8192> first_memory{};
std::size_t num_first_memory_used = 0;

void* take_first_memory(std::size_t num_bytes) {
  const std::size_t begin = num_first_memory_used;
  const std::size_t padded_bytes =
      (num_bytes + alignof(std::max_align_t) - 1) / alignof(std::max_align_t) * alignof(std::max_align_t);
  if (padded_bytes > first_memory.size() - begin) std::abort();
  num_first_memory_used += padded_bytes;
  return first_memory.data() + begin;
}

bool is_first_memory(const void* data) {
  return data >= first_memory.data() && data < first_memory.data() + first_memory.size();
}

template <class Function>
void look_up(Function& function, const char* name) {
  function = reinterpret_cast<Function>(::dlsym(RTLD_NEXT, name));
  if (function == nullptr) std::abort();
}

// Returns null while the functions are looked up.
const Allocator* real_allocator() {
  static Allocator allocator;
  static bool looking_up = false;
  static bool ready = false;
  if (ready) return &allocator;
  if (looking_up) return nullptr;
  looking_up = true;
  look_up(allocator.malloc, "malloc");
  look_up(allocator.calloc, "calloc");
  look_up(allocator.realloc, "realloc");
  look_up(allocator.free, "free");
  look_up(allocator.aligned_alloc, "aligned_alloc");
  look_up(allocator.memalign, "memalign");
  look_up(allocator.posix_memalign, "posix_memalign");
  ready = true;
  return &allocator;
}

}  // namespace

#define PD_INTERPOSED extern "C" __attribute__((visibility("default")))

PD_INTERPOSED void* malloc(std::size_t num_bytes) noexcept {
  const Allocator* const real = real_allocator();
  if (real == nullptr) return take_first_memory(num_bytes);
  count(num_bytes);
  return real->malloc(num_bytes);
}

PD_INTERPOSED void* calloc(std::size_t num_items, std::size_t item_bytes) noexcept {
  const Allocator* const real = real_allocator();
  // The memory is zero, because it was never used.
  if (real == nullptr) return take_first_memory(num_items * item_bytes);
  count(num_items * item_bytes);
  return real->calloc(num_items, item_bytes);
}

PD_INTERPOSED void* realloc(void* data, std::size_t num_bytes) noexcept {
  const Allocator* const real = real_allocator();
  if (real == nullptr && data == nullptr) return take_first_memory(num_bytes);
  if (real == nullptr || is_first_memory(data)) {
    // The old block's size is not known, but it is at most the rest of first_memory.
    void* const grown = real == nullptr ? take_first_memory(num_bytes) : real->malloc(num_bytes);
    const auto* const end = first_memory.data() + first_memory.size();
    const auto num_left = static_cast<std::size_t>(end - static_cast<const std::byte*>(data));
    if (grown != nullptr) std::memmove(grown, data, std::min(num_bytes, num_left));
    return grown;
  }
  count(num_bytes);
  return real->realloc(data, num_bytes);
}

PD_INTERPOSED void free(void* data) noexcept {
  if (data == nullptr || is_first_memory(data)) return;
  real_allocator()->free(data);
}

PD_INTERPOSED void* aligned_alloc(std::size_t alignment, std::size_t num_bytes) noexcept {
  count(num_bytes);
  return real_allocator()->aligned_alloc(alignment, num_bytes);
}

PD_INTERPOSED void* memalign(std::size_t alignment, std::size_t num_bytes) noexcept {
  count(num_bytes);
  return real_allocator()->memalign(alignment, num_bytes);
}

PD_INTERPOSED int posix_memalign(void** data, std::size_t alignment, std::size_t num_bytes) noexcept {
  count(num_bytes);
  return real_allocator()->posix_memalign(data, alignment, num_bytes);
}

#endif

}  // namespace pipedream
