// Both ends of a channel over every transport, with the wire reading the tensors' memory (direct) and with
// staging buffers between (staged), as on a device whose memory the wire cannot read.
#include <gtest/gtest.h>

#include <atomic>
#include <cstring>
#include <functional>
#include <latch>
#include <memory>
#include <string>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#include "channel/receive_channel.h"
#include "channel/send_channel.h"
#include "transport/recorder.h"

namespace pipedream {
namespace {

constexpr const char* kName = "activations of stage 0 to stage 1";

// Memory of a work item's tensors. Its death is what keep_alive is about.
struct Content {
  std::vector<std::vector<std::byte>> bytes;
  std::vector<TensorView> tensors;

  void add(DType dtype, const std::vector<std::int64_t>& shape, std::uint32_t seed) {
    TensorView tensor;
    tensor.dtype = dtype;
    tensor.num_dims = static_cast<std::uint8_t>(shape.size());
    std::copy(shape.begin(), shape.end(), tensor.shape.begin());
    bytes.push_back(patterned_bytes(tensor.size_bytes(), seed));
    tensor.data = bytes.back().data();
    tensors.push_back(tensor);
  }
};

// Where keep_alives die, and how often.
class Deaths {
 public:
  std::shared_ptr<void> watch(std::shared_ptr<Content> content) {
    return {content.get(), [this, content](void*) mutable {
              content.reset();
              const std::lock_guard lock(mutex_);
              threads_.push_back(std::this_thread::get_id());
            }};
  }
  [[nodiscard]] std::size_t count() const {
    const std::lock_guard lock(mutex_);
    return threads_.size();
  }
  [[nodiscard]] bool all_on_this_thread() const {
    const std::lock_guard lock(mutex_);
    return std::all_of(threads_.begin(), threads_.end(),
                       [](std::thread::id thread) { return thread == std::this_thread::get_id(); });
  }

 private:
  mutable std::mutex mutex_;  // guards threads_
  std::vector<std::thread::id> threads_;
};

ItemSpec one_tensor_spec(std::size_t bytes_max = 4096) { return ItemSpec({{DType::kUInt8, 1, bytes_max}}); }

std::shared_ptr<Content> one_tensor(std::int64_t num_bytes, std::uint32_t seed) {
  auto content = std::make_shared<Content>();
  content->add(DType::kUInt8, {num_bytes}, seed);
  return content;
}

class Channels : public testing::TestWithParam<std::tuple<std::string, bool>> {
 protected:
  struct Sizes {
    std::int64_t num_slots = 2;
    std::size_t num_items_max = 16;
    std::size_t chunk_bytes = 1000;
  };

  void SetUp() override {
    sending_ = make_transport(std::get<0>(GetParam()));
    receiving_ = make_transport(std::get<0>(GetParam()));
    if (!sending_ || !receiving_) GTEST_SKIP() << std::get<0>(GetParam()) << " is not available";
  }
  void TearDown() override { stop(); }

  // Channels last until the transports have ended, items as long as the test wants, the pool longest.
  void stop() {
    if (sending_) sending_->shutdown(0);
    if (receiving_) receiving_->shutdown(0);
    sender_.reset();
    receiver_.reset();
    sending_.reset();
    receiving_.reset();
  }

  [[nodiscard]] bool staged() const { return std::get<1>(GetParam()); }

