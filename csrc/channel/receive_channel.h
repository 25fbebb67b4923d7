// The receiving end of one directed channel: checks each frame against the plan, lands its bytes in a
// leased slot, and hands whole items to the compute thread in order.
//
//   wire             transport thread                       copy stream            compute thread
//   frame ---------> 1 checked against plan and order
//                    2 first chunk: lease a slot
//                    3 payload -> slot (host), or -> staging buffer -> 4 device slot
//                    5 last chunk: item into the inbox, event after its copies ---> 6 try_take()
//   credit <-------- 8 <-------------------------------------------------------- 7 the lease dies
//
// A sender holds one credit per free slot, so the bytes in flight are bounded by the plan. Threads: as
// drawn; the inbox is guarded by the Wakeup's mutex.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "base/ids.h"
#include "channel/send_channel.h"
#include "channel/tensor.h"
#include "channel/wakeup.h"
#include "device/device.h"
#include "pool/pool.h"
#include "transport/transport.h"

namespace pipedream {

// On an asynchronous device a slot may be dropped while kernels that read it are still enqueued: the next
// copy into it waits for the event that its last reader recorded. One event a slot; shared with the items,
// which may outlive the channel.
struct SlotUse {
  Stream* compute_stream = nullptr;  // outlives the items
  std::vector<std::unique_ptr<Event>> last_read;
};

// A staged item's slot and staging buffer. The copy stream holds them beside the item, until its copies are
// done: an item may be dropped before the device has copied it. The staging buffer goes first: a slot that
// is free has one.
struct StagedLease {
  Lease slot;
  Lease staging;
};

// A work item's tensors in leased slots. They are valid while the item lives.
struct ReceivedItem {
  ReceivedItem() = default;
  ReceivedItem(ReceivedItem&&) noexcept = default;
  ReceivedItem& operator=(ReceivedItem&& other) noexcept;  // what was held is dropped as by the destructor
  ReceivedItem(const ReceivedItem&) = delete;
  ReceivedItem& operator=(const ReceivedItem&) = delete;
  ~ReceivedItem();

  bool is_end = false;
  std::int64_t num_minibatches = 0;  // is_end
  MinibatchId minibatch;
  MicrobatchIndex microbatch;
  std::uint64_t tag = 0;
  std::vector<TensorView> tensors;
  Lease slot;                           // invalid when it was staged
  std::shared_ptr<StagedLease> staged;  // null when nothing was staged
  std::shared_ptr<SlotUse> use;         // null when the device is the host
  std::unique_ptr<Event> ready;  // null when the bytes are there; else wait for it on the compute stream
};

class ReceiveChannel final : public LinkHandler {
 public:
  // slots: of spec.slot_bytes() on the device. staging: null when the wire writes device memory, else
  // as many slots of the same size. compute_stream: what the items are read on; null on the host. All
  // outlive the channel and its items.
  ReceiveChannel(ChannelOptions options, Transport& transport, Wakeup& wakeup, Device& device,
                 SlotGroup& slots, SlotGroup* staging, Stream* compute_stream);
  ~ReceiveChannel() override;

  void attach(Link& link) { link_.store(&link); }

  // Call inside Wakeup::wait_until. Moves the next item out; false when there is none.
  [[nodiscard]] bool try_take(ReceivedItem& item);
  // The peer said BYE and the inbox is empty: nothing will come.
  [[nodiscard]] bool exhausted() const { return closed_ && inbox_.empty(); }

  // No slot is free to receive into. Never so while the compute thread waits for this channel and gives
  // back what it was given: the plan has a slot more than it keeps.
  [[nodiscard]] bool all_slots_held() const { return slots_.num_free() == 0; }

  // Stops returning credits; items may die after this.
  void detach();

  [[nodiscard]] bool open() const { return open_.load(); }
  [[nodiscard]] const ChannelOptions& options() const { return options_; }
  [[nodiscard]] LinkCounters counters() const;

  void on_open(Link& link) override;
  [[nodiscard]] std::optional<Failure> on_frame(Link& link, const FrameHeader& header,
                                                std::span<const std::byte> payload) override;
  void on_failed(Link& link, const Failure& failure) override;
  void on_closed(Link& link) override;

 private:
  // Outlives the channel: the slots' release callback reaches the channel through it, or finds it gone.
  struct CreditReturn {
    std::mutex mutex;  // guards channel
    ReceiveChannel* channel = nullptr;
  };

  [[nodiscard]] std::optional<Failure> on_tensor(const FrameHeader& header,
                                                 std::span<const std::byte> payload);
  [[nodiscard]] std::optional<Failure> on_end(const FrameHeader& header);
  [[nodiscard]] std::optional<Failure> begin_item(const FrameHeader& header);
  [[nodiscard]] std::optional<std::string> misplaced(const FrameHeader& header) const;
  [[nodiscard]] Failure broken(const std::string& what) const;
  void land(const FrameHeader& header, std::span<const std::byte> payload);
  void deliver(ReceivedItem item);
  void slot_released();
  void return_credits();

  const ChannelOptions options_;
  Transport& transport_;
  Wakeup& wakeup_;
  Device& device_;
  SlotGroup& slots_;
  SlotGroup* const staging_;
  std::unique_ptr<Stream> copy_stream_;  // null when nothing is staged
  std::shared_ptr<SlotUse> use_;         // null when the device is the host
  std::atomic<Link*> link_{nullptr};     // set by attach() or on_open(), whichever comes first
  std::atomic<bool> open_{false};
  std::atomic<std::uint64_t> num_credits_owed_{0};
  std::shared_ptr<CreditReturn> credit_return_;

  // Guarded by wakeup_'s mutex.
  std::deque<ReceivedItem> inbox_;
  bool closed_ = false;

  // Transport thread: the item being received.
  std::optional<ReceivedItem> current_;
  std::size_t tensor_index_ = 0;   // being received
  std::size_t tensor_offset_ = 0;  // bytes of it that are here
  MinibatchId next_minibatch_;
  bool ended_ = false;
};

}  // namespace pipedream
