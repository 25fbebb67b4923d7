// The items of a sending channel, all made with it: free -> queued -> taken -> released, and free again.
// Bound: their number. Any thread, but for collect_released().
#pragma once

#include <atomic>
#include <cstddef>
#include <memory>
#include <mutex>
#include <vector>

#include "base/ring_buffer.h"
#include "channel/send_item.h"

namespace pipedream {

class SendQueue {
 public:
  SendQueue(std::size_t num_items, const WireLayout& layout);

  // Null when there is none: more are in use than the owner's bound allows.
  [[nodiscard]] SendItem* take_free();
  void push(SendItem* item);
  // The next one stays queued; null when there is none.
  [[nodiscard]] SendItem* next();
  [[nodiscard]] SendItem* take_next();
  // Some queued item is more than the end.
  [[nodiscard]] bool has_tensors();
  // It is free again; its keep_alive waits for collect_released().
  void release(SendItem& item);
  // Destroys what kept released items alive, on this thread; one at a time.
  void collect_released();
  // From take_free() to release().
  [[nodiscard]] std::size_t num_unreleased() const { return num_unreleased_.load(); }

 private:
  std::vector<std::unique_ptr<SendItem>> items_;  // fixed after construction
  std::atomic<std::size_t> num_unreleased_{0};

  std::mutex mutex_;  // guards the members below
  std::vector<SendItem*> free_;
  RingBuffer<SendItem*> queued_;
  std::vector<std::shared_ptr<void>> released_;

  std::vector<std::shared_ptr<void>> collected_;  // of who collects
};

}  // namespace pipedream
