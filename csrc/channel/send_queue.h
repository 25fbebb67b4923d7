// Holds all items of a sending channel, which are made together with it. An item goes free -> queued ->
// taken, and release() makes it free again. The number of items bounds the queue. Any thread;
// collect_released() one at a time.
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

  // Null when all items are in use.
  [[nodiscard]] SendItem* take_free();
  void push(SendItem* item);
  // Returns the first queued item and leaves it in the queue; null when the queue is empty.
  [[nodiscard]] SendItem* next();
  [[nodiscard]] SendItem* take_next();
  // Whether some queued item has tensors; the item that marks the end has none.
  [[nodiscard]] bool has_tensors();
  // Makes the item free again. Its keep_alive lives until collect_released().
  void release(SendItem& item);
  // Destroys the keep_alives of released items, on the calling thread.
  void collect_released();
  // The number of items between take_free() and release().
  [[nodiscard]] std::size_t num_unreleased() const { return num_unreleased_.load(); }

 private:
  std::vector<std::unique_ptr<SendItem>> items_;  // fixed after construction
  std::atomic<std::size_t> num_unreleased_{0};

  std::mutex mutex_;  // guards the members below
  std::vector<SendItem*> free_;
  RingBuffer<SendItem*> queued_;
  std::vector<std::shared_ptr<void>> released_;

  std::vector<std::shared_ptr<void>> collected_;  // used by collect_released() alone
};

}  // namespace pipedream
