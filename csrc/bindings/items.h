// Makes the Python types of work items, and of items that are received outside the schedule. Called with the
// GIL held.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <memory>
#include <optional>

#include "channel/receive_channel.h"
#include "device/device.h"
#include "pool/pool.h"
#include "stage/engine.h"
#include "wire/item_fields.h"

namespace pipedream {

// Owns a received item whose tensors Python borrows, and keeps the item's pool alive until the item is
// released.
struct ItemHolder {
  std::shared_ptr<Pool> pool;
  ReceivedItem item;
};

// An item received outside the schedule.
struct PyItem {
  std::shared_ptr<Pool> pool;  // keeps the memory of the item's leases
  std::optional<ReceivedItem> received;
  DeviceType device = DeviceType::kHost;
  int device_index = 0;
  ItemFields fields;
  bool is_end = false;

  // Returns one capsule per tensor. The slot is free again once all capsules and their tensors are gone. A
  // second call returns an empty list, and so does the call for an item that ends the channel.
  pybind11::list take_tensors();
};

// Makes a WorkItem. Its members cost next to nothing to make and to read. freed_slot: -1 for none.
[[nodiscard]] pybind11::object make_work_item(const WorkItem& work, const ItemFields& fields,
                                              const pybind11::list& tensors, std::int64_t freed_slot);

// Makes the Python types. Call it before the first item is made.
void bind_items(pybind11::module_& module);

}  // namespace pipedream
