// Fuzzes a sending channel with a receiver that may send back anything: credits, posted places and other
// frames. A frame that is not allowed must end the link with CorruptFrame. Items may be sent only to granted
// slots, nothing may be written outside the memory that the receiver shares, and every item must be released
// in the end.
//
// An input is the path (take the byte modulo 4) and then steps. A step sends an item or the end, collects
// released items, or lets a frame arrive: at first a HELLO, then a CREDIT of the next slot. The input may
// change the frame.
#include <array>
#include <memory>
#include <optional>
#include <set>
#include <vector>

#include "channel/send_channel.h"
#include "fuzz_link.h"
#include "transport/shared_memory.h"

namespace pipedream {
namespace {

constexpr std::size_t kElements = 24;
constexpr std::size_t kItemBytes = kElements * 4;
constexpr std::uint16_t kNumSlots = 3;
constexpr std::size_t kNumStepsMax = 96;

enum class Path : std::uint8_t { kWire, kEncoded, kPlaced, kPosted };

ChannelOptions channel_options(Path path) {
  ChannelOptions options;
  options.name = "activations";
  options.item = ItemSpec({{DType::kFloat32, 1, kItemBytes}});
  options.chunk_bytes = 40;
  options.num_items_max = 4;
  if (path == Path::kEncoded) options.codec = {CodecKind::kBFloat16, 1};
  return options;
}

// Checks that the sender fills only slots that the receiver has granted. A lying receiver may grant a slot
// again before the item for that slot is sent. Then two items may go to the slot.
class Grants {
 public:
  void note_credit(const FrameHeader& credit) {
    granted_.insert(credit.slot);
    for (std::uint64_t bit = 0; bit < 64; ++bit) {
      if ((credit.further_slots >> bit & 1) != 0) granted_.insert(credit.slot + 1 + bit);
    }
  }
  void note_sent(const FrameHeader& header) {
    if (header.kind != FrameKind::kTensor || header.chunk_offset != 0) return;
    const auto grant = granted_.find(header.slot);
    PD_CHECK(grant != granted_.end(), "slot " << header.slot << " was not granted");
    granted_.erase(grant);
  }

 private:
  std::multiset<std::uint64_t> granted_;
};

class Steps {
 public:
  Steps(SendChannel& channel, FuzzLink& link, Wakeup& wakeup, Grants& grants, FuzzInput& input)
      : channel_(channel), link_(link), wakeup_(wakeup), grants_(grants), input_(input) {}

  void take() {
    const auto how = input_.take<std::uint8_t>();
    if ((how & 3U) == 0 && !ended_ && !wakeup_.failure()) return send((how & 4U) != 0);
    if ((how & 3U) == 1) return channel_.collect_released();
    bring(how);
  }

 private:
  void send(bool ends) {
    ended_ = ends;
    if (ends) return channel_.send_end(num_sent_);
    TensorView tensor;
    tensor.dtype = DType::kFloat32;
    tensor.num_dims = 1;
    tensor.shape[0] = kElements;
    tensor.data = bytes_.data();
    channel_.send(MinibatchId(num_sent_++), MicrobatchIndex(0), {}, {tensor}, nullptr, nullptr);
    link_.drive();
  }
  void bring(std::uint8_t how) {
    FrameHeader header;
    header.identity = fuzz_link_options().identity;
    header.sequence = sequence_++;
    if (header.sequence == 0) {
      header.plan_hash = fuzz_link_options().plan_hash;
    } else {
      header.kind = FrameKind::kCredit;
      header.slot = static_cast<std::uint16_t>(sequence_ % kNumSlots);
      if ((how & 8U) != 0) {
        header.tensor_bytes = kItemBytes;
        header.chunk_offset = header.slot * kItemBytes;
      }
    }
    for (unsigned count = how >> 6U; count > 0; --count) change(header, input_);
    const std::vector<std::byte> payload(std::min<std::uint64_t>(header.payload_bytes, 2048));
    if (header.kind == FrameKind::kCredit && !find_violation(header)) grants_.note_credit(header);
    link_.bring(header, payload);
  }

  SendChannel& channel_;
  FuzzLink& link_;
  Wakeup& wakeup_;
  Grants& grants_;
  FuzzInput& input_;
  std::vector<std::byte> bytes_ = std::vector<std::byte>(kItemBytes);
  std::int64_t num_sent_ = 0;
  std::uint64_t sequence_ = 0;
  bool ended_ = false;
};

// The receiver's shared memory, mapped at each end; null if the receiver shares none.
struct Shared {
  std::unique_ptr<SharedMemory> receivers;
  std::unique_ptr<SharedMemory> senders;
};

Shared share(Path path) {
  Shared shared;
  if (path != Path::kPlaced && path != Path::kPosted) return shared;
  const SharedMemoryUse use{fuzz_link_options().identity, path == Path::kPosted ? 0 : kItemBytes};
  shared.receivers = SharedMemory::make(kNumSlots * slot_stride_bytes(kItemBytes), use);
  shared.senders = SharedMemory::open(shared.receivers->address(), use);
  return shared;
}

}  // namespace
}  // namespace pipedream

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t num_bytes) {
  using namespace pipedream;
  static const std::unique_ptr<Device> device = make_host_device();
  FuzzInput input(data, num_bytes);
  const auto path = static_cast<Path>(input.take<std::uint8_t>() % 4);
  const ChannelOptions options = channel_options(path);

  Pool pool(*device);
  SlotGroup* staging = nullptr;
  if (path == Path::kEncoded) {
    const WireLayout layout(options.item, options.codec);
    staging = &pool.add({"staging", layout.slot_bytes(), 2, MemoryKind::kStaging});
  }
  pool.seal();
  Shared shared = share(path);
  SilentTransport transport;
  Wakeup wakeup;
  Grants grants;
  {
    SendChannel channel(options, transport, wakeup, *device, staging);
    if (shared.senders && path == Path::kPlaced) channel.place_into(std::move(shared.senders));
    if (shared.senders && path == Path::kPosted) channel.place_where_posted(std::move(shared.senders));
    FuzzLink link(transport, fuzz_link_options(), channel,
                  [&](const FrameHeader& header) { grants.note_sent(header); });
    channel.attach(link);
    Steps steps(channel, link, wakeup, grants, input);
    for (std::size_t step = 0; step < kNumStepsMax && !input.empty() && !link.ended(); ++step) steps.take();
    transport.post([&] { link.lost("the input ended"); });
    transport.drive_without_thread();
    if (const auto failure = wakeup.failure()) PD_CHECK(!failure->message.empty(), "a failure without words");
    channel.collect_released();
  }
  return 0;
}
