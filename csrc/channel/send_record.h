// The record of a sending channel: its figures, the times of its newest items, and the best chunk size by
// them. Any thread.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <vector>

#include "base/newest_log.h"
#include "channel/channel_stats.h"
#include "channel/chunk_tuner.h"
#include "channel/send_item.h"
#include "channel/transfer.h"

namespace pipedream {

class SendRecord {
 public:
  // chunk_bytes as ChunkTuner has them.
  SendRecord(std::size_t chunk_bytes, std::size_t num_transfers_kept);

  // The item with tensors is given to the channel. Chooses its chunk_bytes; is_placed is known.
  void begin(SendItem& item);
  // A chunk is about to be given to the link: the one at item.framed.
  void note_framed(SendItem& item);
  // The transport no longer reads the item, or never will.
  void end(const SendItem& item, std::int64_t released_ns);
  // Whether the first item in the queue has to wait for a slot of the receiver. One thread at a time.
  void note_credit_wait(bool waits);

  // But for those of the link.
  [[nodiscard]] ChannelStats stats() const;
  // Transfers of the items that were released last, in the order in which they were sent.
  [[nodiscard]] std::vector<SentTransfer> transfers() const;

 private:
  void time(const SendItem& item, std::int64_t released_ns);

  std::atomic<std::uint64_t> num_items_sent_{0};
  std::atomic<std::uint64_t> num_chunks_framed_{0};
  std::atomic<std::uint64_t> num_tensor_bytes_{0};
  std::atomic<std::uint64_t> num_placed_bytes_{0};
  std::atomic<std::int64_t> credit_wait_ns_{0};
  std::atomic<std::int64_t> credit_wait_began_ns_{0};  // 0: not waiting

  mutable std::mutex mutex_;  // guards the members below
  ChunkTuner tuner_;
  std::uint64_t num_sent_ = 0;     // items with tensors
  std::size_t num_under_way_ = 0;  // of them, from begin() to end()
  std::int64_t under_way_since_ns_ = 0;
  std::int64_t transfer_ns_ = 0;
  NewestLog<SentTransfer> transfers_;
};

}  // namespace pipedream
