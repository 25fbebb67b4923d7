// Tests that in the steady state two workers exchange items without a call of the allocator on any thread:
// the compute threads, the transport threads and the copy streams.
#include <gtest/gtest.h>

#include <cstdio>
#include <cstring>
#include <latch>
#include <memory>
#include <new>
#include <string>
#include <thread>
#include <tuple>
#include <vector>

#include "channel/data_paths.h"
#include "channel/receive_channel.h"
#include "channel/send_channel.h"
#include "support/allocation_counter.h"
#include "transport/recorder.h"

namespace pipedream {
namespace {

constexpr std::int64_t kNumWarmupItems = 50;
constexpr std::int64_t kNumItems = 1000;
constexpr std::int64_t kNumInFlight = 4;
constexpr std::size_t kNumTransfersKept = 200;  // fewer than the items, so old records are overwritten
constexpr std::size_t kChunkBytes = 1024;       // The large tensor has 5 chunks, and an item 7 frames.

ItemSpec spec() {
  return ItemSpec({{DType::kUInt8, 1, 5000}, {DType::kInt64, 1, 64}, {DType::kFloat32, 2, 400}});
}

// The tensors of one direction, made once and sent again and again.
struct Tensors {
  Tensors() {
    std::byte* data = bytes->data();
    const ItemSpec item_spec = spec();
    for (const TensorSpec& tensor : item_spec.tensors()) {
      TensorView view{tensor.dtype, tensor.num_dims, {}, data};
      view.shape[0] = static_cast<std::int64_t>(tensor.bytes_max / dtype_bytes(tensor.dtype));
      if (tensor.num_dims == 2) view.shape[1] = 1;
      views.push_back(view);
      data += tensor.bytes_max;
    }
  }
  // Moves the tensors to this memory, one after the other.
  void move_to(std::byte* data) {
    for (TensorView& view : views) view.data = data + (view.data - bytes->data());
  }
  std::shared_ptr<std::vector<std::byte>> bytes =
      std::make_shared<std::vector<std::byte>>(patterned_bytes(8192, 1));
  std::vector<TensorView> views;
};

// One worker with a receiving and a sending channel over its own transport.
class Peer {
 public:
  Peer(const std::string& transport, DataPath data_path, const Codec& codec)
      : device_(make_device_of(data_path)), transport_(make_transport(transport)) {
    if (!transport_) return;
    wakeup_.drive_while_waiting(*transport_);
    const WireLayout layout(spec(), codec);
    slot_bytes_ = layout.slot_bytes();
    PoolTerm slots{"slots", spec().slot_bytes(), kNumInFlight, MemoryKind::kDevice};
    PoolTerm in{"receive staging", layout.slot_bytes(), kNumInFlight, MemoryKind::kStaging};
    if (data_path == DataPath::kPlaced) slots = in_shared_memory(slots, *device_, shared_);
    if (is_staged(data_path) && is_placed(data_path)) in = in_shared_memory(in, *device_, shared_);
    if (is_placed_on_device(data_path)) slots = in_device_memory(slots, *device_, shared_);
    if (is_on_device(data_path)) {
      compute_stream_ = device_->make_stream();
      uploaded_ = upload(*device_, *compute_stream_, *tensors_.bytes);
      tensors_.move_to(uploaded_->data());
    }
    SlotGroup& slot_group = pool_.add(slots);
    SlotGroup* const in_group = is_staged(data_path) ? &pool_.add(in) : nullptr;
    SlotGroup* const out_group =
        is_staged(data_path) ? &pool_.add({"send staging", layout.slot_bytes(), 2, MemoryKind::kStaging})
                             : nullptr;
    SlotGroup& residual =
        pool_.add({"residual", layout.residual_bytes(), 1, MemoryKind::kDevice, /*poison=*/false});
    pool_.seal();
    ChannelOptions options{"items", spec(), kChunkBytes, static_cast<std::size_t>(kNumInFlight)};
    options.codec = codec;
    options.num_transfers_kept = kNumTransfersKept;
    receiver_ = std::make_unique<ReceiveChannel>(options, *transport_, wakeup_, *device_, slot_group,
                                                 in_group, compute_stream_.get(), shared_);
    sender_ = std::make_unique<SendChannel>(options, *transport_, wakeup_, *device_, out_group, &residual);
    listener_ = &transport_->listen(link_options("the other"), *receiver_);
    receiver_->attach(*listener_);
  }
  ~Peer() { stop(); }
  Peer(const Peer&) = delete;
  Peer& operator=(const Peer&) = delete;

