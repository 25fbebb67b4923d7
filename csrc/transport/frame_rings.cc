#include "transport/frame_rings.h"

#include <array>
#include <atomic>
#include <cstring>
#include <new>
#include <optional>
#include <utility>

#include "base/check.h"

namespace pipedream {
namespace {

constexpr std::size_t kCacheLineBytes = 64;
// The slot size in the rings' SharedMemoryUse. No channel plans slots of this size, so no channel takes the
// rings for its own memory.
constexpr std::uint64_t kNoSlots = ~std::uint64_t{0};

constexpr std::size_t kBoardAddressBytesMax = 128;

struct alignas(kCacheLineBytes) Cell {
  FrameHeaderBytes header;
  std::uint64_t num_carried;  // frames that the connection carried before this one
};

}  // namespace

// One side of a link: the board of its transport (ring_board.h), which says which rings have frames, and the
// link's number on that board. The other side marks this number when it has put frames into the ring that
// this side reads.
struct RingEnd {
  std::array<char, kBoardAddressBytesMax> board_address;  // text, padded with zeros
  std::uint32_t number;                                   // the link's number on that board

  void set(const std::string& address, std::uint32_t own_number) {
    PD_CHECK(address.size() < board_address.size(), address);
    address.copy(board_address.data(), address.size());
    number = own_number;
  }
  // Reads no more than the array, because the other side may overwrite the text's end at any time.
  [[nodiscard]] std::string address() const {
    return {board_address.data(), ::strnlen(board_address.data(), board_address.size() - 1)};
  }
};

// The ring of one direction. Parts with different writers lie in different cache lines.
struct RingWay {
  alignas(kCacheLineBytes) std::atomic<std::uint64_t> num_pushed;  // written by the sender
  alignas(kCacheLineBytes) std::atomic<std::uint64_t> num_taken;   // written by the receiver
  alignas(kCacheLineBytes) std::array<Cell, FrameRings::kNumCells> cells;
};

struct FrameRingsPlan {
  RingEnd listener;
  RingEnd connector;
  RingWay to_listener;
  RingWay to_connector;
};

namespace {

// Shared memory always begins at a page, and cache lines at the same offset of their pages compete for a few
// places in a cache. So the rings of neighbouring channels begin at different offsets.
constexpr std::size_t kNumPlaces = 16;
constexpr std::size_t kPlaceBytes = 4 * kCacheLineBytes;
constexpr std::size_t kPlanBytes = sizeof(FrameRingsPlan) + (kNumPlaces - 1) * kPlaceBytes;

std::byte* place_of_plan(const SharedMemory& memory, const LinkIdentity& identity) {
  return memory.data() + identity.channel_id % kNumPlaces * kPlaceBytes;
}

}  // namespace

FrameRings::FrameRings(std::unique_ptr<SharedMemory> memory, FrameRingsPlan& plan, bool is_listener,
                       std::uint32_t number)
    : memory_(std::move(memory)),
      plan_(plan),
      is_listener_(is_listener),
      in_(is_listener ? plan.to_listener : plan.to_connector),
      out_(is_listener ? plan.to_connector : plan.to_listener),
      number_(number) {
  static_assert(std::atomic<std::uint64_t>::is_always_lock_free);
}

FrameRings::~FrameRings() = default;

std::unique_ptr<FrameRings> FrameRings::make(const LinkIdentity& identity, RingBoard& board, bool is_quick) {
  const std::optional<std::uint32_t> number = board.take_number(is_quick);
  if (!number) return nullptr;
  auto memory = SharedMemory::make(kPlanBytes, {identity, kNoSlots});
  // NOLINTNEXTLINE(*-owning-memory): the plan lies in shared memory
  auto* const plan = new (place_of_plan(*memory, identity)) FrameRingsPlan{};
  plan->listener.set(board.address(), *number);
  return std::unique_ptr<FrameRings>(new FrameRings(std::move(memory), *plan, /*is_listener=*/true, *number));
}

std::unique_ptr<FrameRings> FrameRings::open(const std::string& address, const LinkIdentity& identity,
                                             RingBoard& board, bool is_quick) {
  auto memory = SharedMemory::open(address, {identity, kNoSlots});
  if (!memory || memory->size_bytes() < kPlanBytes) return nullptr;
  auto* const plan = reinterpret_cast<FrameRingsPlan*>(place_of_plan(*memory, identity));
  const std::optional<std::uint32_t> number = board.take_number(is_quick);
  if (!number) return nullptr;
  std::unique_ptr<FrameRings> rings(new FrameRings(std::move(memory), *plan, /*is_listener=*/false, *number));
  if (!rings->find_peer(board, plan->listener)) return nullptr;
  plan->connector.set(board.address(), *number);
  rings->memory_->claim();
  return rings;
}

bool FrameRings::find_peer(RingBoard& board, const RingEnd& peer) {
  number_at_peer_ = peer.number;
  if (number_at_peer_ < RingBoard::kNumLinksMax) board_of_peer_ = board.board_of_peer(peer.address());
  return board_of_peer_ != nullptr;
}

// A listener that cannot open the connector's board still reads frames from the ring, but sends all its own
// frames on the connection.
bool FrameRings::begin(RingBoard& board) {
  if (!memory_->is_claimed()) return false;
  if (is_listener_) static_cast<void>(find_peer(board, plan_.connector));
  board.mark(number_);  // frames may have come before this side looks at the link's marks
  return true;
}

bool FrameRings::push(const FrameHeaderBytes& header, bool is_urgent) {
  if (!board_of_peer_) return false;
  if (num_free_ == 0) {
    const std::uint64_t num_left = num_pushed_ - out_.num_taken.load(std::memory_order_acquire);
    if (num_left >= kNumCells) return false;
    num_free_ = kNumCells - num_left;
  }
  --num_free_;
  out_.cells[num_pushed_ % kNumCells] = {header, num_carried_};
  out_.num_pushed.store(++num_pushed_, std::memory_order_release);
  board_of_peer_->tell(number_at_peer_, is_urgent);
  return true;
}

// Reads each value once: the sender could change the cell at any time, because its memory is shared.
bool FrameRings::take(FrameHeaderBytes& header) {
  const std::uint64_t num_there = in_.num_pushed.load(std::memory_order_acquire) - num_taken_;
  if (num_there == 0 || num_there > kNumCells) return false;
  const Cell cell = in_.cells[num_taken_ % kNumCells];
  if (cell.num_carried > num_brought_) return false;
  header = cell.header;
  in_.num_taken.store(++num_taken_, std::memory_order_release);
  return true;
}

bool FrameRings::has_frames() const { return in_.num_pushed.load(std::memory_order_acquire) != num_taken_; }

}  // namespace pipedream
