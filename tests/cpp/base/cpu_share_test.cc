// Tests that a thread comes back to its preferred CPUs, and may still run on all other CPUs.
#include "base/cpu_share.h"

#include <gtest/gtest.h>
#include <sched.h>

#include <vector>

namespace pipedream {
namespace {

std::vector<int> allowed_cpus() {
  cpu_set_t allowed;
  EXPECT_EQ(::sched_getaffinity(0, sizeof(allowed), &allowed), 0);
  std::vector<int> cpus;
  for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu) {
    if (CPU_ISSET(cpu, &allowed)) cpus.push_back(cpu);
  }
  return cpus;
}

void allow(const std::vector<int>& cpus) {
  cpu_set_t allowed;
  CPU_ZERO(&allowed);
  for (const int cpu : cpus) CPU_SET(cpu, &allowed);
  ASSERT_EQ(::sched_setaffinity(0, sizeof(allowed), &allowed), 0);
}

// Restores this thread's affinity after each test.
class CpuShareTest : public testing::Test {
 protected:
  void TearDown() override { allow(before_); }
  const std::vector<int> before_ = allowed_cpus();
};

TEST_F(CpuShareTest, MovesAThreadThatRunsElsewhereAndLeavesItFree) {
  if (before_.size() < 2) GTEST_SKIP() << "one CPU";
  const int elsewhere = before_.front();
  allow({elsewhere});  // makes the thread run elsewhere
  CpuShare bound({before_.back()});
  EXPECT_EQ(bound.come_back(0), std::nullopt) << "its own CPUs are not allowed";
  EXPECT_EQ(allowed_cpus(), std::vector<int>{elsewhere});

  CpuShare own({before_.back()});
  std::optional<int> left;
  for (std::int64_t now_ns = 0; !left; now_ns += CpuShare::kPeriodNs) {
    allow({elsewhere});
    allow(before_);  // the scheduler may move the thread back before come_back() is called
    left = own.come_back(now_ns);
  }
  EXPECT_NE(*left, before_.back());
  EXPECT_EQ(allowed_cpus(), before_);
}

TEST_F(CpuShareTest, LeavesAThreadAloneOnItsOwnCpusAndWithoutAny) {
  CpuShare all(before_);
  CpuShare none({});
  EXPECT_EQ(all.come_back(0), std::nullopt);
  EXPECT_EQ(none.come_back(0), std::nullopt);
}

TEST_F(CpuShareTest, LooksOnceAPeriod) {
  if (before_.size() < 2) GTEST_SKIP() << "one CPU";
  CpuShare own({before_.back()});
  static_cast<void>(own.come_back(0));
  allow({before_.front()});
  allow(before_);
  EXPECT_EQ(own.come_back(CpuShare::kPeriodNs - 1), std::nullopt);
}

}  // namespace
}  // namespace pipedream
