// Tests BoundedQueue: order, bound, close(), and that no item is lost between threads.
#include "base/bounded_queue.h"

#include <gtest/gtest.h>

#include <atomic>
#include <latch>
#include <memory>
#include <optional>
#include <thread>
#include <vector>

namespace pipedream {
namespace {

TEST(BoundedQueue, IsFirstInFirstOut) {
  BoundedQueue<int> queue(3);
  ASSERT_TRUE(queue.push(1));
  ASSERT_TRUE(queue.push(2));
  ASSERT_TRUE(queue.push(3));
  EXPECT_EQ(queue.pop(), 1);
  EXPECT_EQ(queue.pop(), 2);
  EXPECT_EQ(queue.pop(), 3);
}

TEST(BoundedQueue, PushWaitsForRoom) {
  BoundedQueue<int> queue(1);
  ASSERT_TRUE(queue.push(1));
  std::atomic<bool> pushed = false;
  std::thread producer([&] {
    EXPECT_TRUE(queue.push(2));
    pushed = true;
  });
  EXPECT_FALSE(pushed);  // the queue is still full
  EXPECT_EQ(queue.pop(), 1);
  EXPECT_EQ(queue.pop(), 2);
  producer.join();
  EXPECT_TRUE(pushed);
}

TEST(BoundedQueue, CloseWakesABlockedPusherWhoseItemIsRefused) {
  BoundedQueue<int> queue(1);
  ASSERT_TRUE(queue.push(1));
  std::latch started(1);
  std::thread producer([&] {
    started.count_down();
    EXPECT_FALSE(queue.push(2));
  });
  started.wait();
  queue.close();
  producer.join();
  EXPECT_EQ(queue.pop(), 1);
  EXPECT_EQ(queue.pop(), std::nullopt);
}

TEST(BoundedQueue, CloseWakesABlockedPopper) {
  BoundedQueue<int> queue(1);
  std::latch started(1);
  std::thread consumer([&] {
    started.count_down();
    EXPECT_EQ(queue.pop(), std::nullopt);
  });
  started.wait();
  queue.close();
  consumer.join();
}

TEST(BoundedQueue, AfterCloseWhatIsInsideIsStillDelivered) {
  BoundedQueue<int> queue(2);
  ASSERT_TRUE(queue.push(1));
  queue.close();
  EXPECT_FALSE(queue.push(2));
  EXPECT_EQ(queue.pop(), 1);
  EXPECT_EQ(queue.pop(), std::nullopt);
}

TEST(BoundedQueue, CarriesItemsThatCannotBeCopied) {
  BoundedQueue<std::unique_ptr<int>> queue(1);
  ASSERT_TRUE(queue.push(std::make_unique<int>(5)));
  EXPECT_EQ(**queue.pop(), 5);
}

TEST(BoundedQueueDeathTest, ABoundOfZeroAborts) { EXPECT_DEATH(BoundedQueue<int>(0), "num_items_max 0"); }

TEST(BoundedQueue, ManyProducersAndConsumersLoseNothingAndRepeatNothing) {
  constexpr int kNumThreads = 3;
  constexpr int kNumItems = 2000;
  BoundedQueue<int> queue(4);
  std::vector<std::atomic<int>> num_seen(kNumThreads * kNumItems);
  std::vector<std::thread> producers;
  std::vector<std::thread> consumers;
  for (int thread = 0; thread < kNumThreads; ++thread) {
    producers.emplace_back([&queue, thread] {
      for (int item = 0; item < kNumItems; ++item) EXPECT_TRUE(queue.push(thread * kNumItems + item));
    });
    consumers.emplace_back([&] {
      while (const std::optional<int> item = queue.pop()) ++num_seen[static_cast<std::size_t>(*item)];
    });
  }
  for (std::thread& producer : producers) producer.join();
  queue.close();
  for (std::thread& consumer : consumers) consumer.join();
  for (const std::atomic<int>& count : num_seen) EXPECT_EQ(count, 1);
}

}  // namespace
}  // namespace pipedream
