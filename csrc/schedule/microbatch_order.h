// A MicrobatchOrder says in which order a worker goes through the microbatches of one minibatch, over all its
// stages. Pure arithmetic; any thread.
//
// A worker with one stage takes the microbatches as they come. A worker with several stages (chunks) takes
// them in groups of as many microbatches as there are workers. A group goes forward through all chunks before
// the next group does. It goes backward through the chunks in reverse (Megatron-LM, SC'21, section 2.2). With
// 2 workers, 2 chunks a and b, and 3 microbatches:
//
//   position   0   1   2   3   4   5   6   7
//   forward    a0  a1  b0  b1  a2  -   b2  -
//   backward   b0  b1  a0  a1  b2  -   a2  -
//
// The last group is filled up with microbatches that do not exist (-). Their positions are skipped.

// No number of microbatches leads to a deadlock. With full groups the order is that of Megatron-LM, which has
// no deadlock. Leaving out a microbatch at all stages adds no deadlock, because no other microbatch waits for
// it.
#pragma once

#include <cstdint>

namespace pipedream {

struct MicrobatchOrder {
  std::int64_t num_microbatches = 1;
  std::int64_t num_chunks = 1;
  std::int64_t group_size = 1;

  // A microbatch at one of the worker's stages.
  struct Item {
    std::int64_t chunk = 0;
    std::int64_t microbatch = 0;
  };

  // Returns the number of positions of one minibatch, skipped positions included.
  [[nodiscard]] std::int64_t num_positions() const {
    return (num_microbatches + group_size - 1) / group_size * group_size * num_chunks;
  }
  [[nodiscard]] Item forward_at(std::int64_t position) const {
    const std::int64_t in_group = position % (group_size * num_chunks);
    const std::int64_t group = position / (group_size * num_chunks);
    return {in_group / group_size, group * group_size + in_group % group_size};
  }
  [[nodiscard]] Item backward_at(std::int64_t position) const {
    const Item item = forward_at(position);
    return {num_chunks - 1 - item.chunk, item.microbatch};
  }
  [[nodiscard]] bool exists(Item item) const { return item.microbatch < num_microbatches; }

  [[nodiscard]] std::int64_t forward_position(Item item) const {
    const std::int64_t group = item.microbatch / group_size;
    return (group * num_chunks + item.chunk) * group_size + item.microbatch % group_size;
  }
  [[nodiscard]] std::int64_t backward_position(Item item) const {
    return forward_position({num_chunks - 1 - item.chunk, item.microbatch});
  }
  // Returns the position of the last forward, and also of the last backward, that is not skipped.
  [[nodiscard]] std::int64_t last_position() const {
    return forward_position({num_chunks - 1, num_microbatches - 1});
  }
};

}  // namespace pipedream
