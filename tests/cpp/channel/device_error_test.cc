// Tests channels whose device refuses a call. The end of the channel that made the call fails with the
// device's message, and the process goes on. All slots and tensors are given back. A child of fork() gives
// nothing back, because it has neither the streams nor the slots.
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#include "channel/channels.h"
#include "support/stream_gate.h"

namespace pipedream {
namespace {

constexpr const char* kWhy = "device-side assert triggered";

class DeviceErrors : public ChannelPair,
                     public testing::WithParamInterface<std::tuple<std::string, DataPath>> {
 protected:
  void SetUp() override {
    take_data_path(std::get<0>(GetParam()), std::get<1>(GetParam()));
    if (!can_fail()) GTEST_SKIP() << "a GPU does not fail on demand";
  }
  void TearDown() override { end_device(); }
  // Destroys everything that belongs to the device, and resets CUDA's errors for the next test.
  void end_device() {
    stop();
    if (!is_on_cuda(data_path_)) return;
    pool_.reset();
    compute_stream_.reset();
    upload_stream_.reset();
    device_.reset();
#if defined(PD_CUDA_STUB)
    cuda_stub::reset();
#endif
  }

  [[nodiscard]] bool can_fail() const {
#if defined(PD_CUDA_STUB)
    return true;
#else
    return !is_on_cuda(data_path_);
#endif
  }
  // fail_copy() makes the next copy fail. fail_any_call(3) lets three calls of any kind succeed and makes the
  // fourth fail. All later calls fail as well.
  void fail_copy() { fail_call("copy", "cudaMemcpyAsync", 0); }
  void fail_any_call(int num_calls_before) { fail_call("", "", num_calls_before); }
  void fail_call(const char* call, [[maybe_unused]] const char* cuda_call, int num_calls_before) {
    if (!is_on_cuda(data_path_)) {
      const auto num_before = static_cast<std::uint64_t>(num_calls_before);
      return hostile().fail({.call = call, .num_calls_before = num_before, .why = kWhy});
    }
#if defined(PD_CUDA_STUB)
    cuda_stub::fail(cuda_call, cudaErrorAssert, num_calls_before, /*ends_context=*/true);
#endif
  }
  // Makes every later call of the device fail.
  void end_context() {
#if defined(PD_CUDA_STUB)
    if (is_on_cuda(data_path_)) return cuda_stub::end_context(cudaErrorAssert);
#endif
    hostile().launch_fault(*upload_stream_, kWhy);
    while (!hostile().is_broken()) std::this_thread::yield();
  }
  void expect_told(const Failure& failure) const {
    const std::string device = is_on_cuda(data_path_) ? "cuda:0: " : "hostile:0: ";
    EXPECT_EQ(failure_kind_name(failure.kind), "DeviceError") << failure.message;
    EXPECT_EQ(failure.message.find(std::string(kName) + ": " + device), 0U) << failure.message;
    EXPECT_NE(failure.message.find(kWhy), std::string::npos) << failure.message;
  }
  void expect_all_given_back() {
    stop();
    EXPECT_EQ(slots_->num_free(), slots_->term().num_slots);
    if (!staged()) return;
    EXPECT_EQ(receive_staging_->num_free(), receive_staging_->term().num_slots);
    EXPECT_EQ(send_staging_->num_free(), send_staging_->term().num_slots);
  }
};

TEST_P(DeviceErrors, OfACopyIsTheSenders) {
  make_channels(one_tensor_spec(), {});
  const auto content = one_tensor(3000, 1);
  OnDevice there = uploaded(*content, deaths_.watch(content));
  upload_stream_->synchronize();
  fail_copy();
  sender_->send(MinibatchId(0), MicrobatchIndex(0), {}, there.tensors, nullptr, std::move(there.owner));
  expect_told(wait_failure(sender_wakeup_));
  wait_until_none_is_unreleased();
  sender_->collect_released();
  EXPECT_EQ(deaths_.count(), 1U);
  expect_all_given_back();
}

TEST_P(DeviceErrors, OfAnItemThatIsDroppedIsTheReceivers) {
  make_channels(one_tensor_spec(), {});
  ReceivedItem item = take_after_send(0);
  end_context();
  item = ReceivedItem();
  expect_told(wait_failure(receiver_wakeup_));
  expect_all_given_back();
}

// The device drops enqueued work, whose callbacks then never run. A thread that waited for these callbacks
// would wait for ever.
TEST_P(DeviceErrors, OfTheContextLeavesNothingBehindOfWhatWasEnqueued) {
  make_channels(one_tensor_spec(), {.num_slots = 2});
  const std::unique_ptr<Memory> read_late = pinned(std::vector<std::byte>(3000));
  ReceivedItem first = take_after_send(0);
  PD_SKIP_WITHOUT_GATES(*device_);
  StreamGate gate(*device_, *compute_stream_);
  compute_stream_->copy(read_late->data(), first.tensors[0].data, read_late->size_bytes());
  first = ReceivedItem();
  for (std::int64_t minibatch = 1; minibatch < 5; ++minibatch) send_one_tensor(minibatch);
  static_cast<void>(nothing_comes());  // some items wait for the reader, and some for a slot
  end_context();
  gate.open();
  expect_all_given_back();
  EXPECT_EQ(deaths_.count(), 5U);
}

TEST_P(DeviceErrors, OfWhicheverCallIsToldAndEverythingIsGivenBack) {
  const int step = is_on_cuda(data_path_) ? 7 : 1;  // on CUDA each operation is several calls
  for (int num_calls_before = 0; num_calls_before < 60 * step; num_calls_before += step) {
    SCOPED_TRACE(num_calls_before);
    SetUp();
    make_channels(one_tensor_spec(), {.num_slots = 2});
    fail_any_call(num_calls_before);
    std::optional<Failure> failure;
    std::string thrown;
    const auto is_told = [&] {
      failure = sender_wakeup_.failure();
      if (!failure) failure = receiver_wakeup_.failure();
      return failure.has_value();
    };
    try {
      for (std::int64_t minibatch = 0; !is_told(); ++minibatch) {
        ASSERT_LT(minibatch, 1000);
        sender_->collect_released();
        send_one_tensor(minibatch);
        ReceivedItem item;
        while (!take(item, Clock::now() + std::chrono::milliseconds(5)) && !is_told()) {
          device_->check();  // as a worker does
        }
        if (!failure) expect_equal(item, *one_tensor(3000, static_cast<std::uint32_t>(minibatch)));
      }
    } catch (const DeviceError& error) {  // the test itself made the call that failed
      thrown = error.what();
    }
    if (thrown.empty()) expect_told(*failure);
    EXPECT_NE((failure ? failure->message : thrown).find(kWhy), std::string::npos) << thrown;
    expect_all_given_back();
    end_device();
  }
}

INSTANTIATE_TEST_SUITE_P(DataPaths, DeviceErrors,
                         testing::Combine(testing::Values("inproc", "zmq"),
                                          testing::ValuesIn(with_cuda({DataPath::kDeviceStaged,
                                                                       DataPath::kDevicePlacedStaged,
                                                                       DataPath::kDevicePlaced}))),
                         [](const auto& parameter) {
                           return std::get<0>(parameter.param) + data_path_name(std::get<1>(parameter.param));
                         });

// ---- Forks ----

class Forks : public DeviceErrors {};

// A child of fork() may drop an item, for example when a worker of a DataLoader collects garbage. The slot
// stays with the parent.
TEST_P(Forks, ItemThatAChildDropsIsItsParents) {
  make_channels(one_tensor_spec(), {.num_slots = 2});
  ReceivedItem item = take_after_send(0);
  ASSERT_TRUE(sender_->wait_until_sent(patience()));
  copies_are_done(item);
  if (compute_stream_) compute_stream_->synchronize();
  const std::int64_t num_free = slots_->num_free();
  const pid_t child = ::fork();
  if (child == 0) {
    item = ReceivedItem();
    ::_exit(slots_->num_free() == num_free ? 0 : 1);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
  expect_equal(item, *one_tensor(3000, 0));
  item = ReceivedItem();
  EXPECT_EQ(take_after_send(1).minibatch, MinibatchId(1));
}

INSTANTIATE_TEST_SUITE_P(DataPaths, Forks,
                         testing::Combine(testing::Values("inproc", "zmq"),
                                          testing::ValuesIn(with_cuda({DataPath::kDirect, DataPath::kStaged,
                                                                       DataPath::kDeviceStaged,
                                                                       DataPath::kDevicePlaced}))),
                         [](const auto& parameter) {
                           return std::get<0>(parameter.param) + data_path_name(std::get<1>(parameter.param));
                         });

}  // namespace
}  // namespace pipedream
