// Tests two workers on devices of one host. The workers find out whether the sender can write into the
// receiver's memory. If so, tensors go from device to device. Otherwise they are staged. The tests run on the
// hostile device (support/hostile_device.h), and on CUDA if there is a device, which both workers share in
// one process.
#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/failure.h"
#include "stage/worker.h"
#include "support/hostile_device.h"

#if defined(PD_CUDA_STUB)
#include "cuda_stub/cuda_stub.h"
#endif
#include "transport/recorder.h"

namespace pipedream {
namespace {

constexpr const char* kName = "activations of stage 0 to stage 1";
constexpr std::size_t kBytesMax = std::size_t{5} << 20;

class DeviceWorkers : public testing::TestWithParam<std::string> {
 protected:
  void SetUp() override {
    if (!make_transport("zmq")) GTEST_SKIP() << "zmq is not available";
    sender_ = make_worker(sending_device_);
    receiver_ = make_worker(receiving_device_);
  }
  void TearDown() override { close(); }

  static std::shared_ptr<Device> make_device() {
    if (GetParam() == "cuda") return make_cuda_device(0);
    return std::make_shared<HostileDevice>();
  }
  static std::unique_ptr<Worker> make_worker(const std::shared_ptr<Device>& device) {
    WorkerOptions options;
    options.run_id = 77;
    return std::make_unique<Worker>(options, device);
  }
  static ChannelSpec channel(bool places_on_device) {
    ChannelSpec spec;
    spec.name = kName;
    spec.peer = "the other stage";
    spec.channel_id = 3;
    spec.item = ItemSpec({{DType::kUInt8, 1, kBytesMax}, {DType::kInt64, 1, 64}});
    spec.num_items_max = 3;
    spec.places_on_device = places_on_device;
    return spec;
  }
  void plan(bool places_on_device) {
    receiver_->add_receive_channel(channel(places_on_device));
    sender_->add_send_channel(channel(places_on_device));
    receiver_->seal();
    sender_->seal();
  }
  void connect() {
    sender_->connect(receiver_->listen());
    for (Worker* worker : {sender_.get(), receiver_.get()}) {
      const Result<bool> open = worker->wait_open(patience());
      ASSERT_TRUE(open.ok() && open.value());
    }
  }
  void close() {
    if (sender_) sender_->close(1);
    if (receiver_) receiver_->close(1);
  }
  static Deadline patience() { return Clock::now() + kPatience; }

