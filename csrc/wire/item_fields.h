// Fields of a work item beside its tensors; they travel in the header of each of its frames. Plain values;
// any thread.
#pragma once

#include <cstdint>

namespace pipedream {

struct ItemFields {
  // Fingerprint of the minibatch's data, as the sender knows it: a stage that reads the same data compares. 0
  // if nobody does. On gradients: the bits of the microbatch's loss, if the first stage wants to know it.
  std::uint64_t data_fingerprint = 0;
  // The factor of the loss, and with it of the item's gradients. 0: none; else finite and positive.
  double loss_scale = 0;
  // Towards downstream: gradients of an earlier minibatch have overflowed at the sender's stage or upstream.
  bool gradients_overflowed = false;
  // The microbatch has no samples: its tensors have no elements.
  bool is_empty = false;
  // Number of minibatches of which a replica's pushed gradients are the sum. With is_end_of_data: number of
  // minibatches of the run.
  std::uint32_t num_minibatches = 0;
  // Instead of gradients: there are no more, and the tensors have no elements.
  bool is_end_of_data = false;
  // Bits that say what is due at the boundary before the minibatch's group; of an end, at the end. The
  // engine passes them on and knows none of them.
  std::uint8_t boundary_events = 0;

  friend bool operator==(const ItemFields&, const ItemFields&) = default;
};

}  // namespace pipedream
