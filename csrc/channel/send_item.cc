// Computes the chunks of an item. Threads as in send_item.h.
#include "channel/send_item.h"

namespace pipedream {

void SendItem::cut() {
  num_chunks = 0;
  for (std::size_t tensor_index = 0; tensor_index < tensors.size(); ++tensor_index) {
    num_chunks += num_chunks_of(tensor_index);
  }
  copied = {};
  framed = {};
  num_chunks_copied = 0;
  num_chunks_left = num_chunks;
}

void SendItem::pass_chunk(Cursor& cursor) const {
  ++cursor.num_passed;
  cursor.offset += chunk_bytes;
  if (cursor.offset < wire_bytes(cursor.tensor_index)) return;
  cursor.offset = 0;
  ++cursor.tensor_index;
}

}  // namespace pipedream
