// Tests RingBuffer: the order of items around the ring's end, the bound, and when items are destroyed.
#include "base/ring_buffer.h"

#include <gtest/gtest.h>

#include <memory>

namespace pipedream {
namespace {

TEST(RingBuffer, IsFirstInFirstOutManyTimesAround) {
  RingBuffer<int> ring(3);
  int next_in = 0;
  int next_out = 0;
  for (int round = 0; round < 10; ++round) {
    while (!ring.full()) ring.push_back(next_in++);
    EXPECT_EQ(ring.size(), 3u);
    for (std::size_t index = 0; index < ring.size(); ++index) {
      EXPECT_EQ(ring[index], next_out + static_cast<int>(index));
    }
    EXPECT_EQ(ring.front(), next_out);
    EXPECT_EQ(ring.take_front(), next_out++);
    EXPECT_EQ(ring.take_front(), next_out++);
  }
  EXPECT_EQ(ring.size(), 1u);
  EXPECT_EQ(ring.num_items_max(), 3u);
}

TEST(RingBuffer, AnItemDiesWhenItIsPopped) {
  RingBuffer<std::shared_ptr<int>> ring(2);
  const auto item = std::make_shared<int>(7);
  ring.push_back(item);
  ring.push_back(item);
  EXPECT_EQ(item.use_count(), 3);
  ring.pop_front();
  EXPECT_EQ(item.use_count(), 2);
  ring.clear();
  EXPECT_EQ(item.use_count(), 1);
  EXPECT_TRUE(ring.empty());
}

TEST(RingBuffer, CarriesItemsThatCannotBeCopied) {
  RingBuffer<std::unique_ptr<int>> ring(1);
  ring.push_back(std::make_unique<int>(7));
  EXPECT_EQ(*ring.take_front(), 7);
}

TEST(RingBufferDeathTest, MoreThanTheBoundAborts) {
  RingBuffer<int> ring(1);
  ring.push_back(1);
  EXPECT_DEATH(ring.push_back(2), "a ring of 1 items is full");
}

TEST(RingBufferDeathTest, TakingFromAnEmptyRingAborts) {
  RingBuffer<int> ring(1);
  EXPECT_DEATH(static_cast<void>(ring.take_front()), "item 0 of 0");
}

}  // namespace
}  // namespace pipedream
