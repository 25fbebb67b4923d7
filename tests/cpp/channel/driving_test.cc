// Tests that the threads at both ends of a channel drive the transport (transport.h) if no other thread does,
// and that nothing is lost if another thread drives.
#include <gtest/gtest.h>

#include <atomic>
#include <thread>

#include "channels.h"

namespace pipedream {
namespace {

using DrivingCase = std::tuple<std::string, DataPath>;

class ChannelDriving : public ChannelPair, public testing::WithParamInterface<DrivingCase> {
 protected:
  void SetUp() override { take_data_path(std::get<0>(GetParam()), std::get<1>(GetParam())); }

  [[nodiscard]] DataPath data_path() const { return std::get<1>(GetParam()); }
};

// Repeats until no other thread drives the transport. If another thread drives, send() leaves the item to
// that thread, and the item leaves a little later.
TEST_P(ChannelDriving, ItemOfAFreeSenderHasLeftWhenSendReturns) {
  if (staged() || on_device()) GTEST_SKIP() << "it leaves when the copy stream has copied it";
  make_channels(one_tensor_spec(), {});
  std::int64_t minibatch = 0;
  EXPECT_TRUE(wait_until([&] {
    send_one_tensor(minibatch++);
    const bool has_left = sender_->stats().num_items == static_cast<std::uint64_t>(minibatch);
    const ReceivedItem item = take();
    EXPECT_TRUE(sender_->wait_until_sent(patience()));
    return has_left;
  }));
}

TEST_P(ChannelDriving, CreditOfADroppedItemHasLeftWhenItIsGone) {
  if (is_placed_on_device(data_path())) GTEST_SKIP() << "it leaves when its readers are done";
  make_channels(one_tensor_spec(), {});
  std::int64_t minibatch = 0;
  EXPECT_TRUE(wait_until([&] {
    ReceivedItem item = take_after_send(minibatch++);
    const std::uint64_t num_credits = receiver_->stats().link.frames_sent;
    item = ReceivedItem();
    return receiver_->stats().link.frames_sent > num_credits;
  }));
}

// Repeats until no other thread happens to drive the transport while the item is dropped.
TEST_P(ChannelDriving, CreditOfWhatIsDroppedDuringAWorkItemLeavesAtItsEnd) {
  if (is_placed_on_device(data_path())) GTEST_SKIP() << "it leaves when its readers are done";
  make_channels(one_tensor_spec(), {});
  std::int64_t minibatch = 0;
  EXPECT_TRUE(wait_until([&] {
    ReceivedItem item = take_after_send(minibatch++);
    const auto num_credits = [this] { return receiver_->stats().link.frames_sent; };
    const std::uint64_t num_before = num_credits();
    receiver_wakeup_.begin_item();
    item = ReceivedItem();
    const std::uint64_t num_during = num_credits();
    receiver_wakeup_.end_item();
    return num_during == num_before && num_credits() > num_before;
  }));
}

TEST_P(ChannelDriving, CreditOfWhatAnotherThreadDropsDuringAWorkItemLeavesBeforeItsEnd) {
  if (is_placed_on_device(data_path())) GTEST_SKIP() << "it leaves when its readers are done";
  make_channels(one_tensor_spec(), {});
  ReceivedItem item = take_after_send(0);
  const std::uint64_t num_before = receiver_->stats().link.frames_sent;
  receiver_wakeup_.begin_item();
  std::thread([&] { item = ReceivedItem(); }).join();
  EXPECT_TRUE(wait_until([&] { return receiver_->stats().link.frames_sent > num_before; }));
  receiver_wakeup_.end_item();
}

// The threads at both ends wait, send and drop items at the same time. If anything were lost, they would
// stop.
TEST_P(ChannelDriving, NothingIsLostBetweenThreadsThatSendWaitAndDrop) {
  const std::int64_t num_items = on_device() ? 200 : 2000;
  make_channels(one_tensor_spec(), {.num_slots = 3, .num_items_max = 4});
  std::thread sending([&] {
    const auto content = one_tensor(3000, 1);
    for (std::int64_t minibatch = 0; minibatch < num_items; ++minibatch) {
      sender_->collect_released();
      ASSERT_TRUE(sender_->wait_for_room(patience())) << "minibatch " << minibatch;
      send(minibatch, content);
    }
    EXPECT_TRUE(sender_->wait_until_sent(patience()));
  });
  ReceivedItem before;  // holds the item before, which is dropped while the next one arrives
  for (std::int64_t minibatch = 0; minibatch < num_items; ++minibatch) {
    ReceivedItem item = take();
    ASSERT_EQ(item.minibatch, MinibatchId(minibatch));
    std::thread dropping;
    if (minibatch % 64 == 0) dropping = std::thread([&] { before = ReceivedItem(); });
    if (dropping.joinable()) dropping.join();
    before = std::move(item);
  }
  before = ReceivedItem();
  sending.join();
}

TEST_P(ChannelDriving, ItemsMayDieWhileTheChannelDetachesAndEnds) {
  make_channels(one_tensor_spec(), {.num_slots = 4});
  std::vector<ReceivedItem> items;
  for (std::int64_t minibatch = 0; minibatch < 4; ++minibatch) items.push_back(take_after_send(minibatch));
  std::thread dropping([&] { items.clear(); });
  receiver_->detach();
  sending_->shutdown(0);
  receiving_->shutdown(0);
  receiver_.reset();
  dropping.join();
}

// The thread that drives the transport ends the link and waits for the copy stream. A host stream runs on a
// thread of its own. If the stream's thread drove the transport, it would wait for itself.
TEST_P(ChannelDriving, FailureInTheMidstOfSendingEndsBothWaits) {
  make_channels(one_tensor_spec(), {.num_slots = 3, .num_items_max = 4});
  std::thread sending([&] {
    const auto content = one_tensor(3000, 1);
    for (std::int64_t minibatch = 0; sender_->wait_for_room(patience()); ++minibatch) {
      sender_->collect_released();
      if (sender_wakeup_.failure()) break;
      send(minibatch, content);
    }
  });
  for (int index = 0; index < 20; ++index) static_cast<void>(take());
  core_of(*receiving_).abandon();
  sending.join();
  EXPECT_TRUE(sender_wakeup_.failure().has_value());
}

INSTANTIATE_TEST_SUITE_P(
    DataPaths, ChannelDriving,
    testing::Combine(testing::Values("inproc", "zmq"),
                     testing::ValuesIn(with_cuda({DataPath::kDirect, DataPath::kStaged, DataPath::kPlaced,
                                                  DataPath::kDeviceStaged, DataPath::kDevicePlaced}))),
    [](const auto& parameter) {
      return std::get<0>(parameter.param) + data_path_name(std::get<1>(parameter.param));
    });

}  // namespace
}  // namespace pipedream
