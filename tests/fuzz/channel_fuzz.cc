// Fuzzes a receiving channel with a peer that may send anything, from the link's HELLO until tensors lie in
// slots of the pool. Any frame that the protocol and the plan do not allow next must end the link with
// CorruptFrame. Nothing may be written outside a slot or a posted place, and every slot must come back.
//
// An input is a mode byte (take_mode()) and then the frames. A frame's first byte is a set of bits, which
// feed() reads: take an item, drop an item, read the payload from the input, shorten the payload, post no
// place, use the last slot again. Its two highest bits are the number of changes. Each frame starts as the
// frame that an honest sender would send next. The changes follow, with field and value each, and then the
// payload. Checksums are corrected, because otherwise the first check would refuse every changed frame.
#include <algorithm>
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
#include "fuzz_link.h"

namespace pipedream {
namespace {

constexpr std::size_t kElements = 24;
constexpr std::size_t kChunkBytes = 32;
constexpr std::int64_t kNumSlots = 6;  // so many that some credits are held back
constexpr std::int64_t kNumMicrobatches = 2;
constexpr std::size_t kNumFramesMax = 64;

constexpr std::size_t kNumPosts = 8;
constexpr std::byte kUntouched{0x5A};

// The choices that the first byte of an input makes.
struct Mode {
  Codec codec;
  bool takes_posts = false;
};

ChannelOptions channel_options(const Mode& mode) {
  ChannelOptions options;
  options.name = "activations";
  options.item = ItemSpec({{DType::kFloat32, 1, kElements * 4}, {DType::kInt64, 2, kElements * 8}});
  if (mode.takes_posts) {
    options.item = ItemSpec({{DType::kFloat32, 1, kElements * 4}});
    options.num_posts_max = kNumPosts;
    options.channel_id = fuzz_link_options().identity.channel_id;
  }
  options.chunk_bytes = kChunkBytes;
  options.num_microbatches = kNumMicrobatches;
  options.codec = mode.codec;
  return options;
}

// Makes the frames of an honest sender, one after the other. It fills the slots that it was granted. Without
// a granted slot an item goes to a slot that it was not granted.
class Sender {
 public:
  explicit Sender(const Mode& mode) : codec_(mode.codec), num_tensors_(mode.takes_posts ? 1 : 2) {}

  void heard(const FrameHeader& header) {
    if (header.kind != FrameKind::kCredit) return;
    note_granted(header.slot);
    for (std::uint64_t left = header.further_slots; left != 0; left &= left - 1) {
      note_granted(header.slot + 1U + static_cast<unsigned>(std::countr_zero(left)));
    }
  }
  // With `reuses` an item that begins now goes to the last item's slot, even if that slot is not granted.
  void choose_slot(bool reuses) {
    if (tensor_index_ != 0 || offset_ != 0 || reuses) return;
    slot_ = granted_.empty() ? static_cast<std::uint16_t>(item_ % kNumSlots) : granted_.front();
    if (!granted_.empty()) granted_.pop_front();
  }

  FrameHeader due() const {
    FrameHeader header;
    header.identity = fuzz_link_options().identity;
    header.sequence = sequence_;
    if (sequence_ == 0) {
      header.plan_hash = fuzz_link_options().plan_hash;
      return header;
    }
    const bool floats = tensor_index_ == 0;
    header.kind = FrameKind::kTensor;
    header.minibatch = MinibatchId(item_ / kNumMicrobatches);
    header.microbatch = MicrobatchIndex(item_ % kNumMicrobatches);
    header.slot = slot_;
    header.has_last_slot = granted_.empty();
    header.tensor_index = static_cast<std::uint16_t>(tensor_index_);
    header.num_tensors = static_cast<std::uint16_t>(num_tensors_);
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

  // Notes that a slot is filled. Call it before the frame arrives, because the arrival may free the slot
  // again.
  void fills(const FrameHeader& header) {
    if (header.kind == FrameKind::kTensor) std::erase(granted_, header.slot);
  }
  void sent(const FrameHeader& header) {
    ++sequence_;
    if (header.kind != FrameKind::kTensor) return;
    offset_ += header.payload_bytes;
    if (offset_ < tensor_bytes()) return;
    offset_ = 0;
    if (++tensor_index_ < num_tensors_) return;
    tensor_index_ = 0;
    ++item_;
  }

 private:
  std::size_t tensor_bytes() const {
    if (tensor_index_ == 1) return kElements * 8;
    return encoded_bytes(codec_, DType::kFloat32, kElements);
  }

  void note_granted(unsigned slot) {
    PD_CHECK(slot < kNumSlots, "slot " << slot << " of " << kNumSlots << " was granted");
    PD_CHECK(std::ranges::find(granted_, slot) == granted_.end(), "slot " << slot << " was granted twice");
    granted_.push_back(static_cast<std::uint16_t>(slot));
  }

  Codec codec_;
  std::size_t num_tensors_;
  std::deque<std::uint16_t> granted_;  // granted slots that are not filled
  std::uint16_t slot_ = 0;             // the slot of the item that is being sent
  std::uint64_t sequence_ = 0;
  std::int64_t item_ = 0;
  std::size_t tensor_index_ = 0;
  std::size_t offset_ = 0;
};

Mode take_mode(FuzzInput& input) {
  constexpr std::array kKinds = {CodecKind::kNone, CodecKind::kBFloat16, CodecKind::kInt8, CodecKind::kTopK};
  const std::size_t mode = input.take<std::uint8_t>() % (kKinds.size() + 1);
  Mode chosen;
  chosen.takes_posts = mode == kKinds.size();
  if (!chosen.takes_posts) chosen.codec = {kKinds.at(mode), 0.25};
  return chosen;
}

// Memory for posted items, with guard bytes between the places.
class Places {
 public:
  Places() { bytes_.fill(kUntouched); }
  ~Places() {
    for (std::size_t at = 0; at < bytes_.size(); ++at) {
      PD_CHECK(at % kStride < kElements * 4 || bytes_[at] == kUntouched, at);
    }
  }
  Places(const Places&) = delete;
  Places& operator=(const Places&) = delete;

