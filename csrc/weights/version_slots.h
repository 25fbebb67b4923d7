// The record of the weight version in each slot, and of the readers of each version. It holds no tensors.
// Owned by the stage's compute thread; not thread-safe.
//
// Raw-pointer writes bump no autograd version counter, so these reference counts are what keeps a slot from
// being overwritten while a backward still needs it.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "base/ids.h"

namespace pipedream {

class VersionSlots {
 public:
  // num_slots: the number of versions kept. At the start slots 0, 1, ... hold the newest version and, as far
  // as there are slots, the versions before it down to the oldest.
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

  // The slot for version newest()+1: among the slots without readers the one with the oldest version, which
  // stays held until publish(). It is the newest's own slot (in place) only when there is a single slot.
  // Aborts when no slot is free: the program is wrong.
  [[nodiscard]] SlotIndex begin_update() const;
  // The write is complete: newest() becomes newest()+1, held in the slot.
  void publish(SlotIndex slot);

 private:
  struct Slot {
    bool held = false;
    WeightVersion version;
    std::int64_t num_readers = 0;
  };

  // Whether the slot has no readers; the optimizer reads the newest version.
  [[nodiscard]] bool is_writable(const Slot& slot) const;
  [[nodiscard]] Slot& slot_at(SlotIndex slot_index);

  std::vector<Slot> slots_;
  WeightVersion newest_;
};

}  // namespace pipedream
