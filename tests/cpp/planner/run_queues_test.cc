// That they are planning/run_queues.py's, to the bit, is what tests/python/planning/test_steady_time.py says.
#include "planner/run_queues.h"

#include <gtest/gtest.h>

#include <limits>
#include <vector>

namespace pipedream {
namespace {

using Workers = std::vector<std::size_t>;

TEST(RunQueues, with_a_core_for_each_all_run_and_nothing_changes_by_itself) {
  RunQueues queues(2, 2);
  queues.enter(0);
  queues.enter(1);
  EXPECT_EQ(queues.running(), (Workers{0, 1}));
  EXPECT_EQ(queues.next_change_ms(0), std::numeric_limits<double>::infinity());
}

TEST(RunQueues, those_of_one_core_take_turns_and_who_leaves_ends_its_own) {
  RunQueues queues(2, 1);
  queues.enter(0);
  queues.enter(1);
  EXPECT_DOUBLE_EQ(queues.next_change_ms(0), 0.7);
  queues.pass_time(0, 0.7);
  EXPECT_EQ(queues.running(), (Workers{1}));
  queues.pass_time(0.7, 0.5);
  queues.leave(1);
  queues.enter(1);
  EXPECT_EQ(queues.running(), (Workers{0}));
  EXPECT_DOUBLE_EQ(queues.next_change_ms(1.2), 0.7);
}

TEST(RunQueues, an_idle_core_takes_a_waiting_worker_at_the_next_tick_and_not_before) {
  RunQueues queues(3, 2);
  for (const std::size_t worker : {0, 1, 2}) queues.enter(worker);
  queues.leave(1);
  EXPECT_EQ(queues.running(), (Workers{0}));
  double now_ms = 3.0;
  while (now_ms < 4.0) {
    EXPECT_EQ(queues.running().size(), 1u);
    const double passing_ms = queues.next_change_ms(now_ms);
    queues.pass_time(now_ms, passing_ms);
    now_ms += passing_ms;
  }
  EXPECT_DOUBLE_EQ(now_ms, 4.0);
  EXPECT_EQ(queues.running().size(), 2u);
}

}  // namespace
}  // namespace pipedream
