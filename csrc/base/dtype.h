// Defines the element types of tensors, for the wire, the pool and the kernels. The enum's values are part of
// the wire format.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

namespace pipedream {

enum class DType : std::uint8_t {
  kUInt8 = 1,
  kInt8 = 2,
  kInt16 = 3,
  kInt32 = 4,
  kInt64 = 5,
  kFloat16 = 6,
  kBFloat16 = 7,
  kFloat32 = 8,
  kFloat64 = 9,
  kBool = 10,
  kComplex64 = 11,
  kComplex128 = 12,
};

[[nodiscard]] bool is_known_dtype(std::uint8_t code);
[[nodiscard]] std::size_t dtype_bytes(DType dtype);
[[nodiscard]] std::string_view dtype_name(DType dtype);      // torch's names: "float32", "bfloat16", ...
[[nodiscard]] DType dtype_from_name(std::string_view name);  // throws UserError when unknown

}  // namespace pipedream
