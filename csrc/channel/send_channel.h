// Implements the sending end of one directed channel between two workers. An item is the set of tensors that
// one work item sends over the channel. The tensors travel in chunks, asynchronously: send() never waits.
//
//   compute thread     copy stream                    thread that drives the transport  wire
//   1 send(item) --------------------------------------> 2 waits for a slot of the receiver
//                      3 device -> slot or buffer <------ 3 (only when the wire does not read the tensors)
//                      4 chunk copied -----------------> 5 frame of the chunk ------------> ...
//   7 collect_released() <----------------------------- 6 last chunk has left
//
// SendQueue has the items, ItemCopier does step 3, SendRecord counts and times. This class decides when an
// item may start, makes its frames, and handles the link's events.
//
// Threads: one thread, usually the compute thread, calls send(), send_end(), the waits and
// collect_released(). Copies and frames are made, and the link's events handled, on the thread that drives
// the transport; that is the compute thread itself when no other thread drives. chunk_sent() and release()
// run on any thread. Bound: there are at most num_items_max unreleased items and kNumSpareItems more. All
// items are made with the channel, so that sending an item allocates nothing.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/ids.h"
#include "base/ring_buffer.h"
#include "channel/channel_stats.h"
#include "channel/granted_slots.h"
#include "channel/item_copier.h"
#include "channel/send_item.h"
#include "channel/send_queue.h"
#include "channel/send_record.h"
#include "channel/tensor.h"
#include "channel/transfer.h"
#include "channel/wakeup.h"
#include "channel/wire_layout.h"
#include "device/device.h"
#include "pool/pool.h"
#include "transport/transport.h"
#include "wire/item_fields.h"

namespace pipedream {

// The usual chunk size of tensors that travel by the wire. Small chunks let copies and the wire overlap, but
// each chunk has a fixed cost.
inline constexpr std::size_t kUsualChunkBytes = std::size_t{1} << 20;

struct ChannelOptions {
  std::string name;  // for errors: "activations of stage 0 to stage 1"
  ItemSpec item;
  // The sender's chunk size. 0 stands for kUsualChunkBytes, or kPlacedChunkBytes for placed items.
  std::size_t chunk_bytes = 0;
  // For a sender: the most items that may wait or be on the wire at once.
  std::size_t num_items_max = 16;
  // The numbers of the microbatches that the channel carries, counted through the whole run: first_microbatch
  // and every microbatch_stride-th number after it, for instance 1, 3, 5 with 1 and 2. With a stride of 0
  // they are any ascending numbers from first_microbatch on.
  std::int64_t first_microbatch = 0;
  std::int64_t microbatch_stride = 1;
  std::int64_t num_microbatches = 1;   // per minibatch
  Codec codec{};                       // applied to float tensors only
  std::size_t num_transfers_kept = 0;  // number of newest items whose times each end keeps
  // The most places that the receiver may have posted and not yet granted; 0 if its items land in slots and
  // not in posted places.
  std::size_t num_posts_max = 0;
  std::uint32_t channel_id = 0;  // names the channel on the wire and in shared memory
  // For a receiver: returns the stream on which the framework computes on the calling thread, or null if that
  // is the compute stream. Any thread may call it. Empty on the host.
  std::function<std::unique_ptr<Stream>()> side_stream{};
};

class SendChannel final : public LinkHandler {
 public:
  // staging: slots of WireLayout::slot_bytes(), which the copy stream of `device` fills; null when the wire
  //   reads the tensors.
  // residual: zeroed slots of WireLayout::residual_bytes(), which the items use in turn; null when the codec
  //   keeps no residual.
  // encoded: a slot as large as staging's, in which the device encodes; null where it encodes straight into
  //   staging.
  // All outlive the channel.
  SendChannel(ChannelOptions options, Transport& transport, Wakeup& wakeup, Device& device,
              SlotGroup* staging, SlotGroup* residual = nullptr, SlotGroup* encoded = nullptr);
  ~SendChannel() override;  // called after the transport's shutdown

  // Takes and claims `memory`, which has the receiver's slots: from now on items are written there. Called
  // before there is a link. If the wire cannot read device memory and there is no staging buffer, this call
  // is needed, and `memory` must be device memory.
  void place_into(std::unique_ptr<SharedMemory> memory);
  // Takes `memory`, in which the receiver posts places: from now on items are written to the posted places.
  // The caller has claimed the memory. Called before there is a link.
  void place_where_posted(std::unique_ptr<SharedMemory> memory);
  [[nodiscard]] bool places() const { return places_; }
  // Unmaps the receiver's memory, so that the receiver may free it. Called after the transport's shutdown.
  void end_placing();

  // Called before the first send.
  void attach(Link& link) { link_.store(&link); }

