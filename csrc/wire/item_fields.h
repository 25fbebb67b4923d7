// What a work item says of itself beside its tensors; travels in the header of each of its frames. Plain
// values; any thread.
#pragma once

#include <cstdint>

namespace pipedream {

struct ItemFields {
  // Of the minibatch's data, as the sender knows it: who reads the same data compares. 0 where nobody does.
  // Of gradients: the bits of the microbatch's loss, where the first stage wants to know it.
  std::uint64_t data_fingerprint = 0;
  // What the loss was multiplied by, and with it the gradients of the item. 0: nothing; else finite and
  // positive.
  double loss_scale = 0;
  // Towards downstream: gradients of an earlier minibatch have overflowed at the sender's stage or upstream.
  bool gradients_overflowed = false;
  // The microbatch has no samples: its tensors have no elements.
  bool is_empty = false;
  // Of gradients that a replica pushes: of how many minibatches they are the sum. With is_end_of_data: how
  // many minibatches the run has.
  std::uint32_t num_minibatches = 0;
  // Instead of gradients: there are no more, and the tensors have no elements.
  bool is_end_of_data = false;
  // Bits that say what is due at the boundary before the minibatch's group; of an end, at the end. The
  // engine passes them on and knows none of them.
  std::uint8_t boundary_events = 0;

  friend bool operator==(const ItemFields&, const ItemFields&) = default;
};

}  // namespace pipedream
