// Tests element types: sizes and names are those of torch, and codes are part of the wire format.
#include "base/dtype.h"

#include <gtest/gtest.h>

#include <string>

namespace pipedream {
namespace {

TEST(DType, SizesAndNamesAreTorchs) {
  EXPECT_EQ(dtype_bytes(DType::kBool), 1u);
  EXPECT_EQ(dtype_bytes(DType::kBFloat16), 2u);
  EXPECT_EQ(dtype_bytes(DType::kFloat32), 4u);
  EXPECT_EQ(dtype_bytes(DType::kInt64), 8u);
  EXPECT_EQ(dtype_bytes(DType::kComplex128), 16u);
  EXPECT_EQ(dtype_name(DType::kBFloat16), "bfloat16");
  EXPECT_EQ(dtype_name(DType::kFloat64), "float64");
  EXPECT_EQ(dtype_name(DType::kBool), "bool");
}

TEST(DType, KnownCodesAreOneToTwelveAndNothingElse) {
  for (int code = 0; code <= 255; ++code) {
    EXPECT_EQ(is_known_dtype(static_cast<std::uint8_t>(code)), code >= 1 && code <= 12) << code;
  }
}

TEST(DType, WireCodesNeverChange) {
  EXPECT_EQ(static_cast<int>(DType::kUInt8), 1);
  EXPECT_EQ(static_cast<int>(DType::kInt64), 5);
  EXPECT_EQ(static_cast<int>(DType::kBFloat16), 7);
  EXPECT_EQ(static_cast<int>(DType::kFloat32), 8);
  EXPECT_EQ(static_cast<int>(DType::kComplex128), 12);
}

TEST(DTypeDeathTest, SizeOfAnUnknownCodeAborts) {
  EXPECT_DEATH((void)dtype_bytes(static_cast<DType>(13)), "dtype code 13");
}

}  // namespace
}  // namespace pipedream
