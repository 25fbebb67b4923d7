#include "base/process.h"

#include <gtest/gtest.h>
#include <sched.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>

namespace pipedream {
namespace {

// Calls `asked` in a child of fork(), and returns 1 + its answer.
template <class Asked>
int status_of_child(Asked asked) {
  const pid_t child = fork();
  if (child == 0) _exit(1 + static_cast<int>(asked()));
  int status = 0;
  EXPECT_EQ(waitpid(child, &status, 0), child);
  return WEXITSTATUS(status);
}

TEST(HomeProcess, IsThisUntilAFork) {
  const HomeProcess home;
  EXPECT_TRUE(home.is_this());
  EXPECT_EQ(status_of_child([&] { return home.is_this(); }), 1);
  EXPECT_TRUE(home.is_this());
}

TEST(HomeProcess, OfAChildIsTheChild) {
  EXPECT_EQ(status_of_child([] { return HomeProcess().is_this(); }), 2);
}

TEST(HomeProcess, OfAChildIsNotItsChild) {
  const int status = status_of_child([] {
    const HomeProcess home;
    return status_of_child([&] { return home.is_this(); }) == 1;
  });
  EXPECT_EQ(status, 2);
}

// The last forked process calls die_with_parent() after its parent has ended. If that process lived on, it
// would report so.
TEST(DieWithParent, ProcessWhoseParentHasEndedEnds) {
  std::array<int, 2> pipe{};
  ASSERT_EQ(::pipe(pipe.data()), 0);
  const pid_t parent = fork();
  if (parent == 0) {
    const pid_t own_parent = getpid();
    if (fork() == 0) {
      while (getppid() == own_parent) sched_yield();
      die_with_parent(own_parent);
      static_cast<void>(!write(pipe[1], "lives", 5));
    }
    _exit(0);
  }
  close(pipe[1]);
  ASSERT_EQ(waitpid(parent, nullptr, 0), parent);
  std::array<char, 5> said{};
  EXPECT_EQ(read(pipe[0], said.data(), said.size()), 0);
  close(pipe[0]);
}

TEST(DieWithParent, ProcessGoesOnWithItsParent) {
  const pid_t parent = getpid();
  EXPECT_EQ(status_of_child([parent] {
              die_with_parent(parent);
              return true;
            }),
            2);
}

}  // namespace
}  // namespace pipedream
