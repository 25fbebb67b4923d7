// Tests that the thread team runs every task once. Threads may come late, and another caller may want the
// team at the same time.
#include "weights/thread_team.h"

#include <dlfcn.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <latch>
#include <set>
#include <thread>
#include <vector>

#include "weights/tensor_ranges.h"

namespace pipedream {
namespace {

std::vector<int> times_run(ThreadTeam& team, int num_threads, std::int64_t num_tasks) {
  std::vector<std::atomic<int>> counts(static_cast<std::size_t>(num_tasks));
  team.run(num_threads, num_tasks, [&](std::int64_t task_index) {
    counts[static_cast<std::size_t>(task_index)].fetch_add(1, std::memory_order_relaxed);
  });
  return {counts.begin(), counts.end()};
}

TEST(ThreadTeam, RunsEveryTaskOnceForAnyNumberOfThreadsAndTasks) {
  ThreadTeam team;
  for (int repeat = 0; repeat < 20; ++repeat) {
    for (const int num_threads : {-1, 0, 1, 2, 3, 8}) {
      for (const std::int64_t num_tasks : {0, 1, 2, 7, 100}) {
        EXPECT_EQ(times_run(team, num_threads, num_tasks),
                  std::vector<int>(static_cast<std::size_t>(num_tasks), 1))
            << num_threads << " threads, " << num_tasks << " tasks";
      }
    }
  }
}

TEST(ThreadTeam, StartsNoMoreThreadsThanItNeeds) {
  ThreadTeam team;
  EXPECT_EQ(team.num_helpers(), 0);
  times_run(team, 1, 100);
  EXPECT_EQ(team.num_helpers(), 0);
  times_run(team, 8, 1);
  EXPECT_EQ(team.num_helpers(), 0);
  times_run(team, 3, 100);
  EXPECT_EQ(team.num_helpers(), 2);
  times_run(team, 2, 100);
  EXPECT_EQ(team.num_helpers(), 2);
}

// Each of the two tasks waits until the other one has begun.
TEST(ThreadTeam, TasksRunOnSeveralThreadsAtOnce) {
  ThreadTeam team;
  std::latch both(2);
  std::vector<std::thread::id> ids(2);
  team.run(2, 2, [&](std::int64_t task_index) {
    ids[static_cast<std::size_t>(task_index)] = std::this_thread::get_id();
    both.arrive_and_wait();
  });
  EXPECT_NE(ids[0], ids[1]);
}

TEST(ThreadTeam, WhatTasksWroteIsSeenByTheCaller) {
  ThreadTeam team;
  std::vector<std::int64_t> values(1000, -1);
  for (std::int64_t round = 0; round < 50; ++round) {
    team.run(4, 1000, [&](std::int64_t task_index) {
      values[static_cast<std::size_t>(task_index)] = task_index * round;
    });
    for (std::int64_t index = 0; index < 1000; ++index)
      ASSERT_EQ(values[static_cast<std::size_t>(index)], index * round);
  }
}

// The second caller finds the team in use, so its tasks run on its own thread.
TEST(ThreadTeam, ASecondCallerRunsItsTasksAlone) {
  ThreadTeam team;
  std::set<std::thread::id> ids_of_second;
  team.run(2, 2, [&](std::int64_t task_index) {
    if (task_index != 0) return;
    std::thread second(
        [&] { team.run(2, 10, [&](std::int64_t) { ids_of_second.insert(std::this_thread::get_id()); }); });
    second.join();
  });
  EXPECT_EQ(ids_of_second.size(), 1U);
}

TEST(ThreadTeam, ManyCallersShareItSafely) {
  ThreadTeam team;
  std::vector<std::thread> callers;
  callers.reserve(4);
  for (int caller = 0; caller < 4; ++caller) {
    callers.emplace_back([&] {
      for (int repeat = 0; repeat < 100; ++repeat) EXPECT_EQ(times_run(team, 3, 50), std::vector<int>(50, 1));
    });
  }
  for (std::thread& caller : callers) caller.join();
}

// A fork does not copy threads, so the child must not wait for them at its exit.
TEST(ThreadTeam, AForkedChildRunsAllTasksByItselfAndExits) {
  times_run(ThreadTeam::of_process(), 3, 100);
  const pid_t child = ::fork();
  if (child == 0) {
    ::alarm(60);
    const bool works = times_run(ThreadTeam::of_process(), 3, 100) == std::vector<int>(100, 1);
    std::exit(works ? 0 : 1);  // exit() also runs the destructors of static objects
  }
  ASSERT_GT(child, 0);
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status)) << "signal " << WTERMSIG(status);
  EXPECT_EQ(WEXITSTATUS(status), 0);
}

TEST(ThreadTeam, KeepsItsOwnThreadsWhenALibraryHasNoOpenMp) {
  ThreadTeam team;
  EXPECT_FALSE(team.share_openmp("/nowhere/lib_of_nobody.so"));
  EXPECT_FALSE(team.share_openmp("libm.so.6"));
  times_run(team, 2, 10);
  EXPECT_EQ(team.num_helpers(), 1);
}

#if !defined(__SANITIZE_THREAD__)  // ThreadSanitizer does not see how OpenMP orders its threads
TEST(ThreadTeam, RunsOnTheOpenMpPoolOfALoadedLibrary) {
  const char* const kLibrary = "libgomp.so.1";
  if (dlopen(kLibrary, RTLD_NOW) == nullptr) GTEST_SKIP() << "no " << kLibrary;
  ThreadTeam team;
  ASSERT_TRUE(team.share_openmp(kLibrary));
  for (const int num_threads : {1, 2, 3}) {
    for (const std::int64_t num_tasks : {0, 1, 2, 100})
      EXPECT_EQ(times_run(team, num_threads, num_tasks),
                std::vector<int>(static_cast<std::size_t>(num_tasks), 1));
  }
  EXPECT_EQ(team.num_helpers(), 0);
}
#endif

struct Row {
  std::int64_t num_elements;
};

TEST(TensorRanges, PartsCoverEveryTensorOnce) {
  const std::vector<Row> rows = {{0}, {5}, {100}, {0}, {1}, {37}};
  for (const std::int64_t step : {1, 7, 50, 1000}) {
    std::vector<std::vector<int>> counts;
    for (const Row& row : rows) counts.emplace_back(static_cast<std::size_t>(row.num_elements), 0);
    for (std::int64_t begin = 0; begin < 143; begin += step) {
      for_each_part(std::span<const Row>(rows), begin, std::min<std::int64_t>(begin + step, 143),
                    [&](const Row& row, std::int64_t first, std::int64_t count) {
                      auto& tensor = counts[static_cast<std::size_t>(&row - rows.data())];
                      for (std::int64_t i = first; i < first + count; ++i)
                        ++tensor[static_cast<std::size_t>(i)];
                    });
    }
    for (const auto& tensor : counts) EXPECT_EQ(tensor, std::vector<int>(tensor.size(), 1));
  }
}

}  // namespace
}  // namespace pipedream
