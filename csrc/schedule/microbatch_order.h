// The order in which a worker goes through the microbatches of one minibatch, over all its stages.
// Pure arithmetic; any thread.
//
// A worker with one stage takes the microbatches as they come. A worker with several stages (chunks) takes
// groups of as many microbatches as there are workers. A group goes forward through all chunks before the
// next group does, and backward through the chunks in reverse (Megatron-LM, SC'21, section 2.2). With 2
// workers, 2 chunks a and b, and 3 microbatches:
//
//   position   0   1   2   3   4   5   6   7
//   forward    a0  a1  b0  b1  a2  -   b2  -       the last group is filled up with microbatches that do
//   backward   b0  b1  a0  a1  b2  -   a2  -       not exist: their positions are passed over
//
// There is no deadlock for any number of microbatches. Full groups have none, as in Megatron-LM. Leaving out
// a microbatch at all stages adds none, because no other microbatch waits for the work on it.
#pragma once

#include <cstdint>

namespace pipedream {

struct MicrobatchOrder {
  std::int64_t num_microbatches = 1;
  std::int64_t num_chunks = 1;
  std::int64_t group_size = 1;

  struct Item {
    std::int64_t chunk = 0;
    std::int64_t microbatch = 0;
  };

  // The number of positions of one minibatch, including those that are passed over.
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
  // The position of the last forward, and of the last backward, that exists.
  [[nodiscard]] std::int64_t last_position() const {
    return forward_position({num_chunks - 1, num_microbatches - 1});
  }
};

}  // namespace pipedream
