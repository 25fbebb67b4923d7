// Tests the exact times at which lines carry items: several items at once, items in chunks, and the line of
// one receiver. A line is one direction of a worker's link.
#include "planner/lanes.h"

#include <gtest/gtest.h>

#include <deque>
#include <utility>
#include <vector>

namespace pipedream {
namespace {

using Span = std::pair<double, double>;

// An item that is sent now, with the times at which its first and last chunk were made.
struct Sent {
  double transfer_ms = 0;
  double first_ms = -1;
  double last_ms = -1;
  double num_chunks = 1;
};

class LanesTest : public ::testing::Test {
 protected:
  std::size_t add_line() { return network_.add_line(); }

  // Sends the items at now_ms, and returns the spans in which the line carries them.
  std::vector<Span> carried_by(std::size_t line, double now_ms, const std::vector<Sent>& sent) {
    const std::size_t before = transfers_.size();
    std::vector<SentItem> items;
    for (const Sent& one : sent) {
      Lane& lane = lanes_.emplace_back();
      lane.edge.kind = one.first_ms < 0 ? EdgeKind::kActivation : EdgeKind::kPush;
      lane.receiver = 1;
      lane.line = line;
      lane.transfer_ms = one.transfer_ms;
      lane.chunks.number = one.num_chunks;
      if (one.first_ms >= 0) {
        lane.chunks.first_lead_ms = now_ms - one.first_ms;
        lane.chunks.last_lead_ms = now_ms - one.last_ms;
      }
      items.push_back({&lane, MinibatchId(0), MicrobatchIndex(0)});
    }
    network_.send(items, now_ms);
    std::vector<Span> spans;
    for (std::size_t index = before; index < transfers_.size(); ++index) {
      spans.emplace_back(transfers_[index].begin_ms, transfers_[index].end_ms);
    }
    return spans;
  }

  // Returns the time when an item begins to use worker 1's incoming line. Its sender has a line of its own.
  double begins_to_come(EdgeKind kind, double ready_ms, double transfer_ms) {
    Lane& lane = lanes_.emplace_back();
    lane.edge.kind = kind;
    lane.receiver = 1;
    lane.line = add_line();
    lane.queues_in = true;
    lane.transfer_ms = transfer_ms;
    std::vector<SentItem> items = {{&lane, MinibatchId(0), MicrobatchIndex(0)}};
    network_.send(items, ready_ms);
    return items[0].arrives_ms - transfer_ms;
  }

 private:
  std::deque<Lane> lanes_;
  std::vector<Transfer> transfers_;
  Network network_{2, &transfers_};
};

TEST_F(LanesTest, what_is_sent_at_once_shares_the_line_evenly_and_what_is_sent_later_waits) {
  const std::size_t line = add_line();
  EXPECT_EQ(carried_by(line, 5, {{3}, {10}}), (std::vector<Span>{{5, 11}, {5, 18}}));
  EXPECT_EQ(carried_by(line, 6, {{2}}), (std::vector<Span>{{18, 20}}));
  EXPECT_EQ(carried_by(line, 30, {{4}, {4}, {4}}), (std::vector<Span>{{30, 42}, {30, 42}, {30, 42}}));
  EXPECT_EQ(carried_by(line, 50, {{0}, {4}}), (std::vector<Span>{{50, 50}, {50, 54}}));
}

TEST_F(LanesTest, chunks_that_were_there_earlier_take_what_the_line_idled_before) {
  const std::size_t line = add_line();
  EXPECT_EQ(carried_by(line, 5, {{3}, {10, 2, 2}}), (std::vector<Span>{{5, 11}, {2, 15}}));
  // The whole item was carried in earlier idle time.
  EXPECT_EQ(carried_by(line, 20, {{2, 13, 16, 2}}), (std::vector<Span>{{15, 17}}));
  EXPECT_EQ(carried_by(line, 20, {{1}}), (std::vector<Span>{{20, 21}}));
  EXPECT_EQ(carried_by(line, 22, {{4, 10, 10}}), (std::vector<Span>{{21, 25}}));
  // The last of four chunks is made 0.5 ms before the send, and takes 1 ms. So half of it is still to be
  // carried.
  EXPECT_EQ(carried_by(line, 40, {{4, 30, 39.5, 4}}), (std::vector<Span>{{30, 40.5}}));
  EXPECT_EQ(carried_by(line, 40, {{1}}), (std::vector<Span>{{40.5, 41.5}}));
}

TEST_F(LanesTest, a_line_in_takes_of_an_exchange_what_other_stages_send_meanwhile) {
  EXPECT_DOUBLE_EQ(begins_to_come(EdgeKind::kPush, 1, 10), 1);
  EXPECT_DOUBLE_EQ(begins_to_come(EdgeKind::kPush, 2, 10), 2);  // The two pushes share the line evenly.
  EXPECT_DOUBLE_EQ(begins_to_come(EdgeKind::kGradient, 4, 3), 4);
  EXPECT_DOUBLE_EQ(begins_to_come(EdgeKind::kGradient, 5, 6),
                   7);  // until 13, a millisecond after the exchange
  EXPECT_DOUBLE_EQ(begins_to_come(EdgeKind::kPull, 15, 10), 12 + 3 + 5);
  EXPECT_DOUBLE_EQ(begins_to_come(EdgeKind::kPull, 15, 10), 15);
  EXPECT_DOUBLE_EQ(begins_to_come(EdgeKind::kGradient, 16, 3), 16);
  EXPECT_DOUBLE_EQ(begins_to_come(EdgeKind::kPull, 40, 10),
                   40);  // the pause before it was long enough for all gradients
}

}  // namespace
}  // namespace pipedream
