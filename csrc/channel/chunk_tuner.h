// Into how large chunks a channel cuts its tensors: found out on the first items of the run itself, over the
// link that they travel on, so that nothing is sent for the measurement's sake.
//
// Small chunks let copies, wire and the far copies overlap; each has a fixed cost. An item is timed from its
// first frame until its last byte was handed over, if it was alone on its way; the sizes take turns until
// each has kNumSamples times. The fastest by its median wins, if it is faster than the usual size by kGain at
// least.
//
// Owned by a sending channel, whose mutex guards it.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace pipedream {

inline constexpr std::array<std::size_t, 4> kChunkBytesTried = {
    std::size_t{256} << 10, std::size_t{512} << 10, std::size_t{1} << 20, std::size_t{2} << 20};
inline constexpr std::size_t kUsualChunkBytes = std::size_t{1} << 20;

class ChunkTuner {
 public:
  // fixed_bytes: nothing is tried; 0: as described.
  explicit ChunkTuner(std::size_t fixed_bytes);

  // For the next item that is timed, and for one that is not.
  [[nodiscard]] std::size_t chunk_bytes() const;
  [[nodiscard]] std::size_t untimed_chunk_bytes() const { return chosen_bytes_; }
  [[nodiscard]] bool decided() const { return decided_; }
  // Items from this size on are worth timing: two of the largest chunks.
  [[nodiscard]] bool wants(std::size_t item_bytes) const {
    return !decided_ && item_bytes >= 2 * kChunkBytesTried.back();
  }
  // An item that was cut by chunk_bytes() and was alone on its way. elapsed_ns above 0.
  void record(std::size_t item_bytes, std::int64_t elapsed_ns);

 private:
  static constexpr std::size_t kNumSamples = 3;
  static constexpr double kGain = 0.05;

  void decide();

  std::array<std::array<double, kNumSamples>, kChunkBytesTried.size()> ns_per_byte_{};
  std::size_t num_recorded_ = 0;
  std::size_t chosen_bytes_;
  bool decided_;
};

}  // namespace pipedream
