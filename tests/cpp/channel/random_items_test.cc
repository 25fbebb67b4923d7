// Tests items with random dtypes, shapes and sizes on every data path. Sender and receiver are two threads,
// each at its own pace.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <tuple>
#include <vector>

#include "channel/channels.h"

namespace pipedream {
namespace {

constexpr std::array kDTypes = {DType::kUInt8,   DType::kInt8,    DType::kInt16,     DType::kInt32,
                                DType::kInt64,   DType::kFloat16, DType::kBFloat16,  DType::kFloat32,
                                DType::kFloat64, DType::kBool,    DType::kComplex64, DType::kComplex128};

class RandomItems : public ChannelPair,
                    public testing::WithParamInterface<std::tuple<std::string, DataPath>> {
 protected:
  void SetUp() override { take_data_path(std::get<0>(GetParam()), std::get<1>(GetParam())); }

  [[nodiscard]] std::size_t random_below(std::size_t bound) { return random_() % bound; }

  // Returns the specs of num_tensors tensors of any dtype. Most have less than 24 KB. One in eight may have
  // up to 2.4 MB.
  ItemSpec random_spec(std::size_t num_tensors) {
    std::vector<TensorSpec> tensors;
    for (std::size_t tensor = 0; tensor < num_tensors; ++tensor) {
      const DType dtype = kDTypes.at(random_below(kDTypes.size()));
      const auto num_dims = static_cast<std::uint8_t>(random_below(4));
      const std::size_t num_elements_max = random_below(random_below(8) == 0 ? 300'000 : 3'000);
      tensors.push_back(
          {dtype, num_dims, num_dims == 0 ? dtype_bytes(dtype) : num_elements_max * dtype_bytes(dtype)});
    }
    return ItemSpec(tensors);
  }
  // Returns a random shape within the spec. If there are several dimensions and an even number of elements,
  // the first dimension is 2 and the last has half of the elements. Otherwise the last has all of them. All
  // other dimensions are 1.
  std::vector<std::int64_t> random_shape(const TensorSpec& tensor) {
    std::vector<std::int64_t> shape(tensor.num_dims, 1);
    if (shape.empty()) return shape;
    const std::size_t num_elements_max = tensor.bytes_max / dtype_bytes(tensor.dtype);
    const std::size_t num_elements =
        random_below(4) == 0 ? num_elements_max : random_below(num_elements_max + 1);
    shape.back() = static_cast<std::int64_t>(num_elements);
    if (shape.size() > 1 && num_elements % 2 == 0) {
      shape.back() /= 2;
      shape.front() = 2;
    }
    return shape;
  }
  std::shared_ptr<Content> random_content(const ItemSpec& spec) {
    auto content = std::make_shared<Content>();
    for (const TensorSpec& tensor : spec.tensors()) {
      content->add(tensor.dtype, random_shape(tensor), static_cast<std::uint32_t>(random_()));
    }
    return content;
  }
  static void jitter(std::mt19937& random) {
    const Deadline end = Clock::now() + std::chrono::microseconds(random() % 200);
    while (Clock::now() < end) std::this_thread::yield();
  }

  std::mt19937 random_{20};
};

TEST_P(RandomItems, ArriveUnchangedInOrder) {
  for (const std::size_t num_tensors : {1U, 3U, 40U}) {
    SCOPED_TRACE(num_tensors);
    SetUp();
    Pool pool(*device_);
    const ItemSpec spec = random_spec(num_tensors);
    const Sizes sizes{.num_slots = 3, .num_items_max = 8, .chunk_bytes = std::size_t{64} << 10};
    add_terms(pool, spec, sizes);
    pool.seal();
    open_receiver(spec, sizes);
    open_sender(spec, sizes);
    std::vector<std::shared_ptr<Content>> contents;
    const int num_minibatches = on_device() ? 6 : 30;  // a chunk takes longer on a device
    for (int minibatch = 0; minibatch < num_minibatches; ++minibatch)
      contents.push_back(random_content(spec));
    std::thread consumer([&] {
      std::mt19937 random(4);
      for (std::size_t minibatch = 0; minibatch < contents.size(); ++minibatch) {
        const ReceivedItem item = take();
        jitter(random);
        ASSERT_EQ(item.minibatch.value(), static_cast<std::int64_t>(minibatch));
        expect_equal(item, *contents[minibatch]);
      }
    });
    for (std::size_t minibatch = 0; minibatch < contents.size(); ++minibatch) {
      ASSERT_TRUE(sender_->wait_for_room(patience())) << failure_text(sender_wakeup_);
      sender_->collect_released();
      send(static_cast<std::int64_t>(minibatch), contents[minibatch]);
      jitter(random_);
    }
    consumer.join();
    const ChannelStats sent = sender_->stats();
    const ChannelStats received = receiver_->stats();
    EXPECT_EQ(sent.num_items, contents.size());
    EXPECT_EQ(received.num_items, contents.size());
    EXPECT_EQ(sent.num_chunks, received.num_chunks);
    EXPECT_EQ(sent.tensor_bytes, received.tensor_bytes);
    EXPECT_EQ(sent.placed_bytes, received.placed_bytes);
    EXPECT_EQ(sent.placed_bytes, placed() ? sent.tensor_bytes : 0);
    stop();
  }
}

// An item has more chunks than a stream has room for, so the channel enqueues its copies in parts.
TEST_P(RandomItems, ItemsOfManyThousandChunksArrive) {
  const std::size_t num_bytes = is_on_cuda(data_path_) ? 50'000 : 200'000;
  const Sizes sizes{.num_slots = 2, .chunk_bytes = 64};
  make_channels(one_tensor_spec(num_bytes), sizes);
  const auto content = [&](std::uint32_t seed) {
    return one_tensor(static_cast<std::int64_t>(num_bytes), seed);
  };
  for (std::uint32_t minibatch = 0; minibatch < 3; ++minibatch) send(minibatch, content(minibatch));
  for (std::uint32_t minibatch = 0; minibatch < 3; ++minibatch) expect_equal(take(), *content(minibatch));
  EXPECT_EQ(receiver_->stats().num_chunks, 3 * ((num_bytes + 63) / 64));
}

TEST_P(RandomItems, LargeItemsTravelInChunksOfTheUsualSizeAndPlacedOnesInLargerChunks) {
  constexpr std::int64_t kNumBytes = static_cast<std::int64_t>(5 * kUsualChunkBytes + 5);
  make_channels(one_tensor_spec(kNumBytes), {.num_slots = 1, .chunk_bytes = 0});
  const auto content = one_tensor(kNumBytes, 3);
  send(0, content);
  expect_equal(take(), *content);
  ASSERT_TRUE(sender_->wait_until_sent(patience()));
  EXPECT_EQ(sender_->stats().chunk_bytes, kUsualChunkBytes);
  EXPECT_EQ(sender_->stats().num_chunks, placed() ? 2U : 6U);
}

// If the receiver takes nothing, the sender sends only as many items as there are slots.
TEST_P(RandomItems, ReceiverThatTakesNothingBoundsWhatIsUnderWay) {
  const Sizes sizes{.num_slots = 2, .num_items_max = 20, .chunk_bytes = std::size_t{64} << 10};
  make_channels(one_tensor_spec(100'000), sizes);
  for (std::uint32_t minibatch = 0; minibatch < 20; ++minibatch)
    send(minibatch, one_tensor(100'000, minibatch));
  ASSERT_TRUE(receiver_wakeup_.wait_until(patience(), [&] { return receiver_->all_slots_held(); }));
  EXPECT_FALSE(sender_->wait_until_sent(moment()));
  ChannelStats stats = sender_->stats();
  EXPECT_EQ(stats.num_items, 2U);
  EXPECT_LT(stats.link.bytes_sent, 2U * 100'000 + 10 * kFrameHeaderBytes);
  EXPECT_GT(stats.credit_wait_ns, 0);
  EXPECT_GE(stats.transfer_ns, stats.credit_wait_ns);
  EXPECT_TRUE(receiver_->all_slots_held());
  for (std::uint32_t minibatch = 0; minibatch < 20; ++minibatch) {
    expect_equal(take(), *one_tensor(100'000, minibatch));
  }
  EXPECT_TRUE(sender_->wait_until_sent(patience()));
  EXPECT_FALSE(receiver_->all_slots_held());
  stats = sender_->stats();
  EXPECT_EQ(stats.num_items, 20U);
  EXPECT_EQ(stats.tensor_bytes, 20U * 100'000);
  EXPECT_EQ(sender_->stats().transfer_ns, stats.transfer_ns);  // the last item has arrived and is released
}

// The channel has more slots than may be granted at once. The remaining slots are granted when granted slots
// are filled.
TEST_P(RandomItems, MoreSlotsThanAreGrantedAtOnceAreAllUsed) {
  if (on_device()) GTEST_SKIP() << "the device has no part in it";
  constexpr std::int64_t kNumSlots = static_cast<std::int64_t>(kNumGrantsMax) + 10;
  make_channels(one_tensor_spec(8), {.num_slots = kNumSlots, .num_items_max = 64});
  std::vector<ReceivedItem> held;
  for (std::int64_t minibatch = 0; minibatch < kNumSlots; ++minibatch) {
    ASSERT_TRUE(sender_->wait_for_room(patience()));
    send(minibatch, one_tensor(8, static_cast<std::uint32_t>(minibatch)));
    held.push_back(take());
    EXPECT_EQ(receiver_->all_slots_held(), minibatch + 1 == kNumSlots) << minibatch;
  }
  expect_equal(held.front(), *one_tensor(8, 0));
  expect_equal(held.back(), *one_tensor(8, kNumSlots - 1));
}

std::string parameter_name(const testing::TestParamInfo<std::tuple<std::string, DataPath>>& parameter) {
  return std::get<0>(parameter.param) + data_path_name(std::get<1>(parameter.param));
}

INSTANTIATE_TEST_SUITE_P(
    Transports, RandomItems,
    testing::Combine(testing::Values("inproc", "zmq", "zmq_rings"),
                     testing::ValuesIn(with_cuda({DataPath::kDirect, DataPath::kStaged, DataPath::kPlaced,
                                                  DataPath::kPlacedStaged, DataPath::kDeviceStaged,
                                                  DataPath::kDevicePlacedStaged, DataPath::kDevicePlaced}))),
    parameter_name);

// The largest item that channels promise to carry: once over the wire, and once placed.
class LargestItem : public ChannelPair, public testing::WithParamInterface<DataPath> {};

TEST_P(LargestItem, Arrives) {
  take_data_path("zmq", GetParam());
  if (IsSkipped()) return;
  constexpr std::size_t kNumBytes = std::size_t{256} << 20;
  make_channels(one_tensor_spec(kNumBytes), {.num_slots = 1, .chunk_bytes = std::size_t{1} << 20});
  const auto content = one_tensor(kNumBytes, 3);
  send(0, content);
  const ReceivedItem item = take();
  ASSERT_EQ(item.tensors.at(0).size_bytes(), kNumBytes);
  EXPECT_EQ(std::memcmp(item.tensors[0].data, content->bytes[0].data(), kNumBytes), 0);
}

INSTANTIATE_TEST_SUITE_P(DataPaths, LargestItem, testing::Values(DataPath::kDirect, DataPath::kPlaced),
                         [](const testing::TestParamInfo<DataPath>& parameter) {
                           return data_path_name(parameter.param);
                         });

}  // namespace
}  // namespace pipedream
