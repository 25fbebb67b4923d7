// Tests that every set of host kernels gives the same bits, streamed or not, for every alignment.
#include "weights/host_kernels.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <random>
#include <string>
#include <type_traits>
#include <vector>

namespace pipedream {
namespace {

template <class T>
const HostKernels<T>* kernels_of(const HostKernelSet& set) {
  if constexpr (std::is_same_v<T, float>) {
    return set.for_float32;
  } else if constexpr (std::is_same_v<T, BFloat16>) {
    return set.for_bfloat16;
  } else {
    return set.for_float64;
  }
}

template <class T>
class HostKernelSets : public testing::Test {
 protected:
  static constexpr std::int64_t kNumElements = 1000;
  // How many offsets into an allocation are tested, so that vectors and cache lines begin at every place.
  static constexpr std::int64_t kNumOffsets = 17;

  std::vector<T> random_values() {
    std::uniform_real_distribution<T> distribution(-1, 1);
    std::vector<T> values(kNumElements + kNumOffsets);
    for (T& value : values) value = distribution(generator_);
    return values;
  }

  // Returns the sets that this processor can run.
  static std::vector<const HostKernels<T>*> sets() {
    std::vector<const HostKernels<T>*> sets = {kernels_of<T>(baseline_kernels())};
    const HostKernels<T>* const avx2 = kernels_of<T>(avx2_kernels());
    if (avx2 != nullptr && processor_has_avx2()) sets.push_back(avx2);
    return sets;
  }