  [[nodiscard]] bool available() const { return transport_ != nullptr; }
  void connect_to(const Peer& other) {
    if (other.shared_ != nullptr) {
      const std::string address = other.shared_->address();
      const SharedMemoryUse use = shared_use(slot_bytes_);
      sender_->place_into(other.shared_->on_device() ? SharedMemory::open_on(*device_, address, use)
                                                     : SharedMemory::open(address, use));
    }
    sender_->attach(transport_->connect(link_options("the other"), other.listener_->endpoint(), *sender_));
  }
  [[nodiscard]] bool wait_open() {
    return wakeup_.wait_until(patience(), [&] { return sender_->open() && receiver_->open(); });
  }
  void send(std::int64_t minibatch) {
    sender_->collect_released();
    ASSERT_TRUE(sender_->wait_for_room(patience()));
    sender_->send(MinibatchId(minibatch), MicrobatchIndex(0), {}, tensors_.views, nullptr, tensors_.bytes);
  }
  // Waits until the tensors can be sent.
  void wait_uploaded() {
    if (compute_stream_) compute_stream_->synchronize();
  }
  void receive(std::int64_t minibatch) {
    ReceivedItem item;
    ASSERT_TRUE(wakeup_.wait_until(patience(), [&] { return receiver_->try_take(item); }));
    ASSERT_EQ(item.minibatch, MinibatchId(minibatch));
    const std::byte* read = item.tensors.at(0).data;
    if (compute_stream_) {
      if (item.ready) compute_stream_->wait(*item.ready);
      compute_stream_->copy(read_.data(), read, read_.size());
      compute_stream_->synchronize();
      read = read_.data();
      compute_stream_->call([] {});  // keeps the stream busy, so that the item's last reader is not done yet
    } else if (item.ready) {
      item.ready->wait();
    }
    ASSERT_EQ(std::memcmp(read, tensors_.bytes->data(), read_.size()), 0);
  }
  void expect_kept_the_newest(std::int64_t num_items) const {
    const std::int64_t first = num_items - static_cast<std::int64_t>(kNumTransfersKept);
    std::int64_t minibatch = first;
    for (const ReceivedTransfer& received : receiver_->transfers()) {
      EXPECT_EQ(received.minibatch, MinibatchId(minibatch++));
    }
    EXPECT_EQ(minibatch, num_items);
    ASSERT_TRUE(sender_->wait_until_sent(patience()));
    const std::vector<SentTransfer> sent = sender_->transfers();
    ASSERT_EQ(sent.size(), kNumTransfersKept);
    // The oldest record may be of an earlier item, because that item was released late.
    EXPECT_GE(sent.front().minibatch, MinibatchId(first - kNumInFlight));
    EXPECT_EQ(sent.back().minibatch, MinibatchId(num_items - 1));
  }
  void stop() {
    if (transport_) transport_->shutdown(0);
  }

 private:
  static Deadline patience() { return Clock::now() + kPatience; }

  Tensors tensors_;
  Wakeup wakeup_;
  std::vector<std::byte> read_ = std::vector<std::byte>(5000);
  const std::unique_ptr<Device> device_;
  std::unique_ptr<Stream> compute_stream_;  // null if the CPU reads the items
  std::shared_ptr<Memory> uploaded_;        // the tensors in device memory; null on the host
  Pool pool_{*device_};
  const SharedMemory* shared_ = nullptr;
  std::size_t slot_bytes_ = 0;  // an encoded item's size
  std::unique_ptr<Transport> transport_;
  std::unique_ptr<ReceiveChannel> receiver_;
  std::unique_ptr<SendChannel> sender_;
  Link* listener_ = nullptr;
};

using Case = std::tuple<std::string, DataPath, std::string>;  // transport, data path, codec

class SteadyState : public testing::TestWithParam<Case> {
 protected:
  void SetUp() override {
    if (!AllocationCounter::counts()) GTEST_SKIP() << "a sanitizer has the allocator";
  }

