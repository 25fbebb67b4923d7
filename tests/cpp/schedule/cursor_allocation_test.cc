// Walking a program allocates nothing.
#include <gtest/gtest.h>

#include "schedule/programs.h"
#include "support/allocation_counter.h"

namespace pipedream {
namespace {

TEST(ProgramCursor, WalkingAllocatesNothing) {
  if (!AllocationCounter::counts()) GTEST_SKIP() << "a sanitizer has the allocator";
  for (const std::string& schedule : schedule_names()) {
    ScheduleOptions options = make_options(schedule, straight(4), 5);
    if (schedule == "interleaved") options = make_interleaved(2, 2, 5);
    options.recompute.assign(4, true);
    options.ties = {{StageIndex(0), StageIndex(1)}, {StageIndex(0), StageIndex(3)}};
    options.exchanges_norms = drains_every_minibatch(options);
    ProgramCursor cursor(options, Rank(0));
    const AllocationCounter counter;
    for (int step = 0; step < 1000; ++step) cursor.advance();
    const bool is_over = !cursor.current().has_value();
    EXPECT_EQ(counter.num_on_this_thread(), 0U) << schedule << ": " << counter.first();
    EXPECT_FALSE(is_over);
  }
}

}  // namespace
}  // namespace pipedream
