// Compares the vectorised Adam with a plain scalar Adam, for every combination of options.
#include "weights/adam.h"

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

// Computes the formula of adam.h one element at a time, in double.
struct ScalarAdam {
  double exp_avg = 0;
  double exp_avg_sq = 0;
  double max_exp_avg_sq = 0;
  double momentum_product = 1;  // of NAdam

  double operator()(const AdamOptions& options, double weight, double gradient, std::int64_t step) {
    if (options.maximize) gradient = -gradient;
    if (options.decoupled_weight_decay) {
      weight *= 1 - options.lr * options.weight_decay;
    } else {
      gradient += options.weight_decay * weight;
    }
    exp_avg = options.beta1 * exp_avg + (1 - options.beta1) * gradient;
    exp_avg_sq = options.beta2 * exp_avg_sq + (1 - options.beta2) * gradient * gradient;
    max_exp_avg_sq = std::max(max_exp_avg_sq, exp_avg_sq);
    const double square = options.amsgrad ? max_exp_avg_sq : exp_avg_sq;
    const auto t = static_cast<double>(step);
    const double corrected = exp_avg / (1 - std::pow(options.beta1, t));
    const double root = std::sqrt(square) / std::sqrt(1 - std::pow(options.beta2, t));
    if (options.nesterov) {
      const double momentum = nesterov_momentum(options, t);
      const double next = nesterov_momentum(options, t + 1);
      momentum_product *= momentum;
      const double ahead = next / (1 - momentum_product * next) * exp_avg;
      const double now = (1 - momentum) / (1 - momentum_product) * gradient;
      return weight - options.lr * (ahead + now) / (root + options.eps);
    }
    return weight - options.lr * corrected / (root + options.eps);
  }

  static double nesterov_momentum(const AdamOptions& options, double t) {
    return options.beta1 * (1 - 0.5 * std::pow(0.96, t * options.momentum_decay));
  }
};

std::vector<AdamOptions> nadam_options() {
  std::vector<AdamOptions> all;
  for (const double beta1 : {0.0, 0.3, 0.99}) {
    for (const double weight_decay : {0.0, 0.1}) {
      for (const bool maximize : {false, true})
        all.push_back({0.01, beta1, 0.99, 1e-6, weight_decay, true, false, maximize, true, 0.01});
    }
  }
  return all;
}

std::vector<AdamOptions> all_options() {
  std::vector<AdamOptions> all;
  for (const double beta1 : {0.0, 0.3, 0.9}) {
    for (const double weight_decay : {0.0, 0.1}) {
      for (const bool decoupled : {false, true}) {
        for (const bool amsgrad : {false, true}) {
          for (const bool maximize : {false, true}) {
            all.push_back({0.01, beta1, 0.99, 1e-6, weight_decay, decoupled, amsgrad, maximize});
          }
        }
      }
    }
  }
  const std::vector<AdamOptions> nadam = nadam_options();
  all.insert(all.end(), nadam.begin(), nadam.end());
  return all;
}

std::string describe(const AdamOptions& options) {
  return "beta1 " + std::to_string(options.beta1) + " weight_decay " + std::to_string(options.weight_decay) +
         (options.decoupled_weight_decay ? " decoupled" : "") + (options.amsgrad ? " amsgrad" : "") +
         (options.nesterov ? " nesterov" : "") + (options.maximize ? " maximize" : "");
}

// The weights and moments of one parameter.
template <class T>
struct Parameter {
  explicit Parameter(std::vector<T> values)
      : weight_in(std::move(values)),
        weight_out(weight_in.size()),
        exp_avg(weight_in.size()),
        exp_avg_sq(weight_in.size()),
        max_exp_avg_sq(weight_in.size()) {}

  void step(AdamOptions options, const std::vector<T>& gradient, std::int64_t step_number,
            std::vector<T>& target, double gradient_scale = 1, int num_threads = 1) {
    options.momentum_product = 1;
    for (std::int64_t t = 1; t <= step_number; ++t)
      options.momentum_product *= ScalarAdam::nesterov_momentum(options, static_cast<double>(t));
    const AdamTensor tensor{static_cast<std::int64_t>(weight_in.size()),
                            weight_in.data(),
                            target.data(),
                            gradient.data(),
                            exp_avg.data(),
                            exp_avg_sq.data(),
                            options.amsgrad ? max_exp_avg_sq.data() : nullptr};
    constexpr DType kDType = std::is_same_v<T, float> ? DType::kFloat32 : DType::kFloat64;
    adam_step_host(options, kDType, {&tensor, 1}, step_number, gradient_scale, num_threads);
  }

  std::vector<T> weight_in;
  std::vector<T> weight_out;
  std::vector<T> exp_avg;
  std::vector<T> exp_avg_sq;
  std::vector<T> max_exp_avg_sq;
};

