// The arithmetic of one element of the codecs, the same text for host and device, and of internal linkage, as
// base/element.h has it. Pure; any thread. C++17, as nvcc compiles it too.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "base/element.h"

namespace pipedream {

// The bits that topk sends of an element.
template <class T>
using SentOf = std::conditional_t<std::is_same_v<T, double>, float, T>;

// ---- int8 ----

// A block with an infinity or a NaN has a NaN for scale, and so for every element that is decoded.
PD_ELEMENT float int8_scale(std::uint32_t largest_magnitude_bits) {
  if (largest_magnitude_bits >= FloatLayout<float>::kInfinity) return from_bits<float>(0x7fc00000U);
  return from_bits<float>(largest_magnitude_bits) / 127.0F;
}

// scale is no NaN; 0 for a block of zeros, or where 127 of the smallest float32 are more than its largest.
PD_ELEMENT std::int8_t to_int8(float value, float scale) {
  const float divisor = scale > 0.0F ? scale : 1.0F;
  const float quotient = value / divisor;
  // Beyond 127 only where scale has lost its bits, near the smallest float32.
  const float not_above = quotient < 127.0F ? quotient : 127.0F;
  const float bounded = not_above > -127.0F ? not_above : -127.0F;
  // The last bit of 1.5 x 2^23 is one: the sum is rounded, to nearest even, and its low bits are the integer.
  return static_cast<std::int8_t>(bits_of(bounded + 12582912.0F) & 0xffU);
}

// ---- topk ----

// The key by which the largest elements are chosen. A NaN is as large as infinity.
template <class T>
PD_ELEMENT typename FloatLayout<T>::Bits magnitude_key(T value) {
  const typename FloatLayout<T>::Bits magnitude = bits_of(value) & FloatLayout<T>::kMagnitude;
  return magnitude < FloatLayout<T>::kInfinity ? magnitude : FloatLayout<T>::kInfinity;
}

// The residual keeps nothing of a number without a finite key, an infinity or a NaN, whether it was sent or
// not: all later items would be infinite there.
template <class T>
PD_ELEMENT bool is_finite_key(typename FloatLayout<T>::Bits key) {
  return key < FloatLayout<T>::kInfinity;
}

// The residual keeps the rounding error of an element that was sent, if sending rounds. It keeps nothing of
// an element that arrives infinite or NaN, or that would be sent for ever.
template <class Number, class Sent>
PD_ELEMENT Number rest_of_sent(Number number, Sent sent) {
  if constexpr (std::is_same_v<Number, Sent>) return Number(0);
  const Number rest = number - static_cast<Number>(number_of(sent));
  return rest - rest == Number(0) ? rest : Number(0);
}

// Keys are examined from the top in digits of this many bits; the last may have fewer.
constexpr int kTopKDigitBits = 11;
constexpr std::size_t kTopKBuckets = std::size_t{1} << kTopKDigitBits;

PD_ELEMENT constexpr int next_digit_shift(int shift) {
  return shift > kTopKDigitBits ? shift - kTopKDigitBits : 0;
}

// The host's sample of a tensor: runs of neighbours, one somewhere in each of equal parts. Few of a small
// one.
constexpr std::size_t kTopKRunElements = 16;
constexpr std::size_t kTopKSampleMax = 4096;
constexpr std::size_t kTopKSampledShare = 32;  // at most one element of so many

PD_ELEMENT std::size_t topk_sample_runs(std::size_t num_elements) {
  const std::size_t num_sampled = num_elements / kTopKSampledShare;
  return (num_sampled < kTopKSampleMax ? num_sampled : kTopKSampleMax) / kTopKRunElements;
}
// The run's first element. Apart by no fixed number: rows and channels of a tensor are.
PD_ELEMENT std::size_t topk_sample_at(std::size_t num_elements, std::size_t run) {
  const std::size_t part_elements = num_elements / topk_sample_runs(num_elements);
  const std::size_t mixed = static_cast<std::size_t>((run * 0x9e3779b97f4a7c15U) >> 32U);
  return run * part_elements + mixed % (part_elements - kTopKRunElements + 1);
}

}  // namespace pipedream
