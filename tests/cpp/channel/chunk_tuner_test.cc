#include "channel/chunk_tuner.h"

#include <gtest/gtest.h>

#include <map>

namespace pipedream {
namespace {

constexpr std::size_t kItemBytes = std::size_t{8} << 20;

// Feeds a tuner with items whose time depends on the chunk size, until it has decided. Returns its choice.
std::size_t chosen(const std::map<std::size_t, std::int64_t>& elapsed_ns) {
  ChunkTuner tuner(0);
  for (int item = 0; item < 100 && !tuner.decided(); ++item) {
    tuner.record(kItemBytes, elapsed_ns.at(tuner.chunk_bytes()));
  }
  EXPECT_TRUE(tuner.decided());
  return tuner.chunk_bytes();
}

TEST(ChunkTuner, AFixedSizeIsNeverMeasured) {
  const ChunkTuner tuner(4096);
  EXPECT_TRUE(tuner.decided());
  EXPECT_EQ(tuner.chunk_bytes(), 4096U);
  EXPECT_FALSE(tuner.wants(kItemBytes));
}

TEST(ChunkTuner, EverySizeIsTriedThreeTimes) {
  ChunkTuner tuner(0);
  std::map<std::size_t, int> num_tried;
  while (!tuner.decided()) {
    ++num_tried[tuner.chunk_bytes()];
    tuner.record(kItemBytes, 1000);
  }
  ASSERT_EQ(num_tried.size(), kChunkBytesTried.size());
  for (const auto& [chunk_bytes, count] : num_tried) EXPECT_EQ(count, 3) << chunk_bytes;
}

TEST(ChunkTuner, TheFastestSizeWins) {
  for (const std::size_t fastest : kChunkBytesTried) {
    std::map<std::size_t, std::int64_t> elapsed_ns;
    for (const std::size_t size : kChunkBytesTried) elapsed_ns[size] = size == fastest ? 800 : 1000;
    EXPECT_EQ(chosen(elapsed_ns), fastest);
  }
}

TEST(ChunkTuner, TheUsualSizeStaysWhereOthersAreHardlyFaster) {
  std::map<std::size_t, std::int64_t> elapsed_ns;
  for (const std::size_t size : kChunkBytesTried) elapsed_ns[size] = size == kUsualChunkBytes ? 1000 : 960;
  EXPECT_EQ(chosen(elapsed_ns), kUsualChunkBytes);
}

TEST(ChunkTuner, OneSlowSampleDecidesNothing) {
  ChunkTuner tuner(0);
  bool first = true;
  while (!tuner.decided()) {
    const bool is_fast = tuner.chunk_bytes() == kChunkBytesTried.back();
    tuner.record(kItemBytes, is_fast ? (first ? 100'000 : 500) : 1000);
    if (is_fast) first = false;
  }
  EXPECT_EQ(tuner.chunk_bytes(), kChunkBytesTried.back());
}

TEST(ChunkTuner, TimesOfItemsOfManySizesAreComparedPerByte) {
  ChunkTuner tuner(0);
  std::size_t factor = 1;
  while (!tuner.decided()) {
    const std::int64_t per_item = tuner.chunk_bytes() == kChunkBytesTried.front() ? 500 : 1000;
    tuner.record(kItemBytes * factor, per_item * static_cast<std::int64_t>(factor));
    factor = factor % 5 + 1;
  }
  EXPECT_EQ(tuner.chunk_bytes(), kChunkBytesTried.front());
}

TEST(ChunkTuner, ItemsThatAreNotTimedHaveTheUsualSizeUntilItHasDecided) {
  ChunkTuner tuner(0);
  while (!tuner.decided()) {
    EXPECT_EQ(tuner.untimed_chunk_bytes(), kUsualChunkBytes);
    tuner.record(kItemBytes, tuner.chunk_bytes() == kChunkBytesTried.back() ? 500 : 1000);
  }
  EXPECT_EQ(tuner.untimed_chunk_bytes(), kChunkBytesTried.back());
}

TEST(ChunkTuner, SmallItemsAreNotTimed) {
  const ChunkTuner tuner(0);
  EXPECT_FALSE(tuner.wants(2 * kChunkBytesTried.back() - 1));
  EXPECT_TRUE(tuner.wants(2 * kChunkBytesTried.back()));
}

}  // namespace
}  // namespace pipedream
