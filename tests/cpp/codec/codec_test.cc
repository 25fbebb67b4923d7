// Tests the codecs on the host. Decoded values are within the bound of error that each codec promises. topk
// chooses the elements that a sort would choose. It keeps what it does not send, the residual, and adds it to
// the next item, so nothing is lost. All instruction sets give the same bytes.
#include "codec/codec.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>
#include <random>
#include <string>
#include <type_traits>
#include <vector>

#include "base/failure.h"
#include "codec/codec_kernels.h"
#include "codec/encoding.h"

namespace pipedream {
namespace {

constexpr std::size_t kSizes[] = {0, 1, 2, 31, 32, 33, 255, 256, 257, 1000, 1 << 20};

template <class T>
constexpr T kInfinity = std::numeric_limits<T>::infinity();
template <class T>
constexpr T kNan = std::numeric_limits<T>::quiet_NaN();

TEST(CodecNames, SurviveTheRoundTrip) {
  for (const char* const name : {"none", "bf16", "fp16", "int8", "topk:0.05", "topk:1", "topk:1e-06"}) {
    EXPECT_EQ(codec_name(codec_from_name(name)), name);
  }
  EXPECT_EQ(codec_name(codec_from_name("topk")), "topk:0.01");
  EXPECT_EQ(codec_from_name("topk:1e-3"), (Codec{CodecKind::kTopK, 0.001}));
}

TEST(CodecNames, AreRefusedWithTheChoices) {
  for (const char* const name :
       {"", "None", "bf16 ", "int4", "topk:", "topk:0", "topk:-0.1", "topk:1.01", "topk:nan", "topk:inf",
        "topk:0.1x", "topk 0.1", "topk0.1", "top", "topk:0x1p-4"}) {
    try {
      (void)codec_from_name(name);
      ADD_FAILURE() << name << " was taken";
    } catch (const UserError& error) {
      const std::string text = error.what();
      EXPECT_EQ(text.find('\n'), std::string::npos);
      EXPECT_NE(text.find("'" + std::string(name) + "'"), std::string::npos) << text;
      for (const char* const choice : {"none", "bf16", "fp16", "int8", "topk"})
        EXPECT_NE(text.find(choice), std::string::npos) << text;
    }
  }
}

TEST(Codec, CodesOnTheWireNeverChange) {
  EXPECT_EQ(static_cast<int>(codec_from_name("none").kind), 0);
  EXPECT_EQ(static_cast<int>(codec_from_name("bf16").kind), 1);
  EXPECT_EQ(static_cast<int>(codec_from_name("fp16").kind), 2);
  EXPECT_EQ(static_cast<int>(codec_from_name("int8").kind), 3);
  EXPECT_EQ(static_cast<int>(codec_from_name("topk").kind), 4);
  for (int code = 0; code < 256; ++code)
    EXPECT_EQ(is_known_codec(static_cast<std::uint8_t>(code)), code <= 4) << code;
}

TEST(Codec, AppliesWhereItMakesFloatsSmaller) {
  for (std::uint8_t code = 0; code < 255; ++code) {
    if (!is_known_dtype(code)) continue;
    const auto dtype = static_cast<DType>(code);
    const bool is_wide = dtype == DType::kFloat32 || dtype == DType::kFloat64;
    const bool is_half = dtype == DType::kBFloat16 || dtype == DType::kFloat16;
    for (const char* const name : {"int8", "topk:0.5"}) {
      const Codec codec = codec_from_name(name);
      EXPECT_EQ(codec_for(codec, dtype), is_wide || is_half ? codec : Codec{}) << name << dtype_name(dtype);
    }
    for (const char* const name : {"bf16", "fp16"}) {
      const Codec codec = codec_from_name(name);
      EXPECT_EQ(codec_for(codec, dtype), is_wide ? codec : Codec{}) << name << dtype_name(dtype);
    }
    EXPECT_EQ(codec_for({}, dtype), Codec{});
  }
}

TEST(Codec, EncodedBytesAreThoseOfTheLayout) {
  for (const std::size_t num_elements : kSizes) {
    for (const DType dtype : {DType::kFloat32, DType::kFloat64, DType::kBFloat16, DType::kFloat16}) {
      const auto bytes = [&](const char* name) {
        return encoded_bytes(codec_from_name(name), dtype, num_elements);
      };
      const bool is_half = dtype_bytes(dtype) == 2;
      const std::size_t entry_bytes = is_half ? 6 : 8;
      EXPECT_EQ(bytes("none"), num_elements * dtype_bytes(dtype));
      EXPECT_EQ(bytes("int8"), num_elements + 4 * ((num_elements + 255) / 256));
      EXPECT_EQ(bytes("topk:1"), entry_bytes * num_elements);
      EXPECT_EQ(bytes("topk:1e-12"), num_elements == 0 ? 0U : entry_bytes);
      if (is_half) continue;
      EXPECT_EQ(bytes("bf16"), 2 * num_elements);
      EXPECT_EQ(bytes("fp16"), 2 * num_elements);
    }
  }
  EXPECT_EQ(encoded_bytes(codec_from_name("topk:0.01"), DType::kFloat32, 101), 16U);
  EXPECT_EQ(encoded_bytes(codec_from_name("topk:0.01"), DType::kFloat16, 101), 12U);
  EXPECT_EQ(encoded_bytes(codec_from_name("none"), DType::kInt64, 3), 24U);
}

TEST(Codec, ResidualsAreAsWideAsWhatIsAddedUp) {
  const Codec topk = codec_from_name("topk:0.01");
  EXPECT_EQ(residual_bytes(topk, DType::kFloat32, 100), 400U);
  EXPECT_EQ(residual_bytes(topk, DType::kFloat64, 100), 800U);
  EXPECT_EQ(residual_bytes(topk, DType::kBFloat16, 100), 400U);
  EXPECT_EQ(residual_bytes(topk, DType::kFloat16, 100), 400U);
  EXPECT_EQ(residual_bytes(codec_from_name("int8"), DType::kFloat16, 100), 0U);
  EXPECT_EQ(residual_bytes({}, DType::kInt32, 100), 0U);
}

TEST(CodecDeathTest, WhatCannotBeEncodedIsOurBug) {
  const std::size_t too_many = std::size_t{1} << 32;
  EXPECT_DEATH((void)encoded_bytes(codec_from_name("topk"), DType::kFloat32, too_many),
               "4294967296 elements");
  EXPECT_DEATH((void)encoded_bytes(codec_from_name("bf16"), DType::kInt32, 1), "bf16 of int32");
  EXPECT_DEATH((void)encoded_bytes(codec_from_name("fp16"), DType::kBFloat16, 1), "fp16 of bfloat16");
  EXPECT_EQ(encoded_bytes(codec_from_name("topk:1"), DType::kFloat32, too_many - 1), (too_many - 1) * 8);
}

template <class T>
class CodecOf : public testing::Test {
 protected:
  static constexpr DType kDType = std::is_same_v<T, float> ? DType::kFloat32 : DType::kFloat64;
  std::mt19937_64 generator_{20191027};

