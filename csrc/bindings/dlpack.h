// Declares by hand the DLPack structures that the core needs (ABI of DLPack 0.x and 1.x,
// https://dmlc.github.io/dlpack). Plain C layout.
#pragma once

#include <cstdint>

extern "C" {

struct DLDevice {
  std::int32_t device_type;
  std::int32_t device_id;
};

struct DLDataType {
  std::uint8_t code;
  std::uint8_t bits;
  std::uint16_t lanes;
};

struct DLTensor {
  void* data;
  DLDevice device;
  std::int32_t ndim;
  DLDataType dtype;
  std::int64_t* shape;
  std::int64_t* strides;  // in elements; null: contiguous
  std::uint64_t byte_offset;
};

struct DLManagedTensor {
  DLTensor dl_tensor;
  void* manager_ctx;
  void (*deleter)(struct DLManagedTensor* self);
};

struct DLPackVersion {
  std::uint32_t major;
  std::uint32_t minor;
};

struct DLManagedTensorVersioned {
  DLPackVersion version;
  void* manager_ctx;
  void (*deleter)(struct DLManagedTensorVersioned* self);
  std::uint64_t flags;
  DLTensor dl_tensor;
};

// A framework's table of functions that convert its tensors, which are Python objects (DLPack 1.3). The
// functions need the GIL, and return 0, or -1 with a Python error set. The table is in the attribute
// __dlpack_c_exchange_api__ of the tensors' type, as a capsule with the name kDLPackExchangeApi.
struct DLPackExchangeAPI {
  DLPackVersion version;
  struct DLPackExchangeAPI* prev_api;
  int (*managed_tensor_allocator)(DLTensor* prototype, DLManagedTensorVersioned** out, void* error_ctx,
                                  void (*set_error)(void* error_ctx, const char* kind, const char* message));
  int (*managed_tensor_from_py_object_no_sync)(void* py_object, DLManagedTensorVersioned** out);
  int (*managed_tensor_to_py_object_no_sync)(DLManagedTensorVersioned* tensor, void** out_py_object);
  int (*dltensor_from_py_object_no_sync)(void* py_object, DLTensor* out);
  int (*current_work_stream)(std::int32_t device_type, std::int32_t device_id, void** out_current_stream);
};

}  // extern "C"

inline constexpr const char* kDLPackExchangeApi = "dlpack_exchange_api";
inline constexpr std::uint32_t kDLPackMajorVersion = 1;
inline constexpr std::int32_t kDLCpu = 1;
inline constexpr std::int32_t kDLCuda = 2;
inline constexpr std::int32_t kDLCudaHost = 3;  // pinned
inline constexpr std::uint8_t kDLInt = 0;
inline constexpr std::uint8_t kDLUInt = 1;
inline constexpr std::uint8_t kDLFloat = 2;
inline constexpr std::uint8_t kDLBfloat = 4;
inline constexpr std::uint8_t kDLComplex = 5;
inline constexpr std::uint8_t kDLBool = 6;
