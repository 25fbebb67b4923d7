// Tests both ends of a channel, over every transport and on every data path (data_paths.h). Items are staged,
// as on a device whose memory the wire cannot read, or placed, as on one host.
#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <cstring>
#include <functional>
#include <latch>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#include "channel/channels.h"
#include "support/stream_gate.h"

namespace pipedream {
namespace {

class Channels : public ChannelPair, public testing::WithParamInterface<std::tuple<std::string, DataPath>> {
 protected:
  void SetUp() override { take_data_path(std::get<0>(GetParam()), std::get<1>(GetParam())); }
};

class StagedChannels : public Channels {};
class DeviceStaged : public Channels {};
class CopyingChannels : public Channels {};

// ---- Order and content ----

TEST_P(Channels, ItemsOfEverySizeArriveInOrderAndUnchanged) {
  const ItemSpec spec(
      {{DType::kFloat32, 3, 4 * 40 * 25 * 10}, {DType::kInt64, 0, 8}, {DType::kUInt8, 1, 5000}});
  make_channels(spec, {.num_slots = 3, .num_items_max = 40});
  std::vector<std::shared_ptr<Content>> contents;
  for (std::uint32_t minibatch = 0; minibatch < 40; ++minibatch) {
    auto content = std::make_shared<Content>();
    content->add(DType::kFloat32, {40 - minibatch, 25, 10}, minibatch);
    content->add(DType::kInt64, {}, minibatch + 100);
    content->add(DType::kUInt8, {minibatch == 0 ? 5000 : 125 * minibatch}, minibatch + 200);
    contents.push_back(content);
    send(minibatch, content,
         {.data_fingerprint = 7000 + minibatch,
          .loss_scale = 0.5 * minibatch,
          .gradients_overflowed = minibatch % 2 == 0,
          .is_empty = minibatch % 3 == 0});
  }
  sender_->send_end(40);
  for (std::uint32_t minibatch = 0; minibatch < 40; ++minibatch) {
    const ReceivedItem item = take();
    ASSERT_FALSE(item.is_end);
    EXPECT_EQ(item.minibatch, MinibatchId(minibatch));
    EXPECT_EQ(item.fields.data_fingerprint, 7000 + minibatch);
    EXPECT_EQ(item.fields.loss_scale, 0.5 * minibatch);
    EXPECT_EQ(item.fields.gradients_overflowed, minibatch % 2 == 0);
    EXPECT_EQ(item.fields.is_empty, minibatch % 3 == 0);
    expect_equal(item, *contents[minibatch]);
  }
  const ReceivedItem end = take();
  EXPECT_TRUE(end.is_end);
  EXPECT_EQ(end.num_minibatches, 40);
}

TEST_P(Channels, ChunksOfEverySizeCarryTheSameBytes) {
  for (const std::size_t chunk_bytes : {1U, 7U, 64U, 128U, 129U, 4096U}) {
    SCOPED_TRACE(chunk_bytes);
    Channels::SetUp();
    Pool pool(*device_);
    const ItemSpec spec({{DType::kUInt8, 1, 128}, {DType::kUInt8, 1, 128}});
    add_terms(pool, spec, {.num_slots = 1});
    pool.seal();
    receiver_ =
        std::make_unique<ReceiveChannel>(channel_options(spec, chunk_bytes, 1), *receiving_, receiver_wakeup_,
                                         *device_, *slots_, receive_staging_, compute_stream_.get(), shared_);
    receiver_link_ = &receiving_->listen(link_options(), *receiver_);
    receiver_->attach(*receiver_link_);
    make_sender(spec, {.chunk_bytes = chunk_bytes}, receiver_link_->endpoint());
    for (std::int64_t minibatch = 0; minibatch < 3; ++minibatch) {
      auto content = std::make_shared<Content>();
      content->add(DType::kUInt8, {128 - minibatch}, 3);
      content->add(DType::kUInt8, {minibatch == 1 ? 64 : 128}, 4);
      send(minibatch, content);
      expect_equal(take(), *content);
    }
    const ChannelStats stats = sender_->stats();
    EXPECT_EQ(stats.num_items, 3U);
    EXPECT_EQ(stats.tensor_bytes, 128U + 128 + 127 + 64 + 126 + 128);
    EXPECT_EQ(stats.placed_bytes, placed() ? stats.tensor_bytes : 0U);
    EXPECT_GE(stats.num_chunks, (stats.tensor_bytes + chunk_bytes - 1) / chunk_bytes);
    EXPECT_GE(stats.link.bytes_sent,
              stats.num_chunks * kFrameHeaderBytes + stats.tensor_bytes - stats.placed_bytes);
    stop();
  }
}

TEST_P(Channels, TensorsWithoutBytesKeepTheirShape) {
  make_channels(ItemSpec({{DType::kFloat32, 2, 60}, {DType::kFloat32, 2, 60}, {DType::kFloat32, 2, 0}}), {});
  for (std::uint32_t minibatch = 0; minibatch < 4; ++minibatch) {
    auto content = std::make_shared<Content>();
    content->add(DType::kFloat32, {0, 3}, 0);
    content->add(DType::kFloat32, {minibatch % 2 == 0 ? 5 : 0, 3}, minibatch);
    content->add(DType::kFloat32, {7, 0}, 0);
    send(minibatch, content);
    expect_equal(take(), *content);
  }
}

TEST_P(Channels, ManyTensorsTravelAsOneItem) {
  constexpr std::uint32_t kNumTensors = 300;
  make_channels(ItemSpec(std::vector<TensorSpec>(kNumTensors, {DType::kInt16, 1, 64})), {});
  for (std::uint32_t minibatch = 0; minibatch < 3; ++minibatch) {
    auto content = std::make_shared<Content>();
    for (std::uint32_t tensor = 0; tensor < kNumTensors; ++tensor) {
      content->add(DType::kInt16, {(tensor + minibatch) % 33}, tensor);
    }
    send(minibatch, content);
    expect_equal(take(), *content);
  }
}

TEST_P(CopyingChannels, CopyWaitsForTheEventThatTheTensorsAreWritten) {
  make_channels(one_tensor_spec(), {});
  const auto stream = device_->make_stream();
  const std::unique_ptr<Memory> written = pinned(patterned_bytes(4096, 5));
  const std::unique_ptr<Memory> memory = device_->allocate(4096, MemoryKind::kDevice);
  auto content = one_tensor(4096, 5);
  content->tensors[0].data = memory->data();
  PD_SKIP_WITHOUT_GATES(*device_);
  StreamGate gate(*device_, *stream);
  stream->copy(memory->data(), written->data(), written->size_bytes());
  auto ready = device_->make_event();
  stream->record(*ready);
  sender_->send(MinibatchId(0), MicrobatchIndex(0), {}, content->tensors, std::move(ready),
                deaths_.watch(content));
  EXPECT_TRUE(nothing_comes());
  gate.open();
  expect_equal(take(), *content);
  ASSERT_TRUE(sender_->wait_until_sent(patience()));
}

// ---- Credits ----

TEST_P(Channels, HeldItemsStopTheSenderButNotSend) {
  make_channels(one_tensor_spec(), {.num_slots = 2});
  for (std::int64_t minibatch = 0; minibatch < 6; ++minibatch) send_one_tensor(minibatch);  // no send blocks
  std::vector<ReceivedItem> held;
  held.push_back(take());
  held.push_back(take());
  EXPECT_TRUE(nothing_comes());
  EXPECT_GE(sender_->num_unreleased(), 4U);
  EXPECT_EQ(slots_->num_free(), 0);
  for (std::int64_t minibatch = 2; minibatch < 6; ++minibatch) {
    held.erase(held.begin());
    held.push_back(take());
    EXPECT_EQ(held.back().minibatch, MinibatchId(minibatch));
    expect_equal(held.back(), *one_tensor(3000, static_cast<std::uint32_t>(minibatch)));
  }
  expect_equal(held.front(), *one_tensor(3000, 4));  // the held items have other slots
  EXPECT_TRUE(sender_->wait_until_sent(patience()));
}

TEST_P(Channels, EveryCreditComesBackOverManyItemsFromAnotherThread) {
  make_channels(one_tensor_spec(), {.num_slots = 3, .num_items_max = 4});
  constexpr std::int64_t kNumItems = 500;
  std::thread consumer([&] {
    ReceivedItem kept;  // each item is dropped by the next, on this thread
    for (std::int64_t minibatch = 0; minibatch < kNumItems; ++minibatch) {
      ReceivedItem item = take();
      ASSERT_EQ(item.minibatch, MinibatchId(minibatch));
      expect_equal(item, *one_tensor(minibatch % 4096, static_cast<std::uint32_t>(minibatch)));
      kept = std::move(item);
    }
  });
  for (std::int64_t minibatch = 0; minibatch < kNumItems; ++minibatch) {
    sender_->collect_released();
    ASSERT_TRUE(sender_->wait_for_room(patience())) << failure_text(sender_wakeup_);
    EXPECT_LT(sender_->num_unreleased(), 4U);
    send(minibatch, one_tensor(minibatch % 4096, static_cast<std::uint32_t>(minibatch)));
  }
  consumer.join();
  EXPECT_TRUE(sender_->wait_until_sent(patience()));
  sender_->collect_released();
  EXPECT_EQ(deaths_.count(), static_cast<std::size_t>(kNumItems));
  EXPECT_TRUE(deaths_.all_on_this_thread());
}

TEST_P(Channels, EndNeedsNoRoomAmongTheItems) {
  make_channels(one_tensor_spec(), {.num_slots = 1, .num_items_max = 2});
  send_one_tensor(0);
  const ReceivedItem held = take();
  ASSERT_TRUE(sender_->wait_until_sent(patience()));
  send_one_tensor(1);
  send_one_tensor(2);
  EXPECT_FALSE(sender_->wait_for_room(moment()));
  sender_->send_end(3);
  EXPECT_FALSE(sender_->wait_until_sent(moment()));
}

// On an asynchronous device an item is dropped while its reader's kernels are still enqueued. So the copy of
// the next item into its slot waits. That item is dropped unread, and its staging buffer is needed until the
// copy is done. The item after it must not overwrite the buffer.
TEST_P(StagedChannels, StagingBufferIsKeptUntilItsCopyIsDoneThoughTheItemIsGone) {
  make_channels(one_tensor_spec(), {.num_slots = 1}, /*computes_apart=*/true);
  const std::unique_ptr<Memory> read_late = pinned(std::vector<std::byte>(3000));
  ReceivedItem item = take_after_send(0);
  PD_SKIP_WITHOUT_GATES(*device_);
  StreamGate gate(*device_, *compute_stream_);
  compute_stream_->copy(read_late->data(), item.tensors[0].data, read_late->size_bytes());
  item = ReceivedItem();  // dropped before it was read
  send_one_tensor(1);
  ReceivedItem unread;
  ASSERT_TRUE(receiver_wakeup_.wait_until(patience(), [&] { return receiver_->try_take(unread); }));
  ASSERT_FALSE(unread.ready->done());
  unread = ReceivedItem();
  EXPECT_EQ(slots_->num_free(), 0);
  EXPECT_EQ(receive_staging_->num_free(), 0);
  send_one_tensor(2);
  EXPECT_TRUE(nothing_comes());
  gate.open();
  expect_equal(take(), *one_tensor(3000, 2));
  compute_stream_->synchronize();
  EXPECT_EQ(bytes_at(*read_late), patterned_bytes(3000, 0));
}

// While two threads drop two items, the first item's slot is granted together with the staging buffer of the
// second item. The copy into the slot must wait for the readers of this slot, and not for those of the other
// one.
TEST_P(DeviceStaged, SlotIsWrittenAfterItsOwnReadersWhicheverStagingBufferItGets) {
  const Sizes sizes{.num_slots = 2};
  make_receiver_terms(one_tensor_spec(), sizes);
  struct Gates {
    std::latch first_is_halfway{1};
    std::latch second_is_halfway{1};
    std::latch first_is_granted{1};
    std::atomic<int> num_released{0};
  };
  // Shared, because the channel releases slots after this test's variables are gone.
  const auto gates = std::make_shared<Gates>();
  receive_staging_->on_release([gates] {
    const int index = gates->num_released++;
    if (index == 0) {
      gates->first_is_halfway.count_down();
      gates->second_is_halfway.wait();
    } else if (index == 1) {
      gates->second_is_halfway.count_down();
      gates->first_is_granted.wait();
    }
  });
  open_receiver(one_tensor_spec(), sizes);
  open_sender(one_tensor_spec(), sizes);
  ReceivedItem first = take_after_send(0);
  ReceivedItem second = take_after_send(1);
  copies_are_done(first);
  copies_are_done(second);
  const std::byte* const slot = first.tensors[0].data;
  const SlotIndex staging_of_second = second.held->staging.slot();

  const auto late_holder = second.held;  // stands in for the copy stream, which may hold the slot longer
  ++late_holder->num_holders;
  second = ReceivedItem();  // no stream reads it
  PD_SKIP_WITHOUT_GATES(*device_);
  StreamGate gate(*device_, *compute_stream_);
  const std::unique_ptr<Memory> read_late = pinned(std::vector<std::byte>(3000));
  compute_stream_->copy(read_late->data(), slot, read_late->size_bytes());
  std::thread dropping([&] { first = ReceivedItem(); });
  gates->first_is_halfway.wait();
  std::thread also_dropping([&] { late_holder->drop(); });
  dropping.join();
  send_one_tensor(2);
  ReceivedItem third;
  ASSERT_TRUE(receiver_wakeup_.wait_until(patience(), [&] { return receiver_->try_take(third); }));
  EXPECT_EQ(third.tensors[0].data, slot);
  EXPECT_EQ(third.held->staging.slot(), staging_of_second);
  gates->first_is_granted.count_down();
  also_dropping.join();
  gate.open();
  compute_stream_->wait(*third.ready);
  expect_equal(third, *one_tensor(3000, 2));
  EXPECT_EQ(bytes_at(*read_late), patterned_bytes(3000, 0));
}

// ---- keep_alive ----

TEST_P(Channels, KeepAliveDiesOnceOnTheCollectingThread) {
  make_channels(one_tensor_spec(), {});
  for (std::int64_t minibatch = 0; minibatch < 5; ++minibatch) {
    send_one_tensor(minibatch);
    static_cast<void>(take());
  }
  ASSERT_TRUE(sender_->wait_until_sent(patience()));
  EXPECT_EQ(deaths_.count(), 0U);  // no other thread has destroyed a keep_alive
  sender_->collect_released();
  EXPECT_EQ(deaths_.count(), 5U);
  EXPECT_TRUE(deaths_.all_on_this_thread());
  stop();
  EXPECT_EQ(deaths_.count(), 5U);
}

TEST_P(Channels, KeepAliveDiesOnceOnTheCollectingThreadAlsoWhenThePeerIsLost) {
  make_channels(one_tensor_spec(), {.num_slots = 2});
  for (std::int64_t minibatch = 0; minibatch < 8; ++minibatch) send_one_tensor(minibatch);
  const ReceivedItem held = take();
  core_of(*receiving_).abandon();
  const Failure failure = wait_failure(sender_wakeup_);
  EXPECT_EQ(failure.kind, FailureKind::kPeerLost) << failure.message;
  EXPECT_NE(failure.message.find(kName), std::string::npos) << failure.message;
  send_one_tensor(8);  // items sent after the failure are released too
  sender_->send_end(9);
  wait_until_none_is_unreleased();
  EXPECT_EQ(deaths_.count(), 0U);
  sender_->collect_released();
  EXPECT_EQ(deaths_.count(), 9U);
  EXPECT_TRUE(deaths_.all_on_this_thread());
  stop();
  EXPECT_EQ(deaths_.count(), 9U);
}

TEST_P(Channels, KeepAliveOfWhatNeverLeftDiesWithTheChannel) {
  make_receiver(one_tensor_spec(), {});
  make_bare_receiver();  // this receiver gives no credits
  make_sender(spec_, {}, receiver_link_->endpoint());
  for (std::int64_t minibatch = 0; minibatch < 4; ++minibatch) send_one_tensor(minibatch);
  sender_->send_end(4);
  stop();
  EXPECT_EQ(deaths_.count(), 4U);
  EXPECT_TRUE(deaths_.all_on_this_thread());
}

// The channel is destroyed while an item's copy still waits for an event. The copy reads the tensors until it
// is done, so they must live as long.
TEST_P(CopyingChannels, KeepAliveOutlivesACopyThatIsUnderWay) {
  make_channels(one_tensor_spec(), {});
  const auto stream = device_->make_stream();
  PD_SKIP_WITHOUT_GATES(*device_);
  StreamGate gate(*device_, *stream);
  auto ready = device_->make_event();
  stream->record(*ready);
  const std::unique_ptr<Memory> memory = device_->allocate(4096, MemoryKind::kDevice);
  const auto content = one_tensor(4096, 5);
  content->tensors[0].data = memory->data();
  sender_->send(MinibatchId(0), MicrobatchIndex(0), {}, content->tensors, std::move(ready),
                deaths_.watch(content));
  std::latch pumped(1);
  sending_->post([&] { pumped.count_down(); });
  pumped.wait();
  // Waits until the copy has a staging buffer, if the data path has staging buffers.
  if (staged()) {
    const std::int64_t num_left = placed() ? 2 : 1;
    const Deadline deadline = patience();
    while (send_staging_->num_free() != num_left && Clock::now() < deadline) std::this_thread::yield();
    EXPECT_EQ(send_staging_->num_free(), num_left);
  }
  std::thread opener([&] {
    std::this_thread::sleep_until(moment());  // a channel that did not wait would end in this time
    EXPECT_EQ(deaths_.count(), 0U);
    gate.open();
  });
  stop();
  opener.join();
  EXPECT_EQ(deaths_.count(), 1U);
}

// ---- Frames against the plan ----

TEST_P(Channels, TensorsThatAreNotAsPlannedAreTheSendersMistake) {
  make_channels(ItemSpec({{DType::kFloat32, 2, 400}}), {});
  const auto expect_user_error = [&](const std::shared_ptr<Content>& content, const std::string& what) {
    try {
      send(7, content);
      FAIL() << "sent, not '" << what << "'";
    } catch (const UserError& error) {
      const std::string text = error.what();
      EXPECT_NE(text.find(std::string(kName) + ", minibatch 7: "), std::string::npos) << text;
      EXPECT_NE(text.find(what), std::string::npos) << text;
    }
  };
  auto content = std::make_shared<Content>();
  expect_user_error(content, "0 tensors, planned 1");
  content->add(DType::kFloat32, {101, 1}, 0);
  expect_user_error(content, "404 bytes, planned at most 400 (float32[101, 1])");
  content = std::make_shared<Content>();
  content->add(DType::kFloat64, {5, 5}, 0);
  expect_user_error(content, "dtype float64, planned float32");
  content = std::make_shared<Content>();
  content->add(DType::kFloat32, {100}, 0);
  expect_user_error(content, "rank 1, planned 2");
  EXPECT_EQ(sender_->num_unreleased(), 0U);
}

struct Break {
  const char* name;
  const char* what;
  // Changes a correct header into a broken one. Minibatch 0 has arrived whole before. The plan has two
  // tensors, of at most 4096 and 64 bytes.
  std::function<void(FrameHeader&)> change;
};

const std::vector<Break>& breaks() {
  static const std::vector<Break> all = {
      {"MinibatchRepeated", "minibatch 0 microbatch 0 where 1 microbatch 0 is due",
       [](FrameHeader& h) { h.minibatch = MinibatchId(0); }},
      {"MinibatchSkipped", "minibatch 2 microbatch 0 where 1 microbatch 0 is due",
       [](FrameHeader& h) { h.minibatch = MinibatchId(2); }},
      {"MicrobatchUnknown", "minibatch 1 microbatch 1 where 1 microbatch 0 is due",
       [](FrameHeader& h) { h.microbatch = MicrobatchIndex(1); }},
      {"TensorSkipped", "tensor 1 from byte 0 where tensor 0 from byte 0 is due",
       [](FrameHeader& h) { h.tensor_index = 1; }},
      {"TensorCountChanged", "3 tensors, planned 2", [](FrameHeader& h) { h.num_tensors = 3; }},
      {"ChunkSkipped", "tensor 0 from byte 1 where tensor 0 from byte 0 is due",
       [](FrameHeader& h) {
         h.chunk_offset = 1;
         h.payload_bytes = 10;
       }},
      {"TooLarge", "tensor 0 has 4097 bytes, planned at most 4096",
       [](FrameHeader& h) {
         h.shape[0] = 4097;
         h.tensor_bytes = 4097;
       }},
      {"OtherDtype", "tensor 0 has dtype int8, planned uint8",
       [](FrameHeader& h) { h.dtype = DType::kInt8; }},
      {"OtherRank", "tensor 0 has rank 2, planned 1",
       [](FrameHeader& h) {
         h.num_dims = 2;
         h.shape[1] = 1;
       }},
      {"EmptyChunk", "an empty chunk", [](FrameHeader& h) { h.payload_bytes = 0; }},
      {"EndTooEarly", "an end after 2 minibatches where minibatch 1 is due",
       [](FrameHeader& h) {
         h = FrameHeader();
         h.kind = FrameKind::kEnd;
         h.minibatch = MinibatchId(2);
       }},
      {"Credit", "a CREDIT frame",
       [](FrameHeader& h) {
         h = FrameHeader();
         h.kind = FrameKind::kCredit;
         h.slot = 1;
       }},
      {"SlotNotGranted", "an item in slot 2, which was not granted", [](FrameHeader& h) { h.slot = 2; }},
      {"SlotFarAway", "an item in slot 65535, which was not granted", [](FrameHeader& h) { h.slot = 65535; }},
      {"SlotThatIsFull", "an item in slot 0, which was not granted", [](FrameHeader& h) { h.slot = 0; }},
      // The memory counts as not shared, because the sender is a bare link and has not opened it.
      {"Placed", "tensor 0 is placed in memory that is not shared",
       [](FrameHeader& h) { h.placed_bytes = std::exchange(h.payload_bytes, 0); }},
  };
  return all;
}

class BrokenSender : public Channels {
 protected:
  void SetUp() override {
    Channels::SetUp();
    if (IsSkipped()) return;
    make_receiver(ItemSpec({{DType::kUInt8, 1, 4096}, {DType::kUInt8, 1, 64}}), {.num_slots = 2});
    make_bare_sender();
  }

