// Defines one table of element types: code, size in bytes, torch's name.
#include "base/dtype.h"

#include <array>
#include <string>

#include "base/check.h"
#include "base/failure.h"

namespace pipedream {
namespace {

struct DTypeRow {
  DType dtype;
  std::size_t num_bytes;
  std::string_view name;
};

constexpr std::array<DTypeRow, 12> kDTypes = {{
    {DType::kUInt8, 1, "uint8"},
    {DType::kInt8, 1, "int8"},
    {DType::kInt16, 2, "int16"},
    {DType::kInt32, 4, "int32"},
    {DType::kInt64, 8, "int64"},
    {DType::kFloat16, 2, "float16"},
    {DType::kBFloat16, 2, "bfloat16"},
    {DType::kFloat32, 4, "float32"},
    {DType::kFloat64, 8, "float64"},
    {DType::kBool, 1, "bool"},
    {DType::kComplex64, 8, "complex64"},
    {DType::kComplex128, 16, "complex128"},
}};

// Codes count from 1, so the table is indexed by code - 1.
constexpr bool rows_are_in_code_order() {
  for (std::size_t row = 0; row < kDTypes.size(); ++row) {
    if (static_cast<std::size_t>(kDTypes[row].dtype) != row + 1) return false;
  }
  return true;
}
static_assert(rows_are_in_code_order());

const DTypeRow& row_of(DType dtype) {
  const auto code = static_cast<std::uint8_t>(dtype);
  PD_CHECK(is_known_dtype(code), "dtype code " << int{code});
  return kDTypes[code - std::size_t{1}];
}

}  // namespace

bool is_known_dtype(std::uint8_t code) { return code >= 1 && code <= kDTypes.size(); }

std::size_t dtype_bytes(DType dtype) { return row_of(dtype).num_bytes; }

std::string_view dtype_name(DType dtype) { return row_of(dtype).name; }

DType dtype_from_name(std::string_view name) {
  for (const DTypeRow& row : kDTypes) {
    if (row.name == name) return row.dtype;
  }
  throw UserError("dtype '" + std::string(name) + "' cannot cross a boundary; cast it to a common dtype");
}

}  // namespace pipedream
