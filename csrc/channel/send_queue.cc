// Implements the queue of a sending channel. Items are handed over under the lock, and their keep_alives are
// destroyed outside of the lock. Threads as in send_queue.h.
#include "channel/send_queue.h"

#include <utility>

namespace pipedream {

SendQueue::SendQueue(std::size_t num_items, const WireLayout& layout) : queued_(num_items) {
  for (std::size_t item_index = 0; item_index < num_items; ++item_index) {
    items_.push_back(std::make_unique<SendItem>(layout));
    items_.back()->tensors.reserve(layout.num_tensors());
    free_.push_back(items_.back().get());
  }
  released_.reserve(num_items);
  collected_.reserve(num_items);
}

SendItem* SendQueue::take_free() {
  const std::lock_guard lock(mutex_);
  if (free_.empty()) return nullptr;
  SendItem* const item = free_.back();
  free_.pop_back();
  num_unreleased_.fetch_add(1);
  return item;
}

void SendQueue::push(SendItem* item) {
  const std::lock_guard lock(mutex_);
  queued_.push_back(item);
}

SendItem* SendQueue::next() {
  const std::lock_guard lock(mutex_);
  return queued_.empty() ? nullptr : queued_.front();
}

SendItem* SendQueue::take_next() {
  const std::lock_guard lock(mutex_);
  return queued_.empty() ? nullptr : queued_.take_front();
}

bool SendQueue::has_tensors() {
  const std::lock_guard lock(mutex_);
  for (std::size_t index = 0; index < queued_.size(); ++index) {
    if (!queued_[index]->is_end) return true;
  }
  return false;
}

void SendQueue::release(SendItem& item) {
  {
    const std::lock_guard lock(mutex_);
    released_.push_back(std::move(item.keep_alive));
    item.keep_alive = nullptr;
    free_.push_back(&item);
  }
  num_unreleased_.fetch_sub(1);
}

void SendQueue::collect_released() {
  {
    const std::lock_guard lock(mutex_);
    collected_.swap(released_);
  }
  collected_.clear();
}

}  // namespace pipedream
