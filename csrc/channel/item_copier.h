// Copies the items of a sending channel to where the wire or the receiver reads them. An item is the set of
// tensors that one work item sends over the channel.
//
//   placed     the copy goes into the receiver's own slot or posted place, in host or device memory that the
//              receiver shares and the sender has mapped. The frames carry no payload
//   staged     the copy goes into a staging buffer: the wire cannot read device memory, or the tensors travel
//              encoded. A GPU encodes in its own memory first: small writes of kernels are slow on the bus
//   in place   there is no copy: the wire reads the tensors
//
// Threads: can_reach(), reserve(), start() and copy() run on the thread that drives the transport. Any thread
// may call places(). A stream's thread calls on_copied. place_into() is called before there is a link,
// end_placing() after the transport's shutdown, and residuals() when no item is under way.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "channel/granted_slots.h"
#include "channel/placed_slots.h"
#include "channel/send_item.h"
#include "channel/wire_layout.h"
#include "codec/stream_codec.h"
#include "device/device.h"
#include "pool/pool.h"

namespace pipedream {

class ItemCopier {
 public:
  // staging, residual, encoded: see SendChannel's constructor. on_copied: called when more chunks of an item
  // can be framed or more copies can be enqueued. It must be short and must not call the device.
  ItemCopier(const WireLayout& layout, Device& device, SlotGroup* staging, SlotGroup* residual,
             SlotGroup* encoded, std::function<void()> on_copied);

  // are_posted: whether items go to places that the receiver posts, and not into its slots.
  void place_into(std::unique_ptr<SharedMemory> memory, bool are_posted);
  // Unmaps the receiver's memory. Called when no copy is under way.
  void end_placing() { placed_slots_.reset(); }
  // Whether items are placed.
  [[nodiscard]] bool places() const { return placed_slots_ != nullptr; }
  // Whether the receiver's slot, or the place that it has posted, lies in the memory that it shares.
  [[nodiscard]] bool can_reach(std::uint16_t slot, PostedRange posted) const;

  // Leases a staging buffer if the item needs one. False when none is free: call again later.
  [[nodiscard]] bool reserve(SendItem& item);
  // Begins an item that has got a slot of the receiver. If nothing has to be copied, all its chunks can be
  // framed now.
  void start(SendItem& item);
  // Copies all of the item that is not copied yet, at once or on the copy stream. False when no more copies
  // may be enqueued: call again after the next on_copied.
  [[nodiscard]] bool copy(SendItem& item);
  // Waits until no copy is under way. Throws DeviceError.
  void synchronize();
  // The codec's residuals in device memory: one entry per residual slot, with one span per tensor. Items use
  // the slots in turn. Empty when the codec keeps no residual. The contents change while items are copied.
  // Before the first item the caller may write residuals of an earlier run into them.
  [[nodiscard]] std::vector<std::vector<std::span<std::byte>>> residuals() const;

 private:
  struct CopyRange {
    std::byte* to;
    const std::byte* from;
    std::size_t num_bytes;
  };

  // A placed item of at most this size is copied between host memories by the calling thread. Such a copy
  // takes at most 24 us if the data are in the cache. Waking the copy stream's thread takes 15 to 25 us, and
  // being woken by it as much again.
  static constexpr std::size_t kCopiedHereBytesMax = std::size_t{1} << 20;
  // The most copies that may be enqueued and not yet done. Each copy is two or three operations on a stream,
  // and a stream holds kStreamDepth operations. So the thread that drives the transport never waits for room
  // in the stream, unless channels share it.
  static constexpr std::size_t kNumCopiesMax = 128;

  [[nodiscard]] bool is_copied_here(const SendItem& item) const;
  [[nodiscard]] CopyRange next_copy(const SendItem& item) const;
  // Whether the next tensor travels encoded.
  [[nodiscard]] bool is_encoded(const SendItem& item) const;
  void copy_here(SendItem& item);
  void enqueue_copy(SendItem& item);
  void enqueue_encoding(SendItem& item, std::byte* to);
  void pass_tensor(SendItem& item);
  void note_copied(SendItem& item, std::size_t num_chunks);
  void tell_when_copied(SendItem& item, std::size_t num_chunks);
  void make_streams();

  const WireLayout& layout_;
  Device& device_;
  SlotGroup* const staging_;            // null when the wire reads the tensors
  const std::vector<Lease> residuals_;  // the items use them in turn; empty when the codec keeps none
  std::size_t num_started_ = 0;         // counted only if there are residuals
  // One item's encoded bytes on the device. Items use it one after the other, in the copy stream's order.
  // Invalid if nothing is encoded on a device.
  const Lease encoded_;
  const std::function<void()> on_copied_;
  std::unique_ptr<PlacedSlots> placed_slots_;  // null without shared memory, and after end_placing()
  std::unique_ptr<StreamCodec> stream_codec_;  // null when nothing travels encoded
  std::atomic<std::size_t> num_copies_{0};     // copies that are enqueued and not done
  std::unique_ptr<Stream> copy_stream_;  // null when nothing is copied; its callbacks use the members above
  // A second stream for host functions, so that they do not hold up copies. On a device one host function
  // delays the copies behind it by 10 to 30 us. Null on the host, where host functions cause no such delay.
  std::unique_ptr<Stream> telling_stream_;
  std::unique_ptr<Event> copied_;  // recorded again for each host function
};

}  // namespace pipedream
