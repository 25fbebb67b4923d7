// Implements budget, seal and lease; see the header. Terms lie in memory in the order in which they were
// added.
#include "pool/pool.h"

#include <algorithm>
#include <array>
#include <cstdlib>
#include <cstring>
#include <string_view>
#include <utility>

#include "base/bytes.h"
#include "base/check.h"
#include "base/failure.h"

namespace pipedream {
namespace {

constexpr std::array<MemoryKind, 2> kKinds = {MemoryKind::kDevice, MemoryKind::kStaging};

#ifndef PD_POISON_BY_DEFAULT
#error "csrc/pool/CMakeLists.txt defines PD_POISON_BY_DEFAULT as 0 or 1"
#endif

const char* kind_name(MemoryKind kind) { return kind == MemoryKind::kDevice ? "device" : "staging"; }

// SlotGroup's head word; the drawing is in the header.
struct Head {
  std::uint16_t top = 0;
  std::uint16_t num_free = 0;
  std::uint32_t tag = 0;
};

constexpr Head unpack(std::uint64_t word) {
  return {static_cast<std::uint16_t>(word), static_cast<std::uint16_t>(word >> 16),
          static_cast<std::uint32_t>(word >> 32)};
}

constexpr std::uint64_t pack(Head head) {
  return std::uint64_t{head.top} | std::uint64_t{head.num_free} << 16 | std::uint64_t{head.tag} << 32;
}

// Returns the distance between two slots, in bytes. Throws UserError if the term's sum overflows.
std::size_t stride_of(const PoolTerm& term) {
  std::size_t padded_bytes = 0;
  std::size_t sum_bytes = 0;
  if (__builtin_add_overflow(term.slot_bytes, kSlotAlignment - 1, &padded_bytes) ||
      __builtin_mul_overflow(padded_bytes, static_cast<std::size_t>(term.num_slots), &sum_bytes)) {
    throw UserError("pool term '" + term.name + "': " + std::to_string(term.num_slots) + " slots of " +
                    std::to_string(term.slot_bytes) +
                    " bytes are more than can be addressed; check the sizes");
  }
  return slot_stride_bytes(term.slot_bytes);
}

}  // namespace

bool poison_by_default() {
  const char* const text = std::getenv("PIPEDREAM_POISON");
  if (text == nullptr) return PD_POISON_BY_DEFAULT != 0;
  const std::string_view value = text;
  if (value == "1" || value == "0") return value == "1";
  throw UserError("PIPEDREAM_POISON is '" + std::string(value) +
                  "'; set it to 1 (fill released memory with 0xFF) or 0 (leave it)");
}

// --- SlotGroup ---------------------------------------------------------------------------------------

SlotGroup::SlotGroup(PoolTerm term, std::byte* base, std::size_t stride_bytes)
    : term_(std::move(term)),
      stride_bytes_(stride_bytes),
      base_(base),
      placed_(base != nullptr),
      next_free_(static_cast<std::size_t>(term_.num_slots)) {
  PD_CHECK(term_.num_slots <= kNumSlotsMax, "'" << term_.name << "' has " << term_.num_slots << " slots");
  PD_CHECK(stride_bytes_ >= term_.slot_bytes,
           "pool term '" << term_.name << "': stride " << stride_bytes_ << ", slot " << term_.slot_bytes);
  const auto num_slots = static_cast<std::uint16_t>(term_.num_slots);
  for (std::uint16_t slot = 0; slot < num_slots; ++slot) {  // slot 0 on top
    const bool last = slot + 1 == num_slots;
    next_free_[slot].store(last ? std::uint16_t{0} : static_cast<std::uint16_t>(slot + 2));
  }
  head_.store(pack({num_slots > 0 ? std::uint16_t{1} : std::uint16_t{0}, num_slots, 0}));
}

SlotGroup::~SlotGroup() {
  PD_CHECK(num_free() == term_.num_slots, term_.num_slots - num_free()
                                              << " of " << term_.num_slots << " slots of '" << term_.name
                                              << "' are still leased while their pool is destroyed");
}

std::optional<Lease> SlotGroup::try_lease() {
  Lease taken = take();
  if (!taken.valid()) return std::nullopt;
  return taken;
}

Lease SlotGroup::lease() {
  Lease taken = take();
  PD_CHECK(taken.valid(), "all " << term_.num_slots << " slots of '" << term_.name << "' ("
                                 << term_.slot_bytes << " bytes each) are leased");
  return taken;
}

Lease SlotGroup::take() {
  PD_CHECK(placed_, "'" << term_.name << "' is leased before the pool is sealed");
  std::uint64_t word = head_.load(std::memory_order_acquire);
  Head head;
  std::size_t slot = 0;
  do {
    head = unpack(word);
    if (head.top == 0) return {};
    slot = head.top - std::size_t{1};
    // May be out of date if another thread has changed the head; then the exchange fails.
    head.top = next_free_[slot].load(std::memory_order_relaxed);
    --head.num_free;
    ++head.tag;
  } while (
      !head_.compare_exchange_weak(word, pack(head), std::memory_order_acq_rel, std::memory_order_acquire));
  note_leased(term_.num_slots - head.num_free);
  return Lease(this, base_ + slot * stride_bytes_, term_.slot_bytes,
               SlotIndex(static_cast<std::int64_t>(slot)));
}

void SlotGroup::note_leased(std::int64_t num_leased) {
  std::int64_t before = num_leased_max_.load(std::memory_order_relaxed);
  while (before < num_leased &&
         !num_leased_max_.compare_exchange_weak(before, num_leased, std::memory_order_relaxed)) {
  }
}

std::int64_t SlotGroup::num_free() const { return unpack(head_.load(std::memory_order_acquire)).num_free; }

std::byte* SlotGroup::slot_data(SlotIndex slot) const {
  PD_CHECK(placed_, "'" << term_.name << "' has no memory before the pool is sealed");
  PD_CHECK(slot.value() >= 0 && slot.value() < term_.num_slots,
           "slot " << slot.value() << " of " << term_.num_slots << " of '" << term_.name << "'");
  return base_ + static_cast<std::size_t>(slot.value()) * stride_bytes_;
}

void SlotGroup::on_release(std::function<void()> callback) {
  PD_CHECK(num_free() == term_.num_slots,
           "on_release of '" << term_.name << "' is set after the first lease");
  on_release_ = std::move(callback);
}

TermReport SlotGroup::report() const {
  const auto num_leased_max = static_cast<std::size_t>(num_leased_max_.load(std::memory_order_relaxed));
  return {term_.name,      term_.kind,      term_.slot_bytes,
          term_.num_slots, planned_bytes(), num_leased_max * stride_bytes_};
}

void SlotGroup::place(std::byte* base, bool poison) {
  base_ = base;
  placed_ = true;
  poison_ = poison && term_.poison && term_.slot_bytes > 0;
  if (!poison_) return;
  for (std::int64_t slot = 0; slot < term_.num_slots; ++slot) fill_with_poison(slot);
}

void SlotGroup::fill_with_poison(std::int64_t slot) {
  std::memset(base_ + static_cast<std::size_t>(slot) * stride_bytes_, std::to_integer<int>(kPoisonByte),
              term_.slot_bytes);
}

void SlotGroup::give_back(SlotIndex slot) {
  if (poison_) fill_with_poison(slot.value());  // before the slot is free and may be leased again
  std::uint64_t word = head_.load(std::memory_order_relaxed);
  Head head;
  do {
    head = unpack(word);
    next_free_[static_cast<std::size_t>(slot.value())].store(head.top, std::memory_order_relaxed);
    head.top = static_cast<std::uint16_t>(slot.value() + 1);
    ++head.num_free;
    ++head.tag;
  } while (
      !head_.compare_exchange_weak(word, pack(head), std::memory_order_acq_rel, std::memory_order_relaxed));
  if (on_release_) on_release_();
}

std::size_t SlotGroup::planned_bytes() const {
  return static_cast<std::size_t>(term_.num_slots) * stride_bytes_;
}

// --- Pool --------------------------------------------------------------------------------------------

Pool::Pool(Device& device, bool poison) : device_(device), poison_(poison) {}

Pool::~Pool() = default;

SlotGroup& Pool::add(PoolTerm term) {
  PD_CHECK(!sealed_, "pool term '" << term.name << "' of " << term.num_slots << " x " << term.slot_bytes
                                   << " bytes is added after the seal");
  PD_CHECK(term.num_slots >= 0, "pool term '" << term.name << "' has " << term.num_slots << " slots");
  if (term.num_slots > kNumSlotsMax) {
    throw UserError("pool term '" + term.name + "' has " + std::to_string(term.num_slots) +
                    " slots, at most " + std::to_string(kNumSlotsMax) +
                    " are possible; use fewer microbatches or fewer minibatches in flight");
  }
  for (const SlotGroup& group : groups_) {
    if (group.term().name == term.name) {
      throw UserError("pool term '" + term.name + "' exists already; every user needs a name of its own");
    }
  }
  const std::size_t stride_bytes = stride_of(term);
  return groups_.emplace_back(std::move(term), nullptr, stride_bytes);
}

void Pool::seal() {
  PD_CHECK(!sealed_, "the pool is sealed twice");
  try {
    for (const MemoryKind kind : kKinds) allocate_kind(kind);
    for (SlotGroup& group : groups_) {
      if (group.term().allocate) allocate_own(group);
    }
  } catch (const UserError& error) {
    allocations_.clear();
    throw UserError(error.what() + std::string("\n") + describe());
  }
  sealed_ = true;
}

// Allocates the memory of all terms of this kind that do not have their own `allocate`.
void Pool::allocate_kind(MemoryKind kind) {
  const auto belongs = [kind](const SlotGroup& group) {
    return group.term().kind == kind && !group.term().allocate;
  };
  static_cast<void>(planned_bytes(kind));  // throws if the sum overflows
  std::size_t sum_bytes = 0;
  for (const SlotGroup& group : groups_) {
    if (belongs(group)) sum_bytes += group.planned_bytes();
  }
  std::byte* next = nullptr;  // stays null when no slot of this kind has any bytes
  if (sum_bytes > 0) next = allocations_.emplace_back(device_.allocate(sum_bytes, kind))->data();
  std::size_t num_placed_bytes = 0;
  for (SlotGroup& group : groups_) {
    if (!belongs(group)) continue;
    group.place(next, is_poisoned(kind));
    if (next != nullptr) next += group.planned_bytes();
    num_placed_bytes += group.planned_bytes();
  }
  PD_CHECK(num_placed_bytes == sum_bytes, "placed " << num_placed_bytes << " of " << sum_bytes << " bytes");
}

void Pool::allocate_own(SlotGroup& group) {
  const std::size_t num_bytes = group.planned_bytes();
  std::byte* data = nullptr;
  if (num_bytes > 0) {
    const std::unique_ptr<Memory>& memory = allocations_.emplace_back(group.term().allocate(num_bytes));
    PD_CHECK(memory->size_bytes() >= num_bytes,
             "'" << group.term().name << "' got " << memory->size_bytes() << " of " << num_bytes << " bytes");
    data = memory->data();
  }
  group.place(data, is_poisoned(group.term().kind));
}

bool Pool::is_poisoned(MemoryKind kind) const {
  return poison_ && (kind == MemoryKind::kStaging || device_.device_memory_is_host_memory());
}

bool Pool::sealed() const { return sealed_; }

std::size_t Pool::planned_bytes(MemoryKind kind) const {
  std::size_t sum_bytes = 0;
  for (const SlotGroup& group : groups_) {
    if (group.term().kind != kind) continue;
    if (__builtin_add_overflow(sum_bytes, group.planned_bytes(), &sum_bytes)) {
      throw UserError("the pool's terms are more than can be addressed, at '" + group.term().name + "'");
    }
  }
  return sum_bytes;
}

std::vector<TermReport> Pool::report() const {
  std::vector<TermReport> reports;
  reports.reserve(groups_.size());
  for (const SlotGroup& group : groups_) reports.push_back(group.report());
  return reports;
}

std::string Pool::describe() const {
  std::size_t name_width = std::string_view("sum, staging").size();
  for (const SlotGroup& group : groups_) name_width = std::max(name_width, group.term().name.size());
  const auto line = [&](const std::string& name, const std::string& text) {
    return name + std::string(name_width - name.size() + 2, ' ') + text + "\n";
  };
  std::string table;
  for (const TermReport& term : report()) {
    table += line(term.name, format_bytes(term.planned_bytes) + " = " + std::to_string(term.num_slots) +
                                 " x " + format_bytes(term.slot_bytes) + " (" + kind_name(term.kind) + ")");
  }
  for (const MemoryKind kind : kKinds) {
    table += line(std::string("sum, ") + kind_name(kind), format_bytes(planned_bytes(kind)));
  }
  return table;
}

}  // namespace pipedream
