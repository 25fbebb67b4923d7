// An item is the set of tensors that one work item sends over a channel. This file has the item on its way
// through the sending channel: its description, its chunks and its progress. The channel makes all its items
// when it is made, and they never move. So a callback captures two pointers and allocates nothing.
//
// Threads: the compute thread uses an item until the item is queued, then the thread that drives the
// transport does. Any thread may change num_chunks_copied and num_chunks_left.
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
  // The position of the next chunk, and the number of chunks before it.
  struct Cursor {
    std::size_t tensor_index = 0;
    std::size_t offset = 0;
    std::size_t num_passed = 0;
  };

  explicit SendItem(const WireLayout& wire_layout) : layout(wire_layout) {}

  // Counts the item's chunks of chunk_bytes each and sets its progress to zero. chunk_bytes is set before the
  // call.
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

  // How the item travels.
  bool is_placed = false;  // the sender writes the tensors into the receiver's memory
  std::size_t chunk_bytes = 0;
  std::size_t num_chunks = 0;
  std::uint16_t slot = 0;  // the receiver's slot
  PostedRange posted;      // the place that the receiver has posted for the slot, if any
  Lease staging;  // the staging buffer; invalid when the item is placed or the wire reads the tensors
  std::byte* copy = nullptr;  // the start of the copy, in the slot or in staging; null when nothing is copied
  std::byte* residual = nullptr;  // what the codec left out of earlier items, or null
  ItemCopier* copier = nullptr;

  // The item's progress.
  Cursor copied;  // the next chunk to copy; earlier ones are copied or enqueued on the copy stream
  Cursor framed;
  std::atomic<std::size_t> num_chunks_copied{0};  // chunks whose copy is complete
  std::atomic<std::size_t> num_chunks_left{0};    // chunks that are not sent yet

  // For SendRecord.
  std::int64_t queued_ns = 0;
  std::int64_t started_ns = 0;  // this time and the next two are 0 until they are known
  std::int64_t copied_ns = 0;
  std::int64_t framed_ns = 0;
};

}  // namespace pipedream
