// The end of a received item: its slot goes back to the channel, where that is still there.
#include "channel/received_item.h"

#include <utility>

#include "channel/receive_channel.h"

namespace pipedream {

void ReceivedSlot::end_reading() {
  if (compute_stream == nullptr) return;
  try {
    compute_stream->record(*last_read);
  } catch (const DeviceError& error) {
    receiver->tell(error);
  }
}

// The staging buffer goes first: a slot that is free has one. After the slot has gone, all of this belongs to
// the next item.
void ReceivedSlot::drop() {
  if (num_holders.fetch_sub(1) != 1) return;
  Lease released = std::move(slot);
  staging.release();
  released.release();
}

ReceivedItem::~ReceivedItem() {
  if (!held) return;
  if (!held->receiver->is_in_its_process()) {
    // Nor may its death, with all it leases, be theirs: nobody owns it from now on.
    // NOLINTNEXTLINE(*-owning-memory, bugprone-unhandled-exception-at-new): no memory ends the process
    static_cast<void>(new std::shared_ptr<ReceivedSlot>(std::move(held)));
    return;
  }
  held->end_reading();
  held->drop();
}

ReceivedItem& ReceivedItem::operator=(ReceivedItem&& other) noexcept {
  if (this != &other) {
    std::destroy_at(this);
    std::construct_at(this, std::move(other));
  }
  return *this;
}

void ReceiverAccess::detach() {
  std::unique_lock lock(mutex_);
  channel_ = nullptr;
  none_reaches_.wait(lock, [&] { return num_reaching_ == 0; });
}

// Not under the mutex: a handler takes it, too.
template <class Call>
void ReceiverAccess::reach(Call call) {
  ReceiveChannel* channel = nullptr;
  {
    const std::lock_guard lock(mutex_);
    if (channel_ == nullptr) return;
    channel = channel_;
    ++num_reaching_;
  }
  call(*channel);
  const std::lock_guard lock(mutex_);
  if (--num_reaching_ == 0) none_reaches_.notify_all();
}

// The compute thread, most often: the credit leaves with what its work item sends.
void ReceiverAccess::slot_released() {
  reach([](ReceiveChannel& channel) {
    if (!channel.note_release()) return;
    channel.wakeup_.post_with_item(channel.transport_, [&channel] { channel.grant_free_slots(); });
  });
}

void ReceiverAccess::tell(const DeviceError& error) {
  reach([&](ReceiveChannel& channel) { channel.wakeup_.fail_of_device(channel.options_.name, error); });
}

}  // namespace pipedream
