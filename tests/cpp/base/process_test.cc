#include "base/process.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

namespace pipedream {
namespace {

// 1 + what `asked` says, of a child of fork().
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

}  // namespace
}  // namespace pipedream
