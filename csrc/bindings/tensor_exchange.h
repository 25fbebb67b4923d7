// Tensors across the language border as DLPack capsules: no copy, no dependence on a framework's ABI.
// Called with the GIL held.
#pragma once

#include <pybind11/pybind11.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "channel/tensor.h"
#include "device/device.h"

namespace pipedream {

// A capsule named "dltensor" over the tensor. owner is dropped when the consumer drops the last
// reference to the memory, on whatever thread that is, GIL or not.
[[nodiscard]] pybind11::capsule to_capsule(const TensorView& tensor, DeviceType device, int device_index,
                                           std::shared_ptr<void> owner);

// Takes the capsules over: the views are valid while the owner lives. The owner may die on any thread
// (the framework takes the GIL itself where it needs it). Throws UserError, after `where()`, for a tensor
// that is not contiguous or lies elsewhere than on the device.
struct Borrowed {
  std::vector<TensorView> tensors;
  std::shared_ptr<void> owner;
};
[[nodiscard]] Borrowed from_capsules(const pybind11::list& capsules, DeviceType device, int device_index,
                                     const std::function<std::string()>& where);

}  // namespace pipedream