  void make_receiver(const ItemSpec& spec, const Sizes& sizes, bool computes_apart = false) {
    spec_ = spec;
    // Who computes apart still reads a slot after its release; on a real device that memory is not poisoned.
    slots_ = &pool_.add(
        {"slots", spec.slot_bytes(), sizes.num_slots, MemoryKind::kDevice, /*poison=*/!computes_apart});
    if (staged()) {
      receive_staging_ =
          &pool_.add({"receive staging", spec.slot_bytes(), sizes.num_slots, MemoryKind::kStaging});
      send_staging_ = &pool_.add({"send staging", spec.slot_bytes(), 2, MemoryKind::kStaging});
    }
    pool_.seal();
    if (computes_apart) compute_stream_ = device_->make_stream();
    receiver_ = std::make_unique<ReceiveChannel>(
        ChannelOptions{kName, spec, sizes.chunk_bytes, static_cast<std::size_t>(sizes.num_slots)},
        *receiving_, receiver_wakeup_, *device_, *slots_, receive_staging_, compute_stream_.get());
    LinkOptions options = link_options("stage 0 (rank 0)");
    receiver_link_ = &receiving_->listen(options, *receiver_);
    receiver_->attach(*receiver_link_);
  }
  void make_channels(const ItemSpec& spec, const Sizes& sizes, bool computes_apart = false) {
    make_receiver(spec, sizes, computes_apart);
    make_sender(spec, sizes, receiver_link_->endpoint());
    ASSERT_TRUE(sender_wakeup_.wait_until(patience(), [&] { return sender_->open(); }));
    ASSERT_TRUE(receiver_wakeup_.wait_until(patience(), [&] { return receiver_->open(); }));
  }
  void make_sender(const ItemSpec& spec, const Sizes& sizes, const std::string& endpoint) {
    sender_ =
        std::make_unique<SendChannel>(ChannelOptions{kName, spec, sizes.chunk_bytes, sizes.num_items_max},
                                      *sending_, sender_wakeup_, *device_, send_staging_);
    sender_link_ = &sending_->connect(link_options(), endpoint, *sender_);
    sender_->attach(*sender_link_);
  }
  // A link without a channel, to send what no channel sends. Its HELLO has been answered.
  void make_bare_sender() {
    sender_link_ = &sending_->connect(link_options(), receiver_link_->endpoint(), bare_sender_);
    ASSERT_TRUE(bare_sender_.wait_open());
  }
  void make_bare_receiver() {
    receiver_link_ = &receiving_->listen(link_options("stage 0 (rank 0)"), bare_receiver_);
  }

  static Deadline patience() { return Clock::now() + kPatience; }
  // For what must not come: short, as it judges nothing but an absence.
  static Deadline moment() { return Clock::now() + std::chrono::milliseconds(30); }

  void send(std::int64_t minibatch, const std::shared_ptr<Content>& content, std::uint64_t tag = 0) {
    sender_->send(MinibatchId(minibatch), MicrobatchIndex(0), tag, content->tensors, nullptr,
                  deaths_.watch(content));
  }
  void send_one_tensor(std::int64_t minibatch) {
    send(minibatch, one_tensor(3000, static_cast<std::uint32_t>(minibatch)));
  }

  [[nodiscard]] bool take(ReceivedItem& item, Deadline deadline) {
    const bool taken = receiver_wakeup_.wait_until(deadline, [&] { return receiver_->try_take(item); });
    if (taken && item.ready) item.ready->wait();
    return taken;
  }
  // The next item, an invalid one when none comes.
  [[nodiscard]] ReceivedItem take() {
    ReceivedItem item;
    EXPECT_TRUE(take(item, patience())) << failure_text(receiver_wakeup_);
    return item;
  }
  [[nodiscard]] ReceivedItem take_after_send(std::int64_t minibatch) {
    send_one_tensor(minibatch);
    return take();
  }
  [[nodiscard]] bool nothing_comes() {
    ReceivedItem item;
    return !take(item, moment());
  }

  static std::string failure_text(const Wakeup& wakeup) {
    const auto failure = wakeup.failure();
    return failure ? failure->message : "no failure";
  }
  [[nodiscard]] static Failure wait_failure(Wakeup& wakeup) {
    EXPECT_FALSE(wakeup.wait_until(patience(), [] { return false; }));
    const auto failure = wakeup.failure();
    return failure ? *failure : Failure{FailureKind::kClosed, "no failure came"};
  }

  // After a failure nobody is woken by a release.
  void wait_until_none_is_unreleased() {
    const Deadline deadline = patience();
    while (sender_->num_unreleased() > 0 && Clock::now() < deadline) std::this_thread::yield();
    EXPECT_EQ(sender_->num_unreleased(), 0U);
  }

