// What a receiving channel hands out, and what it keeps for it per slot. Threads as in receive_channel.h.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
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
  explicit ReceiverAccess(ReceiveChannel& channel) : channel_(&channel) {}
  // Whichever thread drops the last reference to an item's tensors.
  void slot_released();
  // What was read last of an item is not known: the run fails.
  void tell(const DeviceError& error);
  // Afterwards nothing reaches the channel: waits for those who do.
  void detach();
  // False in a child of fork(): slots, streams and threads are its parent's.
  [[nodiscard]] bool is_in_its_process() const { return home_.is_this(); }

 private:
  template <class Call>
  void reach(Call call);

  const HomeProcess home_;
  std::mutex mutex_;  // guards the members below
  std::condition_variable none_reaches_;
  ReceiveChannel* channel_;
  int num_reaching_ = 0;  // threads on their way to the channel, or there
};

// What the channel keeps for the item in one slot of the device, from the slot's lease to the item's last
// holder. A staged item has two: the item and, until its copies are done, the copy stream, as an item may be
// dropped before the device has copied it. Shared with the items, which may outlive the channel.
struct ReceivedSlot {
  void end_reading();  // what was enqueued so far are the item's last readers; any thread
  void drop();         // by a holder, once each; any thread

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
  // makes that copy. Both null when the device is the host.
  Stream* compute_stream = nullptr;  // outlives the items
  std::unique_ptr<Event> last_read;
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