  [[nodiscard]] std::span<std::byte> next() {
    return std::span(bytes_).subspan(num_given_++ % kNumPosts * kStride, kElements * 4);
  }

 private:
  static constexpr std::size_t kStride = kElements * 4 + 64;
  std::array<std::byte, kNumPosts * kStride> bytes_;
  std::size_t num_given_ = 0;
};

// Does the work of the receiver's other threads: takes an item and drops an item, if `how` says so.
void consume(ReceiveChannel& channel, Wakeup& wakeup, std::deque<ReceivedItem>& held, std::uint8_t how) {
  ReceivedItem item;
  if ((how & 1U) != 0 && wakeup.wait_until(Clock::now(), [&] { return channel.try_take(item); })) {
    if (item.ready != nullptr) item.ready->wait();
    held.push_back(std::move(item));
  }
  if ((how & 2U) != 0 && !held.empty()) held.pop_front();
}

// Posts one place at a time, as long as there is room.
class Poster {
 public:
  Poster(ReceiveChannel& channel, bool posts) : channel_(channel), posts_(posts) {}
  void post(std::uint64_t num_begun) {
    if (!posts_ || num_posted_ >= num_begun + kNumPosts) return;
    const std::array<std::span<std::byte>, 1> place = {places_.next()};
    channel_.post(place);
    ++num_posted_;
  }

 private:
  ReceiveChannel& channel_;
  const bool posts_;
  Places places_;
  std::uint64_t num_posted_ = 0;
};

void feed(FuzzLink& link, Sender& sender, ReceiveChannel& channel, Wakeup& wakeup, Poster& poster,
          FuzzInput& input) {
  std::deque<ReceivedItem> held;
  for (std::size_t frame = 0; frame < kNumFramesMax && !input.empty() && !link.ended(); ++frame) {
    const auto how = input.take<std::uint8_t>();
    sender.choose_slot(/*reuses=*/(how & 32U) != 0);
    FrameHeader header = sender.due();
    for (unsigned count = how >> 6U; count > 0; --count) change(header, input);
    consume(channel, wakeup, held, how);
    if ((how & 16U) == 0) poster.post(channel.stats().num_items);
    std::vector<std::byte> payload(std::min<std::uint64_t>(header.payload_bytes, 2048));
    const auto bytes = input.take_bytes((how & 4U) != 0 ? payload.size() : 0);
    std::copy(bytes.begin(), bytes.end(), payload.begin());
    if ((how & 8U) != 0 && !payload.empty()) payload.pop_back();
    sender.fills(header);
    link.bring(header, payload);
    sender.sent(header);
  }
}

}  // namespace
}  // namespace pipedream

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t num_bytes) {
  using namespace pipedream;
  static const std::unique_ptr<Device> device = make_host_device();
  FuzzInput input(data, num_bytes);
  const Mode mode = take_mode(input);
  const ChannelOptions options = channel_options(mode);
  const bool staged = mode.codec.kind != CodecKind::kNone;

  Pool pool(*device);
  SlotGroup& slots =
      pool.add({"slots", mode.takes_posts ? 0 : options.item.slot_bytes(), kNumSlots, MemoryKind::kDevice});
  SlotGroup* staging = nullptr;
  if (staged) {
    const WireLayout layout(options.item, mode.codec);
    staging = &pool.add({"staging", layout.slot_bytes(), kNumSlots, MemoryKind::kStaging});
  }
  pool.seal();
  SilentTransport transport;
  Wakeup wakeup;
  {
    ReceiveChannel channel(options, transport, wakeup, *device, slots, staging, nullptr);
    Sender sender(mode);
    Poster poster(channel, mode.takes_posts);
    FuzzLink link(transport, fuzz_link_options(), channel,
                  [&](const FrameHeader& header) { sender.heard(header); });
    channel.attach(link);
    feed(link, sender, channel, wakeup, poster, input);
    transport.post([&] { link.lost("the input ended"); });
    link.drive();
    if (const auto failure = wakeup.failure()) PD_CHECK(!failure->message.empty(), "a failure without words");
    channel.detach();
  }
  PD_CHECK(slots.num_free() == kNumSlots, slots.num_free() << " of " << kNumSlots << " slots came back");
  return 0;
}
