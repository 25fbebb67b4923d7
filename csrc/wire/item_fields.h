// Defines the fields that a work item has in addition to its tensors. The header of each of the item's frames
// has these fields. Plain values; any thread.
#pragma once

#include <cstdint>

namespace pipedream {

struct ItemFields {
  // The fingerprint of the minibatch's data at the sender, or 0. A stage that reads the same data compares it
  // with its own fingerprint. On gradients it has the bits of the microbatch's loss instead, if the first
  // stage needs the loss.
  std::uint64_t data_fingerprint = 0;
  // The factor by which the loss, and so the item's gradients, are multiplied. It is finite and positive, or
  // 0 if there is no factor.
  double loss_scale = 0;
  // Whether gradients of an earlier minibatch have overflowed at the sender's stage or further upstream. Set
  // only on items that go downstream.
  bool gradients_overflowed = false;
  // Whether the microbatch has no samples. Its tensors then have no elements.
  bool is_empty = false;
  // A number that depends on the item. With is_end_of_data it is the number of minibatches of the run. On
  // gradients that a replica pushes it is the number of microbatches whose gradients are added up in them. On
  // the version that an asynchronous shard sends, it is the number of gradients that the version contains.
  std::uint32_t num_minibatches = 0;
  // On an evaluation's item: this is the last item of its block (schedule/evaluations.h). On a push: the data
  // have ended, so the item comes in place of gradients and its tensors have no elements.
  bool is_end_of_data = false;
  // One bit for each kind of event that is due at the boundary before the minibatch's group of minibatches
  // (schedule/evaluations.h). In an END it is due at the end of the run. The engine passes the bits on and
  // does not interpret them.
  std::uint8_t boundary_events = 0;

  friend bool operator==(const ItemFields&, const ItemFields&) = default;
};

}  // namespace pipedream
