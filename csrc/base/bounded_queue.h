// A bounded blocking FIFO between threads. Any number of producers and consumers; the mutex guards all
// members. Only the constructor allocates. close() wakes every waiter: push then refuses, pop drains what is
// left and then returns empty.
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

  // Waits for room. False once closed: the item was not taken.
  [[nodiscard]] bool push(T item) {
    std::unique_lock lock(mutex_);
    room_.wait(lock, [&] { return closed_ || !items_.full(); });
    if (closed_) return false;
    items_.push_back(std::move(item));
    lock.unlock();
    available_.notify_one();
    return true;
  }

  // Waits for an item; empty once closed and drained.
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
