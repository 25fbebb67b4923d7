// The DLPack exchange structures (ABI of DLPack 0.x, https://dmlc.github.io/dlpack), declared by hand:
// the core needs no more of it than this. Plain C layout.
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

}  // extern "C"

inline constexpr std::int32_t kDLCpu = 1;
inline constexpr std::int32_t kDLCuda = 2;
inline constexpr std::int32_t kDLCudaHost = 3;  // pinned
inline constexpr std::uint8_t kDLInt = 0;
inline constexpr std::uint8_t kDLUInt = 1;
inline constexpr std::uint8_t kDLFloat = 2;
inline constexpr std::uint8_t kDLBfloat = 4;
inline constexpr std::uint8_t kDLComplex = 5;
inline constexpr std::uint8_t kDLBool = 6;
