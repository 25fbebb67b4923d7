#include "bindings/tensor_exchange.h"

#include <algorithm>
#include <array>
#include <span>
#include <string>
#include <type_traits>
#include <utility>

#include "bindings/dlpack.h"
#include "wire/frame.h"

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

// Managed: DLManagedTensor or DLManagedTensorVersioned.
template <class Managed>
struct Exported {
  Managed managed{};
  std::array<std::int64_t, kNumDimsMax> shape{};
  std::array<std::int64_t, kNumDimsMax> strides{};
  std::shared_ptr<void> owner;
};

template <class Managed>
std::unique_ptr<Exported<Managed>> export_view(const TensorView& tensor, DeviceType device, int device_index,
                                               std::shared_ptr<void> owner) {
  auto exported = std::make_unique<Exported<Managed>>();
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
  exported->managed.deleter = [](Managed* managed) {
    delete static_cast<Exported<Managed>*>(managed->manager_ctx);  // NOLINT(cppcoreguidelines-owning-memory)
  };
  return exported;
}

// Frees the tensor of a capsule that nobody consumed.
void drop_capsule(PyObject* capsule) {
  if (PyCapsule_IsValid(capsule, kFreshCapsule) == 0) return;
  auto* managed = static_cast<DLManagedTensor*>(PyCapsule_GetPointer(capsule, kFreshCapsule));
  managed->deleter(managed);
}

bool is_contiguous(const DLTensor& tensor) {
  // An empty tensor has no elements that could lie apart, whatever its strides.
  if (tensor.strides == nullptr || std::count(tensor.shape, tensor.shape + tensor.ndim, 0) > 0) return true;
  std::int64_t expected = 1;
  for (std::int32_t dim = tensor.ndim - 1; dim >= 0; --dim) {
    if (tensor.shape[dim] != 1 && tensor.strides[dim] != expected) return false;
    expected *= tensor.shape[dim];
  }
  return true;
}

bool is_on_host(DLDevice device) { return device.device_type == kDLCpu || device.device_type == kDLCudaHost; }

bool is_on_host(const DLTensor& tensor) { return is_on_host(tensor.device); }

std::string device_text(DLDevice device) {
  if (is_on_host(device)) return "cpu";
  if (device.device_type == kDLCuda) return "cuda:" + std::to_string(device.device_id);
  return "a device of DLPack type " + std::to_string(device.device_type);
}

