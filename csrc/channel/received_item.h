// Defines the item that a receiving channel hands out, and the record that the channel has for each slot.
// Threads as in receive_channel.h.
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

// Slots and the items in them call their channel through this object. Slots and items may outlive the
// channel; this object lives as long as the slots' group. Any thread.
class ReceiverAccess {
 public:
  // side_stream: see ChannelOptions.
  ReceiverAccess(ReceiveChannel& channel, std::function<std::unique_ptr<Stream>()> side_stream)
      : side_stream_(std::move(side_stream)), channel_(&channel) {}
  // Tells the channel that a slot became free. Called by the thread that has released the slot.
  void slot_released();
  // Makes the run fail, because after a device's error nobody knows whether an item was read completely.
  void tell(const DeviceError& error);
  // The stream other than the compute stream on which this thread may have read the item; null if there is
  // none.
  [[nodiscard]] std::unique_ptr<Stream> side_stream() const {
    return side_stream_ ? side_stream_() : nullptr;
  }
  // Runs the function when the compute thread next asks for work. Returns false, without keeping the
  // function, if the channel is gone.
  bool defer(std::function<void()> function);
  // Cuts the way to the channel, and waits for threads that are using it.
  void detach();
  // False in a child of fork(): the slots, streams and threads belong to its parent.
  [[nodiscard]] bool is_in_its_process() const { return home_.is_this(); }

 private:
  template <class Call>
  void reach(Call call);

  const HomeProcess home_;
  const std::function<std::unique_ptr<Stream>()> side_stream_;
  std::mutex mutex_;  // guards the members below
  std::condition_variable none_reaches_;
  ReceiveChannel* channel_;
  int num_reaching_ = 0;  // threads inside reach()
};

// The channel's record of one slot, from the slot's lease until the item's last holder drops it. A
// staged item has two holders: the item, and the copy stream until its copies are done. So an item may be
// dropped before the device has copied it. Items share the record and may outlive the channel.
struct ReceivedSlot {
  // Records events behind all work that is enqueued now. They mark the end of the item's last read. Any
  // thread. False if a graph is being captured from the compute stream. The event would become part of the
  // graph, so the caller must try again later.
  [[nodiscard]] bool end_reading();
  void drop();  // called once by each holder; any thread
  void wait_for_readers(Stream& stream) const;
  [[nodiscard]] bool has_readers() const;  // whether kernels still read the slot

  ReceiverAccess* receiver = nullptr;
  bool awaits_item = false;          // whether the slot is leased and no item has begun
  std::byte* data = nullptr;         // where the item lands: the slot's memory or the posted place
  std::size_t num_posted_bytes = 0;  // 0: no place was posted
  std::atomic<int> num_holders{0};
  Lease slot;
  Lease staging;                    // invalid if the item is not staged
  std::vector<TensorView> tensors;  // capacity for all tensors is reserved
  std::unique_ptr<Event> ready;     // recorded after the copies; null when nothing is staged

  // On an asynchronous device an item may be dropped while enqueued kernels still read its slot. The last
  // reader's event marks their end. The next copy into the slot waits for this event. If the sender makes the
  // copy, the grant of the slot waits instead. A thread may also have read on another stream than the compute
  // stream, as some backwards do. Then a second event marks the end of these reads. Without a compute stream,
  // as on the host, there are no events.
  Device* device = nullptr;  // device and compute_stream outlive the items
  Stream* compute_stream = nullptr;
  std::unique_ptr<Event> last_read;
  std::unique_ptr<Event> last_read_aside;  // null until first needed
  bool is_read_aside = false;              // the last item was read on another stream, too
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

// A work item's tensors in a leased slot. They are valid while the item lives.
struct ReceivedItem {
  ReceivedItem() = default;
  ReceivedItem(ReceivedItem&&) noexcept = default;
  ReceivedItem& operator=(ReceivedItem&& other) noexcept;  // drops the old item as the destructor does
  ReceivedItem(const ReceivedItem&) = delete;
  ReceivedItem& operator=(const ReceivedItem&) = delete;
  ~ReceivedItem();

  bool is_end = false;
  std::int64_t num_minibatches = 0;  // of the run; set with is_end
  MinibatchId minibatch;
  MicrobatchIndex microbatch;
  ItemFields fields{};
  TensorList tensors;
  const Event* ready = nullptr;        // wait for it on the compute stream; null when the bytes are there
  std::shared_ptr<ReceivedSlot> held;  // owns the tensors' memory; null for the end
};

}  // namespace pipedream
