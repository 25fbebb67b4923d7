// Tests that parameters lie in order and aligned, and do not overlap.
#include "weights/weight_layout.h"

#include <gtest/gtest.h>

#include <limits>
#include <stdexcept>

namespace pipedream {
namespace {

TEST(WeightLayout, ParametersAreAlignedInOrderAndDoNotOverlap) {
  const WeightLayout layout({{"weight", DType::kFloat32, 7},
                             {"bias", DType::kFloat64, 1},
                             {"scale", DType::kBFloat16, 33},
                             {"empty", DType::kFloat32, 0},
                             {"head", DType::kFloat32, 16}});
  std::size_t end_bytes = 0;
  for (std::size_t parameter_index = 0; parameter_index < layout.parameters().size(); ++parameter_index) {
    const ParameterSpec& parameter = layout.parameters()[parameter_index];
    EXPECT_EQ(layout.offset_bytes(parameter_index) % kParameterAlignment, 0U) << parameter.name;
    EXPECT_GE(layout.offset_bytes(parameter_index), end_bytes) << parameter.name;
    end_bytes = layout.offset_bytes(parameter_index) +
                static_cast<std::size_t>(parameter.num_elements) * dtype_bytes(parameter.dtype);
  }
  EXPECT_GE(layout.slot_bytes(), end_bytes);
  EXPECT_EQ(layout.slot_bytes() % kParameterAlignment, 0U);
}

TEST(WeightLayout, AddsNoMoreThanTheAlignment) {
  const WeightLayout layout(
      {{"a", DType::kFloat32, 16}, {"b", DType::kFloat32, 17}, {"c", DType::kUInt8, 1}});
  EXPECT_EQ(layout.offset_bytes(0), 0U);
  EXPECT_EQ(layout.offset_bytes(1), 64U);
  EXPECT_EQ(layout.offset_bytes(2), 192U);
  EXPECT_EQ(layout.slot_bytes(), 256U);
}

TEST(WeightLayout, AStageWithoutParametersNeedsNoBytes) {
  EXPECT_EQ(WeightLayout({}).slot_bytes(), 0U);
  EXPECT_EQ(WeightLayout({{"empty", DType::kFloat32, 0}}).slot_bytes(), 0U);
}

TEST(WeightLayout, AnUnknownParameterIndexThrows) {
  const WeightLayout layout({{"weight", DType::kFloat32, 7}});
  EXPECT_THROW((void)layout.offset_bytes(1), std::out_of_range);
}

TEST(WeightLayoutDeathTest, ImpossibleSizesAbort) {
  EXPECT_DEATH(WeightLayout({{"weight", DType::kFloat32, -1}}), "weight has -1 elements");
  const std::int64_t num_elements_max = std::numeric_limits<std::int64_t>::max();
  EXPECT_DEATH(WeightLayout({{"weight", DType::kFloat64, num_elements_max}}), "overflows the slot");
  EXPECT_DEATH(WeightLayout({{"a", DType::kUInt8, num_elements_max}, {"b", DType::kUInt8, num_elements_max}}),
               "b of 9223372036854775807 elements overflows the slot");
}

}  // namespace
}  // namespace pipedream
