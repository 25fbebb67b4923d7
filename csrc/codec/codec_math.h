// Defines what the codecs compute for one element. Host and device compile this same text. All functions have
// internal linkage, for the reason in base/element.h. Pure; any thread. C++17, because nvcc compiles it too.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "base/element.h"

namespace pipedream {

// The type in which topk sends an element: float32 for float64, otherwise the element's own type.
template <class T>
using SentOf = std::conditional_t<std::is_same_v<T, double>, float, T>;

// ---- int8 ----

// The scale of a block. A block with an infinity or a NaN has a NaN as its scale, so that every element
// decodes to NaN.
PD_ELEMENT float int8_scale(std::uint32_t largest_magnitude_bits) {
  if (largest_magnitude_bits >= FloatLayout<float>::kInfinity) return from_bits<float>(0x7fc00000U);
  return from_bits<float>(largest_magnitude_bits) / 127.0F;
}

// scale must not be a NaN. It is 0 for a block of zeros, and for a block whose largest magnitude / 127 is too
// small for a float32.
PD_ELEMENT std::int8_t to_int8(float value, float scale) {
  const float divisor = scale > 0.0F ? scale : 1.0F;
  const float quotient = value / divisor;
  // The quotient exceeds 127 only if scale is near the smallest float32, where a float32 has few bits.
  const float not_above = quotient < 127.0F ? quotient : 127.0F;
  const float bounded = not_above > -127.0F ? not_above : -127.0F;
  // 12582912 is 1.5 x 2^23, where the last bit of a float32 counts 1. So the addition rounds to an integer,
  // to nearest even, and the integer is in the sum's low bits.
  return static_cast<std::int8_t>(bits_of(bounded + 12582912.0F) & 0xffU);
}

// ---- topk ----

// The key by which the largest elements are chosen. A NaN has the same key as an infinity.
template <class T>
PD_ELEMENT typename FloatLayout<T>::Bits magnitude_key(T value) {
  const typename FloatLayout<T>::Bits magnitude = bits_of(value) & FloatLayout<T>::kMagnitude;
  return magnitude < FloatLayout<T>::kInfinity ? magnitude : FloatLayout<T>::kInfinity;
}

// False for the key of an infinity or a NaN. The residual keeps nothing of such a number, whether it was sent
// or not. Otherwise this element would be infinite in all later tensors.
template <class T>
PD_ELEMENT bool is_finite_key(typename FloatLayout<T>::Bits key) {
  return key < FloatLayout<T>::kInfinity;
}

// The part of a sent number that the residual keeps: the rounding error. It is 0 if the number was sent as an
// infinity or a NaN, because the residual would otherwise send that again with every later tensor.
template <class Number, class Sent>
PD_ELEMENT Number rest_of_sent(Number number, Sent sent) {
  if constexpr (std::is_same_v<Number, Sent>) return Number(0);
  const Number rest = number - static_cast<Number>(number_of(sent));
  return rest - rest == Number(0) ? rest : Number(0);
}

// Keys are examined from the highest bits down, in digits of this many bits. The last digit may have fewer
// bits.
constexpr int kTopKDigitBits = 11;
constexpr std::size_t kTopKBuckets = std::size_t{1} << kTopKDigitBits;

PD_ELEMENT constexpr int next_digit_shift(int shift) {
  return shift > kTopKDigitBits ? shift - kTopKDigitBits : 0;
}

// The host samples a tensor in runs of neighbouring elements. The tensor is cut into equal parts, and each
// part gives one run of kTopKRunElements elements. A small tensor has few runs or none.
constexpr std::size_t kTopKRunElements = 16;
constexpr std::size_t kTopKSampleMax = 4096;
constexpr std::size_t kTopKSampledShare = 32;  // at most 1 element in 32 is sampled

PD_ELEMENT std::size_t topk_sample_runs(std::size_t num_elements) {
  const std::size_t num_sampled = num_elements / kTopKSampledShare;
  return (num_sampled < kTopKSampleMax ? num_sampled : kTopKSampleMax) / kTopKRunElements;
}
// The run's first element, at a pseudorandom place in its part. Runs at a fixed distance could all hit the
// same column or channel of a tensor.
PD_ELEMENT std::size_t topk_sample_at(std::size_t num_elements, std::size_t run) {
  const std::size_t part_elements = num_elements / topk_sample_runs(num_elements);
  const std::size_t mixed = static_cast<std::size_t>((run * 0x9e3779b97f4a7c15U) >> 32U);
  return run * part_elements + mixed % (part_elements - kTopKRunElements + 1);
}

}  // namespace pipedream