template <class T>
class Adam : public testing::Test {
 protected:
  // Allows for rounding only. Weights and gradients are about 1, and a step divides by a root that may be
  // small.
  static constexpr double kTolerance = 64 * static_cast<double>(std::numeric_limits<T>::epsilon());

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
TYPED_TEST_SUITE(Adam, Elements);

constexpr std::int64_t kNumSteps = 4;

TYPED_TEST(Adam, EqualsTheScalarFormulaForAllOptionsInPlaceAndOutOfPlace) {
  for (const AdamOptions& options : all_options()) {
    for (const bool in_place : {false, true}) {
      for (const std::size_t num_elements : {1U, 3U, 8U, 15U, 17U, 64U, 1023U}) {
        SCOPED_TRACE(describe(options) + (in_place ? " in place " : " out of place ") +
                     std::to_string(num_elements));
        Parameter<TypeParam> parameter(this->random_values(num_elements));
        std::vector<ScalarAdam> scalar(num_elements);
        std::vector<double> expected(parameter.weight_in.begin(), parameter.weight_in.end());
        for (std::int64_t step = 1; step <= kNumSteps; ++step) {
          const std::vector<TypeParam> gradient = this->random_values(num_elements);
          const std::vector<TypeParam> weight_before = parameter.weight_in;
          std::vector<TypeParam>& target = in_place ? parameter.weight_in : parameter.weight_out;
          parameter.step(options, gradient, step, target);
          if (!in_place) {
            ASSERT_EQ(parameter.weight_in, weight_before);  // the version that was read has not changed
          }
          for (std::size_t element = 0; element < num_elements; ++element) {
            expected[element] =
                scalar[element](options, expected[element], static_cast<double>(gradient[element]), step);
            ASSERT_NEAR(static_cast<double>(target[element]), expected[element], this->kTolerance)
                << "element " << element << ", step " << step;
          }
          if (!in_place) std::swap(parameter.weight_in, parameter.weight_out);
        }
      }
    }
  }
}

TYPED_TEST(Adam, KeepsTheLargestSquareAndANanInIt) {
  constexpr TypeParam kNan = std::numeric_limits<TypeParam>::quiet_NaN();
  Parameter<TypeParam> parameter({1, 1, 1, 1});
  parameter.max_exp_avg_sq = {5, 0, kNan, 5};
  const std::vector<TypeParam> gradient = {1, 1, 1, kNan};
  parameter.step({.beta2 = 0.5, .amsgrad = true}, gradient, 1, parameter.weight_out);
  EXPECT_EQ(parameter.max_exp_avg_sq[0], 5);
  EXPECT_EQ(parameter.max_exp_avg_sq[1], TypeParam(0.5));
  EXPECT_TRUE(std::isnan(parameter.max_exp_avg_sq[2]));
  EXPECT_TRUE(std::isnan(parameter.max_exp_avg_sq[3]));
}

TYPED_TEST(Adam, WithoutWeightDecayAnInfiniteWeightGivesNoNan) {
  Parameter<TypeParam> parameter(std::vector<TypeParam>(5, std::numeric_limits<TypeParam>::infinity()));
  parameter.step({}, std::vector<TypeParam>(5, 1), 1, parameter.weight_out);
  EXPECT_EQ(parameter.weight_out, parameter.weight_in);
}

TYPED_TEST(Adam, GradientScaleIsAGradientMultipliedFirst) {
  const AdamOptions options{.weight_decay = 0.1, .amsgrad = true};
  const std::vector<TypeParam> weights = this->random_values(33);
  const std::vector<TypeParam> gradient = this->random_values(33);
  std::vector<TypeParam> scaled = gradient;
  for (TypeParam& value : scaled) value *= TypeParam(0.37);
  Parameter<TypeParam> parameter(weights);
  Parameter<TypeParam> expected(weights);
  parameter.step(options, gradient, 1, parameter.weight_out, TypeParam(0.37));
  expected.step(options, scaled, 1, expected.weight_out);
  EXPECT_EQ(parameter.weight_out, expected.weight_out);
  EXPECT_EQ(parameter.exp_avg_sq, expected.exp_avg_sq);
}

// The tensor is large enough for several tasks of the thread team. The step touches 40 MiB, so it writes its
// weights past the caches ("streaming"), unless the last-level cache is larger than that.
TYPED_TEST(Adam, ThreadsAndStreamingChangeNoBit) {
  const AdamOptions options{.weight_decay = 0.1};
  const std::size_t num_elements = (std::size_t{40} << 20) / (5 * sizeof(TypeParam)) + 13;
  const std::vector<TypeParam> weights = this->random_values(num_elements);
  const std::vector<TypeParam> gradient = this->random_values(num_elements);
  Parameter<TypeParam> in_place(weights);
  in_place.step(options, gradient, 1, in_place.weight_in);
  for (const int num_threads : {1, 2, 3}) {
    Parameter<TypeParam> parameter(weights);
    parameter.step(options, gradient, 1, parameter.weight_out, 1, num_threads);
    EXPECT_EQ(parameter.weight_out, in_place.weight_in) << num_threads << " threads";
    EXPECT_EQ(parameter.exp_avg, in_place.exp_avg) << num_threads << " threads";
    EXPECT_EQ(parameter.exp_avg_sq, in_place.exp_avg_sq) << num_threads << " threads";
  }
}

// The step uses the gradient widened to float32, and only the weights that are written are rounded.
TEST(AdamOfBFloat16, StepsTheMasterAsAFloat32WeightAndWritesItRounded) {
  constexpr std::size_t kNumElements = 1023;
  std::mt19937_64 generator(1);
  std::normal_distribution<float> distribution;
  for (const AdamOptions& options : all_options()) {
    SCOPED_TRACE(describe(options));
    std::vector<BFloat16> gradient(kNumElements);
    std::vector<float> wide_gradient(kNumElements);
    std::vector<float> initial(kNumElements);
    for (std::size_t i = 0; i < kNumElements; ++i) {
      gradient[i] = {to_bfloat16(distribution(generator))};
      wide_gradient[i] = number_of(gradient[i]);
      initial[i] = distribution(generator);
    }
    Parameter<float> expected(initial);
    Parameter<float> state(initial);  // its weight_in is the float32 master
    const std::vector<BFloat16> weight_in(kNumElements, BFloat16{0x7fc0});  // NaNs, which nobody reads
    std::vector<BFloat16> weight_out(kNumElements);
    AdamOptions with_product = options;
    with_product.momentum_product = ScalarAdam::nesterov_momentum(options, 1);
    const AdamTensor tensor{static_cast<std::int64_t>(kNumElements),
                            weight_in.data(),
                            weight_out.data(),
                            gradient.data(),
                            state.exp_avg.data(),
                            state.exp_avg_sq.data(),
                            options.amsgrad ? state.max_exp_avg_sq.data() : nullptr,
                            state.weight_in.data()};
    adam_step_host(with_product, DType::kBFloat16, {&tensor, 1}, 1, 0.37);
    expected.step(options, wide_gradient, 1, expected.weight_in, 0.37);
    ASSERT_EQ(state.weight_in, expected.weight_in);
    ASSERT_EQ(state.exp_avg, expected.exp_avg);
    ASSERT_EQ(state.exp_avg_sq, expected.exp_avg_sq);
    ASSERT_EQ(state.max_exp_avg_sq, expected.max_exp_avg_sq);
    for (std::size_t i = 0; i < kNumElements; ++i)
      ASSERT_EQ(weight_out[i].bits, to_bfloat16(state.weight_in[i])) << "element " << i;
  }
}

TEST(AdamOptions, RefusesWhatTorchRefuses) {
  constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
  EXPECT_NO_THROW(check_adam_options({}));
  EXPECT_NO_THROW(check_adam_options({.beta1 = 0, .beta2 = 0, .eps = 0}));
  EXPECT_THROW(check_adam_options({.lr = -0.1}), UserError);
  EXPECT_THROW(check_adam_options({.lr = kNan}), UserError);
  EXPECT_THROW(check_adam_options({.beta1 = 1}), UserError);
  EXPECT_THROW(check_adam_options({.beta1 = kNan}), UserError);
  EXPECT_THROW(check_adam_options({.beta2 = -0.1}), UserError);
  EXPECT_THROW(check_adam_options({.eps = -1e-8}), UserError);
  EXPECT_THROW(check_adam_options({.weight_decay = -0.1}), UserError);
  EXPECT_THROW(check_adam_options({.momentum_decay = -0.1}), UserError);
}

TEST(AdamDeathTest, AbortsOnMisuse) {
  const std::vector<float> gradient(8, 1);
  Parameter<float> parameter(std::vector<float>(8, 1));
  EXPECT_DEATH(parameter.step({}, gradient, 0, parameter.weight_out), "step 0");
  const AdamTensor without_moments{
      8, parameter.weight_in.data(), parameter.weight_out.data(), gradient.data(), nullptr, nullptr, nullptr};
  EXPECT_DEATH(adam_step_host({}, DType::kFloat32, {&without_moments, 1}, 1), "exp_avg");
  const AdamTensor without_maximum{8,
                                   parameter.weight_in.data(),
                                   parameter.weight_out.data(),
                                   gradient.data(),
                                   parameter.exp_avg.data(),
                                   parameter.exp_avg_sq.data(),
                                   nullptr};
  EXPECT_DEATH(adam_step_host({.amsgrad = true}, DType::kFloat32, {&without_maximum, 1}, 1),
               "without its maximum");
}

}  // namespace
}  // namespace pipedream
