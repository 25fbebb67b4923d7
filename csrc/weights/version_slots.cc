// Counts the readers of each slot's version. See version_slots.h.
#include "weights/version_slots.h"

#include <algorithm>

#include "base/check.h"

namespace pipedream {

VersionSlots::VersionSlots(std::int64_t num_slots, WeightVersion newest, std::optional<WeightVersion> oldest)
    : newest_(newest) {
  PD_CHECK(num_slots >= 1, "num_slots " << num_slots);
  PD_CHECK(!oldest || *oldest <= newest, "oldest version " << oldest->value() << " of " << newest.value());
  slots_.resize(static_cast<std::size_t>(num_slots));
  WeightVersion version(std::max(oldest.value_or(newest).value(), newest.value() - num_slots + 1));
  for (Slot& slot : slots_) {
    if (version > newest) return;
    slot.held = true;
    slot.version = version;
    version = version.next();
  }
}

std::int64_t VersionSlots::num_slots() const { return static_cast<std::int64_t>(slots_.size()); }

std::int64_t VersionSlots::num_live() const {
  std::int64_t num_live = 0;
  for (const Slot& slot : slots_) {
    if (slot.held && (slot.num_readers > 0 || slot.version == newest_)) ++num_live;
  }
  return num_live;
}

SlotIndex VersionSlots::acquire(WeightVersion version) {
  const SlotIndex slot_index = slot_of(version);
  ++slot_at(slot_index).num_readers;
  return slot_index;
}

void VersionSlots::release(WeightVersion version) {
  Slot& slot = slot_at(slot_of(version));
  PD_CHECK(slot.num_readers > 0, "version " << version.value() << " has no readers");
  --slot.num_readers;
}

SlotIndex VersionSlots::slot_of(WeightVersion version) const {
  for (std::size_t slot_index = 0; slot_index < slots_.size(); ++slot_index) {
    const Slot& slot = slots_[slot_index];
    if (slot.held && slot.version == version) return SlotIndex(static_cast<std::int64_t>(slot_index));
  }
  PD_CHECK(false, "version " << version.value() << " is not held in " << slots_.size()
                             << " slots; the newest is " << newest_.value());
}

bool VersionSlots::is_held(WeightVersion version) const {
  return std::ranges::any_of(slots_, [&](const Slot& slot) { return slot.held && slot.version == version; });
}

std::int64_t VersionSlots::num_readers(WeightVersion version) const {
  return slots_[static_cast<std::size_t>(slot_of(version).value())].num_readers;
}

SlotIndex VersionSlots::begin_update() const {
  // Overwrites the oldest version first, because schedules that read older versions still need the newer
  // versions.
  const Slot* oldest = nullptr;
  for (const Slot& slot : slots_) {
    if (!is_writable(slot)) continue;
    if (!slot.held) {
      oldest = &slot;
      break;
    }
    if (oldest == nullptr || slot.version < oldest->version) oldest = &slot;
  }
  PD_CHECK(oldest != nullptr, "no slot is free for version " << newest_.next().value() << ": all "
                                                             << slots_.size() << " are read");
  return SlotIndex(oldest - slots_.data());
}

void VersionSlots::publish(SlotIndex slot_index) {
  Slot& slot = slot_at(slot_index);
  PD_CHECK(is_writable(slot), "slot " << slot_index.value() << " holds version " << slot.version.value()
                                      << " with " << slot.num_readers << " readers; the newest is "
                                      << newest_.value());
  newest_ = newest_.next();
  slot = Slot{.held = true, .version = newest_, .num_readers = 0};
}

bool VersionSlots::is_writable(const Slot& slot) const {
  if (!slot.held) return true;
  return slot.num_readers == 0 && (slot.version != newest_ || slots_.size() == 1);
}

VersionSlots::Slot& VersionSlots::slot_at(SlotIndex slot_index) {
  PD_CHECK(slot_index.value() >= 0 && slot_index.value() < num_slots(),
           "slot " << slot_index.value() << " of " << num_slots());
  return slots_[static_cast<std::size_t>(slot_index.value())];
}

}  // namespace pipedream
