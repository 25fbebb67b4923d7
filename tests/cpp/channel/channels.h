// Makes a channel for the tests of this folder. Both ends are in one process, on any data path. The receiver
// has slots, each of which takes one item. It grants free slots to the sender in frames that are called
// credits. The sender fills only granted slots.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "channel/data_paths.h"
#include "channel/receive_channel.h"
#include "channel/send_channel.h"
#include "transport/recorder.h"

namespace pipedream {

inline constexpr const char* kName = "activations of stage 0 to stage 1";

// The memory of a work item's tensors. keep_alive owns it, and tests watch when it is destroyed.
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

// Counts the destroyed keep_alives and the threads on which they were destroyed.
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

inline ItemSpec one_tensor_spec(std::size_t bytes_max = 4096) {
  return ItemSpec({{DType::kUInt8, 1, bytes_max}});
}

inline std::shared_ptr<Content> one_tensor(std::int64_t num_bytes, std::uint32_t seed) {
  auto content = std::make_shared<Content>();
  content->add(DType::kUInt8, {num_bytes}, seed);
  return content;
}

inline OutgoingFrame grant_frame(std::uint16_t slot) {
  OutgoingFrame frame;
  frame.header.kind = FrameKind::kCredit;
  frame.header.slot = slot;
  return frame;
}

// Both ends of one channel in one process, and the pool from which both get memory.
class ChannelPair : public testing::Test {
 protected:
  struct Sizes {
    std::int64_t num_slots = 2;
    std::size_t num_items_max = 16;
    std::size_t chunk_bytes = 1000;
    Codec codec{};
    std::size_t num_transfers_kept = 0;
    std::int64_t first_microbatch = 0;
    std::int64_t microbatch_stride = 1;
    std::int64_t num_residuals = 1;
  };

  // Chooses transport and data path; skips the test if the transport is not available. Called before all
  // other functions.
  void take_data_path(const std::string& transport, DataPath data_path) {
    transport_ = transport;
    data_path_ = data_path;
    renew(sender_wakeup_);
    renew(receiver_wakeup_);
    pool_.reset();
    compute_stream_.reset();
    upload_stream_.reset();
    device_ = make_device_of(data_path);
    pool_ = std::make_unique<Pool>(*device_);
    if (on_device()) {
      compute_stream_ = device_->make_stream();
      upload_stream_ = device_->make_stream();
    }
    sending_ = make_transport(transport);
    receiving_ = make_transport(transport);
    if (!sending_ || !receiving_) GTEST_SKIP() << transport << " is not available";
    sender_wakeup_.drive_while_waiting(*sending_);
    receiver_wakeup_.drive_while_waiting(*receiving_);
  }
  // Replaces the wakeup by a new one, because a failure stays in it for good.
  static void renew(Wakeup& wakeup) {
    std::destroy_at(&wakeup);
    std::construct_at(&wakeup);
  }
  void TearDown() override { stop(); }

  // Ends the transports, and after them the channels. Items may live as long as the test wants, and the pool
  // lives longest.
  void stop() {
    if (sending_) sending_->shutdown(0);
    if (receiving_) receiving_->shutdown(0);
    sender_.reset();
    receiver_.reset();
    sending_.reset();
    receiving_.reset();
  }

  [[nodiscard]] bool staged() const { return is_staged(data_path_); }
  [[nodiscard]] bool placed() const { return is_placed(data_path_); }
  [[nodiscard]] bool on_device() const { return is_on_device(data_path_); }
  [[nodiscard]] HostileDevice& hostile() { return dynamic_cast<HostileDevice&>(*device_); }
  // Host memory that a stream reads or writes while the host goes on. It is pinned, because for other memory
  // CUDA makes the host wait.
  [[nodiscard]] std::unique_ptr<Memory> pinned(std::vector<std::byte> bytes) {
    auto memory = device_->allocate(bytes.size(), MemoryKind::kStaging);
    std::memcpy(memory->data(), bytes.data(), bytes.size());
    return memory;
  }
  [[nodiscard]] static std::vector<std::byte> bytes_at(const Memory& memory) {
    return {memory.data(), memory.data() + memory.size_bytes()};
  }

  // The options of both ends.
  static ChannelOptions channel_options(const ItemSpec& spec, std::size_t chunk_bytes,
                                        std::size_t num_items_max) {
    ChannelOptions options{kName, spec, chunk_bytes, num_items_max};
    return options;
  }
  [[nodiscard]] static ChannelOptions channel_options(const ItemSpec& spec, const Sizes& sizes) {
    ChannelOptions options = channel_options(spec, sizes.chunk_bytes, sizes.num_items_max);
    options.codec = sizes.codec;
    options.num_transfers_kept = sizes.num_transfers_kept;
    options.first_microbatch = sizes.first_microbatch;
    options.microbatch_stride = sizes.microbatch_stride;
    return options;
  }
  [[nodiscard]] ChannelOptions receiver_options(const ItemSpec& spec, const Sizes& sizes) const {
    ChannelOptions options = channel_options(spec, sizes);
    options.side_stream = side_stream_;
    return options;
  }

