// Tests the promises of the host backend that device.h does not make for all backends.
#include "device/host/host_stream.h"

#include <gtest/gtest.h>

#include <future>
#include <memory>
#include <thread>

namespace pipedream {
namespace {

class ForeignEvent final : public Event {
 public:
  [[nodiscard]] bool done() const override { return true; }
  void wait() const override {}
};

TEST(HostStream, ARecordWithNothingPendingIsDoneAtOnce) {
  HostStream stream;
  HostEvent event;
  stream.record(event);
  EXPECT_TRUE(event.done());
}

TEST(HostStream, CallsRunOnAThreadOfTheStreamsOwn) {
  HostStream one;
  HostStream other;
  std::thread::id one_thread;
  std::thread::id other_thread;
  one.call([&] { one_thread = std::this_thread::get_id(); });
  other.call([&] { other_thread = std::this_thread::get_id(); });
  one.synchronize();
  other.synchronize();
  EXPECT_NE(one_thread, std::this_thread::get_id());
  EXPECT_NE(other_thread, std::this_thread::get_id());
  EXPECT_NE(one_thread, other_thread);
}

TEST(HostStream, AnEarlierRecordThatFinishesLateDoesNotUndoALaterOne) {
  HostStream slow;
  HostStream quick;
  HostEvent event;
  std::promise<void> opened;
  slow.call([gate = opened.get_future().share()] { gate.wait(); });
  slow.record(event);
  EXPECT_FALSE(event.done());
  quick.record(event);
  event.wait();
  EXPECT_TRUE(event.done());
  opened.set_value();
  slow.synchronize();
  EXPECT_TRUE(event.done());
}

TEST(CallerStream, EverythingIsDoneWhenTheCallReturns) {
  CallerStream stream;
  HostEvent event;
  const int from = 42;
  int to = 0;
  std::thread::id thread;
  stream.copy(&to, &from, sizeof(to));
  EXPECT_EQ(to, 42);
  stream.record(event);
  EXPECT_TRUE(event.done());
  stream.call([&] { thread = std::this_thread::get_id(); });
  EXPECT_EQ(thread, std::this_thread::get_id());
}

TEST(HostStreamDeathTest, AnEventOfAnotherDeviceAborts) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_DEATH(
      {
        HostStream stream;
        ForeignEvent event;
        stream.record(event);
      },
      "an event of another device on a host stream");
}

}  // namespace
}  // namespace pipedream
