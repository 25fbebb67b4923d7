// Copies items to where the wire, or the receiver, reads them: the middle of a sending channel.
//
//   placed     into the receiver's own slot, or where it has posted a place, mapped here: its memory is
//              shared, the host's or its device's. The frames tell of the bytes
//   staged     into a staging buffer: the wire cannot read device memory, or the tensors travel encoded.
//              A GPU encodes in its own memory first: small writes of kernels are slow on the bus
//   in place   nowhere: the wire reads the tensors
//
// Threads: all on who drives the transport, but for places(), any, and on_copied, which the copy stream
// calls. place_into() before there is a link.
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
  // staging, residual, encoded: as SendChannel has them. on_copied: more chunks of an item can be framed, or
  // more copies be enqueued; must be short and not call the device.
  ItemCopier(const WireLayout& layout, Device& device, SlotGroup* staging, SlotGroup* residual,
             SlotGroup* encoded, std::function<void()> on_copied);

  // are_posted: not into slots, but where the receiver has posted a place.
  void place_into(std::unique_ptr<SharedMemory> memory, bool are_posted);
  // Lets go of that memory. No copy is under way.
  void end_placing() { placed_slots_.reset(); }
  // Whether items are placed.
  [[nodiscard]] bool places() const { return placed_slots_ != nullptr; }
  // False: the receiver names a slot, or has posted a place for it, that is not in its memory.
  [[nodiscard]] bool can_reach(std::uint16_t slot, PostedRange posted) const;

  // Leases the staging buffer that the item needs. False when none is free: to be asked again.
  [[nodiscard]] bool reserve(SendItem& item);
  // The item has its slot of the receiver. Where nothing is to be copied all its chunks can be framed.
  void start(SendItem& item);
  // Copies what is left of the item, now or on the copy stream. False when no more copies may be enqueued
  // now: to be asked again after the next on_copied.
  [[nodiscard]] bool copy(SendItem& item);
  // Until no copy is under way. Throws DeviceError.
  void synchronize();
  // The codec's residuals, item by item in turn, one per tensor, in device memory. Empty where it keeps
  // nothing. Changes while items are copied; another's may take its place before the first.
  [[nodiscard]] std::vector<std::vector<std::span<std::byte>>> residuals() const;

 private:
  struct CopyRange {
    std::byte* to;
    const std::byte* from;
    std::size_t num_bytes;
  };

  // Between host memories a placed item of at most so many bytes is copied at once by the calling thread:
  // that takes no longer than to wake the copy stream's thread and to be woken by it (24 us for 1 MiB in the
  // cache, while either takes 15 to 25 us).
  static constexpr std::size_t kCopiedHereBytesMax = std::size_t{1} << 20;
  // Copies that may be enqueued and not done, of two or three operations each on a stream: who drives must
  // not wait for room in it (kStreamDepth). Where channels share a stream it may, until the device has gone
  // on.
  static constexpr std::size_t kNumCopiesMax = 128;

  [[nodiscard]] bool is_copied_here(const SendItem& item) const;
  [[nodiscard]] CopyRange next_copy(const SendItem& item) const;
  // Whether the tensor whose turn it is travels encoded.
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
  const std::vector<Lease> residuals_;  // of the items in turn; empty when the codec keeps none
  std::size_t num_started_ = 0;         // items, where there are residuals
  const Lease encoded_;  // in the copy stream's order; invalid where nothing is encoded on a device
  const std::function<void()> on_copied_;
  std::unique_ptr<PlacedSlots> placed_slots_;  // null when the receiver's memory is not shared, or was let go
  std::unique_ptr<StreamCodec> stream_codec_;  // null when nothing travels encoded
  std::atomic<std::size_t> num_copies_{0};     // enqueued and not done
  std::unique_ptr<Stream> copy_stream_;        // null when nothing is copied; its callbacks use the above
  // On a device its host functions run on a stream of their own: one holds up the copies behind it for 10 to
  // 30 us, in which NVLink moves a MiB. Null on the host, whose streams lose no time by it.
  std::unique_ptr<Stream> telling_stream_;
  std::unique_ptr<Event> copied_;  // recorded anew for each
};

}  // namespace pipedream
