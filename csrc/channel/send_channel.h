// The sending end of one directed channel between two stages: takes the tensors of a work item on the
// device and puts them on the wire in chunks, asynchronously. Compute never waits for a send.
//
//   compute thread     copy stream                transport thread                  wire
//   1 send(item) ----------------------------------> 2 waits for a credit
//                      3 device -> staging buffer <-- 3 (only when the wire cannot read device memory)
//                      4 chunk copied -------------> 5 frame of the chunk ------------> ...
//   7 collect_released() <------------------------- 6 last chunk has left
//
// Threads: send(), send_end() and collect_released() on the compute thread; the rest on the transport
// thread. Which member belongs to whom is said below. Bound: num_items_max items that are not released, and
// kNumSpareItems. All of them are made with the channel: to send an item allocates nothing.
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
#include "base/ring_buffer.h"
#include "channel/tensor.h"
#include "channel/wakeup.h"
#include "device/device.h"
#include "pool/pool.h"
#include "transport/transport.h"

namespace pipedream {

struct ChannelOptions {
  std::string name;  // for errors: "activations of stage 0 to stage 1"
  ItemSpec spec;
  std::size_t chunk_bytes = std::size_t{512} << 10;
  std::size_t num_items_max = 16;
  std::int64_t num_microbatches = 1;  // of every minibatch: items come in the order of both
};

class SendChannel final : public LinkHandler {
 public:
  // staging: null when the wire reads device memory. Otherwise slots of spec.slot_bytes(), and the
  // device whose copy stream fills them. All outlive the channel.
  SendChannel(ChannelOptions options, Transport& transport, Wakeup& wakeup, Device& device,
              SlotGroup* staging);
  ~SendChannel() override;  // the transport has been shut down

  // Before the first send.
  void attach(Link& link) { link_.store(&link); }

  // The tensors are read until they show up in collect_released(); keep_alive owns their memory. ready:
  // an event on the compute stream after which the tensors are written; null when they are. Never
  // blocks. Throws UserError when a tensor is not what the plan says.
  void send(MinibatchId minibatch, MicrobatchIndex microbatch, std::uint64_t tag,
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
  [[nodiscard]] LinkCounters counters() const;

  void on_open(Link& link) override;
  [[nodiscard]] std::optional<Failure> on_frame(Link& link, const FrameHeader& header,
                                                std::span<const std::byte> payload) override;
  void on_failed(Link& link, const Failure& failure) override;
  void on_closed(Link& link) override;

 private:
  // Fixed places, so that callbacks capture two pointers and allocate nothing.
  struct Item {
    SendChannel* channel = nullptr;
    bool is_end = false;
    MinibatchId minibatch;
    MicrobatchIndex microbatch;
    std::uint64_t tag = 0;
    std::vector<TensorView> tensors;
    std::unique_ptr<Event> ready;
    std::shared_ptr<void> keep_alive;
    Lease staging;
    std::size_t num_chunks = 0;
    std::atomic<std::size_t> num_chunks_copied{0};
    std::size_t num_chunks_framed = 0;
    std::atomic<std::size_t> num_chunks_left{0};  // not yet sent
  };

  static constexpr std::uint64_t kCreditsMax = 1 << 20;  // more is a broken peer
  // The end, which waits for no room, and an item whose on_sent is late: the answer to it may come first.
  static constexpr std::size_t kNumSpareItems = 2;

  [[nodiscard]] bool wait_until_fewer(std::size_t num_items, Deadline deadline);
  void enqueue(Item* item);
  Item* take_free_item();
  void schedule_pump();
  void pump();
  bool start(Item& item);
  void frame_copied_chunks(Item& item);
  void frame_chunk(Item& item, std::size_t tensor_index, std::size_t offset);
  void chunk_sent(Item& item);
  void release(Item& item);
  void fail_queued();
  [[nodiscard]] Item* take_queued();  // null when there is none
  [[nodiscard]] bool has_unsent_tensors();
  [[nodiscard]] static bool has_tensors(RingBuffer<Item*>& items);

  const ChannelOptions options_;
  Transport& transport_;
  Wakeup& wakeup_;
  SlotGroup* const staging_;
  std::unique_ptr<Stream> copy_stream_;  // null when nothing is staged
  std::atomic<Link*> link_{nullptr};     // set by attach() or on_open(), whichever comes first
  std::atomic<bool> open_{false};
  std::atomic<bool> pump_scheduled_{false};
  std::atomic<std::size_t> num_unreleased_{0};
  std::atomic<bool> waiting_for_release_{false};

  std::mutex mutex_;  // guards the three below
  std::vector<Item*> free_items_;
  RingBuffer<Item*> queued_;
  std::vector<std::shared_ptr<void>> released_;

  std::vector<std::unique_ptr<Item>> items_;      // fixed after construction
  std::vector<std::shared_ptr<void>> collected_;  // compute thread

  // Transport thread.
  RingBuffer<Item*> started_;
  std::uint64_t num_credits_ = 0;
  bool failed_ = false;
  bool peer_left_ = false;  // it said BYE: what is sent from now on would vanish
};

}  // namespace pipedream
