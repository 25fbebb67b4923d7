// Tests the table by which a header's codec and dtype are checked.
#include "wire/codec_kind.h"

#include <gtest/gtest.h>

#include <vector>

namespace pipedream {
namespace {

using Kinds = std::vector<CodecKind>;

Kinds kinds_of(DType dtype) {
  Kinds kinds;
  for (std::uint8_t code = 0; is_known_codec(code); ++code) {
    if (applies_to(static_cast<CodecKind>(code), dtype)) kinds.push_back(static_cast<CodecKind>(code));
  }
  return kinds;
}

TEST(CodecKind, float32_and_float64_travel_by_every_codec) {
  const Kinds all = {CodecKind::kNone, CodecKind::kBFloat16, CodecKind::kFloat16, CodecKind::kInt8,
                     CodecKind::kTopK};
  EXPECT_EQ(kinds_of(DType::kFloat32), all);
  EXPECT_EQ(kinds_of(DType::kFloat64), all);
}

TEST(CodecKind, sixteen_bit_floats_travel_by_what_makes_them_smaller) {
  const Kinds smaller = {CodecKind::kNone, CodecKind::kInt8, CodecKind::kTopK};
  EXPECT_EQ(kinds_of(DType::kBFloat16), smaller);
  EXPECT_EQ(kinds_of(DType::kFloat16), smaller);
}

TEST(CodecKind, what_is_no_float_travels_as_it_is) {
  for (const DType dtype : {DType::kInt64, DType::kInt32, DType::kUInt8, DType::kBool}) {
    EXPECT_EQ(kinds_of(dtype), Kinds{CodecKind::kNone}) << dtype_name(dtype);
  }
}

}  // namespace
}  // namespace pipedream
