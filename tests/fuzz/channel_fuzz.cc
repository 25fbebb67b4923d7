// A peer that says anything: the whole way of a frame from a link's first HELLO to a slot of the pool. What
// is not the next thing that the protocol and the plan allow ends the link with CorruptFrame; nothing is
// written outside a slot, and every slot comes back.
//
// An input is a list of frames. Each is the one that is due, then changed: [number of changes, then field and
// value each], payload from the input. Checksums are made right, or no frame would come past the first check.
#include <array>
#include <bit>
#include <cstring>
#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "channel/receive_channel.h"
#include "fuzz.h"
#include "transport/link_core.h"

namespace pipedream {
namespace {

constexpr std::size_t kElements = 24;
constexpr std::size_t kChunkBytes = 32;
constexpr std::int64_t kNumSlots = 3;
constexpr std::int64_t kNumMicrobatches = 2;
constexpr std::size_t kNumFramesMax = 64;

// No sockets and no thread: what would be sent is dropped. Tasks are those of the link's own sends.
class SilentTransport final : public TransportCore {
 public:
  SilentTransport() : TransportCore(TransportOptions{}) {}
  std::string_view name() const override { return "silent"; }
  Link& listen(LinkOptions /*options*/, LinkHandler& /*handler*/) override { PD_CHECK(false, "not used"); }
  Link& connect(LinkOptions /*options*/, const std::string& /*endpoint*/, LinkHandler& /*handler*/) override {
    PD_CHECK(false, "not used");
  }

 private:
  void note_ready(std::uint64_t /*name*/) override {}
  void deliver(Driver /*driver*/) override {}
  [[nodiscard]] bool has_traffic() const override { return false; }
  void teardown() override {}
};

class FuzzLink final : public LinkCore {
 public:
  FuzzLink(TransportCore& transport, LinkOptions options, LinkHandler& handler)
      : LinkCore(transport, std::move(options), handler, Role::kListener) {}

  using LinkCore::lost;
  using LinkCore::receive;
  [[nodiscard]] std::string endpoint() const override { return address_; }

 private:
  void carry(const FrameHeaderBytes& /*header*/, HeldFrame /*frame*/) override {}
  void disconnect() override {}
  [[nodiscard]] const std::string& address() const override { return address_; }

  const std::string address_ = "fuzz://1";
};

LinkOptions link_options() {
  LinkOptions options;
  options.identity = {7, 1, 3};
  options.plan_hash = 5;
  options.name = "activations";
  options.peer = "stage 0";
  options.payload_bytes_max = 1024;
  return options;
}

ChannelOptions channel_options(const Codec& codec) {
  ChannelOptions options;
  options.name = "activations";
  options.spec = ItemSpec({{DType::kFloat32, 1, kElements * 4}, {DType::kInt64, 2, kElements * 8}});
  options.chunk_bytes = kChunkBytes;
  options.num_microbatches = kNumMicrobatches;
  options.codec = codec;
  return options;
}

// The frames of an honest sender, one after the other.
class Sender {
 public:
  explicit Sender(const Codec& codec) : codec_(codec) {}

  FrameHeader due() const {
    FrameHeader header;
    header.identity = link_options().identity;
    header.sequence = sequence_;
    if (sequence_ == 0) {
      header.plan_hash = link_options().plan_hash;
      return header;
    }
    const bool floats = tensor_index_ == 0;
    header.kind = FrameKind::kTensor;
    header.minibatch = MinibatchId(item_ / kNumMicrobatches);
    header.microbatch = MicrobatchIndex(item_ % kNumMicrobatches);
    header.slot = static_cast<std::uint16_t>(item_ % kNumSlots);
    header.tensor_index = static_cast<std::uint16_t>(tensor_index_);
    header.num_tensors = 2;
    header.dtype = floats ? DType::kFloat32 : DType::kInt64;
    header.num_dims = floats ? 1 : 2;
    header.shape[0] = floats ? kElements : 4;
    if (!floats) header.shape[1] = kElements / 4;
    header.codec = codec_for(codec_, header.dtype).kind;
    header.tensor_bytes = tensor_bytes();
    header.chunk_offset = offset_;
    header.payload_bytes = std::min(kChunkBytes, tensor_bytes() - offset_);
    return header;
  }

  void sent(const FrameHeader& header) {
    ++sequence_;
    if (header.kind != FrameKind::kTensor) return;
    offset_ += header.payload_bytes;
    if (offset_ < tensor_bytes()) return;
    offset_ = 0;
    if (++tensor_index_ < 2) return;
    tensor_index_ = 0;
    ++item_;
  }

 private:
  std::size_t tensor_bytes() const {
    if (tensor_index_ == 1) return kElements * 8;
    return encoded_bytes(codec_, DType::kFloat32, kElements);
  }

