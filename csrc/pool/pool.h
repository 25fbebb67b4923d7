// The pool is the memory of a worker: budget -> seal -> lease. Before the first minibatch every user of
// memory adds a term, which is a number of slots of one size. seal() allocates and touches the memory of all
// terms once. After that the pool only leases slots.
//
// Leasing takes constant time, allocates nothing and never waits. Any thread may lease and release, because
// the head of a term's list of free slots is one atomic word. A Lease must not outlive the Pool.

// Poison: if it is on (poison_by_default()), every free slot is filled with kPoisonByte from the seal on. A
// read before the first write or after the release then gives NaN in every float type and -1 in signed
// integers, which is easy to see. Only memory that the CPU can write is filled. Other device memory would
// need a fill on a stream, in an order with the readers' streams.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/ids.h"
#include "device/device.h"

namespace pipedream {

struct PoolTerm {
  std::string name;            // its user, for example "received activations"
  std::size_t slot_bytes = 0;  // 0 is allowed: a stage without parameters still counts its versions
  std::int64_t num_slots = 0;
  MemoryKind kind = MemoryKind::kDevice;
  // Whether free slots of this term are poisoned. False for a user that reads bytes which it did not write
  // (device.h says their values). Also false for slots that enqueued work still reads after their release.
  bool poison = true;
  // Makes memory of num_bytes for this term alone when the pool is sealed; the pool owns it. If empty, the
  // term shares one allocation with the other terms of its kind.
  std::function<std::unique_ptr<Memory>(std::size_t num_bytes)> allocate{};
};

inline constexpr std::size_t kSlotAlignment = 256;
inline constexpr std::int64_t kNumSlotsMax = 65535;  // the most slots of one term

// Returns the distance in bytes between two slots of slot_bytes. Another process that shares the term's
// memory uses it to find the slots.
[[nodiscard]] constexpr std::size_t slot_stride_bytes(std::size_t slot_bytes) {
  return (slot_bytes + kSlotAlignment - 1) / kSlotAlignment * kSlotAlignment;
}

inline constexpr std::byte kPoisonByte{0xFF};

// Returns whether free slots are poisoned: true if $PIPEDREAM_POISON is 1, false if it is 0. If the variable
// is not set: true in debug builds (CMAKE_BUILD_TYPE=Debug), false in other builds. Throws UserError for
// another value.
[[nodiscard]] bool poison_by_default();

class SlotGroup;

// A Lease is the right to use one slot. Its destructor gives the slot back. It can be moved, but not copied.
class Lease {
 public:
  Lease() = default;
  Lease(Lease&& other) noexcept
      : group_(std::exchange(other.group_, nullptr)),
        data_(std::exchange(other.data_, nullptr)),
        size_bytes_(std::exchange(other.size_bytes_, 0)),
        slot_(other.slot_) {}
  Lease& operator=(Lease&& other) noexcept;
  Lease(const Lease&) = delete;
  Lease& operator=(const Lease&) = delete;
  ~Lease() { release(); }

  [[nodiscard]] bool valid() const { return group_ != nullptr; }
  [[nodiscard]] std::byte* data() const { return data_; }
  [[nodiscard]] std::size_t size_bytes() const { return size_bytes_; }
  [[nodiscard]] SlotIndex slot() const { return slot_; }
  void release();

 private:
  friend class SlotGroup;
  Lease(SlotGroup* group, std::byte* data, std::size_t size_bytes, SlotIndex slot)
      : group_(group), data_(data), size_bytes_(size_bytes), slot_(slot) {}

