// The sending end of one directed channel between two stages: takes the tensors of a work item on the
// device and puts them on the wire in chunks, asynchronously. Compute never waits for a send.
//
//   compute thread     copy stream                    who drives                        wire
//   1 send(item) --------------------------------------> 2 waits for a slot of the receiver
//                      3 device -> slot or buffer <------ 3 (only when the wire does not read the tensors)
//                      4 chunk copied -----------------> 5 frame of the chunk ------------> ...
//   7 collect_released() <----------------------------- 6 last chunk has left
//
// SendQueue has the items, ItemCopier does step 3, SendRecord counts and times; what is left is here: when an
// item may start, its frames, and what the link tells.
//
// Threads: send(), send_end() and collect_released() on the compute thread; the rest on whoever drives the
// transport, which a compute thread that sends does itself when nobody else does. Which member belongs to
// whom is said below. Bound: num_items_max items that are not released, and kNumSpareItems. All of them are
// made with the channel: to send an item allocates nothing.
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

struct ChannelOptions {
  std::string name;  // for errors: "activations of stage 0 to stage 1"
  ItemSpec spec;
  std::size_t chunk_bytes = 0;  // of what a sender cuts; 0: measured, see chunk_tuner.h
  std::size_t num_items_max = 16;
  // The microbatches whose items come, counted through the run: this one, and every so many after it, or with
  // 0 any after it in ascending order. Where minibatches are not cut a microbatch is a minibatch.
  std::int64_t first_microbatch = 0;
  std::int64_t microbatch_stride = 1;
  std::int64_t num_microbatches = 1;   // of every minibatch
  Codec codec{};                       // of the float tensors
  std::size_t num_transfers_kept = 0;  // the newest items whose times each end keeps
  // Number of places that a receiver may post and has not granted yet, if its items land in posted places and
  // not in slots; else 0.
  std::size_t num_posts_max = 0;
  std::uint32_t channel_id = 0;  // of those
  // For a receiver: gives the stream that the calling thread's framework computes on, where that is not the
  // compute stream. Null on the host; it gives null for the compute stream itself. Any thread.
  std::function<std::unique_ptr<Stream>()> side_stream{};
};

class SendChannel final : public LinkHandler {
 public:
  // staging: null when the wire reads the tensors. Otherwise slots of WireLayout::slot_bytes(), and the
  // device whose copy stream fills them. residual: slots of WireLayout::residual_bytes(), zeroed, which the
  // items use in turn; null when the codec keeps none. encoded: a slot as large as staging's, in which the
  // device encodes; null where it encodes into staging at once. All outlive the channel.
  SendChannel(ChannelOptions options, Transport& transport, Wakeup& wakeup, Device& device,
              SlotGroup* staging, SlotGroup* residual = nullptr, SlotGroup* encoded = nullptr);
  ~SendChannel() override;  // the transport has been shut down

  // From now on items are written into the receiver's slots, which lie in this memory. Where it is device
  // memory, a channel that the wire can neither read from nor stage for must have it. Before there is a link.
  // Claims it.
  void place_into(std::unique_ptr<SharedMemory> memory);
  // Places items like place_in(), into memory where the receiver posts places for them. The caller has
  // claimed it.
  void place_where_posted(std::unique_ptr<SharedMemory> memory);
  [[nodiscard]] bool places() const { return places_; }
  // Lets go of that memory, which the receiver frees then. The transport has been shut down.
  void end_placing();

  // Before the first send.
  void attach(Link& link) { link_.store(&link); }

  // The tensors are read until they show up in collect_released(); keep_alive owns their memory. ready:
  // an event on the compute stream after which the tensors are written; null when they are. Never
  // blocks. Throws UserError when a tensor is not what the plan says.
  void send(MinibatchId minibatch, MicrobatchIndex microbatch, const ItemFields& fields,
            const std::vector<TensorView>& tensors, std::unique_ptr<Event> ready,
            std::shared_ptr<void> keep_alive);
  // No more items; the receiver learns how many minibatches there were, and what is due at their end.
  void send_end(std::int64_t num_minibatches, std::uint8_t boundary_events = 0);
  // Destroys, on this thread, the keep_alives of items that have left.
  void collect_released() { queue_.collect_released(); }
  // True once the link is open.
  [[nodiscard]] bool open() const { return open_.load(); }
  // Waits until an item can be sent without exceeding num_items_max: for senders without a schedule,
  // which bounds the others. False at the deadline or when the run has failed.
  [[nodiscard]] bool wait_for_room(Deadline deadline);
  // Waits until everything that was given to send() and send_end() has left. False as above.
  bool wait_until_sent(Deadline deadline);
  // Waits until fewer items than these are not released. False as above.
  [[nodiscard]] bool wait_until_fewer(std::size_t num_items, Deadline deadline);
  // The residuals of ItemCopier: valid before the first send, and when all items have left.
  [[nodiscard]] std::vector<std::vector<std::span<std::byte>>> residuals() const {
    return copier_.residuals();
  }
  // Items that are not released yet.
  [[nodiscard]] std::size_t num_unreleased() const { return queue_.num_unreleased(); }
  [[nodiscard]] const ChannelOptions& options() const { return options_; }
  [[nodiscard]] ChannelStats stats() const;  // any thread
  // Transfers of the items that were released last, in the order in which they were sent. Any thread.
  [[nodiscard]] std::vector<SentTransfer> transfers() const { return record_.transfers(); }

  void on_open(Link& link) override;
  [[nodiscard]] std::optional<Failure> on_frame(Link& link, const FrameHeader& header,
                                                std::span<const std::byte> payload) override;
  void on_failed(Link& link, const Failure& failure) override;
  void on_closed(Link& link) override;
  [[nodiscard]] bool is_quick() const override { return true; }  // credits

 private:
  // Size of a placed tensor's chunks: the receiver copies nothing, so that small chunks gain nothing on the
  // host, and little on a device.
  static constexpr std::size_t kPlacedChunkBytes = std::size_t{4} << 20;
  // The end, which waits for no room, and an item whose on_sent is late: the answer to it may come first.
  static constexpr std::size_t kNumSpareItems = 2;

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

  // Who drives.
  RingBuffer<SendItem*> started_;
  GrantedSlots granted_;
  bool failed_ = false;
  std::optional<std::string> refused_;  // what the receiver has posted wrongly
  bool peer_left_ = false;              // it said BYE: what is sent from now on would vanish

  ItemCopier copier_;  // its callbacks use the above
};

}  // namespace pipedream