  Codec codec_;
  std::uint64_t sequence_ = 0;
  std::int64_t item_ = 0;
  std::size_t tensor_index_ = 0;
  std::size_t offset_ = 0;
};

void change_metadata(FrameHeader& header, std::uint64_t value) {
  switch (value % 8) {
    case 0:
      header.fields.data_fingerprint = value;
      return;
    case 1:
      header.fields.loss_scale = std::bit_cast<double>(value);
      return;
    case 2:
      header.fields.gradients_overflowed = !header.fields.gradients_overflowed;
      return;
    case 3:
      header.fields.is_empty = !header.fields.is_empty;
      return;
    case 4:
      header.plan_hash = value;
      return;
    case 6:
      header.fields.num_minibatches = static_cast<std::uint32_t>(value);
      return;
    case 7:
      header.fields.is_end_of_data = !header.fields.is_end_of_data;
      return;
    default:
      header.num_work_items = value;
      return;
  }
}

// One field becomes what the input says.
void change(FrameHeader& header, FuzzInput& input) {
  const auto field = input.take<std::uint8_t>();
  const auto value = input.take<std::uint64_t>();
  switch (field % 20) {
    case 0:
      header.kind = static_cast<FrameKind>(value % 9);
      return;
    case 1:
      header.identity.run_id = value;
      return;
    case 2:
      header.identity.incarnation = static_cast<std::uint32_t>(value);
      return;
    case 3:
      header.identity.channel_id = static_cast<std::uint32_t>(value);
      return;
    case 4:
      header.sequence = value;
      return;
    case 5:
      header.minibatch = MinibatchId(static_cast<std::int64_t>(value));
      return;
    case 6:
      header.microbatch = MicrobatchIndex(static_cast<std::int64_t>(value));
      return;
    case 7:
      header.tensor_index = static_cast<std::uint16_t>(value);
      return;
    case 8:
      header.num_tensors = static_cast<std::uint16_t>(value);
      return;
    case 9:
      header.dtype = static_cast<DType>(value % 16);
      return;
    case 10:
      header.num_dims = static_cast<std::uint8_t>(value % 12);
      return;
    case 11:
      header.shape[value % kNumDimsMax] = static_cast<std::int64_t>(value >> 8U);
      return;
    case 12:
      header.tensor_bytes = value;
      return;
    case 13:
      header.chunk_offset = value;
      return;
    case 14:
      header.payload_bytes = value;
      return;
    case 15:
      header.placed_bytes = value;
      return;
    case 17:
      header.slot = static_cast<std::uint16_t>(value);
      return;
    case 18:
      header.codec = static_cast<CodecKind>(value % 6);
      return;
    case 16:
      change_metadata(header, value);
      return;
    default:
      header.has_payload_checksum = value % 2 == 0;
      header.payload_checksum = static_cast<std::uint32_t>(value >> 8U);
      return;
  }
}

Codec take_codec(FuzzInput& input) {
  constexpr std::array kKinds = {CodecKind::kNone, CodecKind::kBFloat16, CodecKind::kInt8, CodecKind::kTopK};
  return {kKinds[input.take<std::uint8_t>() % kKinds.size()], 0.25};
}

// What the receiver's other threads do: takes some items, and drops some.
void consume(ReceiveChannel& channel, Wakeup& wakeup, std::deque<ReceivedItem>& held, std::uint8_t how) {
  ReceivedItem item;
  if ((how & 1U) != 0 && wakeup.wait_until(Clock::now(), [&] { return channel.try_take(item); })) {
    if (item.ready != nullptr) item.ready->wait();
    held.push_back(std::move(item));
  }
  if ((how & 2U) != 0 && !held.empty()) held.pop_front();
}

void feed(FuzzLink& link, ReceiveChannel& channel, Wakeup& wakeup, const Codec& codec, FuzzInput& input) {
  Sender sender(codec);
  std::deque<ReceivedItem> held;
  for (std::size_t frame = 0; frame < kNumFramesMax && !input.empty() && !link.ended(); ++frame) {
    const auto how = input.take<std::uint8_t>();
    FrameHeader header = sender.due();
    for (unsigned count = how >> 6U; count > 0; --count) change(header, input);
    consume(channel, wakeup, held, how);
    std::vector<std::byte> payload(std::min<std::uint64_t>(header.payload_bytes, 2048));
    const auto bytes = input.take_bytes((how & 4U) != 0 ? payload.size() : 0);
    std::copy(bytes.begin(), bytes.end(), payload.begin());
    if ((how & 8U) != 0 && !payload.empty()) payload.pop_back();
    FrameHeaderBytes header_bytes;
    encode(header, header_bytes);
    link.receive(header_bytes, payload);
    sender.sent(header);
  }
}

}  // namespace
}  // namespace pipedream

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t num_bytes) {
  using namespace pipedream;
  static const std::unique_ptr<Device> device = make_host_device();
  FuzzInput input(data, num_bytes);
  const Codec codec = take_codec(input);
  const ChannelOptions options = channel_options(codec);
  const bool staged = codec.kind != CodecKind::kNone;

  Pool pool(*device);
  SlotGroup& slots = pool.add({"slots", options.spec.slot_bytes(), kNumSlots, MemoryKind::kDevice});
  SlotGroup* staging = nullptr;
  if (staged) {
    const WireLayout layout(options.spec, codec);
    staging = &pool.add({"staging", layout.slot_bytes(), kNumSlots, MemoryKind::kStaging});
  }
  pool.seal();
  SilentTransport transport;
  Wakeup wakeup;
  {
    ReceiveChannel channel(options, transport, wakeup, *device, slots, staging, nullptr);
    FuzzLink link(transport, link_options(), channel);
    channel.attach(link);
    feed(link, channel, wakeup, codec, input);
    if (!link.ended()) link.lost("the input ended");
    if (const auto failure = wakeup.failure()) PD_CHECK(!failure->message.empty(), "a failure without words");
    channel.detach();
  }
  PD_CHECK(slots.num_free() == kNumSlots, slots.num_free() << " of " << kNumSlots << " slots came back");
  return 0;
}