  // Adds the slots of both ends that the data path needs.
  void add_terms(Pool& pool, const ItemSpec& spec, const Sizes& sizes, bool poison = true) {
    const WireLayout layout(spec, sizes.codec);
    PoolTerm slots{"slots", spec.slot_bytes(), sizes.num_slots, MemoryKind::kDevice, poison};
    PoolTerm staging{"receive staging", layout.slot_bytes(), sizes.num_slots, MemoryKind::kStaging};
    if (data_path_ == DataPath::kPlaced) slots = in_shared_memory(slots, *device_, shared_);
    if (is_placed_on_device(data_path_)) slots = in_device_memory(slots, *device_, shared_);
    if (staged() && placed()) staging = in_shared_memory(staging, *device_, shared_);
    slots_ = &pool.add(slots);
    receive_staging_ = staged() ? &pool.add(staging) : nullptr;
    send_staging_ =
        staged() ? &pool.add({"send staging", layout.slot_bytes(), 2, MemoryKind::kStaging}) : nullptr;
    encoded_ = on_device() && layout.encodes()
                   ? &pool.add({"encoded", layout.slot_bytes(), 2, MemoryKind::kDevice})
                   : nullptr;
    residual_ = &pool.add({"residual", layout.residual_bytes(), sizes.num_residuals, MemoryKind::kDevice,
                           /*poison=*/false});
  }

  void make_receiver(const ItemSpec& spec, const Sizes& sizes, bool computes_apart = false) {
    make_receiver_terms(spec, sizes, computes_apart);
    open_receiver(spec, sizes, computes_apart);
  }
  // Plans the receiver's memory and seals the pool. With computes_apart the reader may still read a slot
  // after its release, so slots are not poisoned.
  void make_receiver_terms(const ItemSpec& spec, const Sizes& sizes, bool computes_apart = true) {
    spec_ = spec;
    add_terms(*pool_, spec, sizes, /*poison=*/!computes_apart);
    pool_->seal();
  }
  // Makes the receiver in memory that the pool has planned already.
  void open_receiver(const ItemSpec& spec, const Sizes& sizes, bool computes_apart = false) {
    if (computes_apart && !compute_stream_) compute_stream_ = device_->make_stream();
    receiver_ = std::make_unique<ReceiveChannel>(receiver_options(spec, sizes), *receiving_, receiver_wakeup_,
                                                 *device_, *slots_, receive_staging_, compute_stream_.get(),
                                                 shared_, encoded_);
    receiver_link_ = &receiving_->listen(link_options("stage 0 (rank 0)"), *receiver_);
    receiver_->attach(*receiver_link_);
  }
  void make_channels(const ItemSpec& spec, const Sizes& sizes, bool computes_apart = false) {
    make_receiver(spec, sizes, computes_apart);
    open_sender(spec, sizes);
  }
  void open_sender(const ItemSpec& spec, const Sizes& sizes) {
    make_sender(spec, sizes, receiver_link_->endpoint());
    ASSERT_TRUE(sender_wakeup_.wait_until(patience(), [&] { return sender_->open(); }));
    ASSERT_TRUE(receiver_wakeup_.wait_until(patience(), [&] { return receiver_->open(); }));
  }
  void make_sender(const ItemSpec& spec, const Sizes& sizes, const std::string& endpoint) {
    sender_ = std::make_unique<SendChannel>(channel_options(spec, sizes), *sending_, sender_wakeup_, *device_,
                                            send_staging_, residual_, encoded_);
    if (shared_ != nullptr) {
      const SharedMemoryUse use = shared_use(WireLayout(spec, sizes.codec).slot_bytes());
      sender_->place_into(shared_->on_device() ? SharedMemory::open_on(*device_, shared_->address(), use)
                                               : SharedMemory::open(shared_->address(), use));
    }
    sender_link_ = &sending_->connect(link_options(), endpoint, *sender_);
    sender_->attach(*sender_link_);
  }
  // Makes a link without a channel, which can send frames that no channel sends. Its HELLO has been answered.
  void make_bare_sender() {
    sender_link_ = &sending_->connect(link_options(), receiver_link_->endpoint(), bare_sender_);
    ASSERT_TRUE(bare_sender_.wait_open());
  }
  void make_bare_receiver() {
    receiver_link_ = &receiving_->listen(link_options("stage 0 (rank 0)"), bare_receiver_);
  }

  static Deadline patience() { return Clock::now() + kPatience; }
  // A deadline for waits in which nothing may arrive. It is short, because such a wait always lasts until its
  // deadline.
  static Deadline moment() { return Clock::now() + std::chrono::milliseconds(30); }

