// Compares the vectorised SGD with a plain scalar SGD, for every combination of options.
#include "weights/sgd.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>
#include <string>
#include <type_traits>
#include <vector>

#include "base/element.h"
#include "base/failure.h"

namespace pipedream {
namespace {

// Computes the formula of sgd.h for one element.
template <class T>
T scalar_sgd(const SgdOptions& options, T weight, T gradient, T& momentum_buffer, bool first_step) {
  if (options.maximize) gradient = -gradient;
  if (options.weight_decay != 0) gradient += static_cast<T>(options.weight_decay) * weight;
  T direction = gradient;
  if (options.momentum != 0) {
    if (first_step) {
      momentum_buffer = gradient;
    } else {
      momentum_buffer = static_cast<T>(options.momentum) * momentum_buffer +
                        static_cast<T>(1 - options.dampening) * gradient;
    }
    direction =
        options.nesterov ? gradient + static_cast<T>(options.momentum) * momentum_buffer : momentum_buffer;
  }
  return weight - static_cast<T>(options.lr) * direction;
}

std::vector<SgdOptions> all_options() {
  std::vector<SgdOptions> all;
  for (const double momentum : {0.0, 0.9}) {
    for (const double dampening : {0.0, 0.25}) {
      for (const double weight_decay : {0.0, 0.01}) {
        for (const bool nesterov : {false, true}) {
          for (const bool maximize : {false, true}) {
            if (nesterov && (momentum == 0 || dampening != 0)) continue;
            all.push_back({0.1, momentum, dampening, weight_decay, nesterov, maximize});
          }
        }
      }
    }
  }
  return all;
}

std::string describe(const SgdOptions& options) {
  return "momentum " + std::to_string(options.momentum) + " dampening " + std::to_string(options.dampening) +
         " weight_decay " + std::to_string(options.weight_decay) + (options.nesterov ? " nesterov" : "") +
         (options.maximize ? " maximize" : "");
}

template <class T>
class Sgd : public testing::Test {
 protected:
  static constexpr DType kDType = std::is_same_v<T, float> ? DType::kFloat32 : DType::kFloat64;
  // Allows for rounding only. A fused multiply-add differs from two roundings by about one ulp.
  static constexpr T kTolerance = 16 * std::numeric_limits<T>::epsilon();

  std::vector<T> random_values(std::size_t num_elements) {
    std::uniform_real_distribution<T> distribution(-1, 1);
    std::vector<T> values(num_elements);
    for (T& value : values) value = distribution(generator_);
    return values;
  }

