// One item on its way through a sending channel: what it is, how it is cut, and how far it has come. Made
// with the channel, in a fixed place, so that callbacks capture two pointers and allocate nothing.
//
// Threads: the compute thread until it is queued, then whoever drives the transport; the two counters any.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "base/ids.h"
#include "channel/granted_slots.h"
#include "channel/tensor.h"
#include "channel/wire_layout.h"
#include "device/device.h"
#include "pool/pool.h"
#include "wire/item_fields.h"

namespace pipedream {

class ItemCopier;

struct SendItem {
  // The next chunk, and how many came before it.
  struct Cursor {
    std::size_t tensor_index = 0;
    std::size_t offset = 0;
    std::size_t num_passed = 0;
  };

  explicit SendItem(const WireLayout& wire_layout) : layout(wire_layout) {}

  // By chunk_bytes, which has been chosen: counts the chunks, none of which has been copied, framed or sent.
  void cut();
  [[nodiscard]] std::size_t wire_bytes(std::size_t tensor_index) const {
    return layout.wire_bytes(tensor_index, tensors[tensor_index].size_bytes());
  }
  // An empty tensor is one frame.
  [[nodiscard]] std::size_t num_chunks_of(std::size_t tensor_index) const {
    return std::max<std::size_t>(1, (wire_bytes(tensor_index) + chunk_bytes - 1) / chunk_bytes);
  }
  [[nodiscard]] std::size_t bytes_of_chunk(const Cursor& cursor) const {
    return std::min(chunk_bytes, wire_bytes(cursor.tensor_index) - cursor.offset);
  }
  void pass_chunk(Cursor& cursor) const;

  const WireLayout& layout;

  // The item's description.
  bool is_end = false;
  MinibatchId minibatch;
  MicrobatchIndex microbatch;
  ItemFields fields{};
  std::vector<TensorView> tensors;
  std::unique_ptr<Event> ready;
  std::shared_ptr<void> keep_alive;
  std::size_t num_wire_bytes = 0;

  // How it travels.
  bool is_placed = false;  // written into the receiver's slot
  std::size_t chunk_bytes = 0;
  std::size_t num_chunks = 0;
  std::uint16_t slot = 0;  // of the receiver
  PostedRange posted;      // what it has posted for the slot, if anything
  Lease staging;  // what it is copied to, unless it is placed; invalid when the wire reads the tensors
  std::byte* copy = nullptr;      // in one of the two; null when there is none
  std::byte* residual = nullptr;  // what the codec has left out before it; null when it keeps none
  ItemCopier* copier = nullptr;

  // How far it has come.
  Cursor copied;  // or given to the copy stream
  Cursor framed;
  std::atomic<std::size_t> num_chunks_copied{0};  // by the copy stream
  std::atomic<std::size_t> num_chunks_left{0};    // not yet sent

  // For SendRecord.
  bool is_timed = false;         // for the tuner, if it stays alone on its way
  std::uint64_t send_index = 0;  // among the items with tensors
  std::int64_t queued_ns = 0;
  std::int64_t started_ns = 0;  // these three: 0 until then
  std::int64_t copied_ns = 0;
  std::int64_t framed_ns = 0;
};

}  // namespace pipedream
