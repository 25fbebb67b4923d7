// Defines what the native optimizers compute for one element. Host and device compile this same text. All
// functions have internal linkage, for the reason in base/element.h. Pure; any thread. C++17, because nvcc
// compiles it too.
//
// A Flags argument has the members of SgdFlags or AdamFlags. On the host these members are compile-time
// constants, so that each combination of options is one loop without branches. On a device they are run-time
// values, because branches that all threads take alike cost nothing compared with the memory traffic.
#pragma once

#include <cmath>
#include <cstdint>
#include <type_traits>

#include "base/element.h"

namespace pipedream {

// Whether weights with these elements need a master copy in float32, because rounding to such elements would
// lose small steps.
template <class Element>
inline constexpr bool kHasMaster = !std::is_same_v<Element, NumberOf<Element>>;

template <class Element>
PD_ELEMENT NumberOf<Element> weight_before(const Element* weight_in, const NumberOf<Element>* master,
                                           std::int64_t i) {
  if constexpr (kHasMaster<Element>) {
    return master[i];
  } else {
    return weight_in[i];
  }
}

template <class Element>
PD_ELEMENT void keep_weight(NumberOf<Element> weight, Element* weight_out, NumberOf<Element>* master,
                            std::int64_t i) {
  if constexpr (kHasMaster<Element>) master[i] = weight;
  weight_out[i] = element_of<Element>(weight);
}

struct SgdFlags {
  bool has_weight_decay;
  bool has_momentum;
  bool nesterov;
  bool first_step;
};

// The scalars of a step, rounded once to the type of the arithmetic, as torch rounds Python's numbers.
template <class T>
struct SgdFactors {
  T gradient_scale;  // negative to maximize
  T weight_decay;
  T momentum;
  T gradient_share;  // 1 - dampening
  T minus_lr;
};

// Returns the new weight and writes the new momentum to *momentum_buffer. Without momentum, *momentum_buffer
// is not touched.
template <class Flags, class T>
PD_ELEMENT T sgd_element(Flags flags, const SgdFactors<T>& factors, T weight, T gradient_in,
                         T* momentum_buffer) {
  T gradient = factors.gradient_scale * gradient_in;
  if (flags.has_weight_decay) gradient += factors.weight_decay * weight;
  T direction = gradient;
  if (flags.has_momentum) {
    const T buffer =
        flags.first_step ? gradient : factors.momentum * *momentum_buffer + factors.gradient_share * gradient;
    *momentum_buffer = buffer;
    direction = flags.nesterov ? gradient + factors.momentum * buffer : buffer;
  }
  return weight + factors.minus_lr * direction;
}

struct AdamFlags {
  bool has_weight_decay;  // added to the gradient; decoupled weight decay is in AdamFactors::weight_share
  bool amsgrad;
  bool lerp_from_gradient;  // 1 - beta1 >= 0.5; torch's lerp then starts from the gradient
  bool nesterov;            // NAdam: the gradient itself moves the weight, too
};

template <class T>
struct AdamFactors {
  T gradient_scale;  // negative to maximize
  T weight_decay;
  T weight_share;  // 1 - lr * weight_decay if it is decoupled, otherwise 1
  T lerp_factor;   // multiplies the difference between the gradient and the first moment
  T beta2;
  T square_share;  // 1 - beta2
  T root_divisor;  // sqrt(1 - beta2 ^ step)
  T eps;
  T minus_step_size;  // multiplies the first moment: -lr / (1 - beta1 ^ step), or the value for NAdam
  T minus_gradient_step_size;  // multiplies the gradient; for NAdam only
};

// Returns the new weight and overwrites the moments with the new moments. Without amsgrad, max_exp_avg_sq is
// not touched.
template <class Flags, class T>
PD_ELEMENT T adam_element(Flags flags, const AdamFactors<T>& factors, T weight_in, T gradient_in, T* exp_avg,
                          T* exp_avg_sq, T* max_exp_avg_sq) {
  using std::sqrt;
  T gradient = factors.gradient_scale * gradient_in;
  if (flags.has_weight_decay) gradient += factors.weight_decay * weight_in;
  const T weight = factors.weight_share * weight_in;
  const T difference = gradient - *exp_avg;
  const T first = flags.lerp_from_gradient ? gradient - factors.lerp_factor * difference
                                           : *exp_avg + factors.lerp_factor * difference;
  const T second = factors.beta2 * *exp_avg_sq + factors.square_share * gradient * gradient;
  *exp_avg = first;
  *exp_avg_sq = second;
  T largest = second;
  if (flags.amsgrad) {
    // The result is NaN if either side is NaN, as with torch.maximum.
    const T before = *max_exp_avg_sq;
    const bool is_new = (second > before) | (second != second);  // no branch: it would stop the vectoriser
    largest = is_new ? second : before;
    *max_exp_avg_sq = largest;
  }
  const T denominator = sqrt(largest) / factors.root_divisor + factors.eps;
  T move = factors.minus_step_size * first;
  if (flags.nesterov) move += factors.minus_gradient_step_size * gradient;
  return weight + move / denominator;
}

}  // namespace pipedream
