// Implements the receiving end of one directed channel. It checks each frame against the plan, writes its
// bytes into a leased slot, and hands whole items to the compute thread in order. An item is the set of
// tensors that one work item sends over the channel.
//
//   wire             thread that drives the transport       copy stream            compute thread
//   credit <-------- 1 a free slot is leased, and granted once the sender has few left
//   frame ---------> 2 checked against plan and order
//                    3 payload -> the granted slot; with shared memory the sender has written it already
//                      staged: the granted slot is a staging buffer -> 4 copied or decoded to the device slot
//                      placed on the device: the sender has written the device slot; no step 4, no event
//                    5 last chunk: item into the inbox, event after its copies ---> 6 try_take()
//   credit <-------- 1 <-------------------------------------------------------- 7 the lease dies
//
// The sender fills only slots that were granted to it, so the plan bounds the bytes in flight. A slot is
// named by its index, or by its staging buffer's index if it has one. Each slot has a record (ReceivedSlot)
// with everything else that an item needs, so that receiving an item allocates nothing.
//
// Threads: as drawn. The Wakeup's mutex guards the inbox.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/check.h"
#include "base/ids.h"
#include "base/newest_log.h"
#include "base/ring_buffer.h"
#include "channel/channel_stats.h"
#include "channel/held_credits.h"
#include "channel/posted_places.h"
#include "channel/received_item.h"
#include "channel/send_channel.h"
#include "channel/tensor.h"
#include "channel/transfer.h"
#include "channel/wakeup.h"
#include "channel/wire_layout.h"
#include "codec/stream_codec.h"
#include "device/device.h"
#include "pool/pool.h"
#include "transport/shared_memory.h"
#include "transport/transport.h"
#include "wire/item_fields.h"

namespace pipedream {

class ReceiveChannel final : public LinkHandler {
 public:
  // slots: one for each item in flight, of options.item.slot_bytes(), where the item is read. Where items
  //   land at posted places, the slots have 0 bytes and need no staging.
  // staging: one slot of WireLayout::slot_bytes() for each of `slots`, into which the wire writes. Null if
  //   the wire or the sender writes into `slots` itself.
  // compute_stream: the stream on which items are read; null if items are in host memory.
  // shared: the memory into which the sender may write by itself, or null. It holds the slots that the wire
  //   writes, or all posted places. If it is device memory there is no staging, and every item is placed.
  // encoded: one slot of WireLayout::slot_bytes(), from which the device decodes. Null if nothing is encoded,
  //   or if it is decoded from staging.
  // All of these outlive the channel and its items.
  ReceiveChannel(ChannelOptions options, Transport& transport, Wakeup& wakeup, Device& device,
                 SlotGroup& slots, SlotGroup* staging, Stream* compute_stream,
                 const SharedMemory* shared = nullptr, SlotGroup* encoded = nullptr);
  ~ReceiveChannel() override;

  void attach(Link& link) { link_.store(&link); }

  // Posts places, in this order, for the next items that have no place yet. The memory outlives the channel.
  // Any thread; one at a time. Only for channels with num_posts_max above 0, whose slots have no memory.
  //
  // A slot is granted together with one place, and its item has exactly as many bytes. When the item is
  // dropped its slot becomes free, and its bytes stay in the place. A place may be posted again at once: it
  // is granted only after its earlier item has arrived. It must not be read before its item is taken.
  void post(std::span<const std::span<std::byte>> places);

  // Moves the next received item to `item`; false when there is none. Call it inside Wakeup::wait_until.
  [[nodiscard]] bool try_take(ReceivedItem& item);
  // Whether an item can be taken now. exhausted(): whether no item will come any more, because the peer said
  // BYE and the inbox is empty.
  [[nodiscard]] bool has_item() const { return !inbox_.empty(); }
  [[nodiscard]] bool exhausted() const { return closed_ && inbox_.empty(); }

  // Whether the sender itself writes into this end's memory. Known once the link is open.
  [[nodiscard]] bool is_claimed() const;

  // Whether received items hold all slots: none is free, granted or being filled. The plan has one slot more
  // than the compute thread keeps. So if the result is true while the compute thread waits for this channel,
  // that thread keeps an item that it should have dropped.
  [[nodiscard]] bool all_slots_held() const { return slots_.num_free() == 0 && num_granted_.load() == 0; }

  // After this call, dropped items do not reach the channel any more, so they may outlive it. Their slots are
  // not granted again.
  void detach();

  [[nodiscard]] bool open() const { return open_.load(); }
  [[nodiscard]] const ChannelOptions& options() const { return options_; }
  [[nodiscard]] ChannelStats stats() const;  // any thread
  // The transfers of the most recently received items, in the order in which they became complete. Items that
  // the compute thread has not taken yet are included. Any thread.
  [[nodiscard]] std::vector<ReceivedTransfer> transfers() const;
  // Adds a time during which the compute thread waited for this channel.
  void add_wait(std::int64_t wait_ns) { wait_ns_.fetch_add(wait_ns, std::memory_order_relaxed); }