// Throws UserError unless the tensor is on the wanted device, where its address is valid.
void check_device(const DLTensor& tensor, DLDevice wanted) {
  const bool fits = wanted.device_type == kDLCpu ? is_on_host(tensor)
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

// Holds exported tensors until nobody reads them.
template <class Managed>
std::shared_ptr<std::vector<Managed*>> make_holder(std::size_t num_tensors) {
  using Tensors = std::vector<Managed*>;
  auto holder = std::shared_ptr<Tensors>(new Tensors(), [](Tensors* tensors) {
    for (Managed* managed : *tensors) {
      if (managed->deleter != nullptr) managed->deleter(managed);
    }
    delete tensors;  // NOLINT(cppcoreguidelines-owning-memory)
  });
  holder->reserve(num_tensors);
  return holder;
}

DLManagedTensor* take_capsule(const py::handle& capsule) {
  auto* managed = static_cast<DLManagedTensor*>(PyCapsule_GetPointer(capsule.ptr(), kFreshCapsule));
  if (managed == nullptr) throw py::error_already_set();
  PyCapsule_SetName(capsule.ptr(), kUsedCapsule);
  return managed;
}

DLManagedTensorVersioned* take_by_table(const DLPackExchangeAPI& table, const py::handle& tensor) {
  DLManagedTensorVersioned* managed = nullptr;
  if (table.managed_tensor_from_py_object_no_sync(tensor.ptr(), &managed) != 0) throw py::error_already_set();
  return managed;
}

// Returns a view of each object. look: returns an object's DLTensor.
template <class Look>
std::vector<TensorView> view_each(const py::list& objects, DLDevice wanted,
                                  const std::function<std::string()>& where, Look look) {
  std::vector<TensorView> views;
  views.reserve(objects.size());
  for (const py::handle object : objects) {
    const DLTensor content = look(object);
    try {
      check_device(content, wanted);
      views.push_back(view_of(content));
    } catch (const UserError& error) {
      throw UserError(where() + ": tensor " + std::to_string(views.size()) + " " + error.what());
    }
  }
  return views;
}

// Keeps Python's tensors alive until nobody reads their memory any more. May be dropped on any thread, with
// the GIL or without.
class KeptTensors {
 public:
  explicit KeptTensors(std::size_t num_tensors) { kept_.reserve(num_tensors); }
  ~KeptTensors() {
    const py::gil_scoped_acquire gil;
    kept_.clear();
  }
  KeptTensors(const KeptTensors&) = delete;
  KeptTensors& operator=(const KeptTensors&) = delete;

  // owner: an object that the tensor's DLTensor needs in addition to the tensor (look_at()).
  void keep(py::object tensor, std::shared_ptr<void> owner) {
    kept_.emplace_back(std::move(tensor), std::move(owner));
  }

 private:
  std::vector<std::pair<py::object, std::shared_ptr<void>>> kept_;
};

// The memory of a tensor that is contiguous.
std::span<const std::byte> bytes_of(const DLTensor& tensor) {
  constexpr std::size_t kBitsPerByte = 8;
  std::size_t num_bytes = std::size_t{tensor.dtype.bits} * tensor.dtype.lanes / kBitsPerByte;
  for (std::int32_t dim = 0; dim < tensor.ndim; ++dim) {
    num_bytes *= static_cast<std::size_t>(tensor.shape[dim]);
  }
  return {static_cast<const std::byte*>(tensor.data) + tensor.byte_offset, num_bytes};
}

// Up to this size the GIL is kept, because hashing takes less time than releasing the GIL and getting it back
// may take.
constexpr std::size_t kHashedWithTheGilBytesMax = std::size_t{64} << 10;

// The hash covers contents, dtypes and shapes.
std::uint64_t hash_of(const std::vector<DLTensor>& tensors) {
  std::uint64_t hash = 0;
  for (const DLTensor& tensor : tensors) {
    const std::span<const std::int64_t> shape(tensor.shape, static_cast<std::size_t>(tensor.ndim));
    hash = fingerprint(bytes_of(tensor), hash);
    hash = fingerprint(std::as_bytes(std::span(&tensor.dtype, 1)), hash);
    hash = fingerprint(std::as_bytes(shape), hash);
  }
  return hash;
}

DLDevice dl_device(DeviceType device, int device_index) {
  return {device == DeviceType::kCuda ? kDLCuda : kDLCpu, device_index};
}

}  // namespace

py::capsule to_capsule(const TensorView& tensor, DeviceType device, int device_index,
                       std::shared_ptr<void> owner) {
  auto exported = export_view<DLManagedTensor>(tensor, device, device_index, std::move(owner));
  return py::capsule(&exported.release()->managed, kFreshCapsule, drop_capsule);
}

Borrowed from_capsules(const py::list& capsules, DeviceType device, int device_index,
                       const std::function<std::string()>& where) {
  auto holder = make_holder<DLManagedTensor>(capsules.size());
  const auto take = [&](const py::handle& capsule) {
    holder->push_back(take_capsule(capsule));
    return holder->back()->dl_tensor;
  };
  Borrowed borrowed{view_each(capsules, dl_device(device, device_index), where, take), nullptr};
  borrowed.owner = std::move(holder);
  return borrowed;
}

TensorExchange::TensorExchange(const py::object& tensor_type, py::object to_capsule, py::object from_capsule,
                               py::object to_plain)
    : is_neg_(py::getattr(tensor_type, "is_neg", py::none())),
      is_conj_(py::getattr(tensor_type, "is_conj", py::none())),
      to_capsule_(std::move(to_capsule)),
      from_capsule_(std::move(from_capsule)),
      to_plain_(std::move(to_plain)) {
  const py::object capsule = py::getattr(tensor_type, "__dlpack_c_exchange_api__", py::none());
  if (capsule.is_none()) return;
  const auto* table =
      static_cast<const DLPackExchangeAPI*>(PyCapsule_GetPointer(capsule.ptr(), kDLPackExchangeApi));
  if (table == nullptr) throw py::error_already_set();
  if (table->version.major == kDLPackMajorVersion) table_ = table;
}