  // Returns the correct header of a frame with the whole first tensor of the minibatch.
  static FrameHeader good_header(std::int64_t minibatch = 1) {
    FrameHeader header;
    header.kind = FrameKind::kTensor;
    header.minibatch = MinibatchId(minibatch);
    header.slot = static_cast<std::uint16_t>(minibatch);  // slots were granted in ascending order
    header.num_tensors = 2;
    header.num_dims = 1;
    header.shape[0] = 100;
    header.tensor_bytes = 100;
    header.payload_bytes = 100;
    return header;
  }
  void send_frame(const FrameHeader& header) {
    OutgoingFrame frame;
    frame.header = header;
    frame.payload = std::span<const std::byte>(payload_).first(header.payload_bytes);
    sender_link_->send(std::move(frame));
  }
  void send_good_item(std::int64_t minibatch) {
    FrameHeader header = good_header(minibatch);
    send_frame(header);
    header.tensor_index = 1;
    header.shape[0] = 0;
    header.tensor_bytes = 0;
    header.payload_bytes = 0;
    send_frame(header);
  }
};

TEST_P(BrokenSender, IsRefusedWithOneClearLine) {
  for (const Break& broken : breaks()) {
    SCOPED_TRACE(broken.name);
    Pool pool(*device_);
    Wakeup wakeup;
    add_terms(pool, spec_, {.num_slots = 2});
    pool.seal();
    const auto receiving = make_transport(transport_);
    const auto sending = make_transport(transport_);
    wakeup.drive_while_waiting(*receiving);
    Recorder recorder;
    auto receiver = std::make_unique<ReceiveChannel>(channel_options(spec_, 1000, 2), *receiving, wakeup,
                                                     *device_, *slots_, receive_staging_, nullptr, shared_);
    Link& listener = receiving->listen(link_options("stage 0 (rank 0)"), *receiver);
    sender_link_ = &sending->connect(link_options(), listener.endpoint(), recorder);
    send_good_item(0);
    ReceivedItem first;
    ASSERT_TRUE(wakeup.wait_until(patience(), [&] { return receiver->try_take(first); }));
    FrameHeader header = good_header();
    broken.change(header);
    send_frame(header);
    static_cast<void>(wakeup.wait_until(patience(), [] { return false; }));
    const auto failure = wakeup.failure();
    ASSERT_TRUE(failure.has_value());
    EXPECT_EQ(failure->kind, FailureKind::kCorruptFrame);
    EXPECT_EQ(failure->message.find(std::string(kName) + ": the sender broke the protocol: "), 0U)
        << failure->message;
    EXPECT_NE(failure->message.find(broken.what), std::string::npos) << failure->message;
    EXPECT_EQ(failure->message.find('\n'), std::string::npos) << failure->message;
    receiving->shutdown(0);
    sending->shutdown(0);
    receiver.reset();
    EXPECT_EQ(slots_->num_free(), 1);  // only the first item's slot is in use
  }
}

TEST_P(BrokenSender, ShapeMayNotChangeBetweenChunks) {
  FrameHeader header = good_header(0);
  header.num_dims = 1;
  header.payload_bytes = 50;
  send_frame(header);
  header.chunk_offset = 50;
  header.shape[0] = 120;
  header.tensor_bytes = 120;
  send_frame(header);
  expect_refused("a shape that changes between chunks");
  stop();
  EXPECT_EQ(slots_->num_free(), 2);  // the slot of the incomplete item is given back
}

TEST_P(BrokenSender, TensorsOfAnItemComeInOrder) {
  FrameHeader header = good_header(0);
  send_frame(header);
  send_frame(header);
  expect_refused("tensor 0 from byte 0 where tensor 1 from byte 0 is due");
}

TEST_P(BrokenSender, SlotMayNotChangeInsideAnItem) {
  FrameHeader header = good_header(0);
  header.payload_bytes = 50;
  send_frame(header);
  header.chunk_offset = 50;
  header.slot = 1;  // granted, too
  send_frame(header);
  expect_refused("slot 1 inside an item in slot 0");
}

TEST_P(BrokenSender, FieldsMayNotChangeInsideAnItem) {
  FrameHeader header = good_header(0);
  header.payload_bytes = 50;
  send_frame(header);
  header.chunk_offset = 50;
  header.fields.gradients_overflowed = true;
  send_frame(header);
  expect_refused("fields of the item that change inside it");
}

TEST_P(BrokenSender, MinibatchMayNotChangeInsideAnItem) {
  FrameHeader header = good_header(0);
  send_frame(header);
  header.minibatch = MinibatchId(1);
  header.tensor_index = 1;
  header.shape[0] = 0;
  header.tensor_bytes = 0;
  header.payload_bytes = 0;
  send_frame(header);
  expect_refused("minibatch 1 microbatch 0 where 0 microbatch 0 is due");
}

TEST_P(BrokenSender, ItemWithoutACreditIsRefusedBeforeItIsRead) {
  for (std::int64_t minibatch = 0; minibatch < 3; ++minibatch) send_good_item(minibatch);
  expect_refused("an item in slot 2, which was not granted");
  EXPECT_EQ(take().minibatch, MinibatchId(0));  // earlier items can still be taken
  EXPECT_EQ(take().minibatch, MinibatchId(1));
}

// A slot may be free and leased again while its credit is held back, so that the sender does not know of it.
// The receiver must refuse an item in such a slot. Otherwise its count of the sender's slots would fall below
// zero.
TEST_P(Channels, ASlotWhoseCreditIsHeldBackIsNotGranted) {
  if (on_device() && placed()) return;  // over this path the wire writes no slots
  make_receiver(one_tensor_spec(), {.num_slots = 8});
  make_bare_sender();
  for (std::int64_t minibatch = 0; minibatch < 9; ++minibatch) {
    OutgoingFrame frame;
    FrameHeader& header = frame.header;
    header.kind = FrameKind::kTensor;
    header.minibatch = MinibatchId(minibatch);
    header.num_tensors = 1;
    header.num_dims = 1;
    header.shape[0] = 100;
    header.tensor_bytes = header.payload_bytes = 100;
    frame.payload = std::span(payload_).first(100);
    sender_link_->send(std::move(frame));
    if (receiver_wakeup_.failure()) break;
    ReceivedItem item;
    if (!take(item, patience())) break;
    copies_are_done(item);
  }
  expect_refused("an item in slot 0, which was not granted");
}

TEST_P(BrokenSender, EndInsideAnItemIsRefused) {
  send_frame(good_header(0));
  FrameHeader end;
  end.kind = FrameKind::kEnd;
  send_frame(end);
  expect_refused("an end after 0 minibatches where minibatch 0 is due");
}

TEST_P(BrokenSender, NothingMayFollowTheEnd) {
  FrameHeader end;
  end.kind = FrameKind::kEnd;
  send_frame(end);
  send_good_item(0);
  expect_refused("a tensor after the end");
}

TEST_P(BrokenSender, ASecondEndIsRefused) {
  FrameHeader end;
  end.kind = FrameKind::kEnd;
  send_frame(end);
  send_frame(end);
  expect_refused("an end after 0 minibatches");
}

// Each replica gets every n-th minibatch, so a channel has a first minibatch and a stride.
TEST_P(Channels, MinibatchesComeFromTheFirstByTheStrideUntilTheEnd) {
  make_channels(one_tensor_spec(), {.first_microbatch = 5, .microbatch_stride = 3});
  for (const std::int64_t minibatch : {5, 8, 11}) {
    send_one_tensor(minibatch);
    EXPECT_EQ(take().minibatch, MinibatchId(minibatch));
  }
  sender_->send_end(13, 0xA5);  // the run has 13 minibatches; 11 is the last one of this channel
  const ReceivedItem end = take();
  EXPECT_TRUE(end.is_end);
  EXPECT_EQ(end.num_minibatches, 13);
  EXPECT_EQ(end.fields.boundary_events, 0xA5);
}

TEST_P(Channels, MinibatchOfAnotherShareIsRefused) {
  make_channels(one_tensor_spec(), {.first_microbatch = 5, .microbatch_stride = 3});
  send_one_tensor(5);
  send_one_tensor(9);
  expect_refused("minibatch 9 microbatch 0 where 8 microbatch 0 is due");
}

TEST_P(Channels, EndThatDoesNotFitTheShareIsRefused) {
  make_channels(one_tensor_spec(), {.first_microbatch = 5, .microbatch_stride = 3});
  send_one_tensor(5);
  sender_->send_end(9);
  expect_refused("an end after 9 minibatches where minibatch 8 is due");
}

TEST_P(Channels, EndBeforeWhatHasComeIsRefused) {
  make_channels(one_tensor_spec(), {.first_microbatch = 5, .microbatch_stride = 3});
  send_one_tensor(5);
  sender_->send_end(5);
  expect_refused("an end after 5 minibatches where minibatch 8 is due");
}

TEST_P(Channels, SenderSaysWhichItemsSlotIsItsLast) {
  if (on_device()) GTEST_SKIP() << "a bare receiver has no device";
  make_receiver(one_tensor_spec(), {});
  make_bare_receiver();
  make_sender(spec_, {}, receiver_link_->endpoint());
  receiver_link_->send(grant_frame(0));
  receiver_link_->send(grant_frame(1));
  ASSERT_TRUE(bare_receiver_.wait_open());
  // The three frames are HELLO and two credits. The credits do not wake the sender's threads, so the test
  // polls.
  const auto is_granted = [&] { return sender_->stats().link.frames_received == 3; };
  ASSERT_TRUE(wait_until([&] { return sender_wakeup_.wait_until(moment(), is_granted); }));
  for (std::size_t item = 0; item < 2; ++item) {
    send(static_cast<std::int64_t>(item), one_tensor(10, 1));  // an item of one chunk
    ASSERT_TRUE(bare_receiver_.wait_frames(item + 1));
    EXPECT_EQ(bare_receiver_.frames().back().header.has_last_slot, item == 1) << item;
  }
}

TEST_P(Channels, CreditIsNotHeldWhileTheSenderHasNoOther) {
  if (on_device()) GTEST_SKIP() << "the wire cannot write its memory";
  make_receiver(one_tensor_spec(), {.num_slots = 8});
  make_bare_sender();
  ASSERT_TRUE(bare_sender_.wait_frames(1));  // the first credit frame grants all slots
  for (const std::int64_t minibatch : {0, 1, 2}) {
    OutgoingFrame frame = tensor_frame(minibatch, std::span<const std::byte>(payload_).first(10));
    frame.header.slot = static_cast<std::uint16_t>(minibatch);
    frame.header.has_last_slot = minibatch < 2;
    sender_link_->send(std::move(frame));
    static_cast<void>(take());  // takes the item and drops it
    if (minibatch == 2) continue;
    ASSERT_TRUE(bare_sender_.wait_frames(static_cast<std::size_t>(minibatch) + 2)) << minibatch;
    EXPECT_EQ(bare_sender_.frames().back().header.kind, FrameKind::kCredit);
  }
  std::this_thread::sleep_until(moment());
  EXPECT_EQ(bare_sender_.frames().size(), 3U) << "the last one is held";
}

TEST_P(Channels, ReceiverThatSendsTensorsIsRefused) {
  make_receiver(one_tensor_spec(), {});
  make_bare_receiver();
  make_sender(spec_, {}, receiver_link_->endpoint());
  ASSERT_TRUE(bare_receiver_.wait_open());
  receiver_link_->send(tensor_frame(0, std::span<const std::byte>(payload_).first(10)));
  const Failure failure = wait_failure(sender_wakeup_);
  EXPECT_EQ(failure.kind, FailureKind::kCorruptFrame);
  EXPECT_EQ(failure.message,
            std::string(kName) + ": the receiver sent a TENSOR frame that is not allowed here");
}

// A broken receiver may answer items although it granted no slots for them. Then the program goes on, and the
// sender's queue gets full.
TEST_P(Channels, ReceiverThatGrantsNothingWhileTheProgramGoesOnIsAFailure) {
  make_receiver(one_tensor_spec(), {});
  make_bare_receiver();
  make_sender(spec_, {.num_items_max = 4}, receiver_link_->endpoint());
  for (std::int64_t minibatch = 0; minibatch < 6; ++minibatch) send_one_tensor(minibatch);
  EXPECT_EQ(failure_text(sender_wakeup_), "no failure");
  send_one_tensor(6);
  const Failure failure = wait_failure(sender_wakeup_);
  EXPECT_EQ(failure.kind, FailureKind::kCorruptFrame);
  EXPECT_EQ(failure.message, std::string(kName) +
                                 ": the receiver holds back the slots for 4 items and goes on "
                                 "without them");
  EXPECT_EQ(sender_->num_unreleased(), 6U);
}

TEST_P(Channels, ReceiverThatGrantsASlotTwiceIsRefused) {
  make_receiver(one_tensor_spec(), {});
  make_bare_receiver();
  make_sender(spec_, {}, receiver_link_->endpoint());
  receiver_link_->send(grant_frame(1));
  receiver_link_->send(grant_frame(0));
  receiver_link_->send(grant_frame(1));
  // No item is queued, so these credits wake no thread. The sender drives until they have come.
  ASSERT_TRUE(wait_until([&] {
    static_cast<void>(sender_wakeup_.wait_until(Clock::now(), [] { return false; }));
    return sender_wakeup_.failure().has_value();
  }));
  const Failure failure = wait_failure(sender_wakeup_);
  EXPECT_EQ(failure.kind, FailureKind::kCorruptFrame);
  EXPECT_EQ(failure.message,
            std::string(kName) + ": the receiver granted slot 1 twice, or more than 4096 slots");
}

TEST_P(Channels, ReceiverThatGrantsWhatItDoesNotShareIsRefused) {
  make_receiver(one_tensor_spec(), {.num_slots = 2});
  make_bare_receiver();
  make_sender(spec_, {}, receiver_link_->endpoint());
  if (placed()) {
    send_one_tensor(0);  // an item is queued, so the sender reads credits at once
    receiver_link_->send(grant_frame(2));
    const Failure failure = wait_failure(sender_wakeup_);
    EXPECT_EQ(failure.kind, FailureKind::kCorruptFrame);
    EXPECT_EQ(
        failure.message,
        std::string(kName) + ": the receiver granted slot 2, which is not in the memory that it shares");
  } else {  // without shared memory the sender knows no bound for a slot's index
    receiver_link_->send(grant_frame(1));
    receiver_link_->send(grant_frame(2));
    for (std::int64_t minibatch = 0; minibatch < 2; ++minibatch) send_one_tensor(minibatch);
    EXPECT_TRUE(sender_->wait_until_sent(patience()));
  }
}

// ---- Farewell ----

void send_abort(Link& link, const std::string& text) {
  OutgoingFrame frame;
  frame.header.kind = FrameKind::kAbort;
  frame.header.payload_bytes = text.size();
  frame.payload = std::as_bytes(std::span(text));
  link.send(std::move(frame));
}

TEST_P(Channels, AbortTextArrivesOnBothEnds) {
  const std::string from_sender = "stage 0 stops: the loss is nan at minibatch 3";
  const std::string from_receiver = "stage 1 stops: out of memory";
  make_channels(one_tensor_spec(), {});
  send_one_tensor(0);
  ASSERT_TRUE(sender_->wait_until_sent(patience()));
  send_abort(*sender_link_, from_sender);
  const Failure at_receiver = wait_failure(receiver_wakeup_);
  EXPECT_EQ(at_receiver.kind, FailureKind::kAborted);
  EXPECT_EQ(at_receiver.message, from_sender);
  EXPECT_EQ(take().minibatch, MinibatchId(0));  // earlier items can still be taken
  stop();

  Wakeup wakeup;
  sending_ = make_transport(transport_);
  receiving_ = make_transport(transport_);
  make_bare_receiver();
  SendChannel sender(channel_options(one_tensor_spec(), 1000, 4), *sending_, wakeup, *device_, nullptr);
  sender_link_ = &sending_->connect(link_options(), receiver_link_->endpoint(), sender);
  send_abort(*receiver_link_, from_receiver);
  const Failure at_sender = wait_failure(wakeup);
  EXPECT_EQ(at_sender.kind, FailureKind::kAborted);
  EXPECT_EQ(at_sender.message, from_receiver);
  sending_->shutdown(0);
}

// Python reads messages as UTF-8, and would raise an error of its own for other bytes.
TEST_P(Channels, AbortTextThatIsNoUtf8IsReadable) {
  const std::string text = "stage 0 stops: caf\xE9";
  make_channels(one_tensor_spec(), {});
  send_abort(*sender_link_, text);
  EXPECT_EQ(wait_failure(receiver_wakeup_).message, "stage 0 stops: caf\xEF\xBF\xBD");
  stop();
}

TEST_P(Channels, ReceiverThatLeavesBeforeItHasEverythingIsLost) {
  make_channels(one_tensor_spec(), {.num_slots = 1});
  send_one_tensor(0);
  send_one_tensor(1);
  const ReceivedItem held = take();
  receiving_->shutdown(1);
  const Failure failure = wait_failure(sender_wakeup_);
  EXPECT_EQ(failure.kind, FailureKind::kPeerLost);
  EXPECT_EQ(failure.message,
            "stage 1 (rank 1) closed " + std::string(kName) + " before it had received everything");
  wait_until_none_is_unreleased();
}

TEST_P(Channels, ReceiverThatHasLeftDoesNotTakeWhatIsSentLater) {
  make_channels(one_tensor_spec(), {});
  send_one_tensor(0);
  static_cast<void>(take());
  ASSERT_TRUE(sender_->wait_until_sent(patience()));
  receiving_->shutdown(60);  // returns once the sender has answered the farewell
  sender_->send_end(1);      // sent without the receiver, which needs no end any more
  ASSERT_TRUE(sender_->wait_until_sent(patience()));
  EXPECT_EQ(sender_wakeup_.failure(), std::nullopt);
  send_one_tensor(1);
  const Failure failure = wait_failure(sender_wakeup_);
  EXPECT_EQ(failure.kind, FailureKind::kPeerLost);
  EXPECT_NE(failure.message.find("before it had received everything"), std::string::npos) << failure.message;
}

TEST_P(Channels, SenderThatLeavesExhaustsTheReceiverAfterItsLastItem) {
  make_channels(one_tensor_spec(), {});
  send_one_tensor(0);
  ASSERT_TRUE(sender_->wait_until_sent(patience()));
  sending_->shutdown(60);
  {
    ReceivedItem item;
    bool exhausted = true;
    ASSERT_TRUE(receiver_wakeup_.wait_until(patience(), [&] {
      exhausted = receiver_->exhausted();
      return receiver_->try_take(item);
    }));
    EXPECT_FALSE(exhausted);
    EXPECT_EQ(item.minibatch, MinibatchId(0));
  }
  EXPECT_TRUE(receiver_wakeup_.wait_until(patience(), [&] { return receiver_->exhausted(); }));
  EXPECT_EQ(receiver_wakeup_.failure(), std::nullopt);
}

TEST_P(Channels, ItemsOutliveTheirChannelAndItsTransport) {
  make_channels(one_tensor_spec(), {.num_slots = 3});
  for (std::int64_t minibatch = 0; minibatch < 3; ++minibatch) send_one_tensor(minibatch);
  ReceivedItem first = take();
  const ReceivedItem second = take();
  receiver_->detach();
  first = ReceivedItem();  // no credit is sent, because the channel has ended
  stop();                  // the third item was never taken
  expect_equal(second, *one_tensor(3000, 1));
  EXPECT_EQ(slots_->num_free(), 2);
}

std::string parameter_name(const testing::TestParamInfo<std::tuple<std::string, DataPath>>& parameter) {
  return std::get<0>(parameter.param) + data_path_name(std::get<1>(parameter.param));
}

const auto kTransports = testing::Values("inproc", "zmq", "zmq_rings");
const auto kDataPaths =
    testing::Values(DataPath::kDirect, DataPath::kStaged, DataPath::kPlaced, DataPath::kPlacedStaged);
const auto kStagedPaths = testing::ValuesIn(with_cuda(
    {DataPath::kStaged, DataPath::kPlacedStaged, DataPath::kDeviceStaged, DataPath::kDevicePlacedStaged}));
const auto kCopyingPaths = testing::ValuesIn(
    with_cuda({DataPath::kStaged, DataPath::kPlaced, DataPath::kPlacedStaged, DataPath::kDeviceStaged,
               DataPath::kDevicePlacedStaged, DataPath::kDevicePlaced}));
const auto kAllPaths = testing::ValuesIn(
    with_cuda({DataPath::kDirect, DataPath::kStaged, DataPath::kPlaced, DataPath::kPlacedStaged,
               DataPath::kDeviceStaged, DataPath::kDevicePlacedStaged, DataPath::kDevicePlaced}));

INSTANTIATE_TEST_SUITE_P(Transports, Channels, testing::Combine(kTransports, kAllPaths), parameter_name);
INSTANTIATE_TEST_SUITE_P(Transports, CopyingChannels, testing::Combine(kTransports, kCopyingPaths),
                         parameter_name);
INSTANTIATE_TEST_SUITE_P(Transports, DeviceStaged,
                         testing::Combine(kTransports,
                                          testing::ValuesIn(with_cuda({DataPath::kDeviceStaged,
                                                                       DataPath::kDevicePlacedStaged}))),
                         parameter_name);
INSTANTIATE_TEST_SUITE_P(Transports, StagedChannels, testing::Combine(kTransports, kStagedPaths),
                         parameter_name);
// BrokenSender leaves out the paths on devices. On kDevicePlaced no bytes of tensors come over the wire;
// device_placed_test.cc tests that path.
INSTANTIATE_TEST_SUITE_P(Transports, BrokenSender, testing::Combine(kTransports, kDataPaths), parameter_name);

}  // namespace
}  // namespace pipedream
