// Tests the rules that only the data paths kDevicePlaced and kCudaPlaced (data_paths.h) have, where the
// sender writes into the receiver's device memory. The receiver grants a slot to the sender only when the
// slot's readers are done, because nothing else would hold the sender back. No bytes of tensors are sent over
// the wire, and none are staged.
#include <gtest/gtest.h>

#include <latch>
#include <string>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#include "channel/channels.h"
#include "support/stream_gate.h"

namespace pipedream {
namespace {

class DevicePlaced : public ChannelPair,
                     public testing::WithParamInterface<std::tuple<std::string, DataPath>> {
 protected:
  void SetUp() override {
    take_data_path(std::get<0>(GetParam()), std::get<1>(GetParam()));
    PD_SKIP_WITHOUT_GATES(*device_);
  }

  // Holds the compute stream until the gate opens, and lets the stream read the item after that.
  [[nodiscard]] std::unique_ptr<StreamGate> read_late(const ReceivedItem& item, const Memory& bytes) {
    auto gate = std::make_unique<StreamGate>(*device_, *compute_stream_);
    compute_stream_->copy(bytes.data(), item.tensors[0].data, bytes.size_bytes());
    return gate;
  }
  void expect_imported(int num_imported) {
    if (!is_on_cuda(data_path_)) {
      EXPECT_EQ(hostile().num_imported(), num_imported);
    }
  }
  // Waits until all functions that were posted to the receiver's transport have run.
  void wait_for_receiver() {
    std::latch done(1);
    receiving_->post([&] { done.count_down(); });
    done.wait();
  }
};

TEST_P(DevicePlaced, SlotIsGrantedAgainOnlyWhenItsLastReaderIsDone) {
  make_channels(one_tensor_spec(), {.num_slots = 1}, /*computes_apart=*/true);
  const std::unique_ptr<Memory> read = pinned(std::vector<std::byte>(3000));
  std::unique_ptr<StreamGate> gate;
  {
    const ReceivedItem item = take_after_send(0);
    EXPECT_EQ(item.ready, nullptr);  // the bytes have arrived
    gate = read_late(item, *read);
  }  // dropped before it was read
  send_one_tensor(1);
  EXPECT_TRUE(nothing_comes());
  EXPECT_EQ(slots_->num_free(), 0);           // a credit for this slot is being prepared
  EXPECT_FALSE(receiver_->all_slots_held());  // so no error message blames the user's code
  EXPECT_EQ(sender_->stats().placed_bytes, 3000U);
  gate->open();
  expect_equal(take(), *one_tensor(3000, 1));
  compute_stream_->synchronize();
  EXPECT_EQ(bytes_at(*read), patterned_bytes(3000, 0));
}

TEST_P(DevicePlaced, SlotsThatAreReadAreGrantedWhileAnotherIsNot) {
  make_channels(one_tensor_spec(), {.num_slots = 2}, /*computes_apart=*/true);
  const std::unique_ptr<Memory> read = pinned(std::vector<std::byte>(3000));
  ReceivedItem first = take_after_send(0);
  ReceivedItem second = take_after_send(1);
  second = ReceivedItem();  // no stream reads it, so its slot is free at once
  expect_equal(take_after_send(2), *one_tensor(3000, 2));
  const auto gate = read_late(first, *read);
  first = ReceivedItem();
  EXPECT_EQ(take_after_send(3).minibatch, MinibatchId(3));
  gate->open();
  compute_stream_->synchronize();
  EXPECT_EQ(bytes_at(*read), patterned_bytes(3000, 0));
}

TEST_P(DevicePlaced, ManyItemsThatAreReadLateArriveUnchanged) {
  constexpr std::int64_t kNumItems = 300;
  make_channels(one_tensor_spec(), {.num_slots = 3, .num_items_max = 4}, /*computes_apart=*/true);
  std::vector<std::vector<std::byte>> read(kNumItems);
  std::thread consumer([&] {
    for (std::int64_t minibatch = 0; minibatch < kNumItems; ++minibatch) {
      const ReceivedItem item = take();
      auto& bytes = read[static_cast<std::size_t>(minibatch)];
      bytes.resize(item.tensors.at(0).size_bytes());
      compute_stream_->copy(bytes.data(), item.tensors[0].data, bytes.size());
    }
  });
  for (std::int64_t minibatch = 0; minibatch < kNumItems; ++minibatch) {
    sender_->collect_released();
    ASSERT_TRUE(sender_->wait_for_room(patience())) << failure_text(sender_wakeup_);
    send(minibatch, one_tensor(minibatch % 4096, static_cast<std::uint32_t>(minibatch)));
  }
  consumer.join();
  compute_stream_->synchronize();
  for (std::int64_t minibatch = 0; minibatch < kNumItems; ++minibatch) {
    EXPECT_EQ(
        read[static_cast<std::size_t>(minibatch)],
        patterned_bytes(static_cast<std::size_t>(minibatch % 4096), static_cast<std::uint32_t>(minibatch)));
  }
}

TEST_P(DevicePlaced, EverySizeIsPlacedAndNothingIsStaged) {
  make_receiver(one_tensor_spec(), {});
  ChannelOptions options{kName, spec_, 1000, 16};
  sender_ = std::make_unique<SendChannel>(options, *sending_, sender_wakeup_, *device_, nullptr);
  sender_->place_into(SharedMemory::open_on(*device_, shared_->address(), shared_use(spec_.slot_bytes())));
  sender_->attach(sending_->connect(link_options(), receiver_link_->endpoint(), *sender_));
  std::size_t num_bytes = 0;
  std::int64_t minibatch = 0;
  for (const std::int64_t size : {1, 0, 1000, 1001, 4096}) {
    send(minibatch, one_tensor(size, 3));
    expect_equal(take(), *one_tensor(size, 3));
    num_bytes += static_cast<std::size_t>(size);
    ++minibatch;
  }
  EXPECT_EQ(sender_->stats().placed_bytes, num_bytes);
  EXPECT_EQ(receiver_->stats().placed_bytes, num_bytes);
  if (!is_on_cuda(data_path_)) {
    EXPECT_EQ(hostile().num_registered(), 0);  // device memory is not pinned
  }
  EXPECT_EQ(pool_->planned_bytes(MemoryKind::kStaging), 0U);
}

TEST_P(DevicePlaced, TensorThatComesByTheWireIsRefused) {
  make_receiver(one_tensor_spec(), {});
  SharedMemory::open_on(*device_, shared_->address(), shared_use(spec_.slot_bytes()))->claim();
  make_bare_sender();
  sender_link_->send(tensor_frame(0, std::span<const std::byte>(payload_).first(10)));
  expect_refused("tensor 0 comes by the wire, which cannot write the device's memory");
}

TEST_P(DevicePlaced, TensorThatIsPlacedWithoutAClaimIsRefused) {
  make_receiver(one_tensor_spec(), {});
  make_bare_sender();
  OutgoingFrame frame = tensor_frame(0, std::span<const std::byte>(payload_).first(10));
  frame.header.placed_bytes = std::exchange(frame.header.payload_bytes, 0);
  frame.payload = {};
  sender_link_->send(std::move(frame));
  expect_refused("tensor 0 is placed in memory that is not shared");
}

// ---- Ends ----

TEST_P(DevicePlaced, GrantThatWaitsIsGivenBackWithTheChannel) {
  make_channels(one_tensor_spec(), {.num_slots = 2}, /*computes_apart=*/true);
  const std::unique_ptr<Memory> read = pinned(std::vector<std::byte>(3000));
  const auto gate = read_late(take_after_send(0), *read);
  wait_for_receiver();
  EXPECT_EQ(slots_->num_free(), 0);
  std::thread opener([&] {
    std::this_thread::sleep_until(moment());  // a channel that did not wait would end in this time
    gate->open();
  });
  stop();
  opener.join();
  EXPECT_EQ(slots_->num_free(), 2);
  compute_stream_->synchronize();
  EXPECT_EQ(bytes_at(*read), patterned_bytes(3000, 0));
}

TEST_P(DevicePlaced, GrantThatWaitsWhileTheSenderIsLostGrantsNothing) {
  make_channels(one_tensor_spec(), {.num_slots = 2}, /*computes_apart=*/true);
  const std::unique_ptr<Memory> read = pinned(std::vector<std::byte>(3000));
  const auto gate = read_late(take_after_send(0), *read);
  wait_for_receiver();
  std::thread opener([&] {
    std::this_thread::sleep_until(moment());
    gate->open();
  });
  core_of(*sending_).abandon();
  EXPECT_EQ(wait_failure(receiver_wakeup_).kind, FailureKind::kPeerLost);
  opener.join();
  compute_stream_->synchronize();
  EXPECT_EQ(bytes_at(*read), patterned_bytes(3000, 0));
  stop();
  EXPECT_EQ(slots_->num_free(), 2);
}

TEST_P(DevicePlaced, CopyIntoTheReceiversMemoryEndsBeforeThatIsLetGo) {
  make_channels(one_tensor_spec(), {});
  const auto stream = device_->make_stream();
  StreamGate gate(*device_, *stream);
  auto ready = device_->make_event();
  stream->record(*ready);
  const std::unique_ptr<Memory> memory = device_->allocate(4096, MemoryKind::kDevice);
  const auto content = one_tensor(4096, 5);
  content->tensors[0].data = memory->data();
  sender_->send(MinibatchId(0), MicrobatchIndex(0), {}, content->tensors, std::move(ready),
                deaths_.watch(content));
  EXPECT_TRUE(nothing_comes());
  sending_->shutdown(0);
  std::thread opener([&] {
    std::this_thread::sleep_until(moment());
    expect_imported(1);
    gate.open();
  });
  sender_->end_placing();
  expect_imported(0);
  opener.join();
  EXPECT_TRUE(sender_->places());  // the sender did import the memory
}

INSTANTIATE_TEST_SUITE_P(Transports, DevicePlaced,
                         testing::Combine(testing::Values("inproc", "zmq"),
                                          testing::ValuesIn(with_cuda({DataPath::kDevicePlaced}))),
                         [](const auto& parameter) {
                           return std::get<0>(parameter.param) + data_path_name(std::get<1>(parameter.param));
                         });

}  // namespace
}  // namespace pipedream
