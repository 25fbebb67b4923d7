// Tests the order of microbatches inside one minibatch: from a microbatch to its position and back.
#include "schedule/microbatch_order.h"

#include <gtest/gtest.h>

#include <string>

namespace pipedream {
namespace {

// Writes the order as text, "a0 a1 b0 b1 a2 - b2 -". The letters are chunks and the numbers microbatches. '-'
// is a position without a microbatch.
std::string on_paper(const MicrobatchOrder& order, bool is_backward) {
  std::string text;
  for (std::int64_t position = 0; position < order.num_positions(); ++position) {
    const MicrobatchOrder::Item item = is_backward ? order.backward_at(position) : order.forward_at(position);
    if (position > 0) text += ' ';
    text += order.exists(item)
                ? std::string(1, static_cast<char>('a' + item.chunk)) + std::to_string(item.microbatch)
                : "-";
  }
  return text;
}

TEST(MicrobatchOrder, OneChunkTakesMicrobatchesAsTheyCome) {
  const MicrobatchOrder order{3, 1, 1};
  EXPECT_EQ(on_paper(order, false), "a0 a1 a2");
  EXPECT_EQ(on_paper(order, true), "a0 a1 a2");
}

TEST(MicrobatchOrder, GroupsGoThroughAllChunksAndBackwardsInReverse) {
  const MicrobatchOrder order{4, 2, 2};
  EXPECT_EQ(on_paper(order, false), "a0 a1 b0 b1 a2 a3 b2 b3");
  EXPECT_EQ(on_paper(order, true), "b0 b1 a0 a1 b2 b3 a2 a3");
}

TEST(MicrobatchOrder, TheLastGroupIsFilledUp) {
  const MicrobatchOrder order{3, 2, 2};
  EXPECT_EQ(on_paper(order, false), "a0 a1 b0 b1 a2 - b2 -");
  EXPECT_EQ(on_paper(order, true), "b0 b1 a0 a1 b2 - a2 -");
  EXPECT_EQ(on_paper({1, 3, 4}, false), "a0 - - - b0 - - - c0 - - -");
}

TEST(MicrobatchOrder, PositionsAreTheInverseAndTheLastOneIsTheLastThatExists) {
  for (std::int64_t num_chunks = 1; num_chunks <= 4; ++num_chunks) {
    for (std::int64_t group_size = 1; group_size <= 4; ++group_size) {
      for (std::int64_t num_microbatches = 1; num_microbatches <= 9; ++num_microbatches) {
        const MicrobatchOrder order{num_microbatches, num_chunks, group_size};
        std::int64_t last = -1;
        for (std::int64_t position = 0; position < order.num_positions(); ++position) {
          EXPECT_EQ(order.forward_position(order.forward_at(position)), position);
          EXPECT_EQ(order.backward_position(order.backward_at(position)), position);
          EXPECT_EQ(order.exists(order.forward_at(position)), order.exists(order.backward_at(position)));
          if (order.exists(order.forward_at(position))) last = position;
        }
        EXPECT_EQ(order.last_position(), last);
      }
    }
  }
}

}  // namespace
}  // namespace pipedream
