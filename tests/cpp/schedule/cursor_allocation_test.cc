// Walking a program allocates nothing.
#include <gtest/gtest.h>

#include "schedule/programs.h"
#include "support/allocation_counter.h"

namespace pipedream {
namespace {

TEST(ProgramCursor, WalkingAllocatesNothing) {
  if (!AllocationCounter::counts()) GTEST_SKIP() << "a sanitizer has the allocator";
  std::vector<ScheduleOptions> all = {make_interleaved(2, 2, 5)};
  for (const std::string& schedule : kStraightSchedules)
    all.push_back(make_options(schedule, straight(4), 5));
  for (ScheduleOptions& options : all) {
    options.recompute.assign(4, true);
    options.ties = {{StageIndex(0), StageIndex(1)}, {StageIndex(0), StageIndex(3)}};
    options.exchanges_norms = drains_every_minibatch(options);
  }
  for (const std::string& schedule : kStraightSchedules) {
    all.push_back(make_replicated(schedule, {4, 2, 1}, 16, schedule == "pipedream" ? 2 : 0));
  }
  for (const ScheduleOptions& options : all) {
    ProgramCursor cursor(options, Rank(0));
    const AllocationCounter counter;
    for (int step = 0; step < 1000; ++step) cursor.advance();
    const bool is_over = !cursor.current().has_value();
    EXPECT_EQ(counter.num_on_this_thread(), 0U) << options.schedule << ": " << counter.first();
    EXPECT_FALSE(is_over);
  }
}

}  // namespace
}  // namespace pipedream