  SlotGroup* group_ = nullptr;
  std::byte* data_ = nullptr;
  std::size_t size_bytes_ = 0;
  SlotIndex slot_;
};

struct TermReport {
  std::string name;
  MemoryKind kind = MemoryKind::kDevice;
  std::size_t slot_bytes = 0;  // the size that the user asked for
  std::int64_t num_slots = 0;
  std::size_t planned_bytes = 0;  // with the gaps that kSlotAlignment needs between slots
  std::size_t peak_bytes = 0;     // the most that was leased at once, with the gaps
};

// The slots of one term. Free slots form a stack, so that the slot released last, which may still be in the
// caches, is leased first. The stack is linked by slot indices. Its head is one word, so a lease and a
// release are one atomic exchange each:
//
//   | tag: 32 bits | free slots: 16 bits | top: 16 bits, slot index + 1, 0 when none is free |
//
// The tag counts the changes. Suppose a thread reads the head and is stopped before its exchange. It then
// sees that the head has changed, even if the same slot is on top again.
class SlotGroup {
 public:
  // base: the memory of the slots, or null if place() will give it later. Until then nothing can be leased.
  SlotGroup(PoolTerm term, std::byte* base, std::size_t stride_bytes);
  SlotGroup(const SlotGroup&) = delete;
  SlotGroup& operator=(const SlotGroup&) = delete;
  ~SlotGroup();  // aborts (our bug) if a slot is still leased

  // Leases a free slot, or returns nothing if all slots are leased. Allocates nothing.
  [[nodiscard]] std::optional<Lease> try_lease();
  // Leases a free slot, for users whose plan proves that there is one. Aborts (our bug) if all slots are
  // leased.
  [[nodiscard]] Lease lease();
  [[nodiscard]] std::int64_t num_free() const;
  [[nodiscard]] const PoolTerm& term() const { return term_; }
  [[nodiscard]] std::byte* slot_data(SlotIndex slot) const;
  // Sets a function that runs after each release, on the releasing thread. Call it before the first lease.
  void on_release(std::function<void()> callback);
  [[nodiscard]] TermReport report() const;

 private:
  friend class Lease;
  friend class Pool;
  void place(std::byte* base, bool poison);  // called by seal(), before any lease
  void fill_with_poison(std::int64_t slot);
  [[nodiscard]] Lease take();  // an invalid lease if all slots are leased
  void give_back(SlotIndex slot);
  void note_leased(std::int64_t num_leased);
  [[nodiscard]] std::size_t planned_bytes() const;

  const PoolTerm term_;
  const std::size_t stride_bytes_;
  std::byte* base_;
  bool placed_;
  bool poison_ = false;
  std::function<void()> on_release_;
  std::atomic<std::uint64_t> head_{0};
  std::vector<std::atomic<std::uint16_t>> next_free_;  // by slot: `top` of the head after this slot is leased
  std::atomic<std::int64_t> num_leased_max_{0};
};

inline Lease& Lease::operator=(Lease&& other) noexcept {
  if (this != &other) {
    release();
    group_ = std::exchange(other.group_, nullptr);
    data_ = std::exchange(other.data_, nullptr);
    size_bytes_ = std::exchange(other.size_bytes_, 0);
    slot_ = other.slot_;
  }
  return *this;
}

inline void Lease::release() {
  if (group_ == nullptr) return;
  data_ = nullptr;
  size_bytes_ = 0;
  std::exchange(group_, nullptr)->give_back(slot_);
}

class Pool {
 public:
  // The device outlives the pool.
  explicit Pool(Device& device, bool poison = poison_by_default());
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;
  ~Pool();

  // Adds a term; aborts after seal(). The returned reference stays valid, and its slots can be leased after
  // seal(). Throws UserError for a second term with the same name, for more than kNumSlotsMax slots and for a
  // size that overflows.
  SlotGroup& add(PoolTerm term);
  // Allocates the sum of all terms: one allocation per MemoryKind, and one for each term that has its own
  // `allocate`. Throws UserError with the table of terms if the device has less memory.
  void seal();
  [[nodiscard]] bool sealed() const;

  [[nodiscard]] std::size_t planned_bytes(MemoryKind kind) const;
  [[nodiscard]] std::vector<TermReport> report() const;
  // Returns a text with one line for each term and its bytes, and then the sums.
  [[nodiscard]] std::string describe() const;

 private:
  void allocate_kind(MemoryKind kind);
  void allocate_own(SlotGroup& group);
  [[nodiscard]] bool is_poisoned(MemoryKind kind) const;

  Device& device_;
  const bool poison_;
  bool sealed_ = false;
  std::vector<std::unique_ptr<Memory>> allocations_;  // declared before groups_, which are destroyed first
  std::deque<SlotGroup> groups_;                      // a deque never moves them
};

}  // namespace pipedream