Borrowed TensorExchange::borrow(const py::list& tensors, DeviceType device, int device_index,
                                const std::function<std::string()>& where) const {
  if (tensors.empty()) return {};
  auto kept = std::make_shared<KeptTensors>(tensors.size());
  const auto look = [&](const py::handle& tensor) {
    std::shared_ptr<void> owner;
    auto plain = py::reinterpret_borrow<py::object>(tensor);
    DLTensor content = look_at(plain, owner);
    if (!is_contiguous(content) || !is_plain(plain, content)) {
      plain = to_plain_(tensor);
      content = look_at(plain, owner);
    }
    kept->keep(std::move(plain), std::move(owner));
    return content;
  };
  Borrowed borrowed{view_each(tensors, dl_device(device, device_index), where, look), nullptr};
  borrowed.owner = std::move(kept);
  return borrowed;
}

// Whether the tensor's memory holds its values.
bool TensorExchange::is_plain(const py::handle& tensor, const DLTensor& content) const {
  const auto says = [&](const py::object& method) {
    if (method.is_none()) return false;
    const auto said = py::reinterpret_steal<py::object>(PyObject_CallOneArg(method.ptr(), tensor.ptr()));
    if (!said) throw py::error_already_set();
    return said.is(py::bool_(true));
  };
  return !says(is_neg_) && (content.dtype.code != kDLComplex || !says(is_conj_));
}

// The tensor's DLTensor. It is valid as long as `owner` and the tensor live and the tensor does not change.
DLTensor TensorExchange::look_at(const py::handle& tensor, std::shared_ptr<void>& owner) const {
  if (table_ != nullptr && table_->dltensor_from_py_object_no_sync != nullptr) {
    DLTensor content{};
    if (table_->dltensor_from_py_object_no_sync(tensor.ptr(), &content) != 0) throw py::error_already_set();
    return content;
  }
  const auto hold = [&](auto* managed) {
    using Managed = std::remove_pointer_t<decltype(managed)>;
    auto holder = make_holder<Managed>(1);
    holder->push_back(managed);
    owner = std::move(holder);
    return managed->dl_tensor;
  };
  return table_ != nullptr ? hold(take_by_table(*table_, tensor)) : hold(take_capsule(to_capsule_(tensor)));
}

py::object TensorExchange::lend(const TensorView& tensor, DeviceType device, int device_index,
                                std::shared_ptr<void> owner) const {
  if (table_ == nullptr) {
    return from_capsule_(::pipedream::to_capsule(tensor, device, device_index, std::move(owner)));
  }
  auto exported = export_view<DLManagedTensorVersioned>(tensor, device, device_index, std::move(owner));
  exported->managed.version = {kDLPackMajorVersion, 0};
  void* object = nullptr;
  if (table_->managed_tensor_to_py_object_no_sync(&exported->managed, &object) != 0) {
    throw py::error_already_set();
  }
  static_cast<void>(exported.release());  // the framework owns it now
  return py::reinterpret_steal<py::object>(static_cast<PyObject*>(object));
}

std::function<std::uintptr_t()> TensorExchange::current_stream(int device_index) const {
  if (table_ == nullptr || table_->current_work_stream == nullptr) return {};
  const auto ask = [current = table_->current_work_stream, device_index](void** stream) {
    return current(kDLCuda, device_index, stream) == 0;
  };
  void* stream = nullptr;
  if (!ask(&stream)) {  // asked here once, because a failure sets a Python error, which needs the GIL
    PyErr_Clear();
    return {};
  }
  return [ask] {
    void* now = nullptr;
    static_cast<void>(ask(&now));
    return reinterpret_cast<std::uintptr_t>(now);
  };
}

std::optional<std::uint64_t> TensorExchange::fingerprint_of(const py::list& tensors) const try {
  std::vector<DLTensor> contents(tensors.size());
  std::vector<std::shared_ptr<void>> owners(tensors.size());
  std::size_t num_bytes = 0;
  for (std::size_t index = 0; index < contents.size(); ++index) {
    contents[index] = look_at(tensors[index], owners[index]);
    if (!is_on_host(contents[index]) || !is_contiguous(contents[index])) return std::nullopt;
    if (!is_plain(tensors[index], contents[index])) return std::nullopt;
    num_bytes += bytes_of(contents[index]).size();
  }
  if (num_bytes <= kHashedWithTheGilBytesMax) return hash_of(contents);
  const py::gil_scoped_release release;
  return hash_of(contents);
} catch (const py::error_already_set&) {  // the framework does not lend the tensor
  return std::nullopt;
}

}  // namespace pipedream