  void on_open(Link& link) override;
  [[nodiscard]] std::optional<Failure> on_frame(Link& link, const FrameHeader& header,
                                                std::span<const std::byte> payload) override;
  void on_failed(Link& link, const Failure& failure) override;
  void on_closed(Link& link) override;

 private:
  friend class ReceiverAccess;

  [[nodiscard]] std::optional<Failure> on_tensor(const FrameHeader& header,
                                                 std::span<const std::byte> payload);
  [[nodiscard]] std::optional<Failure> on_end(const FrameHeader& header);
  [[nodiscard]] std::optional<Failure> begin_item(const FrameHeader& header);
  [[nodiscard]] std::optional<std::string> misplaced(const FrameHeader& header) const;
  [[nodiscard]] std::optional<std::string> unplanned(const FrameHeader& header) const;
  [[nodiscard]] Failure broken(const std::string& what) const;
  [[nodiscard]] std::byte* encoded_at(std::size_t tensor_index) const;
  void land(const FrameHeader& header, std::span<const std::byte> payload);
  [[nodiscard]] std::optional<std::string> finish_tensor(const FrameHeader& header);
  void note_arrival(std::size_t num_bytes);
  void note_complete(const ReceivedItem& item);
  [[nodiscard]] std::int64_t arrival_ns(std::int64_t complete_ns) const;
  void finish_item();
  void deliver(ReceivedItem item);
  [[nodiscard]] bool note_release();
  void grant_free_slots();
  [[nodiscard]] bool grant_slot();
  [[nodiscard]] bool is_awaited(const std::byte* place) const;
  [[nodiscard]] bool has_post_to_grant();
  void grant_when_read(ReceivedSlot& received);
  void grant(ReceivedSlot& received);
  void tell_due_credits();
  void tell(const Credit& credit);
  template <class Function>
  void on_device(Function function);
  void give_up();
  void finish_copies();
  [[nodiscard]] bool takes_posts() const { return options_.num_posts_max > 0; }
  [[nodiscard]] bool is_placed_on_device() const { return shared_ != nullptr && shared_->on_device(); }

  const ChannelOptions options_;
  const WireLayout layout_;
  Transport& transport_;
  Wakeup& wakeup_;
  SlotGroup& slots_;
  SlotGroup* const staging_;
  // One item's encoded bytes on the device. Items use it one after the other, in the copy stream's order.
  const Lease encoded_;
  const SharedMemory* const shared_;                                 // null when the memory is not shared
  const std::shared_ptr<std::vector<ReceivedSlot>> received_slots_;  // by slot of `slots_`
  std::unique_ptr<StreamCodec> stream_codec_;                        // null when nothing travels encoded
  std::unique_ptr<Stream> copy_stream_;  // null when nothing is staged and no grant waits for readers
  std::atomic<Link*> link_{nullptr};     // set by attach() or on_open(), whichever comes first
  std::atomic<bool> open_{false};
  std::atomic<bool> grant_scheduled_{false};
  std::atomic<std::size_t> num_granted_{0};  // an upper bound of the slots that are granted or being filled
  const std::shared_ptr<ReceiverAccess> access_;

  // Counters of stats().
  std::atomic<std::uint64_t> num_items_received_{0};
  std::atomic<std::uint64_t> num_chunks_received_{0};
  std::atomic<std::uint64_t> num_tensor_bytes_{0};
  std::atomic<std::uint64_t> num_placed_bytes_{0};
  std::atomic<std::int64_t> arrival_ns_{0};
  std::atomic<std::int64_t> wait_ns_{0};

  mutable std::mutex transfers_mutex_;  // guards transfers_
  NewestLog<ReceivedTransfer> transfers_;

  PostedPlaces posts_;

  // Guarded by wakeup_'s mutex.
  RingBuffer<ReceivedItem> inbox_;  // has room for one item per slot, and for the end
  bool closed_ = false;

  // Used by the thread that drives the transport: for each slot number on the wire, the slot that waits for
  // an item, or null. The sender knows of these slots, except those that credits_ holds back.
  std::vector<ReceivedSlot*> granted_;
  HeldCredits credits_;  // says when granted slots are told to the sender

  // Used by the thread that drives the transport: the item being received.
  std::optional<ReceivedItem> current_;
  std::uint16_t current_slot_ = 0;
  std::size_t tensor_index_ = 0;    // of the tensor that is being received
  std::size_t tensor_offset_ = 0;   // bytes of this tensor that have arrived
  std::size_t num_item_bytes_ = 0;  // bytes of the item that have arrived
  std::size_t num_first_bytes_ = 0;
  std::int64_t arrived_ns_ = 0;        // when the first chunk was noticed
  std::int64_t first_arrival_ns_ = 0;  // when the first chunk was in its slot
  std::int64_t next_number_;           // the number of the next microbatch
  bool ended_ = false;
  bool failed_ = false;
};

}  // namespace pipedream