  // Sends the tensors of a work item. Never blocks. keep_alive owns the tensors' memory; after their last
  // read collect_released() destroys it. ready: an event of the compute stream after which the tensors are
  // written; null when they are written already. Throws UserError when a tensor does not fit the plan. Makes
  // the run fail when all items of the channel are in use.
  void send(MinibatchId minibatch, MicrobatchIndex microbatch, const ItemFields& fields,
            const std::vector<TensorView>& tensors, std::unique_ptr<Event> ready,
            std::shared_ptr<void> keep_alive);
  // Ends the channel: no items follow. Tells the receiver how many minibatches there were and what is due at
  // the end (ItemFields::boundary_events).
  void send_end(std::int64_t num_minibatches, std::uint8_t boundary_events = 0);
  // Destroys the keep_alives of sent items on the calling thread.
  void collect_released() { queue_.collect_released(); }
  // True once the link is open.
  [[nodiscard]] bool open() const { return open_.load(); }
  // Waits until an item can be sent without exceeding num_items_max. For senders that no schedule bounds.
  // False at the deadline or when the run has failed.
  [[nodiscard]] bool wait_for_room(Deadline deadline);
  // Waits until all items given to send() and send_end() are sent. False at the deadline or when the run has
  // failed.
  bool wait_until_sent(Deadline deadline);
  // Waits until fewer than num_items items are unreleased. False at the deadline or when the run has failed.
  [[nodiscard]] bool wait_until_fewer(std::size_t num_items, Deadline deadline);
  // Returns ItemCopier::residuals(). Valid before the first send and after all items are sent.
  [[nodiscard]] std::vector<std::vector<std::span<std::byte>>> residuals() const {
    return copier_.residuals();
  }
  // Items that are not released yet.
  [[nodiscard]] std::size_t num_unreleased() const { return queue_.num_unreleased(); }
  [[nodiscard]] const ChannelOptions& options() const { return options_; }
  [[nodiscard]] ChannelStats stats() const;  // any thread
  // The transfers of the most recently released items, in the order in which they were sent. Any thread.
  [[nodiscard]] std::vector<SentTransfer> transfers() const { return record_.transfers(); }

  void on_open(Link& link) override;
  [[nodiscard]] std::optional<Failure> on_frame(Link& link, const FrameHeader& header,
                                                std::span<const std::byte> payload) override;
  void on_failed(Link& link, const Failure& failure) override;
  void on_closed(Link& link) override;
  [[nodiscard]] bool is_quick() const override { return true; }  // credits are small and quickly handled

 private:
  // The chunk size of placed tensors. The receiver does not copy placed tensors, so small chunks gain nothing
  // on the host and little on a device.
  static constexpr std::size_t kPlacedChunkBytes = std::size_t{4} << 20;
  // One spare item is for the end of the channel, which does not wait for room. The other is for an item
  // whose on_sent comes late, after the receiver has already sent back a result of it.
  static constexpr std::size_t kNumSpareItems = 2;

  [[nodiscard]] std::size_t chunk_bytes(bool is_placed) const {
    if (options_.chunk_bytes != 0) return options_.chunk_bytes;
    return is_placed ? kPlacedChunkBytes : kUsualChunkBytes;
  }
  [[nodiscard]] std::size_t check_and_count_bytes(MinibatchId minibatch,
                                                  const std::vector<TensorView>& tensors) const;
  [[nodiscard]] Failure starved() const;
  void enqueue(SendItem& item);
  void schedule_pump();
  void pump();
  [[nodiscard]] Failure broken(const std::string& what) const;
  [[nodiscard]] std::optional<std::string> add_grants(const FrameHeader& credit);
  void start_queued();
  [[nodiscard]] Patience patience();
  void place(std::unique_ptr<SharedMemory> memory, bool are_posted);
  [[nodiscard]] bool start(SendItem& item);
  void copy_started();
  void frame_copied();
  void frame_end(const SendItem& item);
  void frame_chunk(SendItem& item);
  void chunk_sent(SendItem& item);
  void release(SendItem& item);
  void give_up();
  void finish_copies();
  void fail_queued();
  [[nodiscard]] bool has_unsent_tensors();

  const ChannelOptions options_;
  const WireLayout layout_;
  Transport& transport_;
  Wakeup& wakeup_;
  SendQueue queue_;
  SendRecord record_;
  bool places_ = false;
  std::atomic<Link*> link_{nullptr};  // set by attach() or on_open(), whichever comes first
  std::atomic<bool> open_{false};
  std::atomic<bool> pump_scheduled_{false};
  std::atomic<bool> waiting_for_release_{false};

  // Used by the thread that drives the transport.
  RingBuffer<SendItem*> started_;
  GrantedSlots granted_;
  bool failed_ = false;
  std::optional<std::string> refused_;  // why a place that the receiver has posted is wrong
  bool peer_left_ = false;              // the peer said BYE: items sent from now on would be lost

  ItemCopier copier_;  // last, because its callbacks use the members above
};

}  // namespace pipedream
