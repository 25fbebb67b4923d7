// Records the weight version in each slot and the number of readers of each version. Holds no tensors. Owned
// by the stage's compute thread; not thread-safe.
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
  // num_slots: the number of versions kept. At the start slots 0, 1, ... hold the newest version and the
  // versions before it, down to the oldest one or until no slot is left.
  explicit VersionSlots(std::int64_t num_slots, WeightVersion newest = {},
                        std::optional<WeightVersion> oldest = std::nullopt);

  [[nodiscard]] WeightVersion newest() const { return newest_; }
  [[nodiscard]] std::int64_t num_slots() const;
  [[nodiscard]] std::int64_t num_live() const;  // versions that are newest or still read

  // Counts a new reader: a forward, which keeps the version until its backward is done. Aborts when no slot
  // holds the version.
  SlotIndex acquire(WeightVersion version);
  void release(WeightVersion version);
  [[nodiscard]] SlotIndex slot_of(WeightVersion version) const;
  [[nodiscard]] bool is_held(WeightVersion version) const;
  [[nodiscard]] std::int64_t num_readers(WeightVersion version) const;

  // The slot for version newest()+1: the slot without readers that has the oldest version. That version stays
  // readable until publish(). If there is only one slot, begin_update() returns it, and the newest version is
  // updated in place. Aborts when no slot is free: the program is wrong.
  [[nodiscard]] SlotIndex begin_update() const;
  // The write is complete: newest() becomes newest()+1, held in the slot.
  void publish(SlotIndex slot);

 private:
  struct Slot {
    bool held = false;
    WeightVersion version;
    std::int64_t num_readers = 0;
  };

  // Whether the slot has no readers. The newest version counts as read, by the optimizer.
  [[nodiscard]] bool is_writable(const Slot& slot) const;
  [[nodiscard]] Slot& slot_at(SlotIndex slot_index);

  std::vector<Slot> slots_;
  WeightVersion newest_;
};

}  // namespace pipedream