  void send(std::int64_t minibatch, const std::shared_ptr<Content>& content, const ItemFields& fields = {}) {
    std::shared_ptr<void> owner = deaths_.watch(content);
    if (!on_device()) {
      return sender_->send(MinibatchId(minibatch), MicrobatchIndex(0), fields, content->tensors, nullptr,
                           std::move(owner));
    }
    OnDevice there = uploaded(*content, std::move(owner));
    auto ready = device_->make_event();
    upload_stream_->record(*ready);
    sender_->send(MinibatchId(minibatch), MicrobatchIndex(0), fields, there.tensors, std::move(ready),
                  std::move(there.owner));
  }
  // Tensors whose copy to the device may still be running.
  struct OnDevice {
    std::vector<TensorView> tensors;
    std::shared_ptr<void> owner;
  };
  OnDevice uploaded(const Content& content, std::shared_ptr<void> owner) {
    std::vector<std::byte> bytes;
    for (const std::vector<std::byte>& tensor : content.bytes) {
      bytes.insert(bytes.end(), tensor.begin(), tensor.end());
      bytes.resize(aligned(bytes.size()));
    }
    const std::shared_ptr<Memory> memory = upload(*device_, *upload_stream_, std::move(bytes));
    using Owners = std::pair<std::shared_ptr<void>, std::shared_ptr<Memory>>;
    OnDevice there{content.tensors, std::make_shared<Owners>(std::move(owner), memory)};
    std::byte* data = memory->data();
    for (TensorView& tensor : there.tensors) {
      tensor.data = data;
      data += aligned(tensor.size_bytes());
    }
    return there;
  }
  // Rounds up to an alignment that every dtype allows.
  static std::size_t aligned(std::size_t num_bytes) { return (num_bytes + 15) / 16 * 16; }
  void send_one_tensor(std::int64_t minibatch) {
    send(minibatch, one_tensor(3000, static_cast<std::uint32_t>(minibatch)));
  }

  [[nodiscard]] bool take(ReceivedItem& item, Deadline deadline) {
    const bool taken = receiver_wakeup_.wait_until(deadline, [&] { return receiver_->try_take(item); });
    if (taken && item.ready != nullptr && on_device()) compute_stream_->wait(*item.ready);
    if (taken && item.ready != nullptr && !on_device()) item.ready->wait();
    return taken;
  }
  // Takes the next item; returns an invalid item if no item comes.
  [[nodiscard]] ReceivedItem take() {
    ReceivedItem item;
    EXPECT_TRUE(take(item, patience())) << failure_text(receiver_wakeup_);
    return item;
  }
  [[nodiscard]] ReceivedItem take_after_send(std::int64_t minibatch) {
    send_one_tensor(minibatch);
    return take();
  }
  // Waits until only the test keeps the item's slot, and no copy does.
  static void copies_are_done(const ReceivedItem& item) {
    while (item.held->num_holders.load() > 1) std::this_thread::yield();
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

  // Polls, because a release after a failure wakes no thread.
  void wait_until_none_is_unreleased() {
    const Deadline deadline = patience();
    while (sender_->num_unreleased() > 0 && Clock::now() < deadline) std::this_thread::yield();
    EXPECT_EQ(sender_->num_unreleased(), 0U);
  }

  [[nodiscard]] std::vector<std::byte> bytes_of(const TensorView& tensor) {
    if (on_device()) return read_bytes(*compute_stream_, tensor.data, tensor.size_bytes());
    return {tensor.data, tensor.data + tensor.size_bytes()};
  }
  void expect_equal(const ReceivedItem& item, const Content& content) {
    ASSERT_EQ(item.tensors.size(), content.tensors.size());
    for (std::size_t index = 0; index < content.tensors.size(); ++index) {
      const TensorView& received = item.tensors[index];
      const TensorView& sent = content.tensors[index];
      EXPECT_EQ(received.dtype, sent.dtype);
      EXPECT_EQ(received.num_dims, sent.num_dims);
      EXPECT_EQ(received.shape, sent.shape);
      ASSERT_EQ(received.size_bytes(), sent.size_bytes());
      EXPECT_EQ(bytes_of(received), content.bytes[index]) << "tensor " << index;
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
  std::unique_ptr<Device> device_;  // shared by both ends
  std::unique_ptr<Stream> compute_stream_;
  std::function<std::unique_ptr<Stream>()> side_stream_;  // given to the receiver as its option of this name
  std::unique_ptr<Stream> upload_stream_;                 // null if tensors are sent from host memory
  std::unique_ptr<Pool> pool_;
  ItemSpec spec_;
  SlotGroup* slots_ = nullptr;
  SlotGroup* receive_staging_ = nullptr;
  SlotGroup* send_staging_ = nullptr;
  SlotGroup* residual_ = nullptr;
  SlotGroup* encoded_ = nullptr;
  const SharedMemory* shared_ = nullptr;
  std::string transport_;
  DataPath data_path_ = DataPath::kDirect;
  std::unique_ptr<Transport> sending_;
  std::unique_ptr<Transport> receiving_;
  std::unique_ptr<SendChannel> sender_;
  std::unique_ptr<ReceiveChannel> receiver_;
  Link* sender_link_ = nullptr;
  Link* receiver_link_ = nullptr;
};

}  // namespace pipedream
