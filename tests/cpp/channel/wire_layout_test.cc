#include "channel/wire_layout.h"

#include <gtest/gtest.h>

#include <array>
#include <cstdint>
#include <string>

#include "base/failure.h"
#include "channel/granted_slots.h"

namespace pipedream {
namespace {

ItemSpec spec() {
  return ItemSpec({{DType::kFloat32, 2, 4000}, {DType::kInt32, 1, 100}, {DType::kFloat64, 1, 800}});
}

TEST(WireLayout, WithoutACodecItIsTheItemsOwn) {
  const WireLayout layout(spec(), {});
  EXPECT_FALSE(layout.encodes());
  EXPECT_EQ(layout.slot_bytes(), spec().slot_bytes());
  EXPECT_EQ(layout.residual_bytes(), 0U);
  for (std::size_t tensor = 0; tensor < 3; ++tensor) {
    EXPECT_EQ(layout.offset_bytes(tensor), spec().offset_bytes(tensor));
    EXPECT_EQ(layout.wire_bytes(tensor, 80), 80U);
    EXPECT_EQ(layout.codec(tensor).kind, CodecKind::kNone);
  }
}

TEST(WireLayout, FloatTensorsTakeWhatTheirEncodingTakes) {
  const WireLayout layout(spec(), codec_from_name("bf16"));
  EXPECT_TRUE(layout.encodes());
  EXPECT_EQ(layout.num_elements_max(), 1000U);
  EXPECT_EQ(layout.wire_bytes(0, 4000), 2000U);
  EXPECT_EQ(layout.wire_bytes(0, 0), 0U);
  EXPECT_EQ(layout.wire_bytes(1, 100), 100U);
  EXPECT_EQ(layout.wire_bytes(2, 800), 200U);
  EXPECT_EQ(layout.offset_bytes(1), 2048U);  // rounded up to kTensorAlignment
  EXPECT_EQ(layout.offset_bytes(2), 2048U + 128);
  EXPECT_EQ(layout.slot_bytes(), 2048U + 128 + 256);
  EXPECT_EQ(layout.residual_bytes(), 0U);
}

TEST(WireLayout, ResidualsAreAsLargeAsTheTensorsOf32And64BitsThatHaveThem) {
  const WireLayout layout(spec(), codec_from_name("topk:0.1"));
  EXPECT_TRUE(layout.has_residual(0));
  EXPECT_FALSE(layout.has_residual(1));
  EXPECT_TRUE(layout.has_residual(2));
  EXPECT_EQ(layout.residual_offset_bytes(2), 4032U);
  EXPECT_EQ(layout.residual_bytes(), 4032U + 832);
}

TEST(WireLayout, TensorsOf16BitsTakeWhatTheirEncodingTakesAndResidualsOfFloat32) {
  const ItemSpec halves({{DType::kBFloat16, 1, 2000}, {DType::kFloat16, 1, 1000}});
  const WireLayout int8(halves, codec_from_name("int8"));
  EXPECT_EQ(int8.num_elements_max(), 1000U);
  EXPECT_EQ(int8.wire_bytes(0, 2000), 1016U);
  EXPECT_EQ(int8.wire_bytes(1, 1000), 508U);
  const WireLayout topk(halves, codec_from_name("topk:0.1"));
  EXPECT_EQ(topk.wire_bytes(0, 2000), 600U);
  EXPECT_EQ(topk.wire_bytes(1, 1000), 300U);
  EXPECT_EQ(topk.residual_offset_bytes(1), 4032U);
  EXPECT_EQ(topk.residual_bytes(), 4032U + 2048);
  for (const char* const name : {"bf16", "fp16"}) {
    const WireLayout as_they_are(halves, codec_from_name(name));
    EXPECT_FALSE(as_they_are.encodes());
    EXPECT_EQ(as_they_are.slot_bytes(), halves.slot_bytes());
  }
}

TEST(WireLayout, NoSmallerTensorTakesMoreThanIsPlanned) {
  for (const char* name : {"none", "bf16", "fp16", "int8", "topk", "topk:1", "topk:0.333"}) {
    for (const DType dtype :
         {DType::kFloat32, DType::kFloat64, DType::kFloat16, DType::kBFloat16, DType::kInt16}) {
      const std::size_t bytes_max = 3000 * dtype_bytes(dtype);
      const WireLayout layout(ItemSpec({{dtype, 1, bytes_max}}), codec_from_name(name));
      std::size_t smaller = 0;
      for (std::size_t num_bytes = 0; num_bytes <= bytes_max; num_bytes += dtype_bytes(dtype)) {
        EXPECT_GE(layout.wire_bytes(0, num_bytes), smaller) << name << ", " << num_bytes;
        smaller = layout.wire_bytes(0, num_bytes);
      }
      EXPECT_LE(smaller, layout.slot_bytes());
    }
  }
}

TEST(GrantedSlots, AreTakenInTheOrderInWhichTheyWereGranted) {
  GrantedSlots slots;
  EXPECT_TRUE(slots.empty());
  for (const std::uint16_t slot : std::array<std::uint16_t, 3>{7, 0, 65535}) EXPECT_TRUE(slots.add(slot));
  EXPECT_EQ(slots.take(), 7);
  EXPECT_TRUE(slots.add(7));  // a slot that was taken may be granted again
  EXPECT_EQ(slots.take(), 0);
  EXPECT_EQ(slots.take(), 65535);
  EXPECT_EQ(slots.take(), 7);
  EXPECT_TRUE(slots.empty());
}

TEST(GrantedSlots, HoldNoneTwiceAndNoMoreThanTheirBound) {
  GrantedSlots slots;
  for (std::size_t slot = 0; slot < kNumGrantsMax; ++slot) {
    ASSERT_TRUE(slots.add(static_cast<std::uint16_t>(slot)));
    ASSERT_FALSE(slots.add(static_cast<std::uint16_t>(slot)));
  }
  EXPECT_FALSE(slots.add(60000));
  static_cast<void>(slots.take());
  EXPECT_TRUE(slots.add(60000));
}

TEST(WireLayout, TensorOfMoreElementsThanTopKCountsIsTheUsersMistake) {
  const std::size_t num_elements = std::size_t{1} << 32;
  const ItemSpec item({{DType::kFloat32, 1, num_elements * sizeof(float)}});
  EXPECT_NO_THROW(WireLayout(item, codec_from_name("int8")));
  try {
    const WireLayout layout(item, codec_from_name("topk:0.1"));
    ADD_FAILURE() << "it was accepted";
  } catch (const UserError& error) {
    EXPECT_EQ(std::string(error.what()),
              "topk:0.1 of a tensor of 4294967296 elements: it counts 4294967295 at most; use int8, or cut "
              "the model elsewhere");
  }
}

}  // namespace
}  // namespace pipedream