 private:
  std::mt19937_64 generator_{20191027};
};

using Elements = testing::Types<float, double>;
TYPED_TEST_SUITE(Sgd, Elements);

constexpr std::int64_t kNumSteps = 3;

// Does one step of one tensor.
template <class T>
void step(const SgdOptions& options, std::int64_t num_elements, const T* weight_in, T* weight_out,
          const T* gradient, T* momentum_buffer, bool first_step, double gradient_scale = 1,
          int num_threads = 1) {
  const SgdTensor tensor{num_elements, weight_in, weight_out, gradient, momentum_buffer};
  constexpr DType kDType = std::is_same_v<T, float> ? DType::kFloat32 : DType::kFloat64;
  sgd_step_host(options, kDType, {&tensor, 1}, first_step, gradient_scale, num_threads);
}

TYPED_TEST(Sgd, EqualsTheScalarFormulaForAllOptionsInPlaceAndOutOfPlace) {
  for (const SgdOptions& options : all_options()) {
    for (const bool in_place : {false, true}) {
      for (const std::size_t num_elements : {1U, 2U, 3U, 4U, 7U, 8U, 15U, 16U, 17U, 64U, 1023U}) {
        SCOPED_TRACE(describe(options) + (in_place ? " in place " : " out of place ") +
                     std::to_string(num_elements));
        std::vector<TypeParam> weight_in = this->random_values(num_elements);
        std::vector<TypeParam> weight_out(num_elements);
        std::vector<TypeParam> momentum_buffer(num_elements, std::numeric_limits<TypeParam>::quiet_NaN());
        std::vector<TypeParam> expected = weight_in;
        std::vector<TypeParam> expected_momentum = momentum_buffer;
        for (std::int64_t step_index = 0; step_index < kNumSteps; ++step_index) {
          const std::vector<TypeParam> gradient = this->random_values(num_elements);
          const std::vector<TypeParam> weight_before = weight_in;
          std::vector<TypeParam>& target = in_place ? weight_in : weight_out;
          step(options, static_cast<std::int64_t>(num_elements), weight_in.data(), target.data(),
               gradient.data(), options.momentum == 0 ? nullptr : momentum_buffer.data(), step_index == 0);
          if (!in_place) {
            ASSERT_EQ(weight_in, weight_before);  // the version that was read has not changed
          }
          for (std::size_t element = 0; element < num_elements; ++element) {
            expected[element] = scalar_sgd(options, expected[element], gradient[element],
                                           expected_momentum[element], step_index == 0);
            ASSERT_NEAR(target[element], expected[element], this->kTolerance) << "element " << element;
            if (options.momentum == 0) continue;
            ASSERT_NEAR(momentum_buffer[element], expected_momentum[element], this->kTolerance);
          }
          if (!in_place) std::swap(weight_in, weight_out);
        }
      }
    }
  }
}

TYPED_TEST(Sgd, WritesNothingBeyondItsElements) {
  constexpr TypeParam kGuard = 77;
  const SgdOptions options{0.1, 0.9, 0, 0.01, true, false};
  for (const std::size_t num_elements : {0U, 1U, 5U, 16U, 31U}) {
    const std::vector<TypeParam> weight_in(num_elements + 8, 1);
    const std::vector<TypeParam> gradient(num_elements + 8, 1);
    std::vector<TypeParam> weight_out(num_elements + 8, kGuard);
    std::vector<TypeParam> momentum_buffer(num_elements + 8, kGuard);
    step(options, static_cast<std::int64_t>(num_elements), weight_in.data(), weight_out.data(),
         gradient.data(), momentum_buffer.data(), true);
    for (std::size_t element = 0; element < num_elements + 8; ++element) {
      EXPECT_EQ(weight_out[element] == kGuard, element >= num_elements);
      EXPECT_EQ(momentum_buffer[element] == kGuard, element >= num_elements);
    }
  }
}

TYPED_TEST(Sgd, WithoutWeightDecayAnInfiniteWeightGivesNoNan) {
  const std::vector<TypeParam> weight_in(5, std::numeric_limits<TypeParam>::infinity());
  const std::vector<TypeParam> gradient(5, 1);
  std::vector<TypeParam> weight_out(5);
  step<TypeParam>({.lr = 0.1}, 5, weight_in.data(), weight_out.data(), gradient.data(), nullptr, false);
  EXPECT_EQ(weight_out, weight_in);
}

TYPED_TEST(Sgd, GradientScaleIsAGradientMultipliedFirst) {
  const SgdOptions options{0.1, 0.9, 0, 0.01, true, false};
  const std::vector<TypeParam> weight_in = this->random_values(33);
  const std::vector<TypeParam> gradient = this->random_values(33);
  std::vector<TypeParam> scaled = gradient;
  for (TypeParam& value : scaled) value *= TypeParam(0.37);
  std::vector<TypeParam> momentum_buffer(33, 0.5);
  std::vector<TypeParam> expected_momentum = momentum_buffer;
  std::vector<TypeParam> weight_out(33);
  std::vector<TypeParam> expected(33);
  step(options, 33, weight_in.data(), weight_out.data(), gradient.data(), momentum_buffer.data(), false,
       TypeParam(0.37));
  step(options, 33, weight_in.data(), expected.data(), scaled.data(), expected_momentum.data(), false);
  EXPECT_EQ(weight_out, expected);
  EXPECT_EQ(momentum_buffer, expected_momentum);
}

// The tensor is large enough for several tasks of the thread team. The step touches 40 MiB, so it writes its
// weights past the caches ("streaming"), unless the last-level cache is larger than that.
TYPED_TEST(Sgd, ThreadsAndStreamingChangeNoBit) {
  const SgdOptions options{0.1, 0.9, 0, 0.01, true, false};
  const std::size_t num_elements = (std::size_t{40} << 20) / (4 * sizeof(TypeParam)) + 13;
  const std::vector<TypeParam> weight_in = this->random_values(num_elements);
  const std::vector<TypeParam> gradient = this->random_values(num_elements);
  std::vector<TypeParam> in_place = weight_in;
  std::vector<TypeParam> momentum_in_place(num_elements, 0.5);
  step(options, static_cast<std::int64_t>(num_elements), in_place.data(), in_place.data(), gradient.data(),
       momentum_in_place.data(), false);
  for (const int num_threads : {1, 2, 3}) {
    std::vector<TypeParam> weight_out(num_elements);
    std::vector<TypeParam> momentum_buffer(num_elements, 0.5);
    step(options, static_cast<std::int64_t>(num_elements), weight_in.data(), weight_out.data(),
         gradient.data(), momentum_buffer.data(), false, 1, num_threads);
    EXPECT_EQ(weight_out, in_place) << num_threads << " threads";
    EXPECT_EQ(momentum_buffer, momentum_in_place) << num_threads << " threads";
  }
}

TYPED_TEST(Sgd, OneStepOverManyTensorsIsOneStepOverEach) {
  const SgdOptions options{0.1, 0, 0, 0.01, false, false};
  std::vector<std::vector<TypeParam>> weights;
  std::vector<std::vector<TypeParam>> gradients;
  for (const std::size_t num_elements : {0U, 5U, 40000U, 1U, 200000U, 0U, 7U}) {
    weights.push_back(this->random_values(num_elements));
    gradients.push_back(this->random_values(num_elements));
  }
  std::vector<std::vector<TypeParam>> expected = weights;
  std::vector<SgdTensor> tensors;
  for (std::size_t tensor = 0; tensor < weights.size(); ++tensor) {
    const auto num_elements = static_cast<std::int64_t>(weights[tensor].size());
    tensors.push_back(
        {num_elements, weights[tensor].data(), weights[tensor].data(), gradients[tensor].data(), nullptr});
    step<TypeParam>(options, num_elements, expected[tensor].data(), expected[tensor].data(),
                    gradients[tensor].data(), nullptr, false);
  }
  sgd_step_host(options, this->kDType, tensors, false, 1, 2);
  EXPECT_EQ(weights, expected);
}

// The step uses the gradient widened to float32, and only the weights that are written are rounded.
TEST(SgdOfBFloat16, StepsTheMasterAsAFloat32WeightAndWritesItRounded) {
  std::mt19937_64 generator(1);
  std::normal_distribution<float> distribution;
  for (const SgdOptions& options : all_options()) {
    for (const int num_threads : {1, 2}) {
      SCOPED_TRACE(describe(options));
      const std::size_t num_elements = num_threads == 1 ? 1023 : 300'001;
      std::vector<BFloat16> gradient(num_elements);
      std::vector<float> wide_gradient(num_elements);
      std::vector<float> master(num_elements);
      for (std::size_t i = 0; i < num_elements; ++i) {
        gradient[i] = {to_bfloat16(distribution(generator))};
        wide_gradient[i] = number_of(gradient[i]);
        master[i] = distribution(generator);
      }
      std::vector<float> expected = master;
      std::vector<float> momentum_buffer(num_elements, 0.5F);
      std::vector<float> expected_momentum = momentum_buffer;
      const std::vector<BFloat16> weight_in(num_elements, BFloat16{0x7fc0});  // NaNs, which nobody reads
      std::vector<BFloat16> weight_out(num_elements);
      const SgdTensor tensor{static_cast<std::int64_t>(num_elements),
                             weight_in.data(),
                             weight_out.data(),
                             gradient.data(),
                             momentum_buffer.data(),
                             master.data()};
      sgd_step_host(options, DType::kBFloat16, {&tensor, 1}, false, 0.37, num_threads);
      step(options, static_cast<std::int64_t>(num_elements), expected.data(), expected.data(),
           wide_gradient.data(), expected_momentum.data(), false, 0.37, num_threads);
      ASSERT_EQ(master, expected);
      ASSERT_EQ(momentum_buffer, expected_momentum);
      for (std::size_t i = 0; i < num_elements; ++i)
        ASSERT_EQ(weight_out[i].bits, to_bfloat16(master[i])) << "element " << i;
    }
  }
}

TEST(SgdOptions, RefusesWhatTorchRefuses) {
  constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
  EXPECT_NO_THROW(check_sgd_options({}));
  EXPECT_NO_THROW(check_sgd_options({.momentum = 0.9, .nesterov = true}));
  EXPECT_NO_THROW(check_sgd_options({.momentum = 0.9, .dampening = -0.5}));
  EXPECT_THROW(check_sgd_options({.lr = -0.1}), UserError);
  EXPECT_THROW(check_sgd_options({.lr = kNan}), UserError);
  EXPECT_THROW(check_sgd_options({.momentum = -0.1}), UserError);
  EXPECT_THROW(check_sgd_options({.weight_decay = -0.1}), UserError);
  EXPECT_THROW(check_sgd_options({.dampening = kNan}), UserError);
  EXPECT_THROW(check_sgd_options({.nesterov = true}), UserError);
  EXPECT_THROW(check_sgd_options({.momentum = 0.9, .dampening = 0.1, .nesterov = true}), UserError);
}

TEST(SgdDeathTest, AbortsOnMisuse) {
  std::vector<float> values(16, 1);
  std::vector<float> gradient(8, 1);
  const SgdTensor half_precision{8, values.data(), values.data(), gradient.data(), nullptr};
  EXPECT_DEATH(sgd_step_host({}, DType::kFloat16, {&half_precision, 1}, true), "dtype float16");
  const SgdTensor no_master{8, values.data(), values.data(), gradient.data(), nullptr};
  EXPECT_DEATH(sgd_step_host({}, DType::kBFloat16, {&no_master, 1}, true), "without a master");
  float* const no_buffer = nullptr;
  const float* const no_gradient = nullptr;
  EXPECT_DEATH(step({.momentum = 0.9}, 8, values.data(), values.data(), gradient.data(), no_buffer, true),
               "without a buffer");
  EXPECT_DEATH(step({}, 8, values.data(), values.data() + 4, gradient.data(), no_buffer, true),
               "overlap over 32 bytes");
  EXPECT_DEATH(step({}, 8, values.data(), values.data(), no_gradient, no_buffer, true), "gradient");
  EXPECT_DEATH(step({}, -1, values.data(), values.data(), gradient.data(), no_buffer, true),
               "num_elements -1");
}

}  // namespace
}  // namespace pipedream
