// Divides one leased slot into large segments for an allocator that divides them further. torch's caching
// allocator takes its segments from the arena. So its tensors lie inside the worker's planned memory and
// cannot exceed it.
//
// It uses best fit and merges neighbouring free pieces. There are few segments, so a search through all free
// ones is fast enough. free() may also wait for the device. Any thread; a mutex guards the lists. The caller
// owns the memory, and frees it after the arena is destroyed.
#pragma once

#include <cstddef>
#include <functional>
#include <map>
#include <mutex>

namespace pipedream {

class SegmentArena {
 public:
  static constexpr std::size_t kAlignment = 512;  // the least that cudaMalloc() gives

  // base: the memory to divide. If it is not aligned to kAlignment, its beginning is not used.
  // wait_until_unused: free() calls it before the segment may be given out again, because streams of the
  // device may still use the segment. cudaFree() waits in the same way.
  SegmentArena(std::byte* base, std::size_t num_bytes, std::function<void()> wait_until_unused = {});
  SegmentArena(const SegmentArena&) = delete;
  SegmentArena& operator=(const SegmentArena&) = delete;
  ~SegmentArena() = default;

  // Returns null if no free piece is large enough. The caller then reports that memory is full.
  [[nodiscard]] std::byte* allocate(std::size_t num_bytes);
  // Aborts (our bug, or the framework's) for a pointer that allocate() did not return or that was freed
  // before.
  void free(std::byte* segment);

  [[nodiscard]] std::size_t peak_bytes() const;
  [[nodiscard]] std::size_t used_bytes() const;

 private:
  const std::function<void()> wait_until_unused_;
  mutable std::mutex mutex_;  // guards the members below
  std::map<std::byte*, std::size_t> free_;
  std::map<std::byte*, std::size_t> used_;
  std::size_t used_bytes_ = 0;
  std::size_t peak_bytes_ = 0;
};

}  // namespace pipedream