 private:
  std::mt19937_64 generator_{20191027};
};

using Elements = testing::Types<float, double>;
TYPED_TEST_SUITE(HostKernelSets, Elements);

TYPED_TEST(HostKernelSets, SgdGivesTheSameBits) {
  const SgdFactors<TypeParam> factors{TypeParam(0.7), TypeParam(0.01), TypeParam(0.9), TypeParam(0.8),
                                      TypeParam(-0.1)};
  const auto weight = this->random_values();
  const auto gradient = this->random_values();
  const auto momentum = this->random_values();
  for (const SgdFlags flags : {SgdFlags{false, false, false, false}, SgdFlags{true, true, false, false},
                               SgdFlags{true, true, true, false}, SgdFlags{false, true, true, true}}) {
    for (std::int64_t offset = 0; offset < this->kNumOffsets; ++offset) {
      std::vector<std::vector<TypeParam>> results;
      for (const auto* kernels : this->sets()) {
        for (const bool streaming : {false, true}) {
          std::vector<TypeParam> weight_out(weight.size());
          std::vector<TypeParam> momentum_out = momentum;
          kernels->sgd(flags, factors,
                       {this->kNumElements, weight.data() + offset, weight_out.data() + offset,
                        gradient.data() + offset, momentum_out.data() + offset},
                       streaming);
          weight_out.insert(weight_out.end(), momentum_out.begin(), momentum_out.end());
          results.push_back(weight_out);
        }
      }
      for (const auto& result : results) ASSERT_EQ(result, results.front()) << "offset " << offset;
    }
  }
}

TYPED_TEST(HostKernelSets, AdamGivesTheSameBits) {
  const AdamFactors<TypeParam> factors{TypeParam(0.7),   TypeParam(0.01),  TypeParam(0.999), TypeParam(0.1),
                                       TypeParam(0.99),  TypeParam(0.01),  TypeParam(0.25),  TypeParam(1e-6),
                                       TypeParam(-0.01), TypeParam(-0.003)};
  const auto weight = this->random_values();
  const auto gradient = this->random_values();
  const auto moment = this->random_values();
  auto square = this->random_values();
  for (TypeParam& value : square) value *= value;
  for (const AdamFlags flags : {AdamFlags{false, false, false, false}, AdamFlags{true, true, false, false},
                                AdamFlags{true, false, true, false}, AdamFlags{false, true, true, false},
                                AdamFlags{false, false, false, true}, AdamFlags{false, false, true, true}}) {
    for (std::int64_t offset = 0; offset < this->kNumOffsets; ++offset) {
      std::vector<std::vector<TypeParam>> results;
      for (const auto* kernels : this->sets()) {
        for (const bool streaming : {false, true}) {
          std::vector<TypeParam> weight_out(weight.size());
          std::vector<TypeParam> first = moment;
          std::vector<TypeParam> second = square;
          std::vector<TypeParam> largest = square;
          kernels->adam(flags, factors,
                        {this->kNumElements, weight.data() + offset, weight_out.data() + offset,
                         gradient.data() + offset, first.data() + offset, second.data() + offset,
                         largest.data() + offset},
                        streaming);
          for (const auto* values : {&first, &second, &largest})
            weight_out.insert(weight_out.end(), values->begin(), values->end());
          results.push_back(weight_out);
        }
      }
      for (const auto& result : results) ASSERT_EQ(result, results.front()) << "offset " << offset;
    }
  }
}

TYPED_TEST(HostKernelSets, StreamingWritesNothingBeyondItsElements) {
  constexpr TypeParam kGuard = 77;
  const auto weight = this->random_values();
  for (const auto* kernels : this->sets()) {
    for (std::int64_t offset = 0; offset < this->kNumOffsets; ++offset) {
      for (const std::int64_t num_elements : {0, 1, 7, 15, 16, 17, 40}) {
        std::vector<TypeParam> weight_out(100, kGuard);
        kernels->sgd({false, false, false, false}, {1, 0, 0, 1, TypeParam(-0.1)},
                     {num_elements, weight.data(), weight_out.data() + offset, weight.data(), nullptr}, true);
        for (std::int64_t element = 0; element < 100; ++element) {
          const bool inside = element >= offset && element < offset + num_elements;
          ASSERT_EQ(weight_out[static_cast<std::size_t>(element)] == kGuard, !inside)
              << "element " << element << ", offset " << offset << ", " << num_elements << " elements";
        }
      }
    }
  }
}

// The weights in and out have elements of 2 bytes, masters and moments of 4 bytes, so their cache lines begin
// at different elements.
TEST(HostKernelSetsOfBFloat16, AdamGivesTheSameBits) {
  constexpr std::int64_t kNumElements = 1000;
  constexpr std::int64_t kNumOffsets = 33;
  constexpr auto kSize = static_cast<std::size_t>(kNumElements + kNumOffsets);
  std::mt19937_64 generator(5);
  std::normal_distribution<float> distribution;
  std::vector<BFloat16> gradient(kSize);
  std::vector<float> values(kSize);
  for (BFloat16& element : gradient) element = {to_bfloat16(distribution(generator))};
  for (float& value : values) value = std::abs(distribution(generator));
  const AdamFactors<float> factors{0.7F, 0.01F, 0.999F, 0.1F, 0.99F, 0.01F, 0.25F, 1e-6F, -0.01F, -0.003F};
  for (std::int64_t offset = 0; offset < kNumOffsets; ++offset) {
    std::vector<std::vector<float>> results;
    for (const HostKernelSet& set : {baseline_kernels(), avx2_kernels()}) {
      if (set.for_bfloat16 == nullptr || (set.name == std::string("avx2") && !processor_has_avx2())) continue;
      for (const bool streaming : {false, true}) {
        std::vector<BFloat16> weight_out(kSize, BFloat16{0x4300});  // must stay where nothing is written
        std::vector<float> result = values;
        std::vector<float> first = values;
        std::vector<float> second = values;
        set.for_bfloat16->adam(
            {true, false, false, false}, factors,
            {kNumElements, nullptr, weight_out.data() + offset, gradient.data() + offset,
             first.data() + offset, second.data() + offset, nullptr, result.data() + offset},
            streaming);
        for (std::size_t i = 0; i < kSize; ++i) {
          const auto position = static_cast<std::int64_t>(i) - offset;
          const bool inside = position >= 0 && position < kNumElements;
          ASSERT_EQ(weight_out[i].bits, inside ? to_bfloat16(result[i]) : 0x4300) << "element " << i;
        }
        for (const auto* moments : {&first, &second})
          result.insert(result.end(), moments->begin(), moments->end());
        results.push_back(result);
      }
    }
    for (const auto& result : results) ASSERT_EQ(result, results.front()) << "offset " << offset;
  }
}

}  // namespace
}  // namespace pipedream
