// An item that a receiving channel hands out, and the channel's record of it per slot. Threads as in
// receive_channel.h.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <span>
#include <vector>

#include "base/check.h"
#include "base/ids.h"
#include "base/process.h"
#include "channel/tensor.h"
#include "device/device.h"
#include "pool/pool.h"
#include "wire/item_fields.h"

namespace pipedream {

class ReceiveChannel;

// The way from the slots, and from the items in them, to their channel: both may outlive it. Lives as long as
// the slots' group. Any thread.
class ReceiverAccess {
 public:
  // side_stream: as ChannelOptions has it.
  ReceiverAccess(ReceiveChannel& channel, std::function<std::unique_ptr<Stream>()> side_stream)
      : side_stream_(std::move(side_stream)), channel_(&channel) {}
  // Whichever thread drops the last reference to an item's tensors.
  void slot_released();
  // Fails the run: nobody knows whether the last reader of the item read it whole.
  void tell(const DeviceError& error);
  // The stream beside the compute stream on which this thread may have read last; null when there is none.
  [[nodiscard]] std::unique_ptr<Stream> side_stream() const {
    return side_stream_ ? side_stream_() : nullptr;
  }
  // Calls it when the compute thread next asks for work. False: there is no channel any more.
  bool defer(std::function<void()> function);
  // Afterwards nothing reaches the channel: waits for those who do.
  void detach();
  // False in a child of fork(): slots, streams and threads are its parent's.
  [[nodiscard]] bool is_in_its_process() const { return home_.is_this(); }

 private:
  template <class Call>
  void reach(Call call);

  const HomeProcess home_;
  const std::function<std::unique_ptr<Stream>()> side_stream_;
  std::mutex mutex_;  // guards the members below
  std::condition_variable none_reaches_;
  ReceiveChannel* channel_;
  int num_reaching_ = 0;  // threads on their way to the channel, or there
};

// The channel's record of the item in one slot of the device, from the slot's lease to the item's last
// holder. A staged item has two: the item and, until its copies are done, the copy stream, as an item may be
// dropped before the device has copied it. Shared with the items, which may outlive the channel.
struct ReceivedSlot {
  // Takes what was enqueued so far for the item's last readers; any thread. False: not now, as the compute
  // stream is being captured, and the graph would have our event.
  [[nodiscard]] bool end_reading();
  void drop();  // by a holder, once each; any thread
  void wait_for_readers(Stream& stream) const;
  [[nodiscard]] bool has_readers() const;  // that are not done

  ReceiverAccess* receiver = nullptr;
  bool awaits_item = false;          // leased for one that has not begun; who drives
  std::byte* data = nullptr;         // where the item lands: the slot's, or what was posted
  std::size_t num_posted_bytes = 0;  // 0: it was not
  std::atomic<int> num_holders{0};
  Lease slot;
  Lease staging;                    // invalid when it was not staged
  std::vector<TensorView> tensors;  // with room for all
  std::unique_ptr<Event> ready;     // recorded after the copies; null when nothing is staged

  // On an asynchronous device a slot may be dropped while kernels that read it are still enqueued: the next
  // copy into it waits for the event that its last reader recorded, and so does its grant where the sender
  // makes that copy. A thread that reads on another stream than the compute stream, as a backward of a layer
  // that does, records there, too. All null when the device is the host.
  Device* device = nullptr;  // outlives the items, as the next
  Stream* compute_stream = nullptr;
  std::unique_ptr<Event> last_read;
  std::unique_ptr<Event> last_read_aside;  // null until there is one
  bool is_read_aside = false;              // by the last item
};

// A view of an item's tensors.
class TensorList : public std::span<const TensorView> {
 public:
  TensorList() = default;
  explicit TensorList(const std::vector<TensorView>& tensors) : span(tensors) {}

  [[nodiscard]] const TensorView& at(std::size_t index) const {
    PD_CHECK(index < size(), "tensor " << index << " of " << size());
    return (*this)[index];
  }
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
  ItemFields fields{};
  TensorList tensors;
  const Event* ready = nullptr;  // null when the bytes are there; else wait for it on the compute stream
  std::shared_ptr<ReceivedSlot> held;  // what the above lies in; null for the end
};

}  // namespace pipedream
