// Passes tensors between Python and the core by DLPack, without a copy and without depending on a framework's
// ABI: as capsules, and as the framework's own objects. Called with the GIL held.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "channel/tensor.h"
#include "device/device.h"

struct DLPackExchangeAPI;
struct DLTensor;

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

// One framework's tensors, by its table of C functions; by capsules where it has none (torch before 2.10).
class TensorExchange {
 public:
  // to_capsule and from_capsule: what makes a capsule of such a tensor and the other way round. to_plain:
  // what makes contiguous memory that holds its very values of one that has none.
  TensorExchange(const pybind11::object& tensor_type, pybind11::object to_capsule,
                 pybind11::object from_capsule, pybind11::object to_plain);

  // Borrows tensors as from_capsules() does: tensors that are not contiguous, or whose memory holds other
  // values, are copied. The owner takes the GIL where it dies without.
  [[nodiscard]] Borrowed borrow(const pybind11::list& tensors, DeviceType device, int device_index,
                                const std::function<std::string()>& where) const;
  // Lends a tensor as to_capsule() does.
  [[nodiscard]] pybind11::object lend(const TensorView& tensor, DeviceType device, int device_index,
                                      std::shared_ptr<void> owner) const;
  // 64 bits of what the tensors hold, with their dtypes and shapes. Empty where one of them is not contiguous
  // in host memory, holds other values than its memory, or cannot be borrowed.
  [[nodiscard]] std::optional<std::uint64_t> fingerprint_of(const pybind11::list& tensors) const;
  // Tells on which stream of the CUDA device the calling thread computes; needs no GIL. Empty where the
  // framework has no table, or does not say.
  [[nodiscard]] std::function<std::uintptr_t()> current_stream(int device_index) const;
  [[nodiscard]] bool by_table() const { return table_ != nullptr; }

 private:
  [[nodiscard]] bool is_plain(const pybind11::handle& tensor, const DLTensor& content) const;
  [[nodiscard]] DLTensor look_at(const pybind11::handle& tensor, std::shared_ptr<void>& owner) const;

  const DLPackExchangeAPI* table_ = nullptr;  // lives as long as the process
  // The type's methods that tell whether its values are the negatives or conjugates of what the memory holds;
  // None where it has none.
  pybind11::object is_neg_;
  pybind11::object is_conj_;
  pybind11::object to_capsule_;
  pybind11::object from_capsule_;
  pybind11::object to_plain_;
};

}  // namespace pipedream
