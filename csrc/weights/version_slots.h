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
  // num_slots: the number of versions that the stage keeps. At the start slots 0, 1, ... hold consecutive
  // versions that end with the newest. The first is `oldest`, or a later version if there are fewer slots.
  explicit VersionSlots(std::int64_t num_slots, WeightVersion newest = {},
                        std::optional<WeightVersion> oldest = std::nullopt);

  [[nodiscard]] WeightVersion newest() const { return newest_; }
  [[nodiscard]] std::int64_t num_slots() const;
  [[nodiscard]] std::int64_t num_live() const;  // number of versions that are newest or still read

  // Counts a new reader of the version, and returns its slot. The reader is a forward, which keeps the
  // version until its backward is done. Aborts if no slot holds the version.
  SlotIndex acquire(WeightVersion version);
  void release(WeightVersion version);
  [[nodiscard]] SlotIndex slot_of(WeightVersion version) const;
  [[nodiscard]] bool is_held(WeightVersion version) const;
  [[nodiscard]] std::int64_t num_readers(WeightVersion version) const;

  // Returns the slot for version newest() + 1: one that holds no version, or else the slot without readers
  // that has the oldest version. That version stays readable until publish(). If there is only one slot, the
  // newest version is updated in place. Aborts if every slot is read, which means that the program is wrong.
  [[nodiscard]] SlotIndex begin_update() const;
  // Says that the write is complete: newest() becomes newest() + 1, which lies in this slot.
  void publish(SlotIndex slot);

 private:
  struct Slot {
    bool held = false;
    WeightVersion version;
    std::int64_t num_readers = 0;
  };

  // Returns whether an update may write into the slot. It may if the slot holds no version, or one without
  // readers. The newest version counts as read, by the optimizer, unless it has the only slot.
  [[nodiscard]] bool is_writable(const Slot& slot) const;
  [[nodiscard]] Slot& slot_at(SlotIndex slot_index);

  std::vector<Slot> slots_;
  WeightVersion newest_;
};

}  // namespace pipedream
