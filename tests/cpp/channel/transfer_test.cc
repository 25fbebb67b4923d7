// Tests the times of a channel's transfers that both ends record.
#include "channel/transfer.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <string>
#include <tuple>
#include <vector>

#include "base/clock.h"
#include "channel/channels.h"

namespace pipedream {
namespace {

constexpr std::int64_t kNumItems = 5;
constexpr std::size_t kItemBytes = 3000;

class Transfers : public ChannelPair, public testing::WithParamInterface<std::tuple<std::string, DataPath>> {
 protected:
  void SetUp() override { take_data_path(std::get<0>(GetParam()), std::get<1>(GetParam())); }
  // Sends num_items, and waits until all have arrived and are released.
  void exchange(std::int64_t num_items) {
    for (std::int64_t minibatch = 0; minibatch < num_items; ++minibatch) {
      EXPECT_EQ(take_after_send(minibatch).minibatch, MinibatchId(minibatch));
      EXPECT_TRUE(sender_->wait_until_sent(patience()));
    }
  }
  [[nodiscard]] bool copies() const { return staged() || placed(); }
};

TEST_P(Transfers, TimesOfAnItemAreOrdered) {
  make_channels(one_tensor_spec(), {.chunk_bytes = 1000, .num_transfers_kept = 100});
  const std::int64_t before_ns = now_ns();
  exchange(kNumItems);
  const std::int64_t after_ns = now_ns();
  const std::vector<SentTransfer> sent = sender_->transfers();
  const std::vector<ReceivedTransfer> received = receiver_->transfers();
  ASSERT_EQ(sent.size(), kNumItems);
  ASSERT_EQ(received.size(), kNumItems);
  for (std::size_t index = 0; index < sent.size(); ++index) {
    SCOPED_TRACE(index);
    const SentTransfer& out = sent[index];
    const ReceivedTransfer& in = received[index];
    EXPECT_EQ(out.minibatch, MinibatchId(static_cast<std::int64_t>(index)));
    EXPECT_EQ(in.minibatch, out.minibatch);
    EXPECT_EQ(out.microbatch, MicrobatchIndex(0));
    EXPECT_EQ(in.microbatch, MicrobatchIndex(0));
    EXPECT_EQ(out.wire_bytes, kItemBytes);
    EXPECT_EQ(in.wire_bytes, kItemBytes);
    EXPECT_LE(before_ns, out.queued_ns);
    EXPECT_LE(out.queued_ns, out.started_ns);
    EXPECT_LE(out.started_ns, out.framed_ns);
    EXPECT_LE(out.framed_ns, out.released_ns);
    EXPECT_LE(out.framed_ns, in.arrived_ns);
    EXPECT_LE(in.arrived_ns, in.complete_ns);
    EXPECT_LE(in.complete_ns, after_ns);
    if (copies()) {
      EXPECT_LE(out.started_ns, out.copied_ns);
      EXPECT_LE(out.copied_ns, in.complete_ns);
    } else {
      EXPECT_EQ(out.copied_ns, 0);
    }
  }
}

TEST_P(Transfers, AnItemStartsWhenItHasRoomAtTheReceiver) {
  make_channels(one_tensor_spec(), {.num_slots = 1, .num_transfers_kept = 100});
  ReceivedItem held = take_after_send(0);
  send_one_tensor(1);
  const std::int64_t given_back_ns = now_ns();
  held = ReceivedItem();
  EXPECT_EQ(take().minibatch, MinibatchId(1));
  ASSERT_TRUE(sender_->wait_until_sent(patience()));
  const SentTransfer waited = sender_->transfers().at(1);
  EXPECT_LE(waited.queued_ns, given_back_ns);
  EXPECT_LE(given_back_ns, waited.started_ns);
}

TEST_P(Transfers, NewestAreKept) {
  make_channels(one_tensor_spec(), {.num_transfers_kept = 2});
  exchange(kNumItems);
  const auto expect_the_last_two = [](const auto& transfers) {
    ASSERT_EQ(transfers.size(), 2U);
    EXPECT_EQ(transfers[0].minibatch, MinibatchId(kNumItems - 2));
    EXPECT_EQ(transfers[1].minibatch, MinibatchId(kNumItems - 1));
  };
  expect_the_last_two(sender_->transfers());
  expect_the_last_two(receiver_->transfers());
}

TEST_P(Transfers, NoneAreKeptWhereNobodyAsks) {
  make_channels(one_tensor_spec(), {});
  exchange(1);
  EXPECT_TRUE(sender_->transfers().empty());
  EXPECT_TRUE(receiver_->transfers().empty());
}

TEST_P(Transfers, TheEndIsNone) {
  make_channels(one_tensor_spec(), {.num_transfers_kept = 100});
  exchange(1);
  sender_->send_end(1);
  EXPECT_TRUE(take().is_end);
  EXPECT_TRUE(sender_->wait_until_sent(patience()));
  EXPECT_EQ(sender_->transfers().size(), 1U);
  EXPECT_EQ(receiver_->transfers().size(), 1U);
}

TEST_P(Transfers, WhatNeverLeftIsNotKept) {
  make_channels(one_tensor_spec(), {.num_slots = 1, .num_transfers_kept = 100});
  const ReceivedItem held = take_after_send(0);
  send_one_tensor(1);
  receiving_->shutdown(0);
  EXPECT_EQ(wait_failure(sender_wakeup_).kind, FailureKind::kPeerLost);
  wait_until_none_is_unreleased();
  const std::vector<SentTransfer> sent = sender_->transfers();
  ASSERT_EQ(sent.size(), 1U);
  EXPECT_EQ(sent[0].minibatch, MinibatchId(0));
}

TEST_P(Transfers, AreInTheOrderInWhichTheyWereSentWhateverWasReleasedFirst) {
  make_channels(one_tensor_spec(), {.num_slots = 4, .num_items_max = 100, .num_transfers_kept = 100});
  for (std::int64_t minibatch = 0; minibatch < 100; ++minibatch) send_one_tensor(minibatch);
  for (std::int64_t minibatch = 0; minibatch < 100; ++minibatch) static_cast<void>(take());
  ASSERT_TRUE(sender_->wait_until_sent(patience()));
  const std::vector<SentTransfer> sent = sender_->transfers();
  ASSERT_EQ(sent.size(), 100U);
  for (std::int64_t minibatch = 0; minibatch < 100; ++minibatch) {
    EXPECT_EQ(sent[static_cast<std::size_t>(minibatch)].minibatch, MinibatchId(minibatch));
  }
}

std::string parameter_name(const testing::TestParamInfo<std::tuple<std::string, DataPath>>& parameter) {
  return std::get<0>(parameter.param) + data_path_name(std::get<1>(parameter.param));
}

INSTANTIATE_TEST_SUITE_P(
    Transports, Transfers,
    testing::Combine(testing::Values("inproc", "zmq", "zmq_rings"),
                     testing::ValuesIn(with_cuda({DataPath::kDirect, DataPath::kStaged, DataPath::kPlaced,
                                                  DataPath::kPlacedStaged, DataPath::kDeviceStaged,
                                                  DataPath::kDevicePlaced}))),
    parameter_name);

}  // namespace
}  // namespace pipedream
