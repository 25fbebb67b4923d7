// Walking a program allocates nothing. This file replaces the test executable's operator new by one that
// counts.
#include <gtest/gtest.h>

#include <cstdint>
#include <cstdlib>
#include <new>

#include "schedule/programs.h"

namespace {
std::int64_t num_allocations = 0;  // of the one thread of this executable
}  // namespace

// NOLINTBEGIN(cppcoreguidelines-no-malloc): what operator new is made of
void* operator new(std::size_t num_bytes) {
  ++num_allocations;
  if (void* memory = std::malloc(num_bytes)) return memory;
  throw std::bad_alloc();
}
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t /*num_bytes*/) noexcept { std::free(memory); }
// NOLINTEND(cppcoreguidelines-no-malloc)

namespace pipedream {
namespace {

TEST(ProgramCursor, WalkingAllocatesNothing) {
  for (const std::string& schedule : schedule_names()) {
    ScheduleOptions options = make_options(schedule, straight(4), 5);
    if (schedule == "interleaved") options = make_interleaved(2, 2, 5);
    options.recompute.assign(4, true);
    ProgramCursor cursor(options, WorkerIndex(0));
    const std::int64_t num_before = num_allocations;
    for (int step = 0; step < 1000; ++step) cursor.advance();
    const bool is_over = !cursor.current().has_value();
    EXPECT_EQ(num_allocations - num_before, 0) << schedule;
    EXPECT_FALSE(is_over);
  }
}

TEST(ProgramCursor, TheCounterOfTheTestAboveCounts) {
  const std::int64_t num_before = num_allocations;
  const Instructions program = make_program(make_options("pipedream", {1}), WorkerIndex(0), 1);
  EXPECT_GT(num_allocations, num_before);
  EXPECT_EQ(program.size(), 3u);
}

}  // namespace
}  // namespace pipedream
