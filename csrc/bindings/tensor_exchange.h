// Passes tensors between Python and the core by DLPack, without a copy and without the ABI of a framework. In
// Python the tensors are DLPack capsules or the framework's own tensors. Called with the GIL held.
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

// Returns a capsule named "dltensor" over the tensor. The capsule keeps `owner` alive until its consumer
// drops the last reference to the memory. That may happen on any thread, with the GIL or without.
[[nodiscard]] pybind11::capsule to_capsule(const TensorView& tensor, DeviceType device, int device_index,
                                           std::shared_ptr<void> owner);

// from_capsules() consumes the capsules. The views are valid while the owner lives. The owner may die on any
// thread, and the framework takes the GIL if it needs the GIL. Throws UserError, which begins with the text
// of where(), for a tensor that is not contiguous or not on the device, or has too many dimensions or a dtype
// that cannot be sent.
struct Borrowed {
  std::vector<TensorView> tensors;
  std::shared_ptr<void> owner;
};
[[nodiscard]] Borrowed from_capsules(const pybind11::list& capsules, DeviceType device, int device_index,
                                     const std::function<std::string()>& where);

// Converts the tensors of one framework, through its table of C functions, or through capsules if the
// framework has no table (torch before 2.10).
class TensorExchange {
 public:
  // to_capsule, from_capsule: Python functions that make a capsule from a tensor, and a tensor from a
  // capsule. to_plain: a Python function that returns a contiguous copy of a tensor, whose memory holds its
  // values.
  TensorExchange(const pybind11::object& tensor_type, pybind11::object to_capsule,
                 pybind11::object from_capsule, pybind11::object to_plain);

  // Borrows tensors like from_capsules(). Copies a tensor that is not contiguous, or whose memory does not
  // hold its values (a negative or a conjugate view). The owner takes the GIL itself when it dies.
  [[nodiscard]] Borrowed borrow(const pybind11::list& tensors, DeviceType device, int device_index,
                                const std::function<std::string()>& where) const;
  // Returns a tensor of the framework over the view's memory, without a copy. The tensor keeps `owner` alive.
  [[nodiscard]] pybind11::object lend(const TensorView& tensor, DeviceType device, int device_index,
                                      std::shared_ptr<void> owner) const;
  // A 64-bit hash of the tensors' values, dtypes and shapes. Empty if a tensor is not contiguous in host
  // memory, if its memory does not hold its values, or if it cannot be borrowed.
  [[nodiscard]] std::optional<std::uint64_t> fingerprint_of(const pybind11::list& tensors) const;
  // A function that returns the stream of the CUDA device on which its calling thread computes. The function
  // needs no GIL. Empty if the framework has no table, or does not tell its stream.
  [[nodiscard]] std::function<std::uintptr_t()> current_stream(int device_index) const;
  [[nodiscard]] bool by_table() const { return table_ != nullptr; }

 private:
  [[nodiscard]] bool is_plain(const pybind11::handle& tensor, const DLTensor& content) const;
  [[nodiscard]] DLTensor look_at(const pybind11::handle& tensor, std::shared_ptr<void>& owner) const;

  const DLPackExchangeAPI* table_ = nullptr;  // lives as long as the process
  // The type's methods is_neg() and is_conj(), or None. They say whether a tensor's values are the negatives,
  // or the conjugates, of the values in its memory.
  pybind11::object is_neg_;
  pybind11::object is_conj_;
  pybind11::object to_capsule_;
  pybind11::object from_capsule_;
  pybind11::object to_plain_;
};

}  // namespace pipedream
