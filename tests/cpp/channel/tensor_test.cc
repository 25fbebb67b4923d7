// Tests the tensors that may cross a boundary: their sizes, their offsets, and the error for a tensor that
// does not fit.
#include "channel/tensor.h"

#include <gtest/gtest.h>

#include <functional>
#include <string>

namespace pipedream {
namespace {

TensorView view(DType dtype, std::vector<std::int64_t> shape) {
  TensorView tensor;
  tensor.dtype = dtype;
  tensor.num_dims = static_cast<std::uint8_t>(shape.size());
  std::copy(shape.begin(), shape.end(), tensor.shape.begin());
  return tensor;
}

void expect_user_error(const std::function<void()>& attempt, const std::string& what) {
  try {
    attempt();
    FAIL() << "nothing was thrown, not '" << what << "'";
  } catch (const UserError& error) {
    const std::string text = error.what();
    EXPECT_NE(text.find(what), std::string::npos) << text;
    EXPECT_EQ(text.find('\n'), std::string::npos) << text;
  }
}

TEST(TensorView, SizeIsTheProductOfShapeAndDtype) {
  EXPECT_EQ(view(DType::kFloat32, {64, 3, 32, 32}).size_bytes(), 64U * 3 * 32 * 32 * 4);
  EXPECT_EQ(view(DType::kInt64, {}).size_bytes(), 8U);
  EXPECT_EQ(view(DType::kFloat64, {5, 0, 7}).size_bytes(), 0U);
  EXPECT_EQ(view(DType::kBool, {1, 1, 1, 1, 1, 1, 1, 9}).size_bytes(), 9U);
}

TEST(TensorView, TextNamesDtypeAndShape) {
  EXPECT_EQ(to_string(view(DType::kFloat32, {64, 3})), "float32[64, 3]");
  EXPECT_EQ(to_string(view(DType::kInt64, {})), "int64[]");
}

TEST(ItemSpec, TensorsLieBehindEachOtherAlignedAndApart) {
  const ItemSpec spec(
      {{DType::kFloat32, 1, 100}, {DType::kInt64, 0, 8}, {DType::kUInt8, 2, 0}, {DType::kUInt8, 1, 64}});
  EXPECT_EQ(spec.num_tensors(), 4U);
  EXPECT_EQ(spec.offset_bytes(0), 0U);
  EXPECT_EQ(spec.offset_bytes(1), 128U);
  EXPECT_EQ(spec.offset_bytes(2), 192U);
  EXPECT_EQ(spec.offset_bytes(3), 192U);  // tensor 2 has no bytes, so tensor 3 has the same offset
  EXPECT_EQ(spec.slot_bytes(), 256U);
}

TEST(ItemSpec, WhatCannotCrossIsRefusedWithTheLimit) {
  expect_user_error([] { ItemSpec(std::vector<TensorSpec>{}); }, "no tensors");
  expect_user_error([] { ItemSpec(std::vector<TensorSpec>(1025)); }, "1025 tensors: at most 1024");
  expect_user_error([] { ItemSpec({{DType::kFloat32, 9, 4}}); }, "9 dimensions: at most 8");
  EXPECT_EQ(ItemSpec(std::vector<TensorSpec>(1024)).num_tensors(), 1024U);
}

TEST(ItemSpec, MismatchNamesTheTensorWhatItHasAndWhatIsPlanned) {
  const ItemSpec spec({{DType::kFloat32, 2, 400}, {DType::kInt64, 1, 80}});
  EXPECT_EQ(spec.mismatch(0, DType::kFloat32, 2, 400), std::nullopt);
  EXPECT_EQ(spec.mismatch(0, DType::kFloat32, 2, 0), std::nullopt);
  EXPECT_EQ(spec.mismatch(1, DType::kInt64, 1, 80), std::nullopt);
  EXPECT_EQ(spec.mismatch(0, DType::kFloat64, 2, 400), "tensor 0 has dtype float64, planned float32");
  EXPECT_EQ(spec.mismatch(1, DType::kInt64, 2, 80), "tensor 1 has rank 2, planned 1");
  // An empty tensor may have any rank: it stands for a missing gradient.
  EXPECT_EQ(spec.mismatch(1, DType::kInt64, 2, 0), std::nullopt);
  EXPECT_EQ(spec.mismatch(1, DType::kInt64, 1, 88), "tensor 1 has 88 bytes, planned at most 80");
  EXPECT_EQ(spec.mismatch(2, DType::kInt64, 1, 80), "tensor 2 of a boundary of 2");
}

}  // namespace
}  // namespace pipedream
