#include "channel/chunk_tuner.h"

#include <algorithm>

#include "base/check.h"

namespace pipedream {

ChunkTuner::ChunkTuner(std::size_t fixed_bytes)
    : chosen_bytes_(fixed_bytes != 0 ? fixed_bytes : kUsualChunkBytes), decided_(fixed_bytes != 0) {}

std::size_t ChunkTuner::chunk_bytes() const {
  return decided_ ? chosen_bytes_ : kChunkBytesTried.at(num_recorded_ % kChunkBytesTried.size());
}

void ChunkTuner::record(std::size_t item_bytes, std::int64_t elapsed_ns) {
  PD_CHECK(wants(item_bytes) && elapsed_ns > 0, item_bytes << " bytes in " << elapsed_ns << " ns");
  const std::size_t size_index = num_recorded_ % kChunkBytesTried.size();
  ns_per_byte_.at(size_index).at(num_recorded_ / kChunkBytesTried.size()) =
      static_cast<double>(elapsed_ns) / static_cast<double>(item_bytes);
  if (++num_recorded_ == kNumSamples * kChunkBytesTried.size()) decide();
}

void ChunkTuner::decide() {
  std::array<double, kChunkBytesTried.size()> medians{};
  for (std::size_t index = 0; index < medians.size(); ++index) {
    auto& samples = ns_per_byte_.at(index);
    std::sort(samples.begin(), samples.end());
    medians.at(index) = samples[kNumSamples / 2];
  }
  const auto usual = std::find(kChunkBytesTried.begin(), kChunkBytesTried.end(), kUsualChunkBytes);
  const double usual_time = medians.at(static_cast<std::size_t>(usual - kChunkBytesTried.begin()));
  const auto fastest = std::min_element(medians.begin(), medians.end());
  decided_ = true;
  if (*fastest > (1 - kGain) * usual_time) return;
  chosen_bytes_ = kChunkBytesTried.at(static_cast<std::size_t>(fastest - medians.begin()));
}

}  // namespace pipedream
