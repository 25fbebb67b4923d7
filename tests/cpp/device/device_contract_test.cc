// Tests what device.h promises, for every backend: the host, CUDA if there is a device, and the tests'
// hostile device (support/hostile_device.h). host_stream_test.cc, host_memory_test.cc and
// hostile_device_test.cc test further promises of single backends.
//
// Order is proved with gates, never with time. A gate is a call() that holds its stream until the test opens
// the gate. Only one gate is closed at a time, and meanwhile no other call() needs to run, because CUDA may
// run the host functions of all streams on one thread.
#include <gtest/gtest.h>

#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <future>
#include <memory>
#include <numeric>
#include <string>
#include <thread>
#include <vector>

#include "base/failure.h"
#include "device/device.h"
#include "support/hostile_device.h"

namespace pipedream {
namespace {

constexpr std::size_t kNumBytes = std::size_t{1} << 20;
// This deadline ends a test that is deadlocked. It does not judge speed.
constexpr std::chrono::seconds kDeadline{60};

// Holds a stream from the moment close() returns until open(). The destructor opens the gate, so that a
// failed assertion ends the test instead of blocking it.
class Gate {
 public:
  Gate() = default;
  Gate(const Gate&) = delete;
  Gate& operator=(const Gate&) = delete;
  ~Gate() { open(); }

  void close(Stream& stream) {
    stream.call([reached = &reached_, opened = opened_.get_future().share()] {
      reached->set_value();
      opened.wait();
    });
    ASSERT_EQ(reached_.get_future().wait_for(kDeadline), std::future_status::ready);
  }
  void open() {
    if (!is_open_) opened_.set_value();
    is_open_ = true;
  }

 private:
  std::promise<void> reached_;
  std::promise<void> opened_;
  bool is_open_ = false;
};

class DeviceContract : public testing::TestWithParam<std::string> {
 protected:
  static std::unique_ptr<Device> make_device(const std::string& backend) {
    if (backend == "Hostile") return std::make_unique<HostileDevice>();
    return backend == "Host" ? make_host_device() : make_cuda_device(0);
  }
  [[nodiscard]] static bool is_host() { return GetParam() == "Host"; }
  [[nodiscard]] static std::string name_begin() {
    return is_host() ? "host" : GetParam() == "Cuda" ? "cuda:0" : "hostile:0";
  }

  // Returns memory that the CPU can read and write on every backend, filled with a pattern of the seed.
  [[nodiscard]] std::unique_ptr<Memory> make_pattern(std::uint8_t seed) const {
    std::unique_ptr<Memory> memory = device_->allocate(kNumBytes, MemoryKind::kStaging);
    for (std::size_t i = 0; i < kNumBytes; ++i) memory->data()[i] = pattern_byte(seed, i);
    return memory;
  }
  [[nodiscard]] std::unique_ptr<Memory> make_empty(MemoryKind kind = MemoryKind::kStaging) const {
    return device_->allocate(kNumBytes, kind);
  }
  static std::byte pattern_byte(std::uint8_t seed, std::size_t i) {
    return static_cast<std::byte>(seed + i * 7 + (i >> 8));
  }
  static bool same(const Memory& one, const Memory& other) {
    return std::memcmp(one.data(), other.data(), kNumBytes) == 0;
  }

