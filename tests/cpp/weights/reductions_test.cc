// The squared norm and the search for values that are not finite, whatever the size and the threads.
#include "weights/reductions.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>
#include <type_traits>
#include <vector>

namespace pipedream {
namespace {

template <class T>
class Reductions : public testing::Test {
 protected:
  static constexpr DType kDType = std::is_same_v<T, float> ? DType::kFloat32 : DType::kFloat64;

  static double squared_norm(const std::vector<T>& values, int num_threads = 1) {
    return squared_norm_host(kDType, static_cast<std::int64_t>(values.size()), values.data(), num_threads);
  }
  static bool all_finite(const std::vector<T>& values, int num_threads = 1) {
    return all_finite_host(kDType, static_cast<std::int64_t>(values.size()), values.data(), num_threads);
  }
  static std::vector<T> random_values(std::size_t num_elements) {
    std::mt19937_64 generator(20191027);
    std::normal_distribution<T> distribution;
    std::vector<T> values(num_elements);
    for (T& value : values) value = distribution(generator);
    return values;
  }
};

using Elements = testing::Types<float, double>;
TYPED_TEST_SUITE(Reductions, Elements);

TYPED_TEST(Reductions, SquaredNormEqualsALongSum) {
  for (const std::size_t num_elements : {0U, 1U, 15U, 16U, 33U, 1000U, 32768U, 300001U}) {
    const auto values = this->random_values(num_elements);
    long double sum = 0;
    for (const TypeParam value : values) sum += static_cast<long double>(value) * value;
    EXPECT_NEAR(this->squared_norm(values), static_cast<double>(sum), 1e-13 * static_cast<double>(sum))
        << num_elements;
  }
}

TYPED_TEST(Reductions, ThreadsChangeNoBitOfTheNorm) {
  const auto values = this->random_values((1 << 20) + 77);
  const double alone = this->squared_norm(values);
  for (const int num_threads : {2, 3, 5}) EXPECT_EQ(this->squared_norm(values, num_threads), alone);
}

TYPED_TEST(Reductions, SquaredNormOfLargeFloatsDoesNotOverflow) {
  const std::vector<TypeParam> values(100, TypeParam(3e38));
  EXPECT_NEAR(this->squared_norm(values) / (100 * 9e76), 1, 1e-6);
}

TYPED_TEST(Reductions, SquaredNormShowsWhatIsNotFinite) {
  std::vector<TypeParam> values(100, 1);
  values[57] = std::numeric_limits<TypeParam>::infinity();
  EXPECT_EQ(this->squared_norm(values), std::numeric_limits<double>::infinity());
  values[99] = std::numeric_limits<TypeParam>::quiet_NaN();
  EXPECT_TRUE(std::isnan(this->squared_norm(values)));
}

TYPED_TEST(Reductions, FindsOneSpecialValueAnywhere) {
  using Limits = std::numeric_limits<TypeParam>;
  for (const std::size_t num_elements : {1U, 17U, 5000U, 200000U}) {
    std::vector<TypeParam> values(num_elements, Limits::max());
    for (const int num_threads : {1, 3}) {
      EXPECT_TRUE(this->all_finite(values, num_threads)) << num_elements;
      for (const std::size_t position : {std::size_t{0}, num_elements / 2, num_elements - 1}) {
        for (const TypeParam special : {Limits::infinity(), -Limits::infinity(), Limits::quiet_NaN()}) {
          const TypeParam before = values[position];
          values[position] = special;
          EXPECT_FALSE(this->all_finite(values, num_threads)) << special << " at " << position;
          values[position] = before;
        }
      }
    }
  }
}

TYPED_TEST(Reductions, NothingIsFiniteAndHasNoNorm) {
  EXPECT_TRUE(this->all_finite({}));
  EXPECT_EQ(this->squared_norm({}), 0);
}

TEST(ReductionsDeathTest, AbortOnMisuse) {
  const std::vector<float> values(8, 1);
  EXPECT_DEATH((void)squared_norm_host(DType::kFloat16, 8, values.data()), "dtype float16");
  EXPECT_DEATH((void)all_finite_host(DType::kFloat32, 8, nullptr), "8 elements at null");
  EXPECT_DEATH((void)all_finite_host(DType::kFloat32, -1, values.data()), "num_elements -1");
}

}  // namespace
}  // namespace pipedream