  static void expect_equal(const ReceivedItem& item, const Content& content) {
    ASSERT_EQ(item.tensors.size(), content.tensors.size());
    for (std::size_t index = 0; index < content.tensors.size(); ++index) {
      const TensorView& received = item.tensors[index];
      const TensorView& sent = content.tensors[index];
      EXPECT_EQ(received.dtype, sent.dtype);
      EXPECT_EQ(received.num_dims, sent.num_dims);
      EXPECT_EQ(received.shape, sent.shape);
      ASSERT_EQ(received.size_bytes(), sent.size_bytes());
      EXPECT_EQ(std::vector<std::byte>(received.data, received.data + received.size_bytes()),
                content.bytes[index])
          << "tensor " << index;
    }
  }
  void expect_refused(const std::string& what) {
    const Failure failure = wait_failure(receiver_wakeup_);
    EXPECT_EQ(failure.kind, FailureKind::kCorruptFrame) << failure.message;
    EXPECT_NE(failure.message.find(std::string(kName) + ": the sender broke the protocol: "),
              std::string::npos)
        << failure.message;
    EXPECT_NE(failure.message.find(what), std::string::npos) << failure.message;
    EXPECT_EQ(failure.message.find('\n'), std::string::npos) << failure.message;
  }

  Wakeup sender_wakeup_;
  Wakeup receiver_wakeup_;
  Recorder bare_sender_;
  Recorder bare_receiver_;
  Deaths deaths_;
  std::vector<std::byte> payload_ = patterned_bytes(4096, 1);
  std::unique_ptr<Device> device_ = make_host_device();
  std::unique_ptr<Stream> compute_stream_;
  Pool pool_{*device_};
  ItemSpec spec_;
  SlotGroup* slots_ = nullptr;
  SlotGroup* receive_staging_ = nullptr;
  SlotGroup* send_staging_ = nullptr;
  std::unique_ptr<Transport> sending_;
  std::unique_ptr<Transport> receiving_;
  std::unique_ptr<SendChannel> sender_;
  std::unique_ptr<ReceiveChannel> receiver_;
  Link* sender_link_ = nullptr;
  Link* receiver_link_ = nullptr;
};

class StagedChannels : public Channels {};

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
    send(minibatch, content, 7000 + minibatch);
  }
  sender_->send_end(40);
  for (std::uint32_t minibatch = 0; minibatch < 40; ++minibatch) {
    const ReceivedItem item = take();
    ASSERT_FALSE(item.is_end);
    EXPECT_EQ(item.minibatch, MinibatchId(minibatch));
    EXPECT_EQ(item.tag, 7000 + minibatch);
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
    slots_ = &pool.add({"slots", 256, 1, MemoryKind::kDevice});
    receive_staging_ = staged() ? &pool.add({"receive staging", 256, 1, MemoryKind::kStaging}) : nullptr;
    send_staging_ = staged() ? &pool.add({"send staging", 256, 1, MemoryKind::kStaging}) : nullptr;
    pool.seal();
    const ItemSpec spec({{DType::kUInt8, 1, 128}, {DType::kUInt8, 1, 128}});
    receiver_ =
        std::make_unique<ReceiveChannel>(ChannelOptions{kName, spec, chunk_bytes, 1}, *receiving_,
                                         receiver_wakeup_, *device_, *slots_, receive_staging_, nullptr);
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
    EXPECT_GT(sender_->counters().bytes_sent, 3 * 192U);
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

TEST_P(StagedChannels, CopyWaitsForTheEventThatTheTensorsAreWritten) {
  make_channels(one_tensor_spec(), {});
  const auto stream = device_->make_stream();
  std::latch gate(1);
  const auto content = one_tensor(4096, 5);
  const std::vector<std::byte> written = content->bytes[0];
  std::fill(content->bytes[0].begin(), content->bytes[0].end(), std::byte{0});
  stream->call([&] { gate.wait(); });
  stream->copy(content->bytes[0].data(), written.data(), written.size());
  auto ready = device_->make_event();
  stream->record(*ready);
  sender_->send(MinibatchId(0), MicrobatchIndex(0), 0, content->tensors, std::move(ready),
                deaths_.watch(content));
  EXPECT_TRUE(nothing_comes());
  gate.count_down();
  const ReceivedItem item = take();
  ASSERT_EQ(item.tensors.size(), 1U);
  EXPECT_EQ(std::memcmp(item.tensors[0].data, written.data(), written.size()), 0);
}

// ---- Credits ----

TEST_P(Channels, HeldItemsStopTheSenderButNotSend) {
  make_channels(one_tensor_spec(), {.num_slots = 2});
  for (std::int64_t minibatch = 0; minibatch < 6; ++minibatch) send_one_tensor(minibatch);  // none blocks
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
  expect_equal(held.front(), *one_tensor(3000, 4));  // what is held is not overwritten
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

// A slot on an asynchronous device: the last reader's kernels are still enqueued when the item is dropped, so
// the copy of the next item waits, and when that item is dropped unread too its staging buffer is still
// needed. The buffer was once overwritten by the item after.
TEST_P(StagedChannels, StagingBufferIsKeptUntilItsCopyIsDoneThoughTheItemIsGone) {
  make_channels(one_tensor_spec(), {.num_slots = 1}, /*computes_apart=*/true);
  std::latch gate(1);
  std::vector<std::byte> read_late(3000);
  {
    const ReceivedItem item = take_after_send(0);
    compute_stream_->call([&] { gate.wait(); });
    compute_stream_->copy(read_late.data(), item.tensors[0].data, read_late.size());
  }  // dropped before it was read
  send_one_tensor(1);
  ReceivedItem unread;
  ASSERT_TRUE(receiver_wakeup_.wait_until(patience(), [&] { return receiver_->try_take(unread); }));
  ASSERT_FALSE(unread.ready->done());
  unread = ReceivedItem();
  EXPECT_EQ(slots_->num_free(), 0);
  EXPECT_EQ(receive_staging_->num_free(), 0);
  send_one_tensor(2);
  EXPECT_TRUE(nothing_comes());
  gate.count_down();
  expect_equal(take(), *one_tensor(3000, 2));
  compute_stream_->synchronize();
  EXPECT_EQ(read_late, patterned_bytes(3000, 0));
}

// ---- keep_alive ----

TEST_P(Channels, KeepAliveDiesOnceOnTheCollectingThread) {
  make_channels(one_tensor_spec(), {});
  for (std::int64_t minibatch = 0; minibatch < 5; ++minibatch) {
    send_one_tensor(minibatch);
    static_cast<void>(take());
  }
  ASSERT_TRUE(sender_->wait_until_sent(patience()));
  EXPECT_EQ(deaths_.count(), 0U);  // not on any other thread
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
  send_one_tensor(8);  // what comes after the failure is released too
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
  make_bare_receiver();  // gives no credits
  make_sender(spec_, {}, receiver_link_->endpoint());
  for (std::int64_t minibatch = 0; minibatch < 4; ++minibatch) send_one_tensor(minibatch);
  sender_->send_end(4);
  stop();
  EXPECT_EQ(deaths_.count(), 4U);
  EXPECT_TRUE(deaths_.all_on_this_thread());
}

// The copy of an item waits for an event when everything is taken down; it reads the tensors until then.
TEST_P(StagedChannels, KeepAliveOutlivesACopyThatIsUnderWay) {
  make_channels(one_tensor_spec(), {});
  const auto stream = device_->make_stream();
  std::latch gate(1);
  stream->call([&] { gate.wait(); });
  auto ready = device_->make_event();
  stream->record(*ready);
  const auto content = one_tensor(4096, 5);
  sender_->send(MinibatchId(0), MicrobatchIndex(0), 0, content->tensors, std::move(ready),
                deaths_.watch(content));
  std::latch pumped(1);
  sending_->post([&] { pumped.count_down(); });
  pumped.wait();
  ASSERT_EQ(send_staging_->num_free(), 1);  // the copy is enqueued
  std::thread opener([&] {
    std::this_thread::sleep_until(moment());  // time for a channel that does not wait to end
    EXPECT_EQ(deaths_.count(), 0U);
    gate.count_down();
  });
  stop();
  opener.join();
  EXPECT_EQ(deaths_.count(), 1U);
}

// ---- What is not as planned ----

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
  // Two tensors of at most 4096 and 64 bytes are planned; one whole item, minibatch 0, has come before.
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
      {"EndTooEarly", "an end after 2 minibatches where 1 have come",
       [](FrameHeader& h) {
         h = FrameHeader();
         h.kind = FrameKind::kEnd;
         h.minibatch = MinibatchId(2);
       }},
      {"Credit", "a CREDIT frame",
       [](FrameHeader& h) {
         h = FrameHeader();
         h.kind = FrameKind::kCredit;
         h.tag = 1;
       }},
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

  // The whole first tensor of minibatch 1, as it should come.
  static FrameHeader good_header(std::int64_t minibatch = 1) {
    FrameHeader header;
    header.kind = FrameKind::kTensor;
    header.minibatch = MinibatchId(minibatch);
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
    SlotGroup& slots = pool.add({"slots", spec_.slot_bytes(), 2, MemoryKind::kDevice});
    SlotGroup* staging =
        staged() ? &pool.add({"staging", spec_.slot_bytes(), 2, MemoryKind::kStaging}) : nullptr;
    pool.seal();
    const auto receiving = make_transport(std::get<0>(GetParam()));
    const auto sending = make_transport(std::get<0>(GetParam()));
    Recorder recorder;
    ReceiveChannel receiver({kName, spec_, 1000, 2}, *receiving, wakeup, *device_, slots, staging, nullptr);
    Link& listener = receiving->listen(link_options("stage 0 (rank 0)"), receiver);
    sender_link_ = &sending->connect(link_options(), listener.endpoint(), recorder);
    send_good_item(0);
    ReceivedItem first;
    ASSERT_TRUE(wakeup.wait_until(patience(), [&] { return receiver.try_take(first); }));
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
    EXPECT_EQ(slots.num_free(), 1);  // the first item's slot is out, nothing else
    receiving->shutdown(0);
    sending->shutdown(0);
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
  EXPECT_EQ(slots_->num_free(), 2);  // half an item is given back
}

TEST_P(BrokenSender, TensorsOfAnItemComeInOrder) {
  FrameHeader header = good_header(0);
  send_frame(header);
  send_frame(header);
  expect_refused("tensor 0 from byte 0 where tensor 1 from byte 0 is due");
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
  expect_refused("an item without a credit");
  EXPECT_EQ(take().minibatch, MinibatchId(0));  // what had come before is still there
  EXPECT_EQ(take().minibatch, MinibatchId(1));
}

TEST_P(BrokenSender, EndInsideAnItemIsRefused) {
  send_frame(good_header(0));
  FrameHeader end;
  end.kind = FrameKind::kEnd;
  send_frame(end);
  expect_refused("an end after 0 minibatches where 0 have come");
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

TEST_P(Channels, ReceiverThatGivesTooManyCreditsIsRefused) {
  make_receiver(one_tensor_spec(), {});
  make_bare_receiver();
  make_sender(spec_, {}, receiver_link_->endpoint());
  receiver_link_->send(credit_frame(std::uint64_t{1} << 40));
  const Failure failure = wait_failure(sender_wakeup_);
  EXPECT_EQ(failure.kind, FailureKind::kCorruptFrame);
  EXPECT_NE(failure.message.find("the receiver sent a CREDIT frame"), std::string::npos) << failure.message;
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
  EXPECT_EQ(take().minibatch, MinibatchId(0));  // what had come before is still used
  stop();

  Wakeup wakeup;
  sending_ = make_transport(std::get<0>(GetParam()));
  receiving_ = make_transport(std::get<0>(GetParam()));
  make_bare_receiver();
  SendChannel sender({kName, one_tensor_spec(), 1000, 4}, *sending_, wakeup, *device_, nullptr);
  sender_link_ = &sending_->connect(link_options(), receiver_link_->endpoint(), sender);
  send_abort(*receiver_link_, from_receiver);
  const Failure at_sender = wait_failure(wakeup);
  EXPECT_EQ(at_sender.kind, FailureKind::kAborted);
  EXPECT_EQ(at_sender.message, from_receiver);
  sending_->shutdown(0);
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
  sender_->send_end(1);      // it may do without that
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
  first = ReceivedItem();  // no credit is given back, nobody is there to
  stop();                  // the third was not taken
  expect_equal(second, *one_tensor(3000, 1));
  EXPECT_EQ(slots_->num_free(), 2);
}

std::string parameter_name(const testing::TestParamInfo<std::tuple<std::string, bool>>& parameter) {
  return std::get<0>(parameter.param) + (std::get<1>(parameter.param) ? "Staged" : "Direct");
}

const auto kParameters = testing::Combine(testing::Values("inproc", "zmq"), testing::Bool());

INSTANTIATE_TEST_SUITE_P(Transports, Channels, kParameters, parameter_name);
INSTANTIATE_TEST_SUITE_P(Transports, StagedChannels,
                         testing::Combine(testing::Values("inproc", "zmq"), testing::Values(true)),
                         parameter_name);
INSTANTIATE_TEST_SUITE_P(Transports, BrokenSender, kParameters, parameter_name);

}  // namespace
}  // namespace pipedream
