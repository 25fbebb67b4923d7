// Tests the Watch, on which a thread that drives a transport sleeps until there is traffic.
#include <gtest/gtest.h>

#include <atomic>
#include <memory>
#include <thread>
#include <vector>

#include "recorder.h"
#include "transport/watch.h"

namespace pipedream {
namespace {

constexpr int kPatienceMs = 60'000;  // ends a deadlocked test; judges no speed

std::vector<std::uint64_t> names_of(Watch& watch, int timeout_ms) {
  const std::span<const std::uint64_t> names = watch.sleep(timeout_ms);
  return {names.begin(), names.end()};
}

TEST(Watch, WakeBeforeTheSleepEndsItOnce) {
  Watch watch;
  watch.wake();
  watch.wake();
  EXPECT_TRUE(names_of(watch, kPatienceMs).empty());
  const auto began = Clock::now();
  EXPECT_TRUE(names_of(watch, 5).empty());
  EXPECT_GE(Clock::now() - began, std::chrono::milliseconds(5));
}

TEST(Watch, ReadableDescriptorIsNamedOncePerEvent) {
  Watch watch;
  WakeFd fd;
  watch.add(fd.fd(), 7);
  for (int round = 0; round < 3; ++round) {
    fd.set();
    EXPECT_EQ(names_of(watch, kPatienceMs), std::vector<std::uint64_t>{7});
    EXPECT_TRUE(names_of(watch, 0).empty());  // nothing, although the fd was not read
  }
  watch.remove(fd.fd());
}

TEST(Watch, WhatWasReadableBeforeItWasAddedIsNamed) {
  Watch watch;
  WakeFd fd;
  fd.set();
  watch.add(fd.fd(), 7);
  EXPECT_EQ(names_of(watch, kPatienceMs), std::vector<std::uint64_t>{7});
  watch.remove(fd.fd());
}

TEST(Watch, RemovedDescriptorIsNotNamed) {
  Watch watch;
  WakeFd fd;
  watch.add(fd.fd(), 7);
  fd.set();
  watch.remove(fd.fd());
  EXPECT_TRUE(names_of(watch, 0).empty());
}

TEST(Watch, MoreThanFitAreNamedByTheNextSleeps) {
  constexpr std::size_t kNumFds = Watch::kNumNamesMax + 5;
  Watch watch;
  std::vector<std::unique_ptr<WakeFd>> fds;
  for (std::size_t index = 0; index < kNumFds; ++index) {
    fds.push_back(std::make_unique<WakeFd>());
    watch.add(fds.back()->fd(), index + 1);
    fds.back()->set();
  }
  EXPECT_EQ(names_of(watch, kPatienceMs).size(), Watch::kNumNamesMax);
  EXPECT_EQ(names_of(watch, 0).size(), 5u);
  EXPECT_TRUE(names_of(watch, 0).empty());
  for (const auto& fd : fds) watch.remove(fd->fd());
}

TEST(Watch, EventIsNamedByOneOfTwoWatchesWhoeverSleeps) {
  constexpr std::uint64_t kNumEvents = 3000;
  Watch first;
  Watch second;
  WakeFd fd;
  first.add(fd.fd(), 7);
  second.add(fd.fd(), 7);
  std::atomic<std::uint64_t> num_named{0};
  std::atomic<std::uint64_t> event{0};
  std::atomic<bool> is_over{false};
  const auto keep_sleeping = [&](Watch& watch, int timeout_ms) {
    while (!is_over.load()) {
      if (names_of(watch, timeout_ms).empty()) continue;
      fd.clear();
      num_named = event.load();
    }
  };
  std::thread one([&] { keep_sleeping(first, 1); });  // sleeps for 1 ms at a time
  std::thread other([&] { keep_sleeping(second, kPatienceMs); });
  for (std::uint64_t index = 1; index <= kNumEvents; ++index) {
    event = index;
    fd.set();
    ASSERT_TRUE(wait_until([&] { return num_named.load() == index; })) << "event " << index << " was lost";
  }
  is_over = true;
  first.wake();
  second.wake();
  one.join();
  other.join();
  first.remove(fd.fd());
  second.remove(fd.fd());
}

}  // namespace
}  // namespace pipedream
