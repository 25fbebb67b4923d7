// Tests received items that are read on several streams. An item lies in a slot of memory. The slot is
// written again, or granted to the sender, only when all these streams have finished reading.
#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <tuple>
#include <vector>

#include "channel/channels.h"
#include "support/stream_gate.h"

namespace pipedream {
namespace {

class Readers : public ChannelPair, public testing::WithParamInterface<std::tuple<std::string, DataPath>> {
 protected:
  void SetUp() override {
    take_data_path(std::get<0>(GetParam()), std::get<1>(GetParam()));
    PD_SKIP_WITHOUT_GATES(*device_);
  }

  // The stream on which the test's threads compute; 0 if it is the compute stream.
  std::uintptr_t current_stream_ = 0;
};

// A layer that computes on a stream of its own also has its backward on that stream. The tensor that the
// layer saved dies on autograd's thread while that stream is current.
TEST_P(Readers, OfAStreamBesideTheComputeStreamAreWaitedFor) {
  constexpr std::uintptr_t kSide = 7;
  side_stream_ = [this]() -> std::unique_ptr<Stream> {
    return current_stream_ == 0 ? nullptr : device_->wrap_stream(current_stream_);
  };
  current_stream_ = kSide;
#if defined(PD_CUDA_STUB)
  if (is_on_cuda(data_path_)) current_stream_ = cuda_stub::make_stream(0);
#endif
  const std::unique_ptr<Stream> side = device_->wrap_stream(current_stream_);
  make_channels(one_tensor_spec(), {.num_slots = 1}, /*computes_apart=*/true);
  const std::unique_ptr<Memory> read = pinned(std::vector<std::byte>(3000));
  ReceivedItem item = take_after_send(0);
  if (item.ready != nullptr) side->wait(*item.ready);
  StreamGate gate(*device_, *side);
  side->copy(read->data(), item.tensors[0].data, read->size_bytes());
  item = ReceivedItem();  // dropped while the side stream has still to read it
  current_stream_ = 0;
  send_one_tensor(1);
  if (staged()) {
    ASSERT_TRUE(receiver_wakeup_.wait_until(patience(), [&] { return receiver_->try_take(item); }));
    EXPECT_FALSE(item.ready->done());
  } else {
    EXPECT_TRUE(nothing_comes());
  }
  gate.open();
  if (!staged()) item = take();
  if (item.ready != nullptr) compute_stream_->wait(*item.ready);
  expect_equal(item, *one_tensor(3000, 1));
  side->synchronize();
  EXPECT_EQ(bytes_at(*read), patterned_bytes(3000, 0));
}

std::string parameter_name(const testing::TestParamInfo<std::tuple<std::string, DataPath>>& parameter) {
  return std::get<0>(parameter.param) + data_path_name(std::get<1>(parameter.param));
}

INSTANTIATE_TEST_SUITE_P(DataPaths, Readers,
                         testing::Combine(testing::Values("inproc", "zmq"),
                                          testing::ValuesIn(with_cuda({DataPath::kDeviceStaged,
                                                                       DataPath::kDevicePlaced}))),
                         parameter_name);

// ---- Graphs (CUDA only) ----

#if defined(PD_CUDA_STUB)
class CapturedReaders : public Readers {};

TEST_P(CapturedReaders, LeaveNoEventInAGraphThatIsCapturedFromTheComputeStream) {
  const std::uintptr_t handle = cuda_stub::make_stream(0);
  compute_stream_ = device_->wrap_stream(handle);
  make_channels(one_tensor_spec(), {.num_slots = 1}, /*computes_apart=*/true);
  ReceivedItem item = take_after_send(0);
  const std::unique_ptr<Memory> read = pinned(std::vector<std::byte>(3000));
  StreamGate gate(*device_, *compute_stream_);
  compute_stream_->copy(read->data(), item.tensors[0].data, read->size_bytes());
  cuda_stub::begin_stream_capture(handle);
  item = ReceivedItem();
  EXPECT_EQ(cuda_stub::end_stream_capture(handle), 0);
  EXPECT_EQ(slots_->num_free(), 0);  // the channel does not know yet which streams have read it
  send_one_tensor(1);
  EXPECT_TRUE(nothing_comes());
  receiver_wakeup_.run_deferred();  // the next work item does the same
  gate.open();
  expect_equal(take(), *one_tensor(3000, 1));
  EXPECT_EQ(bytes_at(*read), patterned_bytes(3000, 0));
}

INSTANTIATE_TEST_SUITE_P(DataPaths, CapturedReaders,
                         testing::Combine(testing::Values("inproc", "zmq"),
                                          testing::Values(DataPath::kCudaStaged, DataPath::kCudaPlaced)),
                         parameter_name);
#endif

}  // namespace
}  // namespace pipedream
