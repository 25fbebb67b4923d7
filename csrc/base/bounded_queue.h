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
#include "base/clock.h"
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

  // Never waits. False when full or closed.
  [[nodiscard]] bool try_push(T item) {
    {
      const std::lock_guard lock(mutex_);
      if (closed_ || items_.full()) return false;
      items_.push_back(std::move(item));
    }
    available_.notify_one();
    return true;
  }

  // Waits for an item; empty once closed and drained.
  [[nodiscard]] std::optional<T> pop() {
    std::unique_lock lock(mutex_);
    available_.wait(lock, [&] { return closed_ || !items_.empty(); });
    return take(lock);
  }

  // Waits until the deadline at most; empty then, or once closed and drained.
  [[nodiscard]] std::optional<T> pop_until(Deadline deadline) {
    std::unique_lock lock(mutex_);
    available_.wait_until(lock, deadline, [&] { return closed_ || !items_.empty(); });
    return take(lock);
  }

  [[nodiscard]] std::optional<T> try_pop() {
    std::unique_lock lock(mutex_);
    return take(lock);
  }

  void close() {
    {
      const std::lock_guard lock(mutex_);
      closed_ = true;
    }
    room_.notify_all();
    available_.notify_all();
  }

  [[nodiscard]] std::size_t size() const {
    const std::lock_guard lock(mutex_);
    return items_.size();
  }
  [[nodiscard]] std::size_t num_items_max() const { return items_.num_items_max(); }

 private:
  std::optional<T> take(std::unique_lock<std::mutex>& lock) {
    if (items_.empty()) return std::nullopt;
    std::optional<T> item(items_.take_front());
    lock.unlock();
    room_.notify_one();
    return item;
  }

  mutable std::mutex mutex_;
  std::condition_variable room_;
  std::condition_variable available_;
  RingBuffer<T> items_;
  bool closed_ = false;
};

}  // namespace pipedream
