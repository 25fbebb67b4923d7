// A record of which slot holds which weight version, and who still reads it. Bookkeeping only: no memory
// here. Owned by the stage's compute thread; not thread-safe.
//
// Raw-pointer writes bump no autograd version counter, so these reference counts are what keeps a slot
// from being overwritten while a backward still needs it.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "base/ids.h"

namespace pipedream {

class VersionSlots {
 public:
  // num_slots = versions kept. What is held at the start lies in slots 0, 1, ...: the newest version and, as
  // far as there are slots, those before it down to the oldest.
  explicit VersionSlots(std::int64_t num_slots, WeightVersion newest = {},
                        std::optional<WeightVersion> oldest = std::nullopt);

  [[nodiscard]] WeightVersion newest() const { return newest_; }
  [[nodiscard]] std::int64_t num_slots() const;
  [[nodiscard]] std::int64_t num_live() const;  // versions that are newest or still read

  // A forward starts to read the version and keeps it until its backward is done. Aborts when the
  // version is not held.
  SlotIndex acquire(WeightVersion version);
  void release(WeightVersion version);
  [[nodiscard]] SlotIndex slot_of(WeightVersion version) const;
  [[nodiscard]] bool is_held(WeightVersion version) const;
  [[nodiscard]] std::int64_t num_readers(WeightVersion version) const;

  // The slot that version newest()+1 is written into: of those that nobody reads the one with the oldest
  // version, which stays held until then; the newest's own slot (in place) only when there is a single
  // slot. Aborts when none is free: the program is wrong.
  [[nodiscard]] SlotIndex begin_update() const;
  // The write is complete: newest() becomes newest()+1, held in the slot.
  void publish(SlotIndex slot);

 private:
  struct Slot {
    bool held = false;
    WeightVersion version;
    std::int64_t num_readers = 0;
  };

  // Nobody reads it, the optimizer's read of the newest version included.
  [[nodiscard]] bool is_writable(const Slot& slot) const;
  [[nodiscard]] Slot& slot_at(SlotIndex slot_index);

  std::vector<Slot> slots_;
  WeightVersion newest_;
};

}  // namespace pipedream