  const std::unique_ptr<Device> device_ = make_device(GetParam());
};

TEST_P(DeviceContract, SaysWhatItIs) {
  EXPECT_EQ(device_->type(), is_host() ? DeviceType::kHost : DeviceType::kCuda);
  EXPECT_EQ(device_->index(), 0);
  EXPECT_EQ(device_->name().find(name_begin()), 0u) << device_->name();
  EXPECT_EQ(device_->device_memory_is_host_memory(), is_host());
}

TEST_P(DeviceContract, CopiesThroughDeviceMemoryArriveUnchanged) {
  const auto stream = device_->make_stream();
  const auto from = make_pattern(3);
  const auto first = make_empty(MemoryKind::kDevice);
  const auto second = make_empty(MemoryKind::kDevice);
  const auto to = make_empty();
  stream->copy(first->data(), from->data(), kNumBytes);
  stream->copy(second->data(), first->data(), kNumBytes);
  stream->copy(to->data(), second->data(), kNumBytes);
  stream->synchronize();
  EXPECT_TRUE(same(*to, *from));
}

TEST_P(DeviceContract, ACopyOfPartOfARangeLeavesTheRestAlone) {
  const auto stream = device_->make_stream();
  const auto from = make_pattern(9);
  const auto to = make_empty();
  stream->copy(to->data() + 1, from->data() + 3, 5);
  stream->synchronize();
  EXPECT_EQ(to->data()[0], std::byte{0});
  EXPECT_EQ(std::memcmp(to->data() + 1, from->data() + 3, 5), 0);
  EXPECT_EQ(to->data()[6], std::byte{0});
}

TEST_P(DeviceContract, ACopyOfNothingTakesNullPointers) {
  const auto stream = device_->make_stream();
  stream->copy(nullptr, nullptr, 0);
  stream->synchronize();
}

TEST_P(DeviceContract, CallsRunInTheOrderTheyWereMade) {
  constexpr int kNumCalls = 200;
  const auto stream = device_->make_stream();
  std::vector<int> order;
  for (int call = 0; call < kNumCalls; ++call) stream->call([&order, call] { order.push_back(call); });
  stream->synchronize();
  std::vector<int> expected(kNumCalls);
  std::iota(expected.begin(), expected.end(), 0);
  EXPECT_EQ(order, expected);
}

TEST_P(DeviceContract, ACallSeesTheCopyBeforeItAndNotTheOneAfterIt) {
  const auto stream = device_->make_stream();
  const auto first = make_pattern(1);
  const auto second = make_pattern(2);
  const auto to = make_empty();
  std::byte seen{};
  stream->copy(to->data(), first->data(), kNumBytes);
  stream->call([&seen, data = to->data()] { seen = data[kNumBytes - 1]; });
  stream->copy(to->data(), second->data(), kNumBytes);
  stream->synchronize();
  EXPECT_EQ(seen, first->data()[kNumBytes - 1]);
  EXPECT_TRUE(same(*to, *second));
}

TEST_P(DeviceContract, EnqueuingReturnsWhileTheStreamIsHeldUp) {
  const auto stream = device_->make_stream();
  const auto event = device_->make_event();
  const auto from = make_pattern(5);
  const auto to = make_empty();
  bool called = false;
  Gate gate;
  gate.close(*stream);

  // All four calls return although none of the enqueued operations can have run.
  stream->copy(to->data(), from->data(), kNumBytes);
  stream->call([&called] { called = true; });
  stream->record(*event);
  stream->wait(*event);
  EXPECT_FALSE(event->done());
  EXPECT_FALSE(same(*to, *from));

  gate.open();
  event->wait();
  EXPECT_TRUE(event->done());
  EXPECT_TRUE(called);
  EXPECT_TRUE(same(*to, *from));
}

TEST_P(DeviceContract, AnEventThatWasNeverRecordedIsDone) {
  const auto event = device_->make_event();
  EXPECT_TRUE(event->done());
  event->wait();
  const auto stream = device_->make_stream();
  stream->wait(*event);
  stream->synchronize();
}

TEST_P(DeviceContract, AnEventRecordedAgainIsDoneWhenItsLastRecordIs) {
  const auto stream = device_->make_stream();
  const auto event = device_->make_event();
  stream->record(*event);
  event->wait();
  EXPECT_TRUE(event->done());

  Gate gate;
  gate.close(*stream);
  stream->record(*event);
  EXPECT_FALSE(event->done());
  gate.open();
  event->wait();
  EXPECT_TRUE(event->done());
}

TEST_P(DeviceContract, AnEventOnAnIdleStreamIsDoneAfterWaiting) {
  const auto stream = device_->make_stream();
  const auto event = device_->make_event();
  for (int i = 0; i < 100; ++i) {
    stream->record(*event);
    event->wait();
    ASSERT_TRUE(event->done());
  }
}

TEST_P(DeviceContract, AStreamThatWaitsForAnEventStartsOnlyWhenItIsDone) {
  const auto producer = device_->make_stream();
  const auto consumer = device_->make_stream();
  const auto produced = device_->make_event();
  const auto consumed = device_->make_event();
  const auto from = make_pattern(7);
  const auto between = make_empty(MemoryKind::kDevice);
  const auto to = make_empty();
  Gate gate;
  gate.close(*producer);
  producer->copy(between->data(), from->data(), kNumBytes);
  producer->record(*produced);
  consumer->wait(*produced);
  consumer->copy(to->data(), between->data(), kNumBytes);
  consumer->record(*consumed);
  EXPECT_FALSE(consumed->done());

  gate.open();
  consumed->wait();
  EXPECT_TRUE(produced->done());
  EXPECT_TRUE(same(*to, *from));
}

TEST_P(DeviceContract, AWaitMeansTheRecordThatWasLastWhenItWasEnqueued) {
  const auto first = device_->make_stream();
  const auto second = device_->make_stream();
  const auto waiting = device_->make_stream();
  const auto event = device_->make_event();
  Gate first_gate;
  first_gate.close(*first);
  first->record(*event);
  waiting->wait(*event);
  first_gate.open();
  first->synchronize();

  Gate second_gate;
  second_gate.close(*second);
  second->record(*event);
  waiting->synchronize();  // would block for good if it waited for the second record
  EXPECT_FALSE(event->done());
}

TEST_P(DeviceContract, AStreamThatIsHeldUpDoesNotHoldUpAnother) {
  const auto held = device_->make_stream();
  const auto other = device_->make_stream();
  const auto from = make_pattern(8);
  const auto to = make_empty();
  Gate gate;
  gate.close(*held);
  other->copy(to->data(), from->data(), kNumBytes);
  other->synchronize();
  EXPECT_TRUE(same(*to, *from));
}

TEST_P(DeviceContract, SynchronizeWaitsForEverythingEnqueued) {
  const auto stream = device_->make_stream();
  const auto event = device_->make_event();
  const auto from = make_pattern(4);
  const auto to = make_empty();
  for (int i = 0; i < 16; ++i) stream->copy(to->data(), from->data(), kNumBytes);
  stream->record(*event);
  stream->synchronize();
  EXPECT_TRUE(event->done());
  EXPECT_TRUE(same(*to, *from));
}

TEST_P(DeviceContract, DestructionFinishesWhatIsEnqueued) {
  const auto from = make_pattern(6);
  const auto to = make_empty();
  const auto event = device_->make_event();
  int num_calls = 0;
  {
    const auto stream = device_->make_stream();
    for (int i = 0; i < 50; ++i) stream->call([&num_calls] { ++num_calls; });
    stream->copy(to->data(), from->data(), kNumBytes);
    stream->record(*event);
  }
  EXPECT_EQ(num_calls, 50);
  EXPECT_TRUE(event->done());
  EXPECT_TRUE(same(*to, *from));
}

TEST_P(DeviceContract, AnEventMayDieBeforeItsRecordIsReached) {
  const auto stream = device_->make_stream();
  bool called = false;
  Gate gate;
  gate.close(*stream);
  {
    const auto event = device_->make_event();
    stream->record(*event);
    stream->wait(*event);
  }
  stream->call([&called] { called = true; });
  gate.open();
  stream->synchronize();
  EXPECT_TRUE(called);
}

TEST_P(DeviceContract, ACallLetsGoOfWhatItHoldsBeforeWhatFollows) {
  const auto stream = device_->make_stream();
  const auto held = std::make_shared<int>(1);
  stream->call([held] { EXPECT_EQ(*held, 1); });
  stream->synchronize();
  EXPECT_EQ(held.use_count(), 1);
}

TEST_P(DeviceContract, ManyThreadsMayEnqueueAndCallsNeverOverlap) {
  constexpr int kNumThreads = 4;
  constexpr int kNumCalls = 300;
  const auto stream = device_->make_stream();
  int num_calls = 0;  // No mutex guards it, because calls of one stream never overlap.
  std::vector<std::thread> threads;
  for (int thread = 0; thread < kNumThreads; ++thread) {
    threads.emplace_back([&] {
      for (int call = 0; call < kNumCalls; ++call) stream->call([&num_calls] { ++num_calls; });
    });
  }
  for (std::thread& thread : threads) thread.join();
  stream->synchronize();
  EXPECT_EQ(num_calls, kNumThreads * kNumCalls);
}

TEST_P(DeviceContract, MoreWorkThanTheDepthOfAStreamIsDoneInOrder) {
  const auto stream = device_->make_stream();
  std::size_t num_calls = 0;
  bool in_order = true;
  for (std::size_t call = 0; call < 3 * kStreamDepth; ++call) {
    stream->call([&, call] { in_order = in_order && num_calls++ == call; });
  }
  stream->synchronize();
  EXPECT_TRUE(in_order);
  EXPECT_EQ(num_calls, 3 * kStreamDepth);
}

TEST_P(DeviceContract, AWrappedStreamTakesPartInTheOrder) {
  const auto stream = device_->make_stream();
  const auto wrapped = device_->wrap_stream(0);
  const auto received = device_->make_event();
  const auto computed = device_->make_event();
  const auto from = make_pattern(11);
  const auto between = make_empty(MemoryKind::kDevice);
  const auto to = make_empty();
  stream->copy(between->data(), from->data(), kNumBytes);
  stream->record(*received);
  wrapped->wait(*received);
  wrapped->copy(to->data(), between->data(), kNumBytes);
  wrapped->record(*computed);
  bool called = false;
  wrapped->call([&called] { called = true; });
  computed->wait();
  EXPECT_TRUE(same(*to, *from));
  wrapped->synchronize();
  EXPECT_TRUE(called);
}

TEST_P(DeviceContract, MemoryIsAlignedZeroedAndOfTheSizeAskedFor) {
  const auto stream = device_->make_stream();
  for (const MemoryKind kind : {MemoryKind::kDevice, MemoryKind::kStaging}) {
    const std::size_t num_bytes = kNumBytes + 13;
    const auto memory = device_->allocate(num_bytes, kind);
    const auto zeros = device_->allocate(num_bytes, MemoryKind::kStaging);
    std::memset(zeros->data(), 1, num_bytes);
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(memory->data()) % 64, 0u);
    EXPECT_EQ(memory->size_bytes(), num_bytes);
    stream->copy(zeros->data(), memory->data(), num_bytes);
    stream->synchronize();
    const std::vector<std::byte> expected(num_bytes);
    EXPECT_EQ(std::memcmp(zeros->data(), expected.data(), num_bytes), 0);
  }
}

// Streams copy from and to the caller's registered memory in the same way as with staging memory.
TEST_P(DeviceContract, CopiesThroughRegisteredHostMemoryArriveUnchanged) {
  constexpr std::size_t kPageBytes = 4096;
  struct Free {
    void operator()(void* data) const { std::free(data); }
  };
  const std::unique_ptr<void, Free> owned(std::aligned_alloc(kPageBytes, 2 * kNumBytes));
  auto* const memory = static_cast<std::byte*>(owned.get());
  ASSERT_NE(memory, nullptr);
  std::memset(memory, 0, 2 * kNumBytes);
  const auto device = make_device(GetParam());
  for (int round = 1; round <= 2; ++round) {  // the second round registers the same memory again
    const auto registration = device->register_host_memory(memory, 2 * kNumBytes);
    const auto on_device = device->allocate(kNumBytes, MemoryKind::kDevice);
    const auto stream = device->make_stream();
    std::memset(memory, round, kNumBytes);
    stream->copy(on_device->data(), memory, kNumBytes);
    stream->copy(memory + kNumBytes, on_device->data(), kNumBytes);
    stream->synchronize();
    EXPECT_EQ(std::memcmp(memory, memory + kNumBytes, kNumBytes), 0);
  }
}

TEST_P(DeviceContract, MoreMemoryThanThereIsNamesSizeAndDevice) {
  const std::size_t num_bytes = std::size_t{1} << 50;
  for (const MemoryKind kind : {MemoryKind::kDevice, MemoryKind::kStaging}) {
    try {
      const auto memory = device_->allocate(num_bytes, kind);
      FAIL() << "1 PiB was allocated";
    } catch (const UserError& error) {
      const std::string text = error.what();
      EXPECT_NE(text.find("1.00 PiB (1125899906842624 bytes)"), std::string::npos) << text;
      EXPECT_NE(text.find(name_begin()), std::string::npos) << text;
      EXPECT_NE(text.find(kind == MemoryKind::kDevice ? "device memory" : "staging memory"),
                std::string::npos)
          << text;
    }
  }
  // The device can be used as before.
  const auto stream = device_->make_stream();
  const auto from = make_pattern(2);
  const auto to = make_empty();
  stream->copy(to->data(), from->data(), kNumBytes);
  stream->synchronize();
  EXPECT_TRUE(same(*to, *from));
}

TEST_P(DeviceContract, ACheckOfADeviceThatWorksSaysNothingAndWaitsForNothing) {
  const auto stream = device_->make_stream();
  Gate gate;
  gate.close(*stream);
  device_->check();
  gate.open();
  stream->synchronize();
  device_->check();
}

std::vector<std::string> devices_here() {
  std::vector<std::string> backends = {"Host", "Hostile"};
  if (cuda_available()) backends.emplace_back("Cuda");
  return backends;
}

INSTANTIATE_TEST_SUITE_P(Backends, DeviceContract, testing::ValuesIn(devices_here()),
                         [](const auto& backend) { return backend.param; });

TEST(CudaDevice, WhatDoesNotExistIsRefusedByName) {
  EXPECT_TRUE(built_with_cuda() || !cuda_available());
  EXPECT_EQ(why_no_cuda().empty(), cuda_available()) << why_no_cuda();
  const int index = cuda_available() ? 4096 : 0;
  try {
    const auto device = make_cuda_device(index);
    FAIL() << device->name();
  } catch (const UserError& error) {
    const std::string text = error.what();
    EXPECT_EQ(text.rfind("cuda:" + std::to_string(index), 0), 0u) << text;
  }
}

}  // namespace
}  // namespace pipedream
