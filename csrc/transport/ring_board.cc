#include "transport/ring_board.h"

#include <new>
#include <utility>

#include "base/check.h"

namespace pipedream {

// The layout of a board's memory. Parts with different writers lie in different cache lines.
struct RingBoardPlan {
  BellAddress bell;
  // 0 if no frame rings the bell; otherwise 1 + the Patience of the last wish().
  alignas(64) std::atomic<std::uint32_t> wish;
  std::array<MarkedLinks, RingBoard::kNumLinksMax / MarkedLinks::kNumLinks> links;
};

namespace {

constexpr std::uint32_t kNoWish = 0;
// The memory of a board belongs to no channel. No channel plans slots of this size, so no channel takes a
// board for its own memory.
constexpr SharedMemoryUse kUse{.identity = {.channel_id = kPostedChannelId - 1},
                               .slot_bytes = ~std::uint64_t{0}};

std::uint32_t wish_for(Patience patience) { return 1 + static_cast<std::uint32_t>(patience); }

std::uint64_t bit_of(std::uint32_t number) { return std::uint64_t{1} << number % MarkedLinks::kNumLinks; }

MarkedLinks& links_with(RingBoardPlan& plan, std::uint32_t number) {
  return plan.links[number / MarkedLinks::kNumLinks];
}

// The bits of the links whose frames ring the bell under this wish only if they are urgent.
std::uint64_t too_patient_for(const MarkedLinks& links, std::uint32_t wish) {
  if (wish <= wish_for(Patience::kNone)) return links.until_one_waits.load();
  if (wish <= wish_for(Patience::kUntilOneWaits)) return links.until_one_drives.load();
  return 0;
}

void set_bits(std::atomic<std::uint64_t>& word, std::uint64_t bits, bool value) {
  const std::uint64_t before = word.load(std::memory_order_relaxed);
  if (((before & bits) != 0) == value) return;
  if (value) {
    word.fetch_or(bits);
  } else {
    word.fetch_and(~bits);
  }
}

}  // namespace

// ---- A peer's board ----

RingBoardOfPeer::RingBoardOfPeer(std::unique_ptr<SharedMemory> memory, std::unique_ptr<BellRope> rope)
    : memory_(std::move(memory)),
      plan_(*reinterpret_cast<RingBoardPlan*>(memory_->data())),
      rope_(std::move(rope)) {}

std::shared_ptr<RingBoardOfPeer> RingBoardOfPeer::open(const std::string& address) {
  auto memory = SharedMemory::open(address, kUse);
  if (!memory || memory->size_bytes() < sizeof(RingBoardPlan)) return nullptr;
  auto rope = BellRope::open(reinterpret_cast<const RingBoardPlan*>(memory->data())->bell);
  if (!rope) return nullptr;
  return std::shared_ptr<RingBoardOfPeer>(new RingBoardOfPeer(std::move(memory), std::move(rope)));
}

// Skips step 3 of the drawing in ring_board.h if the link was marked already. Then the sender that marked the
// link does step 3. Until step A removes the mark, step c sees it.
//
// The first sender that rings takes the wish back, so other senders do not ring. The woken thread looks at
// all marks before any thread sleeps with a new wish. If this sender is stopped between taking the wish back
// and ringing, the receiver may sleep until the sender goes on or the next beat comes.
void RingBoardOfPeer::tell(std::uint32_t number, bool is_urgent) {
  MarkedLinks& links = links_with(plan_, number);
  const std::uint64_t bit = bit_of(number);
  if (((is_urgent ? links.urgent : links.patient).fetch_or(bit) & bit) != 0) return;
  const std::uint32_t wish = plan_.wish.load();
  if (wish == kNoWish || (!is_urgent && (too_patient_for(links, wish) & bit) != 0)) return;
  if (plan_.wish.exchange(kNoWish) != kNoWish) rope_->ring();
}

// ---- A transport's own board ----

RingBoard::RingBoard()
    : memory_(SharedMemory::make(sizeof(RingBoardPlan), kUse)),
      // NOLINTNEXTLINE(*-owning-memory): the plan lies in shared memory
      plan_(*new (memory_->data()) RingBoardPlan{}),
      halves_{Half{0, 0}, Half{kNumLinksMax / 2, kNumLinksMax / 2}} {
  static_assert(std::atomic<std::uint64_t>::is_always_lock_free && sizeof(MarkedLinks) == 64);
  plan_.bell = bell_.address();
}

RingBoard::~RingBoard() = default;

std::shared_ptr<RingBoardOfPeer> RingBoard::board_of_peer(const std::string& address) {
  const std::lock_guard lock(mutex_);
  std::weak_ptr<RingBoardOfPeer>& known = peers_[address];
  auto peer = known.lock();
  if (!peer) known = peer = RingBoardOfPeer::open(address);
  return peer;
}

std::optional<std::uint32_t> RingBoard::take_number(bool is_quick) {
  Half& half = halves_[is_quick ? 0 : 1];
  std::uint32_t number = half.end.load();
  do {
    if (number == half.first + kNumLinksMax / 2) return std::nullopt;
  } while (!half.end.compare_exchange_weak(number, number + 1));
  return number;
}

MarkedLinks& RingBoard::links_with(std::uint32_t number) const {
  return pipedream::links_with(plan_, number);
}

void RingBoard::let_wait(std::uint32_t number, Patience patience) {
  MarkedLinks& links = links_with(number);
  set_bits(links.until_one_waits, bit_of(number), patience >= Patience::kUntilOneWaits);
  set_bits(links.until_one_drives, bit_of(number), patience >= Patience::kUntilOneDrives);
}

void RingBoard::mark(std::uint32_t number) { links_with(number).urgent.fetch_or(bit_of(number)); }

std::uint64_t RingBoard::marks_of(std::uint32_t first) const {
  const MarkedLinks& links = links_with(first);
  return links.urgent.load(std::memory_order_relaxed) | links.patient.load(std::memory_order_relaxed);
}

// This is step A of the drawing in ring_board.h, and step 2 changes the same words atomically. If A removes
// the mark of step 2, step B finds the frame. If step 2 comes after A, the mark stays for the next thread
// that drives.
//
// A thread that leaves frames in a ring marks the link itself. If a ring's next frame must wait for the
// connection, the thread that reads the connection next reads the ring (ZmqLink::receive_one).
void RingBoard::unmark(std::uint32_t number) {
  MarkedLinks& links = links_with(number);
  for (std::atomic<std::uint64_t>* word : {&links.urgent, &links.patient}) {
    if ((word->load(std::memory_order_relaxed) & bit_of(number)) != 0) word->fetch_and(~bit_of(number));
  }
}

// This is step a of the drawing in ring_board.h. The sender marks the link (2) before it reads the wish (3).
// The receiver writes the wish (a) before it looks at the marks (c). A full barrier lies between 2 and 3, and
// between a and c. So the sender sees the wish, or the receiver sees the mark. The same holds for a link's
// patience, because let_wait() writes it before step a.
void RingBoard::wish(std::optional<Patience> patience) {
  if (!patience && !wished_) return;
  wished_ = patience;
  const std::uint32_t value = patience ? wish_for(*patience) : kNoWish;
  if (plan_.wish.load(std::memory_order_relaxed) != value) plan_.wish.store(value, std::memory_order_relaxed);
}

bool RingBoard::has_wished() const {
  if (!wished_) return false;
  for (const Half& half : halves_) {
    const std::uint32_t end = half.end.load(std::memory_order_relaxed);
    for (std::uint32_t first = half.first; first < end; first += MarkedLinks::kNumLinks) {
      const MarkedLinks& links = links_with(first);
      if (links.urgent.load() != 0) return true;
      const std::uint64_t patient = links.patient.load();
      if (patient != 0 && (patient & ~too_patient_for(links, wish_for(*wished_))) != 0) return true;
    }
  }
  return false;
}

}  // namespace pipedream
