// Tests the summary of a timeline: the bubble, and the window between the last warm-up and the first
// cool-down.
#include "planner/timeline.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <string>
#include <vector>

namespace pipedream {
namespace {

// Makes steps from a text such as "F0 B0 U0". Each step takes 1 ms, and the first begins at begin_ms. "-"
// stands for 1 ms of waiting.
std::vector<TimedStep> row_of(const std::string& text, double begin_ms = 0) {
  std::vector<TimedStep> row;
  double now_ms = begin_ms;
  for (std::size_t at = 0; at < text.size(); ++at) {
    const char letter = text[at];
    if (letter == ' ') continue;
    if (letter != '-') {
      const Opcode opcode = letter == 'F'   ? Opcode::kForward
                            : letter == 'B' ? Opcode::kBackward
                                            : Opcode::kUpdate;
      row.push_back({opcode, static_cast<std::int64_t>(text[++at] - '0'), now_ms, now_ms + 1});
    }
    now_ms += 1;
  }
  return row;
}

TEST(Timeline, shares_are_of_all_workers_time) {
  const TimelineSummary summary = summarize({row_of("F0 - - B0 U0"), row_of("F0 B0 U0", 1)});
  EXPECT_EQ(summary.num_minibatches, 1);
  EXPECT_DOUBLE_EQ(summary.makespan_ms, 5);
  EXPECT_DOUBLE_EQ(summary.bubble_share, 1 - 6.0 / 10);
  EXPECT_FALSE(summary.steady);
  EXPECT_DOUBLE_EQ(summary.ms_per_minibatch(), 5);
}

TEST(Timeline, the_window_leaves_out_what_is_started_before_the_first_update_at_both_ends) {
  // Two minibatches are started before the first update, so one minibatch is left out at each end.
  const TimelineSummary summary = summarize({row_of("F0 F1 B0 U0 F2 B1 U1 - F3 B2 U2 B3 U3")});
  ASSERT_TRUE(summary.steady);
  EXPECT_DOUBLE_EQ(summary.steady->ms_per_minibatch, 11 - 7);  // time from U1 to U2
  EXPECT_DOUBLE_EQ(summary.steady->bubble_share, 1.0 / 4);
  EXPECT_FALSE(summarize({row_of("F0 F1 B0 U0 F2 B1 U1 B2 U2")}).steady);
}

TEST(Timeline, the_window_begins_and_ends_with_a_round_of_all) {
  // The second worker updates every other minibatch.
  const std::vector<TimedStep> each =
      row_of("F0 B0 U0 F1 B1 U1 F2 B2 U2 F3 B3 U3 F4 B4 U4 F5 B5 U5 F6 B6 U6");
  const std::vector<TimedStep> rounds = row_of("F0 B0 F1 B1 U0 - F2 B2 F3 B3 U2 - F4 B4 F5 B5 U4 - F6 B6 U6");
  const TimelineSummary summary = summarize({each, rounds});
  ASSERT_TRUE(summary.steady);
  // Time from U2 to U4, the updates of all workers.
  EXPECT_DOUBLE_EQ(summary.steady->ms_per_minibatch, (17.0 - 11) / 2);
}

TEST(Timeline, a_worker_without_updates_has_no_steady_state) {
  EXPECT_FALSE(summarize({row_of("F0 B0 U0 F1 B1 U1"), {}}).steady);
  EXPECT_DOUBLE_EQ(summarize({{}, {}}).makespan_ms, 0);
  EXPECT_DOUBLE_EQ(summarize({{}, {}}).bubble_share, 0);
}

}  // namespace
}  // namespace pipedream
