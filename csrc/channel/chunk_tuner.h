// Chooses the chunk size of a sending channel by timing the first items of the run itself. So no data are
// sent only for the measurement.
//
// Small chunks let copies and the wire overlap, but each chunk has a fixed cost. The tuner times an item from
// its start until its last byte was handed over, if no other item was under way. It tries the sizes in turn
// until it has kNumSamples times for each size. The size with the least median time per byte wins if it beats
// kUsualChunkBytes by at least kGain.
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
  // fixed_bytes: a chunk size that is used without any measurement; 0: measure, as described above.
  explicit ChunkTuner(std::size_t fixed_bytes);

  // The chunk size for the next timed item, and for an item that is not timed.
  [[nodiscard]] std::size_t chunk_bytes() const;
  [[nodiscard]] std::size_t untimed_chunk_bytes() const { return chosen_bytes_; }
  [[nodiscard]] bool decided() const { return decided_; }
  // Whether an item of this size should be timed. It should if the chunk size is not decided yet and the item
  // has at least two chunks of the largest size.
  [[nodiscard]] bool wants(std::size_t item_bytes) const {
    return !decided_ && item_bytes >= 2 * kChunkBytesTried.back();
  }
  // Records the time of an item that had chunks of chunk_bytes() and was the only item under way. elapsed_ns
  // is above 0.
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
