// Defines the fields of a work item beside its tensors. The header of each of the item's frames has these
// fields. Plain values; any thread.
#pragma once

#include <cstdint>

namespace pipedream {

struct ItemFields {
  // The fingerprint of the minibatch's data at the sender. A stage that reads the same data compares its own
  // fingerprint; 0 if no stage does. On gradients these are the bits of the microbatch's loss, if the first
  // stage needs the loss.
  std::uint64_t data_fingerprint = 0;
  // The factor by which the loss, and so the item's gradients, are multiplied. It is finite and positive; 0
  // if there is no factor.
  double loss_scale = 0;
  // Whether gradients of an earlier minibatch have overflowed at the sender's stage or further upstream. Only
  // on items that go downstream.
  bool gradients_overflowed = false;
  // Whether the microbatch has no samples, so that its tensors have no elements.
  bool is_empty = false;
  // With is_end_of_data, the number of minibatches of the run. Otherwise, on gradients that a replica pushes,
  // the number of microbatches whose gradients are added in them; on an asynchronous shard's version, the
  // number of gradients that the version contains.
  std::uint32_t num_minibatches = 0;
  // Whether the data have ended. Then the item comes in place of gradients, and its tensors have no elements.
  bool is_end_of_data = false;
  // Bits for the events due at the boundary before the minibatch's group, or in an END at the end of the run.
  // The engine passes them on and does not interpret them.
  std::uint8_t boundary_events = 0;

  friend bool operator==(const ItemFields&, const ItemFields&) = default;
};

}  // namespace pipedream
