// Turns a user's options into the factors that the kernels of all devices take, and checks options and
// tensors. Factors are computed in double and rounded once, to the type of the arithmetic. Internal to
// csrc/weights; pure, any thread.
#pragma once

#include <cmath>
#include <cstdint>
#include <span>

#include "weights/adam.h"
#include "weights/element_math.h"
#include "weights/sgd.h"

namespace pipedream {

// Throws a UserError that names the option if the value is not finite, or negative although may_be_negative
// is false.
void check_number(const char* name, double value, bool may_be_negative);

// check_sgd_tensors() and check_adam_tensors() abort if a tensor fails check_tensor(), or lacks a pointer
// that the options need. check_adam_tensors() also aborts for a step below 1, and for options that NAdam
// cannot have.
void check_sgd_tensors(const SgdOptions& options, DType dtype, std::span<const SgdTensor> tensors);
void check_adam_tensors(const AdamOptions& options, DType dtype, std::span<const AdamTensor> tensors,
                        std::int64_t step);

inline SgdFlags sgd_flags(const SgdOptions& options, bool first_step) {
  const bool has_momentum = options.momentum != 0;
  return {options.weight_decay != 0, has_momentum, has_momentum && options.nesterov,
          has_momentum && first_step};
}

template <class T>
SgdFactors<T> sgd_factors(const SgdOptions& options, double gradient_scale) {
  return {static_cast<T>(options.maximize ? -gradient_scale : gradient_scale),
          static_cast<T>(options.weight_decay), static_cast<T>(options.momentum),
          static_cast<T>(1 - options.dampening), static_cast<T>(-options.lr)};
}

inline AdamFlags adam_flags(const AdamOptions& options) {
  return {options.weight_decay != 0 && !options.decoupled_weight_decay, options.amsgrad,
          1 - options.beta1 >= 0.5, options.nesterov};
}

// mu(step) of adam.h.
inline double nesterov_momentum(const AdamOptions& options, std::int64_t step) {
  return options.beta1 * (1 - 0.5 * std::pow(0.96, static_cast<double>(step) * options.momentum_decay));
}

template <class T>
AdamFactors<T> adam_factors(const AdamOptions& options, std::int64_t step, double gradient_scale) {
  const auto step_number = static_cast<double>(step);
  const double bias_correction1 = 1 - std::pow(options.beta1, step_number);
  const double bias_correction2 = 1 - std::pow(options.beta2, step_number);
  const double lerp_weight = 1 - options.beta1;
  const double kept = options.decoupled_weight_decay ? 1 - options.lr * options.weight_decay : 1;
  AdamFactors<T> factors{};
  factors.gradient_scale = static_cast<T>(options.maximize ? -gradient_scale : gradient_scale);
  factors.weight_decay = static_cast<T>(options.weight_decay);
  factors.weight_share = static_cast<T>(kept);
  // lerp_weight is rounded first, and only then subtracted from 1, as in torch's lerp.
  factors.lerp_factor = static_cast<T>(lerp_weight);
  if (lerp_weight >= 0.5) factors.lerp_factor = 1 - factors.lerp_factor;
  factors.beta2 = static_cast<T>(options.beta2);
  factors.square_share = static_cast<T>(1 - options.beta2);
  factors.root_divisor = static_cast<T>(std::sqrt(bias_correction2));
  factors.eps = static_cast<T>(options.eps);
  factors.minus_step_size = static_cast<T>(-(options.lr / bias_correction1));
  if (options.nesterov) {
    const double momentum = nesterov_momentum(options, step);
    const double next_momentum = nesterov_momentum(options, step + 1);
    factors.minus_gradient_step_size =
        static_cast<T>(-options.lr * (1 - momentum) / (1 - options.momentum_product));
    factors.minus_step_size =
        static_cast<T>(-options.lr * next_momentum / (1 - options.momentum_product * next_momentum));
  }
  return factors;
}

}  // namespace pipedream