  // Copies the bytes to the sender's device and sends them as a tensor, together with a second tensor.
  void send(const std::vector<std::byte>& bytes) {
    const std::shared_ptr<Memory> memory = sending_device_->allocate(kBytesMax + 64, MemoryKind::kDevice);
    copy(*sending_device_, memory->data(), bytes.data(), bytes.size());
    TensorView first{DType::kUInt8, 1, {}, memory->data()};
    first.shape[0] = static_cast<std::int64_t>(bytes.size());
    TensorView second{DType::kInt64, 1, {}, memory->data() + kBytesMax};
    second.shape[0] = 8;
    const Result<bool> sent =
        sender_->send_item(kName, {.data_fingerprint = 5}, {first, second}, memory, patience());
    ASSERT_TRUE(sent.ok() && sent.value());
  }
  [[nodiscard]] std::vector<std::byte> receive() {
    auto item = receiver_->receive_item(kName, patience());
    if (!item.ok() || !item.value()) {
      ADD_FAILURE() << (item.ok() ? "nothing came" : item.failure().message);
      return {};
    }
    const TensorView& tensor = item.value()->tensors.at(0);
    std::vector<std::byte> bytes(tensor.size_bytes());
    if (item.value()->ready != nullptr) item.value()->ready->wait();
    copy(*receiving_device_, bytes.data(), tensor.data, bytes.size());
    return bytes;
  }
  static void copy(Device& device, void* to, const void* from, std::size_t num_bytes) {
    const auto stream = device.make_stream();
    stream->copy(to, from, num_bytes);
    stream->synchronize();
  }
  void expect_items_of_every_size_arrive() {
    std::uint32_t seed = 0;
    for (const std::size_t size : {std::size_t{0}, std::size_t{1}, std::size_t{5000}, kBytesMax,
                                   kBytesMax - 3, std::size_t{100'000}}) {
      const std::vector<std::byte> bytes = patterned_bytes(size, ++seed);
      send(bytes);
      EXPECT_EQ(receive(), bytes);
    }
  }
  [[nodiscard]] static HostileDevice* hostile(const std::shared_ptr<Device>& device) {
    return dynamic_cast<HostileDevice*>(device.get());
  }

  std::shared_ptr<Device> sending_device_ = make_device();
  std::shared_ptr<Device> receiving_device_ = make_device();
  std::unique_ptr<Worker> sender_;
  std::unique_ptr<Worker> receiver_;
};

TEST_P(DeviceWorkers, TensorsGoFromDeviceToDeviceWithoutStaging) {
  const std::string offer = receiver_->offer_device_memory();
  ASSERT_NE(offer, "");
  EXPECT_EQ(sender_->why_out_of_reach(offer), "");
  plan(/*places_on_device=*/true);
  connect();
  expect_items_of_every_size_arrive();
  for (Worker* worker : {sender_.get(), receiver_.get()}) {
    EXPECT_EQ(worker->channel_transports().at(kName), "cuda ipc");
    EXPECT_EQ(worker->pool()->planned_bytes(MemoryKind::kStaging), 0U);
    const ChannelStats stats = worker->channel_stats().at(kName);
    EXPECT_EQ(stats.num_items, 6U);
    EXPECT_EQ(stats.placed_bytes, stats.tensor_bytes);
  }
}

TEST_P(DeviceWorkers, TensorsAreStagedInSharedMemoryWhereTheyAreNotPlacedOnTheDevice) {
  plan(/*places_on_device=*/false);
  connect();
  expect_items_of_every_size_arrive();
  for (Worker* worker : {sender_.get(), receiver_.get()}) {
    EXPECT_EQ(worker->channel_transports().at(kName), "shared memory");
    EXPECT_GT(worker->pool()->planned_bytes(MemoryKind::kStaging), 0U);
  }
}

TEST_P(DeviceWorkers, OfferIsGoneOnceThePoolIsSealed) {
  const std::string offer = receiver_->offer_device_memory();
  EXPECT_EQ(receiver_->offer_device_memory(), offer);  // all senders get the same offer
  receiver_->seal();
  EXPECT_NE(sender_->why_out_of_reach(offer), "");
}

TEST_P(DeviceWorkers, MemoryOfTheReceiverIsLetGoWhenTheSenderCloses) {
  plan(/*places_on_device=*/true);
  connect();
  expect_items_of_every_size_arrive();
  close();
  EXPECT_EQ(sender_->channel_transports().at(kName), "cuda ipc");
  receiver_.reset();  // frees its memory while the sender is still there
  if (hostile(receiving_device_) != nullptr) {
    EXPECT_EQ(hostile(sending_device_)->num_imported(), 0);
    EXPECT_EQ(hostile(receiving_device_)->num_exported(), 0);
  }
}

// The copy of the item is dropped, and so is the call() after it. No call of the device reports this, but the
// receiver must not wait for ever.
TEST_P(DeviceWorkers, ErrorOfTheDeviceWhileAWorkerWaitsEndsItsWait) {
#if !defined(PD_CUDA_STUB)
  if (GetParam() == "cuda") GTEST_SKIP() << "a GPU does not fail on demand";
#endif
  plan(/*places_on_device=*/false);
  connect();
  EXPECT_TRUE(receiver_->receive_item(kName, Clock::now() + std::chrono::milliseconds(5), false).ok());
  if (auto* device = hostile(receiving_device_)) {
    device->launch_fault(*device->make_stream(), "device-side assert triggered");
    while (!device->is_broken()) std::this_thread::yield();
  }
#if defined(PD_CUDA_STUB)
  if (GetParam() == "cuda") cuda_stub::end_context(cudaErrorAssert);
#endif
  const auto item = receiver_->receive_item(kName, Clock::now() + std::chrono::milliseconds(5), false);
  ASSERT_FALSE(item.ok());
  EXPECT_EQ(failure_kind_name(item.failure().kind), "DeviceError");
  EXPECT_NE(item.failure().message.find("device-side assert triggered"), std::string::npos)
      << item.failure().message;
#if defined(PD_CUDA_STUB)
  sender_.reset();
  receiver_.reset();
  cuda_stub::reset();
#endif
}

std::vector<std::string> devices_here() {
  std::vector<std::string> names = {"hostile"};
  if (cuda_available()) names.emplace_back("cuda");
  return names;
}
INSTANTIATE_TEST_SUITE_P(Devices, DeviceWorkers, testing::ValuesIn(devices_here()),
                         [](const auto& device) { return device.param; });

// ---- Calls that a device may refuse. Only the tests' own device refuses on request ----

#if defined(PD_CUDA_STUB)
// A GPU has hardware queues for a few streams only. If there are more streams, work of one may have to wait
// for work of another.
TEST(DeviceOfAWorker, HasFewStreamsHoweverManyChannelsThereAre) {
  const auto num_streams = [] {
    return cuda_stub::num_calls("cudaStreamCreateWithFlags") - cuda_stub::num_calls("cudaStreamDestroy");
  };
  const std::uint64_t num_before = num_streams();
  WorkerOptions options;
  options.device = "cuda:0";
  options.transport = "inproc";
  Worker worker(options);
  for (int channel = 0; channel < 9; ++channel) {
    ChannelSpec spec;
    spec.item = ItemSpec({{DType::kFloat32, 1, 4000}});
    spec.codec = codec_from_name(channel % 2 == 0 ? "none" : "int8");
    spec.name = "activations " + std::to_string(channel);
    worker.add_send_channel(spec);
    spec.name = "gradients " + std::to_string(channel);
    worker.add_receive_channel(spec);
  }
  worker.seal();
  // Torch has two more, which makes 8: CUDA's default of CUDA_DEVICE_MAX_CONNECTIONS.
  EXPECT_LE(num_streams() - num_before, 6U);
}

// python/pipedream/budget/memory.py counts the same memory.
TEST(DeviceOfAWorker, HasRoomForOneEncodedItemOfEachEndOfAChannel) {
  WorkerOptions options;
  options.device = "cuda:0";
  options.transport = "inproc";
  Worker worker(options);
  ChannelSpec spec;
  spec.item = ItemSpec({{DType::kFloat32, 1, 4000}});
  spec.num_items_max = 3;
  spec.name = "plain";
  worker.add_send_channel(spec);
  spec.codec = codec_from_name("bf16");
  spec.name = "activations";
  worker.add_send_channel(spec);
  spec.name = "gradients";
  worker.add_receive_channel(spec);
  std::vector<std::string> names;
  for (const TermReport& term : worker.pool()->report()) {
    if (!term.name.starts_with("encoded, ")) continue;
    names.push_back(term.name);
    EXPECT_EQ(term.kind, MemoryKind::kDevice);
    EXPECT_EQ(term.slot_bytes, 2048U);  // rounded up to the pool's alignment
    EXPECT_EQ(term.num_slots, 1);
  }
  EXPECT_EQ(names, (std::vector<std::string>{"encoded, activations", "encoded, gradients"}));
}

TEST(DeviceOfAWorker, HasTheKernelsOfTheOptimizersLoaded) {
  const std::uint64_t num_before = cuda_stub::num_calls("cudaFuncGetAttributes");
  EXPECT_EQ(make_device("cuda:0")->index(), 0);
  EXPECT_GT(cuda_stub::num_calls("cudaFuncGetAttributes"), num_before);
}
#endif

class RefusingDevices : public DeviceWorkers {};

TEST_P(RefusingDevices, ReasonsAreSaidBeforeAnyMemoryIsPlanned) {
  hostile(receiving_device_)->why_not_exported = "hostile:0 does not support it";
  std::string why;
  EXPECT_EQ(receiver_->offer_device_memory(&why), "");
  EXPECT_EQ(why, "hostile:0 does not support it");
  hostile(receiving_device_)->why_not_exported = "";
  const std::string offer = receiver_->offer_device_memory();
  hostile(sending_device_)->why_not_imported = "hostile:0 has no peer access to hostile:1";
  EXPECT_EQ(sender_->why_out_of_reach(offer), "hostile:0 has no peer access to hostile:1");
}

TEST_P(RefusingDevices, MemoryThatCannotBeOpenedAfterAllIsOneClearLine) {
  plan(/*places_on_device=*/true);
  hostile(sending_device_)->why_not_imported = "cudaErrorTooManyPeers";
  try {
    sender_->connect(receiver_->listen());
    FAIL() << "connected";
  } catch (const UserError& error) {
    const std::string text = error.what();
    for (const char* part : {"the other stage", kName, "cudaErrorTooManyPeers", "transport='shm'"}) {
      EXPECT_NE(text.find(part), std::string::npos) << text;
    }
  }
}

TEST_P(RefusingDevices, MemoryThatCannotBeExportedAfterAllIsOneClearLine) {
  receiver_->add_receive_channel(channel(/*places_on_device=*/true));
  hostile(receiving_device_)->why_not_exported = "cudaErrorNotSupported";
  try {
    receiver_->seal();
    FAIL() << "sealed";
  } catch (const UserError& error) {
    const std::string text = error.what();
    EXPECT_EQ(text.find("the slots of " + std::string(kName) + ": cudaErrorNotSupported"), 0U) << text;
  }
}

// Someone has changed the endpoint on its way.
TEST_P(RefusingDevices, EndpointWithoutDeviceMemoryIsRefused) {
  plan(/*places_on_device=*/true);
  auto endpoints = receiver_->listen();
  std::string& endpoint = endpoints.at(kName);
  endpoint.erase(endpoint.find(" memory="));
  EXPECT_THROW(sender_->connect(endpoints), UserError);
}

INSTANTIATE_TEST_SUITE_P(Devices, RefusingDevices, testing::Values("hostile"),
                         [](const auto& device) { return device.param; });

}  // namespace
}  // namespace pipedream
