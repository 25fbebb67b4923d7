// Tests one replica's pushes over queues: when a chunk is sent, from which memory, and how missing gradients
// are reported.
#include "param_server/shard_pushes.h"

#include <gtest/gtest.h>

#include <array>
#include <memory>
#include <utility>
#include <vector>

#include "param_server/queue_carrier.h"

namespace pipedream {
namespace {

// Three parameters have 16 floats, which are 64 bytes. The last has one float.
constexpr std::size_t kNumParameters = 4;

// Owner 1 has one chunk, with parameter 0. Owner 2 has two: the first has parameters 1 and 3 and a gap
// between them, the second has parameter 2.
class ShardPushesTest : public testing::Test {
 protected:
  explicit ShardPushesTest(Codec codec = {}) {
    spec_.push_codec = codec;
    add_owner(1, {{0, 64, false, {piece(0, 16, 0)}}});
    add_owner(2,
              {{64, 192, false, {piece(1, 16, 0), piece(3, 1, 128)}}, {256, 64, false, {piece(2, 16, 0)}}});
    PushLayout layout(codec);
    for (const auto& [other, peer] : spec_.peers) {
      for (const ExchangeChunk& chunk : peer.shard.chunks) layout.add(peer.shard, chunk);
    }
    for (Bytes& slot : slots_) {
      slot.resize(layout.slot_bytes());
      spec_.push_slots.push_back(slot.data());
    }
    pushes_ = std::make_unique<ShardPushes>(spec_, carrier_);
  }

  // Gives a gradient whose elements all have this value. 0 means that there is no gradient.
  float* give(std::size_t parameter, float value) {
    if (value == 0) {
      pushes_->give(parameter, {});
      return nullptr;
    }
    auto gradient = std::make_shared<std::vector<float>>(parameter == 3 ? 1 : 16, value);
    float* const data = gradient->data();
    const TensorView view = flat_view(DType::kFloat32, reinterpret_cast<std::byte*>(data),  // NOLINT
                                      gradient->size() * sizeof(float));
    pushes_->give(parameter, {view, std::move(gradient)});
    return data;
  }
  void push_round(const std::array<float, kNumParameters>& values) {
    for (std::size_t parameter = 0; parameter < kNumParameters; ++parameter)
      give(parameter, values[parameter]);
    ASSERT_TRUE(send());
    static_cast<void>(pushes_->end_round());
  }
  bool send() { return pushes_->send_complete(3, Deadline{}).value(); }

  [[nodiscard]] std::deque<QueuedItem>& to(int owner) { return queues_.items[std::to_string(owner)]; }
  [[nodiscard]] static std::vector<float> floats(const Bytes& content) {
    std::vector<float> values(content.size() / sizeof(float));
    std::memcpy(values.data(), content.data(), content.size());
    return values;
  }
  [[nodiscard]] static std::vector<float> shared(float of_1, float of_3) {
    std::vector<float> values(48);
    std::fill_n(values.begin(), 16, of_1);
    values[32] = of_3;
    return values;
  }

  std::array<Bytes, 2> slots_;
  Queues queues_;
  std::unique_ptr<ShardPushes> pushes_;

 private:
  static ExchangePiece piece(std::size_t parameter, std::int64_t num_elements, std::size_t begin_bytes) {
    return {parameter, 0, num_elements, begin_bytes, DType::kFloat32};
  }
  void add_owner(int owner, std::vector<ExchangeChunk> chunks) {
    ExchangePeer& peer = spec_.peers[ReplicaIndex(owner)];
    peer.shard = {std::move(chunks), DType::kFloat32};
    peer.push_to = std::to_string(owner);
  }

