// A BoundedQueue is a bounded blocking FIFO between any number of producer and consumer threads. A mutex
// guards all members. Only the constructor allocates. close() wakes every waiter. After close(), push()
// refuses items, and pop() returns the remaining items and then nothing.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <mutex>
#include <optional>
#include <utility>

#include "base/check.h"
#include "base/ring_buffer.h"

namespace pipedream {

template <class T>
class BoundedQueue {
 public:
  explicit BoundedQueue(std::size_t num_items_max) : items_(num_items_max) {
    PD_CHECK(num_items_max > 0, "num_items_max " << num_items_max);
  }

  // Waits for room and adds the item. If the queue is closed, returns false and does not add it.
  [[nodiscard]] bool push(T item) {
    std::unique_lock lock(mutex_);
    room_.wait(lock, [&] { return closed_ || !items_.full(); });
    if (closed_) return false;
    items_.push_back(std::move(item));
    lock.unlock();
    available_.notify_one();
    return true;
  }

  // Waits for an item and removes it. Returns nothing once the queue is closed and empty.
  [[nodiscard]] std::optional<T> pop() {
    std::unique_lock lock(mutex_);
    available_.wait(lock, [&] { return closed_ || !items_.empty(); });
    if (items_.empty()) return std::nullopt;
    std::optional<T> item(items_.take_front());
    lock.unlock();
    room_.notify_one();
    return item;
  }

  void close() {
    {
      const std::lock_guard lock(mutex_);
      closed_ = true;
    }
    room_.notify_all();
    available_.notify_all();
  }

 private:
  std::mutex mutex_;
  std::condition_variable room_;
  std::condition_variable available_;
  RingBuffer<T> items_;
  bool closed_ = false;
};

}  // namespace pipedream
