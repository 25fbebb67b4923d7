#include "bindings/tensor_exchange.h"

#include <algorithm>
#include <string>
#include <utility>

#include "bindings/dlpack.h"

namespace py = pybind11;

namespace pipedream {

namespace {

constexpr const char* kFreshCapsule = "dltensor";
constexpr const char* kUsedCapsule = "used_dltensor";

struct DTypeCode {
  DType dtype;
  std::uint8_t code;
  std::uint8_t bits;
};

constexpr std::array kDTypeCodes{
    DTypeCode{DType::kUInt8, kDLUInt, 8},         DTypeCode{DType::kInt8, kDLInt, 8},
    DTypeCode{DType::kInt16, kDLInt, 16},         DTypeCode{DType::kInt32, kDLInt, 32},
    DTypeCode{DType::kInt64, kDLInt, 64},         DTypeCode{DType::kFloat16, kDLFloat, 16},
    DTypeCode{DType::kBFloat16, kDLBfloat, 16},   DTypeCode{DType::kFloat32, kDLFloat, 32},
    DTypeCode{DType::kFloat64, kDLFloat, 64},     DTypeCode{DType::kBool, kDLBool, 8},
    DTypeCode{DType::kComplex64, kDLComplex, 64}, DTypeCode{DType::kComplex128, kDLComplex, 128},
};

DLDataType to_dl(DType dtype) {
  for (const DTypeCode& entry : kDTypeCodes) {
    if (entry.dtype == dtype) return {entry.code, entry.bits, 1};
  }
  PD_CHECK(false, "dtype " << static_cast<int>(dtype));
}

DType from_dl(DLDataType dtype) {
  for (const DTypeCode& entry : kDTypeCodes) {
    if (entry.code == dtype.code && entry.bits == dtype.bits && dtype.lanes == 1) return entry.dtype;
  }
  throw UserError("is of DLPack type code " + std::to_string(dtype.code) + " with " +
                  std::to_string(dtype.bits) +
                  " bits, which cannot cross a boundary: cast it to a common dtype");
}

struct Exported {
  DLManagedTensor managed{};
  std::array<std::int64_t, kNumDimsMax> shape{};
  std::array<std::int64_t, kNumDimsMax> strides{};
  std::shared_ptr<void> owner;
};

void drop_exported(DLManagedTensor* managed) {
  delete static_cast<Exported*>(managed->manager_ctx);  // NOLINT(cppcoreguidelines-owning-memory)
}

// Of a capsule that nobody consumed.
void drop_capsule(PyObject* capsule) {
  if (PyCapsule_IsValid(capsule, kFreshCapsule) == 0) return;
  auto* managed = static_cast<DLManagedTensor*>(PyCapsule_GetPointer(capsule, kFreshCapsule));
  managed->deleter(managed);
}

bool is_contiguous(const DLTensor& tensor) {
  if (tensor.strides == nullptr) return true;
  std::int64_t expected = 1;
  for (std::int32_t dim = tensor.ndim - 1; dim >= 0; --dim) {
    if (tensor.shape[dim] == 0) return true;
    if (tensor.shape[dim] != 1 && tensor.strides[dim] != expected) return false;
    expected *= tensor.shape[dim];
  }
  return true;
}

std::string device_text(DLDevice device) {
  if (device.device_type == kDLCpu || device.device_type == kDLCudaHost) return "cpu";
  if (device.device_type == kDLCuda) return "cuda:" + std::to_string(device.device_id);
  return "a device of DLPack type " + std::to_string(device.device_type);
}

// Whoever reads a tensor by its address must be able to.
void check_device(const DLTensor& tensor, DLDevice wanted) {
  const bool on_host = tensor.device.device_type == kDLCpu || tensor.device.device_type == kDLCudaHost;
  const bool fits = wanted.device_type == kDLCpu ? on_host
                                                 : tensor.device.device_type == wanted.device_type &&
                                                       tensor.device.device_id == wanted.device_id;
  if (fits) return;
  throw UserError("is on " + device_text(tensor.device) + ", but it is sent from " + device_text(wanted) +
                  ": move it there (.to(device)) in the layer that makes it");
}

TensorView view_of(const DLTensor& tensor) {
  if (tensor.ndim > static_cast<std::int32_t>(kNumDimsMax)) {
    throw UserError("has " + std::to_string(tensor.ndim) + " dimensions: at most " +
                    std::to_string(kNumDimsMax) + " can cross a boundary");
  }
  if (!is_contiguous(tensor)) throw UserError("is not contiguous, and cannot cross a boundary");
  TensorView view;
  view.dtype = from_dl(tensor.dtype);
  view.num_dims = static_cast<std::uint8_t>(tensor.ndim);
  std::copy_n(tensor.shape, tensor.ndim, view.shape.begin());
  view.data = static_cast<std::byte*>(tensor.data) + tensor.byte_offset;
  return view;
}

}  // namespace

py::capsule to_capsule(const TensorView& tensor, DeviceType device, int device_index,
                       std::shared_ptr<void> owner) {
  auto exported = std::make_unique<Exported>();
  exported->owner = std::move(owner);
  exported->shape = tensor.shape;
  std::int64_t stride = 1;
  for (std::size_t dim = tensor.num_dims; dim-- > 0;) {
    exported->strides.at(dim) = stride;
    stride *= std::max<std::int64_t>(1, tensor.shape.at(dim));
  }
  DLTensor& dl = exported->managed.dl_tensor;
  dl.data = tensor.data;
  dl.device = {device == DeviceType::kCuda ? kDLCuda : kDLCpu, device_index};
  dl.ndim = tensor.num_dims;
  dl.dtype = to_dl(tensor.dtype);
  dl.shape = exported->shape.data();
  dl.strides = exported->strides.data();
  dl.byte_offset = 0;
  exported->managed.manager_ctx = exported.get();
  exported->managed.deleter = drop_exported;
  return py::capsule(&exported.release()->managed, kFreshCapsule, drop_capsule);
}

Borrowed from_capsules(const py::list& capsules, DeviceType device, int device_index,
                       const std::function<std::string()>& where) {
  const DLDevice wanted{device == DeviceType::kCuda ? kDLCuda : kDLCpu, device_index};
  using Tensors = std::vector<DLManagedTensor*>;
  auto owner = std::shared_ptr<Tensors>(new Tensors(), [](Tensors* tensors) {
    for (DLManagedTensor* managed : *tensors) {
      if (managed->deleter != nullptr) managed->deleter(managed);
    }
    delete tensors;  // NOLINT(cppcoreguidelines-owning-memory)
  });
  owner->reserve(capsules.size());
  Borrowed borrowed;
  borrowed.tensors.reserve(capsules.size());
  for (const py::handle capsule : capsules) {
    auto* managed = static_cast<DLManagedTensor*>(PyCapsule_GetPointer(capsule.ptr(), kFreshCapsule));
    if (managed == nullptr) throw py::error_already_set();
    PyCapsule_SetName(capsule.ptr(), kUsedCapsule);
    owner->push_back(managed);
    try {
      check_device(managed->dl_tensor, wanted);
      borrowed.tensors.push_back(view_of(managed->dl_tensor));
    } catch (const UserError& error) {
      const std::size_t tensor_index = owner->size() - 1;
      throw UserError(where() + ": tensor " + std::to_string(tensor_index) + " " + error.what());
    }
  }
  borrowed.owner = std::move(owner);
  return borrowed;
}

}  // namespace pipedream
