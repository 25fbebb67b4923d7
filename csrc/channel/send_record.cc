// Counts and times of a sending channel. Threads as in send_record.h.
#include "channel/send_record.h"

#include <algorithm>
#include <tuple>

#include "base/clock.h"

namespace pipedream {

void SendRecord::begin(SendItem& item) {
  item.queued_ns = now_ns();
  item.started_ns = item.copied_ns = item.framed_ns = 0;
  const std::lock_guard lock(mutex_);
  if (num_under_way_++ == 0) under_way_since_ns_ = item.queued_ns;
}

void SendRecord::note_framed(SendItem& item) {
  const auto [tensor_index, offset, num_passed] = item.framed;
  if (num_passed == 0) item.framed_ns = now_ns();
  if (offset == 0) {
    num_tensor_bytes_.fetch_add(item.tensors[tensor_index].size_bytes(), std::memory_order_relaxed);
  }
  if (item.is_placed) {
    num_placed_bytes_.fetch_add(item.bytes_of_chunk(item.framed), std::memory_order_relaxed);
  }
  num_chunks_framed_.fetch_add(1, std::memory_order_relaxed);
  if (num_passed + 1 == item.num_chunks) num_items_sent_.fetch_add(1, std::memory_order_relaxed);
}

// An item that was never sent, in a failed run, gets no entry among the transfers.
void SendRecord::end(const SendItem& item, std::int64_t released_ns) {
  const std::lock_guard lock(mutex_);
  if (--num_under_way_ == 0) transfer_ns_ += released_ns - under_way_since_ns_;
  if (item.framed_ns == 0) return;
  transfers_.add({item.minibatch, item.microbatch, item.num_wire_bytes, item.queued_ns, item.started_ns,
                  item.copied_ns, item.framed_ns, released_ns});
}

void SendRecord::note_credit_wait(bool waits) {
  const std::int64_t began_ns = credit_wait_began_ns_.load();
  if (waits == (began_ns != 0)) return;
  credit_wait_began_ns_.store(waits ? now_ns() : 0);
  if (!waits) credit_wait_ns_.fetch_add(now_ns() - began_ns);
}

ChannelStats SendRecord::stats() const {
  ChannelStats stats;
  stats.num_items = num_items_sent_.load(std::memory_order_relaxed);
  stats.num_chunks = num_chunks_framed_.load(std::memory_order_relaxed);
  stats.tensor_bytes = num_tensor_bytes_.load(std::memory_order_relaxed);
  stats.placed_bytes = num_placed_bytes_.load(std::memory_order_relaxed);
  stats.credit_wait_ns = credit_wait_ns_.load();
  const std::int64_t credit_wait_began_ns = credit_wait_began_ns_.load();
  if (credit_wait_began_ns != 0) stats.credit_wait_ns += now_ns() - credit_wait_began_ns;
  const std::lock_guard lock(mutex_);
  stats.transfer_ns = transfer_ns_ + (num_under_way_ > 0 ? now_ns() - under_way_since_ns_ : 0);
  return stats;
}

// Sorts the transfers: they are kept in the order of releases, which come from several threads.
std::vector<SentTransfer> SendRecord::transfers() const {
  std::vector<SentTransfer> in_order;
  {
    const std::lock_guard lock(mutex_);
    in_order = transfers_.items();
  }
  std::sort(in_order.begin(), in_order.end(), [](const SentTransfer& one, const SentTransfer& other) {
    return std::tie(one.minibatch, one.microbatch) < std::tie(other.minibatch, other.microbatch);
  });
  return in_order;
}

}  // namespace pipedream
