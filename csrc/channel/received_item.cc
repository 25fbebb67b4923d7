// Ends received items: releases an item's slot, and tells the channel if the channel still exists.
#include "channel/received_item.h"

#include <utility>

#include "channel/receive_channel.h"

namespace pipedream {

bool ReceivedSlot::end_reading() {
  if (compute_stream == nullptr) return true;
  try {
    if (compute_stream->is_capturing()) return false;
    compute_stream->record(*last_read);
    const std::unique_ptr<Stream> aside = receiver->side_stream();
    is_read_aside = aside != nullptr && !aside->is_capturing();
    if (is_read_aside) {
      if (!last_read_aside) last_read_aside = device->make_event();
      aside->record(*last_read_aside);
    }
  } catch (const DeviceError& error) {
    receiver->tell(error);
  }
  return true;
}

void ReceivedSlot::wait_for_readers(Stream& stream) const {
  if (!last_read) return;
  stream.wait(*last_read);
  if (is_read_aside) stream.wait(*last_read_aside);
}

bool ReceivedSlot::has_readers() const {
  return last_read && (!last_read->done() || (is_read_aside && !last_read_aside->done()));
}

// Releases the staging buffer first, because every free slot must find a free staging buffer. After the
// slot's release this record belongs to the next item.
void ReceivedSlot::drop() {
  if (num_holders.fetch_sub(1) != 1) return;
  Lease released = std::move(slot);
  staging.release();
  released.release();
}

ReceivedItem::~ReceivedItem() {
  if (!held) return;
  if (!held->receiver->is_in_its_process()) {
    // In a child of fork() the record must not be destroyed either, because its leases are the parent's. So
    // it is leaked.
    // NOLINTNEXTLINE(*-owning-memory, bugprone-unhandled-exception-at-new): without memory the process ends
    static_cast<void>(new std::shared_ptr<ReceivedSlot>(std::move(held)));
    return;
  }
  if (!held->end_reading()) {
    const auto again = [late = held] {
      if (late->end_reading()) {
        late->drop();
        return;
      }
      ReceivedItem item;
      item.held = late;
    };
    if (held->receiver->defer(again)) return;
  }
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

// Calls the channel without holding the mutex, because the call may run a handler, which may take the mutex.
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

// Most calls come from the compute thread within a work item. The credit is then sent together with the
// tensors that this work item sends.
void ReceiverAccess::slot_released() {
  reach([](ReceiveChannel& channel) {
    if (!channel.note_release()) return;
    channel.wakeup_.post_with_item(channel.transport_, [&channel] { channel.grant_free_slots(); });
  });
}

bool ReceiverAccess::defer(std::function<void()> function) {
  bool is_deferred = false;
  reach([&](ReceiveChannel& channel) {
    channel.wakeup_.defer(std::move(function));
    is_deferred = true;
  });
  return is_deferred;
}

void ReceiverAccess::tell(const DeviceError& error) {
  reach([&](ReceiveChannel& channel) { channel.wakeup_.fail_of_device(channel.options_.name, error); });
}

}  // namespace pipedream
