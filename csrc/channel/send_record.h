// Keeps a sending channel's statistics: its counters, and the times of its newest items. Any thread.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <vector>

#include "base/newest_log.h"
#include "channel/channel_stats.h"
#include "channel/send_item.h"
#include "channel/transfer.h"

namespace pipedream {

class SendRecord {
 public:
  explicit SendRecord(std::size_t num_transfers_kept) : transfers_(num_transfers_kept) {}

  // Notes that send() got an item with tensors.
  void begin(SendItem& item);
  // Notes that the chunk at item.framed is about to be given to the link.
  void note_framed(SendItem& item);
  // Notes that the transport has read the item for the last time, or will never read it.
  void end(const SendItem& item, std::int64_t released_ns);
  // Notes whether the first item in the queue waits for a slot of the receiver. One thread at a time.
  void note_credit_wait(bool waits);

  // All fields that a sender has, except `link` and `chunk_bytes`.
  [[nodiscard]] ChannelStats stats() const;
  // The transfers of the most recently released items, in the order in which they were sent.
  [[nodiscard]] std::vector<SentTransfer> transfers() const;

 private:
  std::atomic<std::uint64_t> num_items_sent_{0};
  std::atomic<std::uint64_t> num_chunks_framed_{0};
  std::atomic<std::uint64_t> num_tensor_bytes_{0};
  std::atomic<std::uint64_t> num_placed_bytes_{0};
  std::atomic<std::int64_t> credit_wait_ns_{0};
  std::atomic<std::int64_t> credit_wait_began_ns_{0};  // 0: not waiting

  mutable std::mutex mutex_;       // guards the members below
  std::size_t num_under_way_ = 0;  // items between begin() and end()
  std::int64_t under_way_since_ns_ = 0;
  std::int64_t transfer_ns_ = 0;
  NewestLog<SentTransfer> transfers_;
};

}  // namespace pipedream
