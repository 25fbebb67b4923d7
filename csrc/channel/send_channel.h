// The sending end of one directed channel between two stages: takes the tensors of a work item on the
// device and puts them on the wire in chunks, asynchronously. Compute never waits for a send.
//
//   compute thread     copy stream                    who drives                        wire
//   1 send(item) --------------------------------------> 2 waits for a slot of the receiver
//                      3 device -> slot or buffer <------ 3 (only when the wire does not read the tensors)
//                      4 chunk copied -----------------> 5 frame of the chunk ------------> ...
//   7 collect_released() <----------------------------- 6 last chunk has left
//
// Where the bytes of an item go in step 3:
//   the receiver's own slot    its memory is shared and the item is not small, or it is its device's memory:
//                              the frames tell of the bytes
//   a staging buffer           the wire cannot read device memory, or the tensors travel encoded
//   nowhere                    else: the wire reads the tensors
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
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "base/ids.h"
#include "base/newest_log.h"
#include "base/ring_buffer.h"
#include "channel/channel_stats.h"
#include "channel/chunk_tuner.h"
#include "channel/granted_slots.h"
#include "channel/placed_slots.h"
#include "channel/tensor.h"
#include "channel/transfer.h"
#include "channel/wakeup.h"
#include "channel/wire_layout.h"
#include "codec/stream_codec.h"
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
  std::int64_t num_microbatches = 1;               // of every minibatch: items come in the order of both
  Codec codec{};                                   // of the float tensors
  std::size_t placed_bytes_min = kPlacedBytesMin;  // items with fewer go through the link
  std::size_t num_transfers_kept = 0;              // the newest items whose times each end keeps
};

class SendChannel final : public LinkHandler {
 public:
  // staging: null when the wire reads the tensors. Otherwise slots of WireLayout::slot_bytes(), and the
  // device whose copy stream fills them. residual: of one slot of WireLayout::residual_bytes(), zeroed; null
  // when the codec keeps none. All outlive the channel.
  SendChannel(ChannelOptions options, Transport& transport, Wakeup& wakeup, Device& device,
              SlotGroup* staging, SlotGroup* residual = nullptr);
  ~SendChannel() override;  // the transport has been shut down

  // From now on items that are not small are written into the receiver's slots, which lie in this memory.
  // Where it is device memory all are: a channel that the wire can neither read from nor stage for must have
  // it. Before there is a link.
  void place_into(std::unique_ptr<SharedMemory> memory);
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
  // No more items; the receiver learns how many minibatches there were.
  void send_end(std::int64_t num_minibatches);
  // Destroys, on this thread, the keep_alives of items that have left.
  void collect_released();
  // True once the link is open.
  [[nodiscard]] bool open() const { return open_.load(); }
  // Waits until an item can be sent without exceeding num_items_max: for senders without a schedule,
  // which bounds the others. False at the deadline or when the run has failed.
  [[nodiscard]] bool wait_for_room(Deadline deadline);
  // Waits until everything that was given to send() and send_end() has left. False as above.
  bool wait_until_sent(Deadline deadline);
  // Items that are not released yet.
  [[nodiscard]] std::size_t num_unreleased() const { return num_unreleased_.load(); }
  [[nodiscard]] const ChannelOptions& options() const { return options_; }
  [[nodiscard]] ChannelStats stats() const;  // any thread
  // Of the items that were released last, in the order in which they were sent. Any thread.
  [[nodiscard]] std::vector<SentTransfer> transfers() const;

  void on_open(Link& link) override;
  [[nodiscard]] std::optional<Failure> on_frame(Link& link, const FrameHeader& header,
                                                std::span<const std::byte> payload) override;
  void on_failed(Link& link, const Failure& failure) override;
  void on_closed(Link& link) override;
  [[nodiscard]] bool is_quick() const override { return true; }  // credits

 private:
  // The next chunk of an item, and how many came before it.
  struct ChunkCursor {
    std::size_t tensor_index = 0;
    std::size_t offset = 0;
    std::size_t num_passed = 0;
  };

  struct CopyRange {
    std::byte* to;
    const std::byte* from;
    std::size_t num_bytes;
  };

  // Fixed places, so that callbacks capture two pointers and allocate nothing.
  struct Item {
    SendChannel* channel = nullptr;
    bool is_end = false;
    MinibatchId minibatch;
    MicrobatchIndex microbatch;
    ItemFields fields{};
    std::vector<TensorView> tensors;
    std::unique_ptr<Event> ready;
    std::shared_ptr<void> keep_alive;
    std::size_t num_wire_bytes = 0;
    std::size_t chunk_bytes = 0;
    std::size_t num_chunks = 0;
    bool is_timed = false;         // for the tuner, if it stays alone on its way
    std::uint64_t send_index = 0;  // among the items with tensors
    std::int64_t queued_ns = 0;
    std::int64_t started_ns = 0;  // these three: 0 until then
    std::int64_t copied_ns = 0;
    std::int64_t framed_ns = 0;
    std::uint16_t slot = 0;     // of the receiver
    bool is_placed = false;     // written there by the copy stream
    Lease staging;              // what it is copied to otherwise; invalid when the wire reads the tensors
    std::byte* copy = nullptr;  // in one of the two; null when there is none
    ChunkCursor copied;         // enqueued on the copy stream
    ChunkCursor framed;
    std::atomic<std::size_t> num_chunks_copied{0};  // by the copy stream
    std::atomic<std::size_t> num_chunks_left{0};    // not yet sent
  };