  ExchangeSpec spec_;
  QueueCarrier carrier_{queues_};
};

const Bytes kThere = {std::byte{1}};
const Bytes kMissing = {std::byte{0}};

TEST_F(ShardPushesTest, AChunkLeavesOnceAllItsGradientsAndTheChunksBeforeItAreThere) {
  give(2, 5);
  give(1, 6);
  ASSERT_TRUE(send());
  EXPECT_TRUE(to(1).empty() && to(2).empty());
  give(3, 7);
  ASSERT_TRUE(send());
  EXPECT_TRUE(to(1).empty());
  ASSERT_EQ(to(2).size(), 2U);
  EXPECT_EQ(floats(to(2)[0].tensors[1]), shared(6, 7));
  EXPECT_EQ(floats(to(2)[1].tensors[1]), std::vector<float>(16, 5));
  EXPECT_EQ(to(2)[0].fields, (ItemFields{.num_minibatches = 3}));
}

TEST_F(ShardPushesTest, AGradientThatFillsAChunkLeavesFromWhereItLies) {
  const float* const gradient = give(0, 5);
  ASSERT_TRUE(send());
  ASSERT_EQ(to(1).size(), 1U);
  EXPECT_EQ(static_cast<const void*>(to(1)[0].places[1]), gradient);
}

TEST_F(ShardPushesTest, RoundsThatMayBeUnsentAtOnceCopyIntoDifferentMemory) {
  for (const float round : {1.0F, 2.0F, 3.0F}) push_round({round, round, round, round});
  const auto& items = to(2);
  ASSERT_EQ(items.size(), 6U);
  EXPECT_NE(items[0].places[1], items[2].places[1]);
  EXPECT_NE(items[0].places[0], items[2].places[0]);
  EXPECT_EQ(items[0].places[1], items[4].places[1]);
  EXPECT_EQ(floats(items[4].tensors[1]), shared(3, 3));
}

TEST_F(ShardPushesTest, AMissingGradientIsZerosInASharedChunkAndNothingInOneThatItWouldFill) {
  for (int round = 0; round < 2; ++round) push_round({1, 1, 1, 1});
  for (int round = 0; round < 2; ++round) {
    to(1).clear();
    to(2).clear();
    push_round({0, 0, 2, 2});
    EXPECT_EQ(to(1)[0].tensors, (std::vector<Bytes>{kMissing, {}}));
    EXPECT_EQ(to(2)[0].tensors[0], (Bytes{std::byte{0}, std::byte{1}}));
    EXPECT_EQ(floats(to(2)[0].tensors[1]), shared(0, 2));
  }
  push_round({3, 3, 3, 3});
  EXPECT_EQ(to(1).back().tensors[0], kThere);
  EXPECT_EQ(to(2)[2].tensors[0], (Bytes{std::byte{1}, std::byte{1}}));
  EXPECT_EQ(floats(to(2)[2].tensors[1]), shared(3, 3));
}

TEST_F(ShardPushesTest, AChunkThatFindsNoRoomLeavesOnceWhenThereIsSome) {
  queues_.has_no_room = {"2"};
  for (std::size_t parameter = 0; parameter < kNumParameters; ++parameter) give(parameter, 1);
  EXPECT_FALSE(send());
  queues_.has_no_room.clear();
  EXPECT_TRUE(send());
  EXPECT_TRUE(send());
  EXPECT_EQ(to(1).size(), 1U);
  EXPECT_EQ(to(2).size(), 2U);
}

TEST_F(ShardPushesTest, AnEndedRoundReturnsItsGradientsByParameter) {
  const float* const gradient = give(0, 5);
  for (const std::size_t parameter : {1, 2, 3}) give(parameter, 0);
  ASSERT_TRUE(send());
  const std::vector<Gradient> gradients = pushes_->end_round();
  ASSERT_EQ(gradients.size(), kNumParameters);
  EXPECT_EQ(static_cast<const void*>(gradients[0].content.data), gradient);
  EXPECT_EQ(gradients[1].content.data, nullptr);
  EXPECT_FALSE(pushes_->has(0));
}

class FeedingBack : public ShardPushesTest {
 protected:
  FeedingBack() : ShardPushesTest({CodecKind::kTopK, 0.5}) {}
};

TEST_F(FeedingBack, AMissingGradientIsZerosThatCarryWhatWasLeftOut) {
  push_round({1, 1, 1, 1});
  push_round({0, 0, 0, 1});
  EXPECT_EQ(to(1)[1].tensors[0], kThere);
  EXPECT_EQ(floats(to(1)[1].tensors[1]), std::vector<float>(16));
  EXPECT_EQ(to(2)[2].tensors[0], (Bytes{std::byte{1}, std::byte{1}}));
  EXPECT_EQ(floats(to(2)[2].tensors[1]), shared(0, 1));
  EXPECT_EQ(floats(to(2)[3].tensors[1]), std::vector<float>(16));
}

}  // namespace
}  // namespace pipedream