  // Sends num_items items to the other worker, numbered from `first`, and takes them back. At most
  // kNumInFlight + 1 items are under way at once.
  static void exchange(Peer& peer, std::int64_t first, std::int64_t num_items) {
    for (std::int64_t minibatch = first; minibatch < first + num_items + kNumInFlight; ++minibatch) {
      if (minibatch < first + num_items) peer.send(minibatch);
      if (minibatch >= first + kNumInFlight) peer.receive(minibatch - kNumInFlight);
    }
  }
  static void answer(Peer& peer, std::int64_t num_items) {
    for (std::int64_t minibatch = 0; minibatch < num_items; ++minibatch) {
      peer.receive(minibatch);
      peer.send(minibatch);
    }
  }
};

TEST_P(SteadyState, ItemsAreExchangedWithoutAnAllocation) {
  const auto& [transport, data_path, codec] = GetParam();
  Peer peer(transport, data_path, codec_from_name(codec));
  Peer other(transport, data_path, codec_from_name(codec));
  if (!peer.available() || !other.available()) GTEST_SKIP() << transport << " is not available";
  peer.connect_to(other);
  other.connect_to(peer);
  ASSERT_TRUE(peer.wait_open() && other.wait_open());
  peer.wait_uploaded();
  other.wait_uploaded();
  std::thread answering([&] { answer(other, kNumWarmupItems + kNumItems); });
  exchange(peer, 0, kNumWarmupItems);
  std::uint64_t num_allocations = 0;
  std::string first;
  {
    const AllocationCounter counter;
    exchange(peer, kNumWarmupItems, kNumItems);
    num_allocations = counter.num_in_all();
    first = counter.first();
  }
  answering.join();
  peer.expect_kept_the_newest(kNumWarmupItems + kNumItems);
  other.expect_kept_the_newest(kNumWarmupItems + kNumItems);
  other.stop();  // both transports end before any channel is destroyed
  peer.stop();

  const double num_frames = static_cast<double>(kNumItems) * 2 * 7;
  std::printf("%s, %s, %s: %.3f allocations a frame\n", transport.c_str(), data_path_name(data_path).c_str(),
              codec.c_str(), static_cast<double>(num_allocations) / num_frames);
  if (transport == "inproc") {
    EXPECT_EQ(num_allocations, 0U) << first;
  } else {
    // libzmq allocates memory for the contents of two parts, and for its receive buffer.
    EXPECT_LT(static_cast<double>(num_allocations) / num_frames, 4.0) << first;
  }
}

std::string case_name(const testing::TestParamInfo<Case>& parameter) {
  const auto& [transport, data_path, codec] = parameter.param;
  return transport + data_path_name(data_path) + "_" + codec;
}

const auto kTransports = testing::Values("inproc", "zmq", "zmq_rings");

INSTANTIATE_TEST_SUITE_P(DataPaths, SteadyState,
                         testing::Combine(kTransports,
                                          testing::Values(DataPath::kDirect, DataPath::kStaged,
                                                          DataPath::kPlaced, DataPath::kPlacedStaged,
                                                          DataPath::kDeviceStaged, DataPath::kDevicePlaced),
                                          testing::Values("none")),
                         case_name);
INSTANTIATE_TEST_SUITE_P(Codecs, SteadyState,
                         testing::Combine(kTransports,
                                          testing::Values(DataPath::kStaged, DataPath::kPlacedStaged),
                                          testing::Values("bf16", "int8", "topk")),
                         case_name);

// ---- The counter itself ----

// Calls operator new in a way that no compiler may leave out.
void allocate_once(std::size_t num_bytes) {
  void* volatile data = ::operator new(num_bytes);
  ::operator delete(data);
}

TEST(AllocationCounter, CountsEveryThreadAndItsOwn) {
  if (!AllocationCounter::counts()) GTEST_SKIP() << "a sanitizer has the allocator";
  std::latch started(1);
  std::latch may_allocate(1);
  std::latch allocated(1);
  std::thread other([&] {
    started.count_down();
    may_allocate.wait();
    for (int i = 0; i < 3; ++i) allocate_once(64);
    allocated.count_down();
  });
  started.wait();
  {
    const AllocationCounter counter;
    EXPECT_EQ(counter.num_in_all(), 0U);
    allocate_once(40);
    EXPECT_EQ(counter.num_on_this_thread(), 1U);
    EXPECT_EQ(counter.num_in_all(), 1U);
    may_allocate.count_down();
    allocated.wait();
    EXPECT_EQ(counter.num_on_this_thread(), 1U);
    EXPECT_EQ(counter.num_in_all(), 4U);
    EXPECT_NE(counter.first().find("the first allocation, 40 bytes:"), std::string::npos) << counter.first();
  }
  other.join();
}

}  // namespace
}  // namespace pipedream
