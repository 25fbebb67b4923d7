// The fields of a work item beside its tensors. The header of each of its frames carries them. Plain values;
// any thread.
#pragma once

#include <cstdint>

namespace pipedream {

struct ItemFields {
  // The fingerprint of the minibatch's data at the sender. A stage that reads the same data compares it; 0 if
  // no stage does. On gradients: the bits of the microbatch's loss, if the first stage needs it.
  std::uint64_t data_fingerprint = 0;
  // The factor by which the loss, and so the item's gradients, are multiplied: finite and positive. 0: none.
  double loss_scale = 0;
  // Downstream only: gradients of an earlier minibatch have overflowed at the sender's stage or further
  // upstream.
  bool gradients_overflowed = false;
  // The microbatch has no samples: its tensors have no elements.
  bool is_empty = false;
  // With is_end_of_data, the number of minibatches of the run. Otherwise, on gradients that a replica pushes,
  // the number of microbatches of which they are the sum; on an asynchronous shard's version, the number of
  // gradients that it contains.
  std::uint32_t num_minibatches = 0;
  // The item replaces gradients: the data have ended, and the tensors have no elements.
  bool is_end_of_data = false;
  // Bits for the events due at the boundary before the minibatch's group, or in an END at the end of the run.
  // The engine passes them on and does not interpret them.
  std::uint8_t boundary_events = 0;

  friend bool operator==(const ItemFields&, const ItemFields&) = default;
};

}  // namespace pipedream
