// Tests that items land at the places that the receiver has posted, which means named in advance. This is
// tested over each transport, by the wire and by shared memory.
#include <gtest/gtest.h>

#include <cstring>
#include <string>
#include <tuple>
#include <vector>

#include "channel/channels.h"
#include "channel/posted_places.h"

namespace pipedream {
namespace {

constexpr std::size_t kVersionBytes = 8192;
constexpr std::size_t kPieceBytes = 3000;
constexpr std::byte kUntouched{0x5A};

std::vector<std::byte> copy_of(std::span<const std::byte> bytes) { return {bytes.begin(), bytes.end()}; }

// A channel whose slots have no memory. The receiver posts places in its own memory instead, as for weight
// versions.
class PostedChannels : public ChannelPair,
                       public testing::WithParamInterface<std::tuple<std::string, DataPath>> {
 protected:
  void SetUp() override {
    take_data_path(std::get<0>(GetParam()), std::get<1>(GetParam()));
    if (IsSkipped()) return;
    spec_ = one_tensor_spec();
    PoolTerm versions{"versions", kVersionBytes, 1, MemoryKind::kDevice, /*poison=*/false};
    if (placed()) {
      versions.allocate = [this](std::size_t num_bytes) {
        auto memory = SharedMemory::make(num_bytes, posted_use());
        shared_ = memory.get();
        return std::make_unique<SharedTerm>(*device_, std::move(memory));
      };
    }
    SlotGroup& term = pool_->add(versions);
    slots_ = &pool_->add({"slots", 0, 2, MemoryKind::kDevice});
    pool_->seal();
    version_ = {term.slot_data(SlotIndex(0)), kVersionBytes};
    std::ranges::fill(version_, kUntouched);
  }

  static SharedMemoryUse posted_use() {
    LinkIdentity identity = link_options().identity;
    identity.channel_id = kPostedChannelId;
    return {identity, 0};
  }
  [[nodiscard]] ChannelOptions options() const {
    ChannelOptions options = channel_options(spec_, Sizes{});
    options.num_posts_max = 8;
    options.channel_id = link_options().identity.channel_id;
    return options;
  }
  void open_posted_receiver() {
    receiver_ = std::make_unique<ReceiveChannel>(options(), *receiving_, receiver_wakeup_, *device_, *slots_,
                                                 nullptr, nullptr, shared_);
    receiver_link_ = &receiving_->listen(link_options("stage 0 (rank 0)"), *receiver_);
    receiver_->attach(*receiver_link_);
  }
  void open_posted_sender() {
    sender_ = std::make_unique<SendChannel>(channel_options(spec_, Sizes{}), *sending_, sender_wakeup_,
                                            *device_, nullptr);
    if (placed()) {
      auto memory = SharedMemory::open(shared_->address(), posted_use());
      ASSERT_TRUE(memory->claim_for(options().channel_id));
      sender_->place_where_posted(std::move(memory));
    }
    sender_link_ = &sending_->connect(link_options(), receiver_link_->endpoint(), *sender_);
    sender_->attach(*sender_link_);
  }
  void open_both() {
    open_posted_receiver();
    open_posted_sender();
    ASSERT_TRUE(receiver_wakeup_.wait_until(patience(), [&] { return receiver_->open(); }));
  }

  [[nodiscard]] std::span<std::byte> piece(std::size_t offset, std::size_t num_bytes = kPieceBytes) const {
    return version_.subspan(offset, num_bytes);
  }
  void post(std::vector<std::span<std::byte>> places) { receiver_->post(places); }
  // Takes the next item and drops it. This frees the slot, and the bytes stay in their place.
  void take_whole(std::int64_t minibatch) {
    const ReceivedItem item = take();
    EXPECT_EQ(item.minibatch, MinibatchId(minibatch));
  }
  void expect_content(std::span<const std::byte> place, std::uint32_t seed) {
    EXPECT_EQ(copy_of(place), one_tensor(static_cast<std::int64_t>(place.size()), seed)->bytes.front());
  }

  std::span<std::byte> version_;
};

TEST_P(PostedChannels, ItemsLandWhereTheyAreWantedAndNowhereElse) {
  open_both();
  post({piece(4096), piece(64)});
  send_one_tensor(0);
  send_one_tensor(1);
  take_whole(0);
  take_whole(1);
  expect_content(piece(4096), 0);
  expect_content(piece(64), 1);
  std::vector<std::byte> others = copy_of(piece(0, 64));
  for (const auto& between :
       {piece(64 + kPieceBytes, 4096 - 64 - kPieceBytes), piece(4096 + kPieceBytes, 1096)}) {
    others.insert(others.end(), between.begin(), between.end());
  }
  EXPECT_TRUE(std::ranges::all_of(others, [](std::byte byte) { return byte == kUntouched; }));
  EXPECT_EQ(receiver_->is_claimed(), placed());
  EXPECT_EQ(receiver_->stats().placed_bytes, placed() ? 2 * kPieceBytes : 0);
}

TEST_P(PostedChannels, NothingComesBeforeItHasAPlace) {
  open_both();
  send_one_tensor(0);
  EXPECT_TRUE(nothing_comes());
  post({piece(0)});
  take_whole(0);
  expect_content(piece(0), 0);
}

TEST_P(PostedChannels, APlaceThatIsPostedAgainWaitsForWhatIsToComeThere) {
  open_both();
  post({piece(0)});
  post({piece(0)});  // of a later version
  send_one_tensor(0);
  send_one_tensor(1);
  take_whole(0);
  take_whole(1);
  expect_content(piece(0), 1);
}

TEST_P(PostedChannels, MorePlacesThanSlotsAreGrantedAsItemsAreTaken) {
  open_both();
  const std::vector<std::size_t> offsets = {0, 1000, 2000, 3000, 4000, 5000, 6000};
  std::vector<std::span<std::byte>> places;
  for (const std::size_t offset : offsets) places.push_back(piece(offset, 900));
  post(places);
  for (std::size_t index = 0; index < offsets.size(); ++index) {
    send(static_cast<std::int64_t>(index), one_tensor(900, static_cast<std::uint32_t>(index)));
  }
  for (std::size_t index = 0; index < offsets.size(); ++index) take_whole(static_cast<std::int64_t>(index));
  for (std::size_t index = 0; index < offsets.size(); ++index) {
    expect_content(places[index], static_cast<std::uint32_t>(index));
  }
}

TEST_P(PostedChannels, SenderOfAnotherSizeSaysSo) {
  open_both();
  post({piece(0, 2000)});
  send_one_tensor(0);
  const Failure failure = wait_failure(sender_wakeup_);
  EXPECT_EQ(failure.kind, FailureKind::kCorruptFrame);
  EXPECT_EQ(failure.message, std::string(kName) + ": the receiver posted 2000 bytes for an item of 3000");
}

TEST_P(PostedChannels, ItemOfAnotherSizeIsRefused) {
  open_posted_receiver();
  make_bare_sender();
  post({piece(0, 2000)});
  ASSERT_TRUE(bare_sender_.wait_frames(1));
  OutgoingFrame frame;
  FrameHeader& header = frame.header;
  header.kind = FrameKind::kTensor;
  header.slot = bare_sender_.frames().front().header.slot;
  header.num_tensors = 1;
  header.num_dims = 1;
  header.shape[0] = 3000;
  header.tensor_bytes = header.payload_bytes = 3000;
  frame.payload = std::span(payload_).first(3000);
  sender_link_->send(std::move(frame));
  expect_refused("an item of 3000 bytes where 2000 were posted");
}

TEST_P(PostedChannels, CreditsSayWhereEachItemGoesInTheOrderOfThePosts) {
  open_posted_receiver();
  make_bare_sender();
  post({piece(4096), piece(64, 100)});
  ASSERT_TRUE(bare_sender_.wait_frames(2));
  const std::vector<Recorder::Frame> credits = bare_sender_.frames();
  EXPECT_EQ(credits.at(0).header.tensor_bytes, kPieceBytes);
  EXPECT_EQ(credits.at(0).header.chunk_offset, placed() ? 4096U : 0U);
  EXPECT_EQ(credits.at(1).header.tensor_bytes, 100U);
  EXPECT_EQ(credits.at(1).header.chunk_offset, placed() ? 64U : 0U);
}

TEST_P(PostedChannels, ReceiverThatPostsWhatItDoesNotShareIsRefused) {
  if (!placed()) return;  // if the wire writes, the receiver alone decides where the bytes go
  make_bare_receiver();
  open_posted_sender();
  send_one_tensor(0);
  OutgoingFrame frame = grant_frame(0);
  frame.header.tensor_bytes = kPieceBytes;
  frame.header.chunk_offset = kVersionBytes - kPieceBytes + 1;
  receiver_link_->send(std::move(frame));
  const Failure failure = wait_failure(sender_wakeup_);
  EXPECT_EQ(failure.kind, FailureKind::kCorruptFrame);
  EXPECT_EQ(failure.message,
            std::string(kName) + ": the receiver granted slot 0, which is not in the memory that it shares");
}

INSTANTIATE_TEST_SUITE_P(Transports, PostedChannels,
                         testing::Combine(testing::Values("inproc", "zmq", "zmq_rings"),
                                          testing::Values(DataPath::kDirect, DataPath::kPlaced)),
                         [](const auto& parameter) {
                           return std::get<0>(parameter.param) + data_path_name(std::get<1>(parameter.param));
                         });

}  // namespace
}  // namespace pipedream
