#include "transport/frame_rings.h"

#include <new>
#include <utility>

#include "base/check.h"

namespace pipedream {
namespace {

constexpr std::size_t kCacheLineBytes = 64;
constexpr std::uint64_t kNoSlots = ~std::uint64_t{0};  // what the memory is for: no channel plans such slots

struct alignas(kCacheLineBytes) Cell {
  FrameHeaderBytes header;
  std::uint64_t num_carried;  // by the connection, before this one
  std::uint64_t is_urgent;
};

}  // namespace

// Who writes what has a cache line of its own.
struct RingWay {
  alignas(kCacheLineBytes) std::atomic<std::uint64_t> num_pushed;  // the sender's
  std::atomic<std::uint64_t> num_urgent_pushed;
  alignas(kCacheLineBytes) std::atomic<std::uint64_t> num_taken;  // the receiver's
  alignas(
      kCacheLineBytes) std::atomic<std::uint32_t> wish;  // a BellWish: the receiver's, cleared by who rings
  alignas(kCacheLineBytes) std::array<Cell, FrameRings::kNumCells> cells;
};

struct FrameRingsPlan {
  BellAddress listener_bell;
  BellAddress connector_bell;
  RingWay to_listener;
  RingWay to_connector;
};

namespace {

// Every memory begins at a page, and lines at the same place of their pages share few places in a cache: of
// neighbouring channels the rings begin at different ones.
constexpr std::size_t kNumPlaces = 16;
constexpr std::size_t kPlaceBytes = 4 * kCacheLineBytes;
constexpr std::size_t kPlanBytes = sizeof(FrameRingsPlan) + (kNumPlaces - 1) * kPlaceBytes;

std::byte* place_of_plan(const SharedMemory& memory, const LinkIdentity& identity) {
  return memory.data() + identity.channel_id % kNumPlaces * kPlaceBytes;
}

}  // namespace

FrameRings::FrameRings(std::unique_ptr<SharedMemory> memory, FrameRingsPlan& plan, bool is_listener)
    : in_(is_listener ? plan.to_listener : plan.to_connector),
      is_listener_(is_listener),
      out_(is_listener ? plan.to_connector : plan.to_listener),
      plan_(plan),
      memory_(std::move(memory)) {
  static_assert(std::atomic<std::uint64_t>::is_always_lock_free);
}

FrameRings::~FrameRings() = default;

std::unique_ptr<FrameRings> FrameRings::make(const LinkIdentity& identity, const Bell& bell) {
  auto memory = SharedMemory::make(kPlanBytes, {identity, kNoSlots});
  // NOLINTNEXTLINE(*-owning-memory): it lies in the memory
  auto* const plan = new (place_of_plan(*memory, identity)) FrameRingsPlan{};
  plan->listener_bell = bell.address();
  return std::unique_ptr<FrameRings>(new FrameRings(std::move(memory), *plan, /*is_listener=*/true));
}

std::unique_ptr<FrameRings> FrameRings::open(const std::string& address, const LinkIdentity& identity,
                                             const Bell& bell) {
  auto memory = SharedMemory::open(address, {identity, kNoSlots});
  if (!memory || memory->size_bytes() < kPlanBytes) return nullptr;
  auto* const plan = reinterpret_cast<FrameRingsPlan*>(place_of_plan(*memory, identity));
  auto rope = BellRope::open(plan->listener_bell);
  if (!rope) return nullptr;
  plan->connector_bell = bell.address();
  memory->claim();
  std::unique_ptr<FrameRings> rings(new FrameRings(std::move(memory), *plan, /*is_listener=*/false));
  rings->rope_ = std::move(rope);
  return rings;
}

// Where the listener cannot open the connector's bell it still takes what comes, and says all by the
// connection.
bool FrameRings::begin() {
  if (!memory_->is_claimed()) return false;
  if (is_listener_) rope_ = BellRope::open(plan_.connector_bell);
  return true;
}

bool FrameRings::push(const FrameHeaderBytes& header, bool is_urgent) {
  if (!rope_) return false;
  if (num_free_ == 0) {
    const std::uint64_t num_left = num_pushed_ - out_.num_taken.load(std::memory_order_acquire);
    if (num_left >= kNumCells) return false;
    num_free_ = kNumCells - num_left;
  }
  --num_free_;
  out_.cells[num_pushed_ % kNumCells] = {header, num_carried_, is_urgent ? 1U : 0U};
  if (is_urgent) out_.num_urgent_pushed.store(++num_urgent_pushed_, std::memory_order_relaxed);
  out_.num_pushed.store(++num_pushed_, std::memory_order_release);
  std::atomic_thread_fence(std::memory_order_seq_cst);  // before the wish is read, as wish() before it looks
  const auto wished = static_cast<BellWish>(out_.wish.load(std::memory_order_relaxed));
  const bool wakes = wished == BellWish::kAll || (wished == BellWish::kUrgent && is_urgent);
  if (wakes && out_.wish.exchange(static_cast<std::uint32_t>(BellWish::kNothing)) != 0) rope_->ring();
  return true;
}

// The sender may write to the cell, as its memory is shared: each value is read once.
bool FrameRings::take(FrameHeaderBytes& header) {
  const std::uint64_t num_taken = num_taken_.load(std::memory_order_relaxed);
  const std::uint64_t num_there = in_.num_pushed.load(std::memory_order_acquire) - num_taken;
  if (num_there == 0) return false;
  if (num_there > kNumCells) {  // no sender does that: its memory is not what it was
    is_blocked_.store(true);
    return false;
  }
  const Cell cell = in_.cells[num_taken % kNumCells];
  if (cell.num_carried > num_brought_) {
    is_blocked_.store(true);
    return false;
  }
  header = cell.header;
  if (cell.is_urgent != 0) {
    num_urgent_taken_.store(num_urgent_taken_.load(std::memory_order_relaxed) + 1, std::memory_order_relaxed);
  }
  num_taken_.store(num_taken + 1, std::memory_order_relaxed);
  in_.num_taken.store(num_taken + 1, std::memory_order_release);
  return true;
}

void FrameRings::wish(BellWish wished) {
  if (wished == BellWish::kNothing && wished_ == BellWish::kNothing) return;
  wished_ = wished;
  const auto value = static_cast<std::uint32_t>(wished);
  if (in_.wish.load(std::memory_order_relaxed) != value) in_.wish.store(value, std::memory_order_relaxed);
}

bool FrameRings::has(BellWish wished) const {
  if (wished == BellWish::kNothing || is_blocked_.load()) return false;
  // Of an urgent one, too: who is halfway through a push has nothing to take yet, and will read the wish.
  if (in_.num_pushed.load(std::memory_order_acquire) == num_taken_.load(std::memory_order_relaxed))
    return false;
  return wished == BellWish::kAll || in_.num_urgent_pushed.load(std::memory_order_acquire) !=
                                         num_urgent_taken_.load(std::memory_order_relaxed);
}

}  // namespace pipedream
