// Tests the arena from which torch's allocator takes its segments.
#include "pool/segment_arena.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <iterator>
#include <map>
#include <random>
#include <vector>

namespace pipedream {
namespace {

constexpr std::size_t kUnit = SegmentArena::kAlignment;

class SegmentArenaTest : public testing::Test {
 protected:
  static constexpr std::size_t kBytes = 64 * kUnit;
  alignas(SegmentArena::kAlignment) std::array<std::byte, kBytes> memory_{};
  SegmentArena arena_{memory_.data(), kBytes};
};

using SegmentArenaDeathTest = SegmentArenaTest;

TEST_F(SegmentArenaTest, GivesAllOfTheMemoryAndThenNothing) {
  std::vector<std::byte*> segments;
  for (std::size_t count = 0; count < 64; ++count) segments.push_back(arena_.allocate(kUnit));
  for (std::size_t index = 0; index < segments.size(); ++index)
    EXPECT_EQ(segments[index], memory_.data() + index * kUnit);
  EXPECT_EQ(arena_.allocate(1), nullptr);
  arena_.free(segments[7]);
  EXPECT_EQ(arena_.allocate(1), segments[7]);
  EXPECT_EQ(arena_.peak_bytes(), kBytes);
}

TEST_F(SegmentArenaTest, ASegmentIsGivenAgainOnlyWhenNobodyUsesItAnyMore) {
  SegmentArena* waiting = nullptr;
  int num_waits = 0;
  SegmentArena arena(memory_.data(), kBytes, [&] {
    ++num_waits;
    // The memory is not free yet, because a stream may still write there.
    EXPECT_EQ(waiting->allocate(1), nullptr);
  });
  waiting = &arena;
  std::byte* const segment = arena.allocate(kBytes);
  arena.free(segment);
  EXPECT_EQ(num_waits, 1);
  EXPECT_EQ(arena.allocate(kBytes), segment);
}

TEST_F(SegmentArenaTest, FreedNeighboursBecomeOnePieceWhateverTheOrder) {
  std::array<int, 3> order = {0, 1, 2};
  do {
    std::array<std::byte*, 3> segments{};
    for (std::byte*& segment : segments) segment = arena_.allocate(20 * kUnit);
    for (const int index : order) arena_.free(segments.at(static_cast<std::size_t>(index)));
    std::byte* whole = arena_.allocate(kBytes);
    EXPECT_EQ(whole, memory_.data());
    arena_.free(whole);
  } while (std::next_permutation(order.begin(), order.end()));
  EXPECT_EQ(arena_.used_bytes(), 0U);
}

TEST_F(SegmentArenaTest, TheSmallestPieceThatFitsIsTaken) {
  std::byte* const large = arena_.allocate(10 * kUnit);
  static_cast<void>(arena_.allocate(kUnit));
  std::byte* const small = arena_.allocate(4 * kUnit);
  static_cast<void>(arena_.allocate(kUnit));
  arena_.free(large);
  arena_.free(small);
  EXPECT_EQ(arena_.allocate(3 * kUnit), small);
  EXPECT_EQ(arena_.allocate(9 * kUnit), large);
}

TEST_F(SegmentArenaTest, MemoryThatIsNotAlignedLosesItsBeginningOnly) {
  SegmentArena shifted(memory_.data() + 1, kBytes - 1);
  EXPECT_EQ(shifted.allocate(kBytes - kUnit), memory_.data() + kUnit);
  SegmentArena nothing(memory_.data() + 1, kUnit);
  EXPECT_EQ(nothing.allocate(1), nullptr);
  EXPECT_EQ(arena_.allocate(SIZE_MAX), nullptr);
}

TEST_F(SegmentArenaTest, SegmentsNeverOverlapUnderARandomTrace) {
  std::mt19937 random(1);  // NOLINT(cert-msc51-cpp): a fixed seed, so that each run has the same trace
  std::map<std::byte*, std::size_t> held;
  for (int step = 0; step < 20'000; ++step) {
    const bool frees = !held.empty() && random() % 2 == 0;
    if (frees) {
      auto victim = std::next(held.begin(), static_cast<std::ptrdiff_t>(random() % held.size()));
      arena_.free(victim->first);
      held.erase(victim);
      continue;
    }
    const std::size_t num_bytes = 1 + random() % (12 * kUnit);
    std::byte* const segment = arena_.allocate(num_bytes);
    if (segment == nullptr) continue;
    ASSERT_GE(segment, memory_.data());
    ASSERT_LE(segment + num_bytes, memory_.data() + kBytes);
    const auto after = held.lower_bound(segment);
    if (after != held.end()) {
      ASSERT_LE(segment + num_bytes, after->first);
    }
    if (after != held.begin()) {
      const auto before = std::prev(after);
      ASSERT_LE(before->first + before->second, segment);
    }
    held[segment] = num_bytes;
  }
}

TEST_F(SegmentArenaDeathTest, FreeingWhatIsNotHeldAborts) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  std::byte* const segment = arena_.allocate(kUnit);
  EXPECT_DEATH(arena_.free(segment + 1), "no segment at");
  arena_.free(segment);
  EXPECT_DEATH(arena_.free(segment), "no segment at");
}

}  // namespace
}  // namespace pipedream
