// SGD kernels for host memory. See sgd.h for the arithmetic.
//
// Every option that would be a branch per element is a template parameter, so each kernel is one loop that
// the compiler vectorises; in place is a kernel of its own because restrict forbids equal pointers.
#include "weights/sgd.h"

#include <cmath>
#include <cstddef>
#include <functional>
#include <string>
#include <type_traits>

#include "base/check.h"
#include "base/failure.h"

namespace pipedream {
namespace {

// Rounded to the element type once, as torch does with Python scalars.
template <class T>
struct Factors {
  explicit Factors(const SgdOptions& options)
      : gradient_sign(options.maximize ? T{-1} : T{1}),
        weight_decay(static_cast<T>(options.weight_decay)),
        momentum(static_cast<T>(options.momentum)),
        gradient_share(static_cast<T>(1 - options.dampening)),
        minus_lr(static_cast<T>(-options.lr)) {}

  T gradient_sign;
  T weight_decay;
  T momentum;
  T gradient_share;  // 1 - dampening
  T minus_lr;
};

template <bool has_momentum, bool nesterov, bool first_step>
struct MomentumKind {
  static constexpr bool kHasMomentum = has_momentum;
  static constexpr bool kNesterov = nesterov;
  static constexpr bool kFirstStep = first_step;
};

// The new weight of one element; updates its momentum.
template <class Kind, bool kWeightDecay, class T>
inline T sgd_element(const Factors<T>& factors, T weight, T gradient_in, T* momentum_buffer) {
  T gradient = factors.gradient_sign * gradient_in;
  if constexpr (kWeightDecay) gradient += factors.weight_decay * weight;
  T direction = gradient;
  if constexpr (Kind::kHasMomentum) {
    T buffer = gradient;
    if constexpr (!Kind::kFirstStep)
      buffer = factors.momentum * *momentum_buffer + factors.gradient_share * gradient;
    *momentum_buffer = buffer;
    direction = Kind::kNesterov ? gradient + factors.momentum * buffer : buffer;
  }
  return weight + factors.minus_lr * direction;
}

template <class Kind, bool kWeightDecay, class T>
void sgd_out_of_place(const Factors<T> factors, std::int64_t num_elements, const T* __restrict weight_in,
                      T* __restrict weight_out, const T* __restrict gradient, T* __restrict momentum_buffer) {
  for (std::int64_t i = 0; i < num_elements; ++i) {
    T* const momentum_element = Kind::kHasMomentum ? momentum_buffer + i : nullptr;
    weight_out[i] = sgd_element<Kind, kWeightDecay>(factors, weight_in[i], gradient[i], momentum_element);
  }
}

template <class Kind, bool kWeightDecay, class T>
void sgd_in_place(const Factors<T> factors, std::int64_t num_elements, T* __restrict weight,
                  const T* __restrict gradient, T* __restrict momentum_buffer) {
  for (std::int64_t i = 0; i < num_elements; ++i) {
    T* const momentum_element = Kind::kHasMomentum ? momentum_buffer + i : nullptr;
    weight[i] = sgd_element<Kind, kWeightDecay>(factors, weight[i], gradient[i], momentum_element);
  }
}

template <class Kind, class T>
void dispatch_weight_decay(const SgdOptions& options, std::int64_t num_elements, const T* weight_in,
                           T* weight_out, const T* gradient, T* momentum_buffer) {
  const Factors<T> factors(options);
  const bool in_place = weight_in == weight_out;
  if (options.weight_decay != 0) {
    if (in_place)
      return sgd_in_place<Kind, true>(factors, num_elements, weight_out, gradient, momentum_buffer);
    return sgd_out_of_place<Kind, true>(factors, num_elements, weight_in, weight_out, gradient,
                                        momentum_buffer);
  }
  if (in_place)
    return sgd_in_place<Kind, false>(factors, num_elements, weight_out, gradient, momentum_buffer);
  return sgd_out_of_place<Kind, false>(factors, num_elements, weight_in, weight_out, gradient,
                                       momentum_buffer);
}

// True when two ranges of num_bytes share a byte.
bool overlap(const void* a, const void* b, std::size_t num_bytes) {
  const auto* a_bytes = static_cast<const std::byte*>(a);
  const auto* b_bytes = static_cast<const std::byte*>(b);
  const std::less<> before;
  return num_bytes > 0 && before(a_bytes, b_bytes + num_bytes) && before(b_bytes, a_bytes + num_bytes);
}

template <class T>
void dispatch_momentum(const SgdOptions& options, std::int64_t num_elements, const void* weight_in,
                       void* weight_out, const void* gradient, void* momentum_buffer, bool first_step) {
  const auto run = [&](auto kernel) {
    dispatch_weight_decay<decltype(kernel)>(options, num_elements, static_cast<const T*>(weight_in),
                                            static_cast<T*>(weight_out), static_cast<const T*>(gradient),
                                            static_cast<T*>(momentum_buffer));
  };
  if (options.momentum == 0) return run(MomentumKind<false, false, false>{});
  if (options.nesterov)
    return first_step ? run(MomentumKind<true, true, true>{}) : run(MomentumKind<true, true, false>{});
  return first_step ? run(MomentumKind<true, false, true>{}) : run(MomentumKind<true, false, false>{});
}

void check_number(const char* name, double value, bool may_be_negative) {
  if (std::isfinite(value) && (may_be_negative || value >= 0)) return;
  throw UserError(std::string(name) + " is " + std::to_string(value) + "; it must be finite" +
                  (may_be_negative ? "" : " and not negative"));
}

}  // namespace

void check_sgd_options(const SgdOptions& options) {
  check_number("lr", options.lr, false);
  check_number("momentum", options.momentum, false);
  check_number("dampening", options.dampening, true);
  check_number("weight_decay", options.weight_decay, false);
  if (options.nesterov && (options.momentum == 0 || options.dampening != 0)) {
    throw UserError("nesterov needs a momentum above 0 and no dampening; momentum is " +
                    std::to_string(options.momentum) + ", dampening " + std::to_string(options.dampening));
  }
}

void sgd_step_host(const SgdOptions& options, DType dtype, std::int64_t num_elements, const void* weight_in,
                   void* weight_out, const void* gradient, void* momentum_buffer, bool first_step) {
  PD_CHECK(num_elements >= 0, "num_elements " << num_elements);
  if (num_elements == 0) return;
  PD_CHECK(dtype == DType::kFloat32 || dtype == DType::kFloat64, "dtype " << dtype_name(dtype));
  PD_CHECK(weight_in != nullptr && weight_out != nullptr && gradient != nullptr,
           weight_in << ", " << weight_out << ", " << gradient);
  PD_CHECK(momentum_buffer != nullptr || options.momentum == 0,
           "momentum " << options.momentum << " without a buffer");
  const std::size_t num_bytes = static_cast<std::size_t>(num_elements) * dtype_bytes(dtype);
  PD_CHECK(weight_in == weight_out || !overlap(weight_in, weight_out, num_bytes),
           "weights at " << weight_in << " and " << weight_out << " overlap over " << num_bytes << " bytes");
  if (dtype == DType::kFloat32) {
    dispatch_momentum<float>(options, num_elements, weight_in, weight_out, gradient, momentum_buffer,
                             first_step);
  } else {
    dispatch_momentum<double>(options, num_elements, weight_in, weight_out, gradient, momentum_buffer,
                              first_step);
  }
}

}  // namespace pipedream
