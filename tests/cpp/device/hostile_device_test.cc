// Tests that the hostile device does what support/hostile_device.h says in addition to device.h.
#include "support/hostile_device.h"
#include "support/stream_gate.h"

#include <gtest/gtest.h>

#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "base/failure.h"

namespace pipedream {
namespace {

using Violations = std::vector<std::string>;

constexpr std::size_t kNumBytes = 4096;

class Hostile : public testing::Test {
 protected:
  static std::string text_of_error(const std::function<void()>& call) {
    try {
      call();
    } catch (const DeviceError& error) {
      return error.what();
    }
    return "";
  }

  HostileDevice device_;
  const std::unique_ptr<Memory> on_device_ = device_.allocate(kNumBytes, MemoryKind::kDevice);
  const std::unique_ptr<Memory> on_host_ = device_.allocate(kNumBytes, MemoryKind::kStaging);
  const std::unique_ptr<Memory> other_ = device_.allocate(kNumBytes, MemoryKind::kStaging);
  const std::unique_ptr<Stream> stream_ = device_.make_stream();
  const std::unique_ptr<Stream> second_ = device_.make_stream();
};

using HostileDeathTest = Hostile;

TEST_F(HostileDeathTest, HostThatTouchesDeviceMemoryIsTrapped) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_DEATH(std::memset(on_device_->data(), 1, 1), "");
  EXPECT_DEATH(
      {
        volatile std::byte byte = *on_device_->data();
        (void)byte;
      },
      "");
}

TEST_F(Hostile, WhatIsReadBeforeItsEventIsAViolation) {
  StreamGate gate(device_, *stream_);
  stream_->copy(on_device_->data(), on_host_->data(), kNumBytes);
  second_->copy(other_->data(), on_device_->data() + kNumBytes - 1, 1);
  EXPECT_EQ(device_.take_violations(), Violations{"a copy reads what another stream writes"});
  gate.open();
}

TEST_F(Hostile, WhatIsWrittenBeforeItsReadersAreDoneIsAViolation) {
  StreamGate gate(device_, *stream_);
  stream_->copy(on_host_->data(), on_device_->data(), kNumBytes);
  second_->copy(on_device_->data(), other_->data(), 1);
  EXPECT_EQ(device_.take_violations(), Violations{"a copy writes what another stream reads"});
  second_->copy(on_host_->data(), other_->data(), 1);
  EXPECT_EQ(device_.take_violations(), Violations{"a copy writes what another stream writes"});
  gate.open();
}

TEST_F(Hostile, WhatAnEventOrdersIsNone) {
  const auto written = device_.make_event();
  const auto passed_on = device_.make_event();
  const auto third = device_.make_stream();
  StreamGate gate(device_, *stream_);
  stream_->copy(on_device_->data(), on_host_->data(), kNumBytes);
  stream_->record(*written);
  second_->wait(*written);
  second_->record(*passed_on);
  third->wait(*passed_on);  // waits for `written` by way of the second stream
  third->copy(other_->data(), on_device_->data(), kNumBytes);
  second_->copy(on_device_->data(), on_host_->data(), 0);
  gate.open();
  third->synchronize();
}

TEST_F(Hostile, AnEventThatWasRecordedTooEarlyOrdersNothing) {
#if defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "the copies race on purpose";
#endif
  const auto early = device_.make_event();
  StreamGate gate(device_, *stream_);
  stream_->record(*early);
  stream_->copy(on_device_->data(), on_host_->data(), kNumBytes);
  second_->wait(*early);
  second_->copy(other_->data(), on_device_->data(), kNumBytes);
  EXPECT_EQ(device_.take_violations(), Violations{"a copy reads what another stream writes"});
  gate.open();
}

// Two devices map the same memory, as they would in two processes.
TEST_F(Hostile, MemoryThatAnotherDeviceMapsIsTheSame) {
  HostileDevice other;
  const auto exported = device_.export_memory(kNumBytes, nullptr);
  const auto imported = other.import_memory(exported->handle(), kNumBytes, nullptr);
  const auto foreign = other.make_stream();
  StreamGate gate(device_, *stream_);
  stream_->copy(on_host_->data(), exported->data(), kNumBytes);
  foreign->copy(imported->data(), other_->data(), kNumBytes);
  EXPECT_EQ(other.take_violations(), Violations{"a copy writes what another stream reads"});
  gate.open();
  stream_->synchronize();
  foreign->synchronize();
}

TEST_F(Hostile, MemoryThatIsFreedWhileItIsUsedIsAViolation) {
  auto memory = device_.allocate(kNumBytes, MemoryKind::kDevice);
  StreamGate gate(device_, *stream_);
  stream_->copy(memory->data(), on_host_->data(), kNumBytes);
  std::thread opener([&] {
    Violations seen;
    while ((seen = device_.take_violations()).empty()) std::this_thread::yield();
    EXPECT_EQ(seen, Violations{"memory is freed while a copy uses it"});
    gate.open();
  });
  std::byte* const data = memory->data();
  memory.reset();
  opener.join();
  EXPECT_EQ(text_of_error([&] { stream_->copy(data, on_host_->data(), 1); }),
            "hostile:0: copy failed: invalid argument");
}

TEST_F(Hostile, ACallOfTheDeviceInAHostFunctionIsAViolation) {
  const auto event = device_.make_event();
  stream_->call([&] { EXPECT_TRUE(event->done()); });
  stream_->synchronize();
  EXPECT_EQ(device_.take_violations(), Violations{"done is called in a host function"});
}

TEST_F(Hostile, WrappedStreamsOfOneHandleAreOne) {
  const auto one = device_.wrap_stream(5);
  const auto same = device_.wrap_stream(5);
  StreamGate gate(device_, *one);
  one->copy(on_device_->data(), on_host_->data(), kNumBytes);
  same->copy(other_->data(), on_device_->data(), kNumBytes);  // no violation: it is the same stream
  gate.open();
  same->synchronize();
}

// ---- Errors ----

TEST_F(Hostile, TheCallThatIsAskedToFailDoesAndNoOther) {
  const auto event = device_.make_event();
  device_.fail({.call = "record", .num_calls_before = 1, .why = "refused", .ends_context = false});
  stream_->record(*event);
  stream_->copy(on_device_->data(), on_host_->data(), kNumBytes);
  EXPECT_EQ(text_of_error([&] { stream_->record(*event); }), "hostile:0: record failed: refused");
  stream_->record(*event);
  event->wait();
  EXPECT_FALSE(device_.is_broken());
}

TEST_F(Hostile, AfterAnErrorOfTheContextEveryCallFailsAndNothingRuns) {
  const auto event = device_.make_event();
  bool called = false;
  StreamGate gate(device_, *second_);
  second_->call([&] { called = true; });
  second_->record(*event);
  device_.launch_fault(*stream_, "device-side assert triggered");
  EXPECT_EQ(text_of_error([&] { stream_->synchronize(); }),
            "hostile:0: synchronize failed: device-side assert triggered");
  gate.open();
  EXPECT_NE(text_of_error([&] { second_->synchronize(); }), "");
  EXPECT_NE(text_of_error([&] { static_cast<void>(event->done()); }), "");
  EXPECT_NE(text_of_error([&] { event->wait(); }), "");
  EXPECT_NE(text_of_error([&] { second_->call([] {}); }), "");
  EXPECT_NE(text_of_error([&] { static_cast<void>(device_.make_event()); }), "");
  EXPECT_NE(text_of_error([&] { static_cast<void>(device_.allocate(1, MemoryKind::kDevice)); }), "");
  EXPECT_FALSE(called);
}

}  // namespace
}  // namespace pipedream