  std::vector<T> normal_values(std::size_t num_elements, T scale = 1) {
    std::normal_distribution<T> distribution(0, scale);
    std::vector<T> values(num_elements);
    for (T& value : values) value = distribution(generator_);
    return values;
  }
  // Returns finite values of random bits, so their exponents are spread over all that the element type has.
  std::vector<T> values_of_all_magnitudes(std::size_t num_elements) {
    using Bits = typename FloatLayout<T>::Bits;
    std::vector<T> values(num_elements);
    for (T& value : values) {
      do {
        value = std::bit_cast<T>(static_cast<Bits>(generator_()));
      } while (!std::isfinite(value));
    }
    return values;
  }
  static std::vector<T> sent(const char* name, const std::vector<T>& values) {
    Encoding<T> encoding(codec_from_name(name), values.size());
    return encoding.sent(values);
  }
};

using Elements = testing::Types<float, double>;
TYPED_TEST_SUITE(CodecOf, Elements);

TYPED_TEST(CodecOf, NoneKeepsEveryBit) {
  for (const std::size_t num_elements : kSizes) {
    const auto values = this->values_of_all_magnitudes(num_elements);
    EXPECT_EQ(this->sent("none", values), values);
  }
}

TYPED_TEST(CodecOf, BFloat16IsWithinHalfOfItsLastBit) {
  for (const std::size_t num_elements : kSizes) {
    const auto values = this->normal_values(num_elements, TypeParam(100));
    const auto decoded = this->sent("bf16", values);
    for (std::size_t i = 0; i < num_elements; ++i)
      ASSERT_LE(std::abs(decoded[i] - values[i]), std::abs(values[i]) * TypeParam(0x1p-8)) << values[i];
  }
}

TYPED_TEST(CodecOf, Float16IsWithinHalfOfItsLastBitInItsRange) {
  for (const std::size_t num_elements : kSizes) {
    const auto values = this->normal_values(num_elements, TypeParam(100));
    const auto decoded = this->sent("fp16", values);
    for (std::size_t i = 0; i < num_elements; ++i) {
      const TypeParam bound =
          // Half of the smallest denormal bounds the error of tiny values.
          std::max(std::abs(values[i]) * TypeParam(0x1p-11), TypeParam(0x1p-25));
      ASSERT_LE(std::abs(decoded[i] - values[i]), bound) << values[i];
    }
  }
}

// Returns the finite magnitudes of a 16-bit format, indexed by their codes.
template <class T>
std::vector<T> finite_magnitudes(const char* name) {
  constexpr std::size_t kNumCodes = std::size_t{1} << 15;
  Encoding<T> encoding(codec_from_name(name), kNumCodes);
  std::vector<std::uint16_t> codes(kNumCodes);
  std::iota(codes.begin(), codes.end(), std::uint16_t{0});
  std::memcpy(encoding.encoded(), codes.data(), kNumCodes * sizeof(std::uint16_t));
  std::vector<T> magnitudes = encoding.decode();
  magnitudes.erase(
      std::find_if(magnitudes.begin(), magnitudes.end(), [](T magnitude) { return std::isinf(magnitude); }),
      magnitudes.end());
  return magnitudes;
}

// Finds the nearest number of the 16-bit format by a search for the two neighbours; the codec rounds by
// arithmetic.
template <class T>
void expect_nearest_even(const char* name, const std::vector<T>& values) {
  std::vector<double> magnitudes = finite_magnitudes<double>(name);
  // The number after the largest magnitude stands for infinity.
  magnitudes.push_back(2 * magnitudes.back() - magnitudes[magnitudes.size() - 2]);
  Encoding<T> encoding(codec_from_name(name), values.size());
  encoding.encode(values);
  for (std::size_t i = 0; i < values.size(); ++i) {
    std::uint16_t code = 0;
    std::memcpy(&code, encoding.encoded() + sizeof(code) * i, sizeof(code));
    ASSERT_EQ((code & 0x8000) != 0, std::signbit(values[i])) << values[i];
    code &= 0x7fff;
    const double magnitude = std::abs(static_cast<double>(values[i]));
    const auto upper = std::lower_bound(magnitudes.begin(), magnitudes.end(), magnitude);
    if (upper == magnitudes.end()) {
      ASSERT_EQ(code, magnitudes.size() - 1) << values[i];
      continue;
    }
    auto expected = static_cast<std::size_t>(upper - magnitudes.begin());
    if (*upper != magnitude) {
      const double to_upper = *upper - magnitude;  // exact if the two distances are nearly equal
      const double to_lower = magnitude - *(upper - 1);
      if (to_lower < to_upper || (to_lower == to_upper && expected % 2 != 0)) --expected;
    }
    ASSERT_EQ(code, expected) << std::hexfloat << values[i];
  }
}

// Returns the numbers half way between two neighbours of the format, and the numbers just above and below
// these.
template <class T>
std::vector<T> ties(const char* name) {
  const std::vector<T> magnitudes = finite_magnitudes<T>(name);
  std::vector<T> values;
  for (std::size_t code = 1; code < magnitudes.size(); ++code) {
    const T tie = magnitudes[code - 1] + (magnitudes[code] - magnitudes[code - 1]) / 2;
    for (const T value :
         {tie, std::nextafter(tie, T(0)), std::nextafter(tie, kInfinity<T>), magnitudes[code]}) {
      values.push_back(value);
      values.push_back(-value);
    }
  }
  return values;
}

TYPED_TEST(CodecOf, BFloat16IsTheNearestEvenAtEveryMagnitude) {
  expect_nearest_even("bf16", this->values_of_all_magnitudes(200'000));
  expect_nearest_even("bf16", ties<TypeParam>("bf16"));
}

TYPED_TEST(CodecOf, Float16IsTheNearestEvenAtEveryMagnitude) {
  expect_nearest_even("fp16", this->values_of_all_magnitudes(100'000));
  expect_nearest_even("fp16", this->normal_values(100'000, TypeParam(1000)));
  expect_nearest_even("fp16", this->normal_values(100'000, TypeParam(1e-5)));
  expect_nearest_even("fp16", ties<TypeParam>("fp16"));
}

TEST(CodecOfFloat64, IsRoundedOnce) {
  // The values are 2^-40 more than half way between two 16-bit floats. As float32 they would be exactly half
  // way, and would round to even.
  const std::vector<double> values = {1 + 0x1p-8 + 0x1p-40, 1 + 0x1p-11 + 0x1p-40};
  Encoding<double> bf16(codec_from_name("bf16"), 2);
  EXPECT_EQ(bf16.sent(values)[0], 1 + 0x1p-7);
  Encoding<double> fp16(codec_from_name("fp16"), 2);
  EXPECT_EQ(fp16.sent(values)[1], 1 + 0x1p-10);
}

TYPED_TEST(CodecOf, HalvesKeepInfinityNanAndTheSignOfZero) {
  const std::vector<TypeParam> values = {kInfinity<TypeParam>, -kInfinity<TypeParam>, kNan<TypeParam>,
                                         -kNan<TypeParam>,     TypeParam(0),          -TypeParam(0)};
  for (const char* const name : {"bf16", "fp16"}) {
    const auto decoded = this->sent(name, values);
    EXPECT_EQ(decoded[0], kInfinity<TypeParam>) << name;
    EXPECT_EQ(decoded[1], -kInfinity<TypeParam>) << name;
    EXPECT_TRUE(std::isnan(decoded[2]) && std::isnan(decoded[3])) << name;
    EXPECT_TRUE(decoded[4] == 0 && !std::signbit(decoded[4])) << name;
    EXPECT_TRUE(decoded[5] == 0 && std::signbit(decoded[5])) << name;
  }
}

TYPED_TEST(CodecOf, NoNanOfAnyBitsBecomesANumber) {
  using Bits = typename FloatLayout<TypeParam>::Bits;
  for (Bits payload = 1; (payload & FloatLayout<TypeParam>::kInfinity) == 0; payload *= 2) {
    const auto nan = std::bit_cast<TypeParam>(FloatLayout<TypeParam>::kInfinity | payload);
    const std::vector<TypeParam> values = {nan, -nan, 1};
    for (const char* const name : {"bf16", "fp16", "int8"}) {
      const auto decoded = this->sent(name, values);
      EXPECT_TRUE(std::isnan(decoded[0]) && std::isnan(decoded[1])) << name << " " << payload;
    }
  }
}

TYPED_TEST(CodecOf, Float16IsInfiniteFromHalfBeyondItsLargest) {
  const auto decoded =
      this->sent("fp16", {TypeParam(65504), TypeParam(65519.99), TypeParam(65520), TypeParam(-1e30)});
  EXPECT_EQ(decoded, (std::vector<TypeParam>{65504, 65504, kInfinity<TypeParam>, -kInfinity<TypeParam>}));
}

TYPED_TEST(CodecOf, Int8IsWithinHalfAStepOfItsBlocksLargest) {
  for (const std::size_t num_elements : kSizes) {
    auto values = this->normal_values(num_elements);
    for (std::size_t i = 0; i < num_elements; ++i)  // Each block of 256 values has another scale.
      values[i] *= static_cast<TypeParam>(std::pow(10.0, static_cast<double>(i / 256 % 60) - 30));
    const auto decoded = this->sent("int8", values);
    for (std::size_t first = 0; first < num_elements; first += kInt8BlockElements) {
      const std::size_t end = std::min(first + kInt8BlockElements, num_elements);
      TypeParam largest = 0;
      for (std::size_t i = first; i < end; ++i) largest = std::max(largest, std::abs(values[i]));
      // 1e-5 is for the rounding of the scale to float32.
      const auto bound = static_cast<double>(largest) / 254 * (1 + 1e-5);
      for (std::size_t i = first; i < end; ++i)
        ASSERT_LE(std::abs(static_cast<double>(decoded[i]) - static_cast<double>(values[i])), bound) << i;
    }
  }
}

TYPED_TEST(CodecOf, Int8RoundsToNearestEvenAndReachesBothEnds) {
  const std::vector<TypeParam> values = {
      127, -127, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 0, TypeParam(126.4), TypeParam(-126.6)};
  EXPECT_EQ(this->sent("int8", values),
            (std::vector<TypeParam>{127, -127, 0, 2, 2, 0, -2, -2, 0, 126, -127}));
}

TYPED_TEST(CodecOf, Int8OfZerosAndOfTheTiniestNumbersIsFinite) {
  EXPECT_EQ(this->sent("int8", std::vector<TypeParam>(300)), std::vector<TypeParam>(300));
  const auto tiny = static_cast<TypeParam>(std::numeric_limits<float>::denorm_min());
  for (const int multiple : {1, 60, 64, 100, 127, 170, 190, 191, 1000}) {
    const TypeParam value = tiny * static_cast<TypeParam>(multiple);
    const auto decoded = this->sent("int8", {value, -value});
    EXPECT_LE(std::abs(decoded[0] - value), tiny * 64) << multiple;
    EXPECT_EQ(decoded[1], -decoded[0]) << multiple;
  }
}

TYPED_TEST(CodecOf, Int8BlockWithAnInfinityOrANanDecodesToNanAndNoOtherBlockDoes) {
  for (const TypeParam special : {kInfinity<TypeParam>, -kInfinity<TypeParam>, kNan<TypeParam>}) {
    auto values = this->normal_values(3 * kInt8BlockElements);
    values[kInt8BlockElements + 17] = special;
    const auto decoded = this->sent("int8", values);
    for (std::size_t i = 0; i < values.size(); ++i)
      ASSERT_EQ(std::isnan(decoded[i]), i / kInt8BlockElements == 1) << i;
  }
}

// ---- topk ----

TYPED_TEST(CodecOf, TopKChoosesWhatASortDoes) {
  for (const std::size_t num_elements : kSizes) {
    if (num_elements == 0) continue;
    for (const double share : {1e-9, 0.01, 0.1, 0.5, 0.9, 1.0}) {
      // Sorting a million values takes long.
      if (num_elements > 1000 && share != 0.01 && share != 0.5) continue;
      const auto values = this->normal_values(num_elements);
      Encoding<TypeParam> encoding({CodecKind::kTopK, share}, num_elements);
      encoding.encode(values);
      ASSERT_EQ(encoding.indices(), largest_by_sort(values, encoding.num_entries()))
          << share << " of " << num_elements;
    }
  }
}

TYPED_TEST(CodecOf, TopKTakesTheFirstOfEquals) {
  std::uniform_int_distribution<int> few(-3, 3);
  for (const std::size_t num_elements : {1U, 5U, 32U, 33U, 100U, 1000U, 5000U}) {
    for (const double share : {0.001, 0.1, 0.3, 0.7, 1.0}) {
      std::vector<TypeParam> values(num_elements);
      for (TypeParam& value : values) value = static_cast<TypeParam>(few(this->generator_));
      Encoding<TypeParam> encoding({CodecKind::kTopK, share}, num_elements);
      encoding.encode(values);
      ASSERT_EQ(encoding.indices(), largest_by_sort(values, encoding.num_entries()))
          << share << " of " << num_elements;
    }
  }
}

TYPED_TEST(CodecOf, TopKDistinguishesMagnitudesToTheLastBit) {
  for (const TypeParam around : {TypeParam(1), TypeParam(1e-30), TypeParam(0)}) {
    std::vector<TypeParam> values(4000);
    TypeParam value = around;
    for (TypeParam& element : values) {
      element = this->generator_() % 2 == 0 ? value : -value;
      value = std::nextafter(value, kInfinity<TypeParam>);
    }
    std::shuffle(values.begin(), values.end(), this->generator_);
    Encoding<TypeParam> encoding({CodecKind::kTopK, 0.1}, values.size());
    encoding.encode(values);
    ASSERT_EQ(encoding.indices(), largest_by_sort(values, 400)) << around;
  }
}

TYPED_TEST(CodecOf, TopKOfEveryMagnitudeAndOfSpecialsChoosesWhatASortDoes) {
  for (const double share : {0.001, 0.02, 0.2}) {
    auto values = this->values_of_all_magnitudes(10'000);
    Encoding<TypeParam> encoding({CodecKind::kTopK, share}, values.size());
    encoding.encode(values);
    ASSERT_EQ(encoding.indices(), largest_by_sort(values, encoding.num_entries()));
    // A third of the elements are infinities and NaNs, which count as equally large. There are more of them
    // than are sent.
    for (std::size_t i = 3; i < values.size(); i += 3) {
      const TypeParam specials[] = {kInfinity<TypeParam>, kNan<TypeParam>, -kNan<TypeParam>,
                                    -kInfinity<TypeParam>};
      values[i] = specials[i % 4];
    }
    Encoding<TypeParam> of_specials({CodecKind::kTopK, share}, values.size());
    of_specials.encode(values);
    ASSERT_EQ(of_specials.indices(), largest_by_sort(values, of_specials.num_entries())) << share;
  }
}

// Some of the orders fill the list of candidates again and again. In others many values are equal, so no
// threshold separates the chosen ones from the rest.
TYPED_TEST(CodecOf, TopKOfValuesInAnyOrderChoosesWhatASortDoes) {
  const auto random = this->normal_values(100'003);
  auto ascending = random;
  std::sort(ascending.begin(), ascending.end(),
            [](TypeParam a, TypeParam b) { return std::abs(a) < std::abs(b); });
  const std::vector<TypeParam> descending(ascending.rbegin(), ascending.rend());
  const std::vector<TypeParam> equal(random.size(), TypeParam(-3));
  const std::vector<TypeParam> nans(random.size(), kNan<TypeParam>);
  std::vector<TypeParam> few(random.size());
  few[random.size() - 1] = few[50'000] = 1;
  auto two_levels = equal;
  for (std::size_t i = 0; i < two_levels.size(); i += 3) two_levels[i] = TypeParam(3.5);
  for (const auto& values : {ascending, descending, equal, nans, few, two_levels}) {
    for (const double share : {0.0001, 0.01, 0.1, 0.3, 0.6}) {
      Encoding<TypeParam> encoding({CodecKind::kTopK, share}, values.size());
      encoding.encode(values);
      ASSERT_EQ(encoding.indices(), largest_by_sort(values, encoding.num_entries())) << share;
    }
  }
}

// topk samples some elements to guess its threshold. In this tensor the sampled elements are much larger or
// smaller than the others, so the guess is wrong.
TYPED_TEST(CodecOf, TopKOfATensorWhoseSampleMisleadsChoosesWhatASortDoes) {
  constexpr std::size_t kNumElements = 300'000;
  for (const TypeParam factor : {TypeParam(1e6), TypeParam(1e-6)}) {
    auto values = this->normal_values(kNumElements);
    for (std::size_t run = 0; run < topk_sample_runs(kNumElements); ++run) {
      for (std::size_t i = 0; i < kTopKRunElements; ++i)
        values[topk_sample_at(kNumElements, run) + i] *= factor;
    }
    for (const double share : {0.001, 0.01, 0.05, 0.1}) {
      Encoding<TypeParam> encoding({CodecKind::kTopK, share}, kNumElements);
      for (int item = 0; item < 2; ++item) {
        auto sums = encoding.residual();
        for (std::size_t i = 0; i < kNumElements; ++i) sums[i] += values[i];
        encoding.encode(values);
        ASSERT_EQ(encoding.indices(), largest_by_sort(sums, encoding.num_entries()))
            << factor << " " << share;
      }
    }
  }
}

TEST(TopKSample, IsOfThePartsOfATensorInOrder) {
  for (const std::size_t num_elements : {511UL, 512UL, 5000UL, 131'072UL, 300'000UL, 0xffffffffUL}) {
    const std::size_t num_runs = topk_sample_runs(num_elements);
    EXPECT_EQ(num_runs == 0, num_elements < 512) << num_elements;
    EXPECT_LE(num_runs * kTopKRunElements, kTopKSampleMax);
    for (std::size_t run = 0; run < num_runs; ++run) {
      const std::size_t part_elements = num_elements / num_runs;
      ASSERT_GE(topk_sample_at(num_elements, run), run * part_elements);
      ASSERT_LE(topk_sample_at(num_elements, run) + kTopKRunElements, (run + 1) * part_elements);
    }
  }
}

TYPED_TEST(CodecOf, TopKOfZerosSendsTheFirstZeros) {
  Encoding<TypeParam> encoding({CodecKind::kTopK, 0.1}, 100);
  EXPECT_EQ(encoding.sent(std::vector<TypeParam>(100)), std::vector<TypeParam>(100));
  EXPECT_EQ(encoding.indices(), (std::vector<std::uint32_t>{0, 1, 2, 3, 4, 5, 6, 7, 8, 9}));
}

TYPED_TEST(CodecOf, TopKDecodesToTheChosenAndZeros) {
  const auto values = this->normal_values(1000);
  Encoding<TypeParam> encoding({CodecKind::kTopK, 0.05}, values.size());
  const auto decoded = encoding.sent(values);
  const auto chosen = largest_by_sort(values, 50);
  for (std::uint32_t i = 0; i < values.size(); ++i) {
    const bool is_chosen = std::binary_search(chosen.begin(), chosen.end(), i);
    ASSERT_EQ(decoded[i], is_chosen ? static_cast<TypeParam>(static_cast<float>(values[i])) : TypeParam(0));
    ASSERT_EQ(encoding.residual()[i], is_chosen ? values[i] - decoded[i] : values[i]);
  }
}

TYPED_TEST(CodecOf, WhatTopKLeavesOutIsSentLaterAndNothingIsLost) {
  constexpr std::size_t kNumElements = 3000;
  // Sums of whole numbers are exact, so if nothing is lost both sums are equal.
  std::uniform_int_distribution<int> whole(1, 1000);
  Encoding<TypeParam> encoding({CodecKind::kTopK, 0.03}, kNumElements);
  std::vector<TypeParam> sum_of_inputs(kNumElements);
  std::vector<TypeParam> sum_of_decoded(kNumElements);
  std::vector<bool> was_sent(kNumElements);
  for (int item = 0; item < 200; ++item) {
    std::vector<TypeParam> values(kNumElements);
    for (std::size_t i = 0; i < kNumElements; ++i) {
      values[i] = static_cast<TypeParam>(whole(this->generator_));
      sum_of_inputs[i] += values[i];
    }
    const auto decoded = encoding.sent(values);
    for (std::size_t i = 0; i < kNumElements; ++i) sum_of_decoded[i] += decoded[i];
    for (const std::uint32_t i : encoding.indices()) was_sent[i] = true;
    const auto residual = encoding.residual();
    for (std::size_t i = 0; i < kNumElements; ++i)
      ASSERT_EQ(sum_of_decoded[i] + residual[i], sum_of_inputs[i]) << "item " << item << ", element " << i;
  }
  EXPECT_EQ(std::count(was_sent.begin(), was_sent.end(), false), 0) << "never sent";
}

TEST(CodecOfFloat64, TopKKeepsTheRoundingErrorOfWhatItSends) {
  const std::vector<double> values = {1 + 0x1p-40, 0, 0.25};
  Encoding<double> encoding({CodecKind::kTopK, 0.3}, 3);
  EXPECT_EQ(encoding.sent(values), (std::vector<double>{1, 0, 0}));
  EXPECT_EQ(encoding.residual(), (std::vector<double>{0x1p-40, 0, 0.25}));
}

TYPED_TEST(CodecOf, WhatTopKSendsAsInfinityOrNanIsNotSentAgain) {
  std::vector<TypeParam> values(10);
  values[2] = kInfinity<TypeParam>;
  values[5] = kNan<TypeParam>;
  values[7] = std::numeric_limits<TypeParam>::max();  // a double of this size is infinite as a float32
  Encoding<TypeParam> encoding({CodecKind::kTopK, 0.3}, values.size());
  const auto decoded = encoding.sent(values);
  EXPECT_EQ(decoded[2], kInfinity<TypeParam>);
  EXPECT_TRUE(std::isnan(decoded[5]));
  EXPECT_EQ(encoding.indices(), (std::vector<std::uint32_t>{2, 5, 7}));
  EXPECT_EQ(encoding.residual(), std::vector<TypeParam>(10));
}

// More elements are infinite or NaN than topk sends, so most of them stay behind. They are in the vectorised
// part of the loop and in its last elements.
TYPED_TEST(CodecOf, AnItemAfterInfinitiesAndNansThatTopKHeldBackIsSentAsFromAFreshResidual) {
  const TypeParam specials[] = {kInfinity<TypeParam>, -kInfinity<TypeParam>, kNan<TypeParam>,
                                -kNan<TypeParam>};
  for (const std::size_t num_elements : {10U, 1000U, 70'001U}) {
    std::vector<TypeParam> overflowed(num_elements);
    std::vector<TypeParam> kept(num_elements);
    for (std::size_t i = 0; i < num_elements; ++i) {
      kept[i] = i % 5 == 3 ? TypeParam(0.25) : TypeParam(0);
      overflowed[i] = i % 5 == 3 ? kept[i] : specials[i % 4];
    }
    Encoding<TypeParam> encoding({CodecKind::kTopK, 0.1}, num_elements);
    encoding.encode(overflowed);
    ASSERT_EQ(encoding.indices(), largest_by_sort(overflowed, encoding.num_entries()));
    ASSERT_EQ(encoding.residual(), kept);

    const auto finite = this->normal_values(num_elements);
    auto with_kept = finite;
    for (std::size_t i = 0; i < num_elements; ++i) with_kept[i] += kept[i];
    Encoding<TypeParam> fresh({CodecKind::kTopK, 0.1}, num_elements);
    const auto decoded = encoding.sent(finite);
    ASSERT_EQ(decoded, fresh.sent(with_kept));
    for (const TypeParam value : decoded) ASSERT_TRUE(std::isfinite(value));
    ASSERT_EQ(encoding.residual(), fresh.residual());
  }
}

TYPED_TEST(CodecOf, TopKForgetsASumThatOverflows) {
  std::vector<TypeParam> values(40, std::numeric_limits<TypeParam>::max());
  Encoding<TypeParam> encoding({CodecKind::kTopK, 0.05}, values.size());
  encoding.encode(values);  // Sends the first two values and keeps the others.
  encoding.encode(values);  // The kept values are infinite now, and two of them are sent.
  EXPECT_EQ(encoding.indices(), (std::vector<std::uint32_t>{2, 3}));
  std::vector<TypeParam> kept(40);
  kept[0] = kept[1] = std::numeric_limits<TypeParam>::max();
  EXPECT_EQ(encoding.residual(), kept);
}

TEST(CodecDeathTest, TopKWithoutAResidualIsOurBug) {
  Encoding<float> encoding(codec_from_name("topk"), 10);
  CodecWork work = encoding.work();
  work.residual = nullptr;
  EXPECT_DEATH(encode_host(work), "residual");
}

// ---- Elements of 16 bits ----

template <class T>
class CodecOfHalf : public testing::Test {
 protected:
  // Half of the last bit of a number just below 1.
  static constexpr double kHalfOfLastBit = std::is_same_v<T, BFloat16> ? 0x1p-9 : 0x1p-12;
  static constexpr double kSmallest = std::is_same_v<T, BFloat16> ? 0x1p-133 : 0x1p-24;
  std::mt19937_64 generator_{20191027};

  static std::vector<T> halves(const std::vector<float>& numbers) {
    std::vector<T> halves(numbers.size());
    std::transform(numbers.begin(), numbers.end(), halves.begin(),
                   [](float number) { return element_of<T>(number); });
    return halves;
  }
  static std::vector<float> numbers(const std::vector<T>& halves) {
    std::vector<float> numbers(halves.size());
    std::transform(halves.begin(), halves.end(), numbers.begin(), [](T half) { return number_of(half); });
    return numbers;
  }
  std::vector<T> normal_values(std::size_t num_elements) {
    std::normal_distribution<float> distribution;
    std::vector<float> values(num_elements);
    for (float& value : values) value = distribution(generator_);
    return halves(values);
  }
  // Returns every code of the format, with denormals and both zeros; with infinities and NaNs if
  // with_specials is set.
  std::vector<T> all_codes(bool with_specials) {
    std::vector<T> codes;
    for (unsigned code = 0; code < 0x10000U; ++code) {
      const T half = {static_cast<std::uint16_t>(code)};
      if (with_specials || std::isfinite(number_of(half))) codes.push_back(half);
    }
    std::shuffle(codes.begin(), codes.end(), generator_);
    return codes;
  }
};

using Halves = testing::Types<BFloat16, Float16>;
TYPED_TEST_SUITE(CodecOfHalf, Halves);

TYPED_TEST(CodecOfHalf, Int8IsWithinHalfAStepAndTheRoundingTo16Bits) {
  // Sorted, so that there are blocks of every scale.
  auto ascending = this->all_codes(/*with_specials=*/false);
  std::sort(ascending.begin(), ascending.end(),
            [](TypeParam a, TypeParam b) { return std::abs(number_of(a)) < std::abs(number_of(b)); });
  for (const auto& halves : {this->normal_values(70'001), this->all_codes(false), ascending}) {
    Encoding<TypeParam> encoding(codec_from_name("int8"), halves.size());
    const auto values = this->numbers(halves);
    const auto decoded = this->numbers(encoding.sent(halves));
    for (std::size_t first = 0; first < values.size(); first += kInt8BlockElements) {
      const std::size_t end = std::min(first + kInt8BlockElements, values.size());
      double largest = 0;
      for (std::size_t i = first; i < end; ++i) largest = std::max<double>(largest, std::abs(values[i]));
      // The scale is a float32. A subnormal scale is off by up to 2^-150, and decoding multiplies it by up to
      // 127.
      const double step = largest / 254 * (1 + 1e-5) + 0x1p-150 * 128;
      for (std::size_t i = first; i < end; ++i) {
        const double rounding =
            std::max(std::abs(double{values[i]}) * 2 * this->kHalfOfLastBit, this->kSmallest);
        ASSERT_LE(std::abs(double{decoded[i]} - double{values[i]}),
                  step + step * this->kHalfOfLastBit + rounding)
            << values[i] << " of a block up to " << largest;
      }
    }
  }
}

TYPED_TEST(CodecOfHalf, Int8DecodesZerosOfBothSignsToZeroAndTheLargestToItself) {
  const TypeParam largest = {std::is_same_v<TypeParam, BFloat16> ? std::uint16_t{0x7f7f}
                                                                 : std::uint16_t{0x7bff}};
  const TypeParam minus_largest = {static_cast<std::uint16_t>(largest.bits | 0x8000U)};
  Encoding<TypeParam> encoding(codec_from_name("int8"), 4);
  const auto decoded = this->numbers(encoding.sent({largest, minus_largest, {0x8000}, {0}}));
  EXPECT_EQ(decoded, (std::vector<float>{number_of(largest), number_of(minus_largest), 0, 0}));
  Encoding<TypeParam> zeros(codec_from_name("int8"), 300);
  EXPECT_EQ(this->numbers(zeros.sent(std::vector<TypeParam>(300, TypeParam{0x8000}))),
            std::vector<float>(300));
}

TYPED_TEST(CodecOfHalf, Int8BlockWithAnInfinityOrANanDecodesToNanAndNoOtherBlockDoes) {
  for (const float special : {kInfinity<float>, -kInfinity<float>, kNan<float>}) {
    auto halves = this->normal_values(3 * kInt8BlockElements);
    halves[kInt8BlockElements + 17] = element_of<TypeParam>(special);
    Encoding<TypeParam> encoding(codec_from_name("int8"), halves.size());
    const auto decoded = this->numbers(encoding.sent(halves));
    for (std::size_t i = 0; i < decoded.size(); ++i) {
      ASSERT_EQ(std::isfinite(decoded[i]), i / kInt8BlockElements != 1) << i;
      ASSERT_EQ(std::isnan(decoded[i]), i / kInt8BlockElements == 1) << i;
    }
  }
}

TYPED_TEST(CodecOfHalf, TopKAddsUpInFloat32SendsTheLargestRoundedAndKeepsTheRest) {
  for (const std::size_t num_elements : {1U, 7U, 1000U, 70'001U}) {
    for (const double share : {0.0001, 0.05, 0.4, 1.0}) {
      Encoding<TypeParam> encoding({CodecKind::kTopK, share}, num_elements);
      std::vector<float> sums(num_elements);
      for (int item = 0; item < 5; ++item) {
        const auto halves = this->normal_values(num_elements);
        for (std::size_t i = 0; i < num_elements; ++i) sums[i] += number_of(halves[i]);
        const auto chosen = largest_by_sort(sums, encoding.num_entries());
        std::vector<TypeParam> expected(num_elements);
        for (const std::uint32_t i : chosen) {
          expected[i] = element_of<TypeParam>(sums[i]);
          sums[i] -= number_of(expected[i]);
        }
        ASSERT_EQ(this->numbers(encoding.sent(halves)), this->numbers(expected)) << share << " " << item;
        ASSERT_EQ(encoding.indices(), chosen) << share << " of " << num_elements;
        ASSERT_EQ(encoding.residual(), sums) << share << " of " << num_elements;
      }
    }
  }
}

TYPED_TEST(CodecOfHalf, NothingThatTopKLeavesOutOrRoundsIsLost) {
  constexpr std::size_t kNumElements = 3000;
  // Sums of these numbers are exact in float32, and too long for 16 bits.
  std::uniform_int_distribution<int> whole(1, 300);
  Encoding<TypeParam> encoding({CodecKind::kTopK, 0.03}, kNumElements);
  std::vector<double> missing(kNumElements);
  bool was_rounded = false;
  for (int item = 0; item < 200; ++item) {
    std::vector<float> values(kNumElements);
    for (float& value : values) value = static_cast<float>(whole(this->generator_));
    const auto halves = this->halves(values);
    const auto decoded = this->numbers(encoding.sent(halves));
    const auto residual = encoding.residual();
    for (std::size_t i = 0; i < kNumElements; ++i) {
      missing[i] += double{number_of(halves[i])} - double{decoded[i]};
      ASSERT_EQ(missing[i], residual[i]) << "item " << item << ", element " << i;
      was_rounded |= decoded[i] != 0 && residual[i] != 0;
    }
  }
  EXPECT_TRUE(was_rounded);
}

TYPED_TEST(CodecOfHalf, TopKSendsASumThatIsTooLargeAsAnInfinityAndForgetsIt) {
  const TypeParam largest = {std::is_same_v<TypeParam, BFloat16> ? std::uint16_t{0x7f7f}
                                                                 : std::uint16_t{0x7bff}};
  Encoding<TypeParam> encoding({CodecKind::kTopK, 0.05}, 40);
  const std::vector<TypeParam> values(40, largest);
  encoding.encode(values);
  const auto decoded = this->numbers(encoding.sent(values));
  EXPECT_EQ(encoding.indices(), (std::vector<std::uint32_t>{2, 3}));
  EXPECT_EQ(decoded[2], kInfinity<float>);
  EXPECT_EQ(encoding.residual()[2], 0);
  EXPECT_EQ(encoding.residual()[0], number_of(largest));
}

TYPED_TEST(CodecOfHalf, AfterInfinitiesAndNansTopKIsAsFromAFreshResidual) {
  auto overflowed = this->normal_values(70'001);
  for (std::size_t i = 0; i < overflowed.size(); ++i) {
    const float specials[] = {kInfinity<float>, -kInfinity<float>, kNan<float>};
    overflowed[i] = element_of<TypeParam>(i % 2 == 0 ? specials[i % 3] : 0.0F);
  }
  const auto finite = this->normal_values(overflowed.size());
  Encoding<TypeParam> encoding({CodecKind::kTopK, 0.1}, overflowed.size());
  encoding.encode(overflowed);
  EXPECT_EQ(encoding.residual(), std::vector<float>(overflowed.size()));
  Encoding<TypeParam> fresh({CodecKind::kTopK, 0.1}, overflowed.size());
  EXPECT_EQ(this->numbers(encoding.sent(finite)), this->numbers(fresh.sent(finite)));
  EXPECT_EQ(encoding.residual(), fresh.residual());
}

// ---- Instruction sets and alignment ----

template <class T>
const CodecKernels<T>& kernels_of(const CodecKernelSet& set) {
  if constexpr (std::is_same_v<T, float>) {
    return *set.for_float32;
  } else if constexpr (std::is_same_v<T, double>) {
    return *set.for_float64;
  } else if constexpr (std::is_same_v<T, BFloat16>) {
    return *set.for_bfloat16;
  } else {
    return *set.for_float16;
  }
}

template <class T>
std::vector<std::byte> bytes_of(const std::vector<T>& values) {
  const auto bytes = std::as_bytes(std::span(values));
  return {bytes.begin(), bytes.end()};
}

// Returns the results of all functions of a set of kernels, joined: encoded and decoded values.
template <class T>
std::vector<std::byte> everything(const CodecKernels<T>& kernels, const std::vector<T>& values) {
  const std::size_t count = values.size();
  std::vector<std::uint16_t> halves(count);
  std::vector<std::byte> blocks(encoded_bytes({CodecKind::kInt8}, DType::kFloat32, count));
  std::vector<T> decoded(count);
  std::vector<std::byte> all;
  const auto keep = [&](const auto& part) {
    const auto bytes = bytes_of(part);
    all.insert(all.end(), bytes.begin(), bytes.end());
  };
  if (sizeof(T) > sizeof(std::uint16_t)) {
    kernels.encode_bfloat16(count, values.data(), halves.data());
    keep(halves);
    kernels.decode_bfloat16(count, halves.data(), decoded.data());
    keep(decoded);
    kernels.encode_float16(count, values.data(), halves.data());
    keep(halves);
    kernels.decode_float16(count, halves.data(), decoded.data());
    keep(decoded);
  }
  kernels.encode_int8(count, values.data(), blocks.data());
  keep(blocks);
  kernels.decode_int8(count, blocks.data(), decoded.data());
  keep(decoded);
  for (const std::size_t num_chosen : {(count + 99) / 100, (count + 2) / 3}) {
    std::vector<NumberOf<T>> residual(count);
    std::vector<std::uint32_t> entries(2 * num_chosen);
    kernels.encode_topk({count, num_chosen, values.data(), residual.data(), entries.data(),
                         reinterpret_cast<SentOf<T>*>(entries.data() + num_chosen)});
    // Only this part is the encoding. The search for the largest values left its own data behind it.
    if (sizeof(SentOf<T>) == 2) entries.resize(num_chosen + num_chosen / 2);
    keep(entries);
    keep(residual);
  }
  return all;
}

TYPED_TEST(CodecOf, EveryInstructionSetGivesTheSameBytes) {
  const CodecKernelSets kernel_sets = codec_kernel_sets();
  const auto& first = kernels_of<TypeParam>(kernel_sets.sets[0]);
  for (const std::size_t num_elements : {1U, 7U, 33U, 255U, 256U, 257U, 1000U, 70'001U}) {
    auto finite = this->values_of_all_magnitudes(num_elements);
    auto special = this->normal_values(num_elements);
    special[num_elements / 2] = kNan<TypeParam>;
    special[num_elements / 3] = -kInfinity<TypeParam>;
    for (const auto& values : {finite, special, this->normal_values(num_elements)}) {
      const auto expected = everything(first, values);
      for (std::size_t set = 1; set < kernel_sets.num_sets; ++set) {
        const bool same = everything(kernels_of<TypeParam>(kernel_sets.sets[set]), values) == expected;
        ASSERT_TRUE(same) << kernel_sets.sets[set].name << ", " << num_elements << " elements";
      }
    }
  }
}

TYPED_TEST(CodecOfHalf, EveryInstructionSetGivesTheSameBytes) {
  const CodecKernelSets kernel_sets = codec_kernel_sets();
  const auto& first = kernels_of<TypeParam>(kernel_sets.sets[0]);
  for (const auto& values : {this->all_codes(false), this->all_codes(true), this->normal_values(257),
                             this->normal_values(70'001)}) {
    const auto expected = everything(first, values);
    for (std::size_t set = 1; set < kernel_sets.num_sets; ++set) {
      const bool same = everything(kernels_of<TypeParam>(kernel_sets.sets[set]), values) == expected;
      ASSERT_TRUE(same) << kernel_sets.sets[set].name << ", " << values.size() << " elements";
    }
  }
}

TYPED_TEST(CodecOf, WhatIsEncodedMayLieAtAnyFourthByte) {
  for (const char* const name : {"none", "bf16", "fp16", "int8", "topk:0.1"}) {
    const auto values = this->normal_values(999);
    Encoding<TypeParam> encoding(codec_from_name(name), values.size());
    encoding.encode(values);
    const auto expected = encoding.decode();
    for (std::size_t offset = 4; offset < 68; offset += 4) {
      const auto bytes = encoding.encoded_span();
      std::vector<std::uint64_t> memory(bytes.size() / 8 + 20);
      std::byte* const moved = reinterpret_cast<std::byte*>(memory.data()) + offset;
      std::memcpy(moved, bytes.data(), bytes.size());
      CodecWork work = encoding.work();
      work.encoded = moved;
      decode_host(work);
      ASSERT_EQ(encoding.values(), expected) << name << ", offset " << offset;
      ASSERT_FALSE(encoding_violation(work.codec, work.dtype, work.num_elements, {moved, bytes.size()}));
    }
  }
}

// ---- Bytes that a receiver refuses ----

class TopKViolation : public testing::Test {
 protected:
  static constexpr std::size_t kNumElements = 1000;
  const Codec codec_ = codec_from_name("topk:0.1");

  static std::vector<std::uint32_t> good_entries() {
    std::vector<std::uint32_t> entries(200);  // 100 indices, 100 values
    for (std::uint32_t i = 0; i < 100; ++i) entries[i] = 3 * i + 1;
    return entries;
  }
  [[nodiscard]] std::optional<std::string> violation(const std::vector<std::uint32_t>& entries) const {
    return encoding_violation(codec_, DType::kFloat32, kNumElements, std::as_bytes(std::span(entries)));
  }
  void expect_refused(const std::vector<std::uint32_t>& entries, const std::string& words) const {
    const auto what = violation(entries);
    ASSERT_TRUE(what) << "expected a refusal: " << words;
    EXPECT_NE(what->find(words), std::string::npos) << *what;
  }
};

TEST_F(TopKViolation, AscendingIndicesWithinTheTensorAreTaken) {
  auto entries = good_entries();
  EXPECT_EQ(violation(entries), std::nullopt);
  entries[0] = 0;
  entries[99] = kNumElements - 1;
  EXPECT_EQ(violation(entries), std::nullopt);
}

TEST_F(TopKViolation, IndicesThatDescendOrRepeatAreRefusedWhereverTheyAre) {
  for (std::size_t entry = 1; entry < 100; ++entry) {
    auto repeated = good_entries();
    repeated[entry] = repeated[entry - 1];
    expect_refused(repeated, "of entry " + std::to_string(entry) + " does not ascend");
    auto descending = good_entries();
    descending[entry] = descending[entry - 1] - 1;
    expect_refused(descending, "of entry " + std::to_string(entry) + " does not ascend");
  }
}

TEST_F(TopKViolation, IndicesBeyondTheTensorAreRefused) {
  for (const std::uint32_t index : {std::uint32_t{kNumElements}, 0x80000000U, 0xffffffffU}) {
    auto entries = good_entries();
    entries[99] = index;
    expect_refused(entries, "index " + std::to_string(index) + " is beyond the tensor's 1000 elements");
    entries[98] = index;  // the last index is out of order, or repeats
    EXPECT_TRUE(violation(entries));
  }
}

TEST_F(TopKViolation, RandomBytesAreNeverDecodedOutOfTheTensor) {
  std::mt19937_64 random(5);
  for (int round = 0; round < 2000; ++round) {
    std::vector<std::uint32_t> entries(200);
    for (std::uint32_t& entry : entries)
      entry = static_cast<std::uint32_t>(random() % (round % 2 == 0 ? 1000 : ~0U));
    EXPECT_TRUE(violation(entries));
  }
}

TEST(EncodingViolation, OtherCodecsAndNothingAtAllAreTaken) {
  for (const char* const name : {"none", "bf16", "fp16", "int8"}) {
    const Codec codec = codec_from_name(name);
    const std::vector<std::byte> bytes(encoded_bytes(codec, DType::kFloat64, 300), std::byte{0xff});
    EXPECT_EQ(encoding_violation(codec, DType::kFloat64, 300, bytes), std::nullopt) << name;
  }
  EXPECT_EQ(encoding_violation(codec_from_name("topk"), DType::kFloat32, 0, {}), std::nullopt);
}

}  // namespace
}  // namespace pipedream