  // Of placed tensors: the receiver copies nothing, so that small chunks gain nothing on the host, and on a
  // device little.
  static constexpr std::size_t kPlacedChunkBytes = std::size_t{4} << 20;
  // Where the memory of both is the host's, who drives copies a placed item of no more bytes itself, at once:
  // that takes no longer than to wake the copy stream's thread and to be woken by it (24 us for 1 MiB in the
  // cache, where either takes 15 to 25 us).
  static constexpr std::size_t kCopiedHereBytesMax = std::size_t{1} << 20;
  // The end, which waits for no room, and an item whose on_sent is late: the answer to it may come first.
  static constexpr std::size_t kNumSpareItems = 2;
  // Copies that may be enqueued and not done, of two or three operations each: who drives must not wait for
  // room in the stream (kStreamDepth).
  static constexpr std::size_t kNumCopiesMax = 128;

  [[nodiscard]] std::size_t check_and_count_bytes(MinibatchId minibatch,
                                                  const std::vector<TensorView>& tensors) const;
  [[nodiscard]] std::size_t wire_bytes(const Item& item, std::size_t tensor_index) const;
  void cut(Item& item);
  [[nodiscard]] static std::size_t num_chunks_of(std::size_t num_bytes, std::size_t chunk_bytes);
  void note_left(const Item& item, std::int64_t released_ns);
  void time(const Item& item, std::int64_t released_ns);
  [[nodiscard]] bool wait_until_fewer(std::size_t num_items, Deadline deadline);
  void enqueue(Item* item);
  Item* take_free_item();
  void schedule_pump();
  void pump();
  void start_queued();
  [[nodiscard]] bool start(Item& item);
  void enqueue_copies();
  [[nodiscard]] bool is_copied_here(const Item& item) const;
  [[nodiscard]] CopyRange next_copy(const Item& item) const;
  void copy_here(Item& item);
  [[nodiscard]] bool enqueue_copies_of(Item& item);
  void enqueue_copy(Item& item);
  void enqueue_encoding(Item& item);
  void note_copied(Item& item, std::size_t num_chunks);
  void frame_copied();
  void frame_end(const Item& item);
  void frame_chunk(Item& item);
  void advance(ChunkCursor& cursor, const Item& item) const;
  void chunk_sent(Item& item);
  void release(Item& item);
  void give_up();
  void finish_copies();
  void fail_queued();
  void note_credit_wait(bool waits);
  [[nodiscard]] Item* first_queued();  // null when there is none
  [[nodiscard]] Item* take_queued();
  [[nodiscard]] bool has_unsent_tensors();
  [[nodiscard]] static bool has_tensors(RingBuffer<Item*>& items);

  const ChannelOptions options_;
  const WireLayout layout_;
  Transport& transport_;
  Wakeup& wakeup_;
  Device& device_;
  SlotGroup* const staging_;
  const Lease residual_;  // invalid when there is none
  bool places_ = false;
  std::unique_ptr<PlacedSlots> placed_slots_;  // null when the receiver's memory is not shared, or was let go
  std::unique_ptr<StreamCodec> stream_codec_;  // null when nothing travels encoded
  std::unique_ptr<Stream> copy_stream_;        // null when nothing is copied
  std::atomic<std::size_t> num_copies_{0};     // enqueued and not done
  std::atomic<Link*> link_{nullptr};           // set by attach() or on_open(), whichever comes first
  std::atomic<bool> open_{false};
  std::atomic<bool> pump_scheduled_{false};
  std::atomic<std::size_t> num_unreleased_{0};
  std::atomic<bool> waiting_for_release_{false};

  // Of stats().
  std::atomic<std::uint64_t> num_items_sent_{0};
  std::atomic<std::uint64_t> num_chunks_framed_{0};
  std::atomic<std::uint64_t> num_tensor_bytes_{0};
  std::atomic<std::uint64_t> num_placed_bytes_{0};
  std::atomic<std::int64_t> credit_wait_ns_{0};
  std::atomic<std::int64_t> credit_wait_began_ns_{0};  // 0: not waiting

  mutable std::mutex mutex_;  // guards the members below
  std::vector<Item*> free_items_;
  RingBuffer<Item*> queued_;
  std::vector<std::shared_ptr<void>> released_;
  ChunkTuner tuner_;
  std::uint64_t num_sent_ = 0;     // items with tensors
  std::size_t num_under_way_ = 0;  // of them, from send() to release()
  std::int64_t under_way_since_ns_ = 0;
  std::int64_t transfer_ns_ = 0;
  NewestLog<SentTransfer> transfers_;

  std::vector<std::unique_ptr<Item>> items_;      // fixed after construction
  std::vector<std::shared_ptr<void>> collected_;  // compute thread

  // Who drives.
  RingBuffer<Item*> started_;
  GrantedSlots granted_;
  bool failed_ = false;
  bool peer_left_ = false;  // it said BYE: what is sent from now on would vanish
};

}  // namespace pipedream
