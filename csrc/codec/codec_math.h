// The arithmetic of one element of the codecs, the same text for host and device. Pure; any thread. C++17, as
// nvcc compiles it too; it includes nothing of ours.
//
// Everything is of internal linkage: the host kernels are compiled once per instruction set, and a copy that
// the linker shared between them could hold instructions that the processor lacks. Selections instead of
// branches, and integers where floating point would not say which NaN it gives: so loops vectorise, and all
// processors give the same bits.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

#if defined(__CUDACC__)
#define PD_CODEC_ELEMENT static __host__ __device__ __forceinline__
#else
#define PD_CODEC_ELEMENT static inline __attribute__((always_inline))
#endif

namespace pipedream {

// Elements of 16 bits as they lie in memory; their arithmetic is float32's.
struct BFloat16 {
  std::uint16_t bits;
};
struct Float16 {
  std::uint16_t bits;
};

// What an element's arithmetic is done in: topk's residual, and what int8 decodes to before it is rounded.
template <class T>
using NumberOf = std::conditional_t<std::is_same_v<T, double>, double, float>;

// What topk sends of an element.
template <class T>
using SentOf = std::conditional_t<std::is_same_v<T, double>, float, T>;

// Bits of a number without its sign order as magnitudes do.
template <class T>
struct FloatLayout;
template <>
struct FloatLayout<float> {
  using Bits = std::uint32_t;
  static constexpr Bits kMagnitude = 0x7fffffffU;
  static constexpr Bits kInfinity = 0x7f800000U;
  static constexpr int kMagnitudeBits = 31;
  static constexpr int kMantissaBits = 23;
};
template <>
struct FloatLayout<double> {
  using Bits = std::uint64_t;
  static constexpr Bits kMagnitude = 0x7fffffffffffffffU;
  static constexpr Bits kInfinity = 0x7ff0000000000000U;
  static constexpr int kMagnitudeBits = 63;
  static constexpr int kMantissaBits = 52;
};

template <class T>
PD_CODEC_ELEMENT typename FloatLayout<T>::Bits bits_of(T value) {
  typename FloatLayout<T>::Bits bits = 0;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits;
}

template <class T>
PD_CODEC_ELEMENT T from_bits(typename FloatLayout<T>::Bits bits) {
  T value = 0;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

// ---- Rounding to 16 bits ----

// The float32 that has the value of a float64 rounded to kMantissaBits, to nearest even: a conversion by way
// of float32 would round twice. Adding and taking away `magic`, whose last bit is the last one that is kept,
// rounds. Exponents are those of the narrow format: below the smallest it has fewer bits.
template <int kMantissaBits, int kExponentMin, int kExponentMax>
PD_CODEC_ELEMENT float rounded_to_float(double value) {
  constexpr std::uint64_t kExponentOne = std::uint64_t{1} << 52;
  constexpr int kExponentBias = 1023;
  const double smallest =
      from_bits<double>(static_cast<std::uint64_t>(kExponentBias + kExponentMin) * kExponentOne);
  const double beyond =
      from_bits<double>(static_cast<std::uint64_t>(kExponentBias + kExponentMax + 1) * kExponentOne);
  const double magnitude = from_bits<double>(bits_of(value) & FloatLayout<double>::kMagnitude);
  const double at_least = magnitude > smallest ? magnitude : smallest;
  const double exponent_of = at_least < beyond ? at_least : beyond;
  const double magic = from_bits<double>((bits_of(exponent_of) & FloatLayout<double>::kInfinity) +
                                         (52 - kMantissaBits) * kExponentOne);
  const double rounded = (magnitude + magic) - magic;
  const std::uint64_t sign = bits_of(value) & ~FloatLayout<double>::kMagnitude;
  return static_cast<float>(from_bits<double>(bits_of(rounded) | sign));
}

PD_CODEC_ELEMENT bool is_nan_bits(std::uint32_t bits) {
  return static_cast<std::int32_t>(bits & FloatLayout<float>::kMagnitude) >
         static_cast<std::int32_t>(FloatLayout<float>::kInfinity);
}

// Every NaN becomes the same one.
PD_CODEC_ELEMENT std::uint16_t to_bfloat16(float value) {
  const std::uint32_t bits = bits_of(value);
  const std::uint32_t rounded = (bits + 0x7fffU + ((bits >> 16) & 1U)) >> 16;
  return static_cast<std::uint16_t>(is_nan_bits(bits) ? 0x7fc0U : rounded);
}
PD_CODEC_ELEMENT std::uint16_t to_bfloat16(double value) {
  return to_bfloat16(rounded_to_float<7, -126, 127>(value));
}
PD_CODEC_ELEMENT float from_bfloat16(std::uint16_t bits) {
  return from_bits<float>(static_cast<std::uint32_t>(bits) << 16);
}

// float16: 5 bits of exponent with bias 15, 10 of mantissa.
PD_CODEC_ELEMENT std::uint16_t to_float16(float value) {
  constexpr std::int32_t kSmallestNormal = 0x38800000;  // 2^-14
  constexpr std::int32_t kBeyond = 0x47800000;          // 2^16, infinite in float16
  constexpr std::uint32_t kExponentShift = 112U << 23;  // the difference of the biases
  const std::uint32_t bits = bits_of(value);
  const std::uint32_t sign = (bits >> 16) & 0x8000U;
  const auto magnitude = static_cast<std::int32_t>(bits & FloatLayout<float>::kMagnitude);
  const auto bounded = static_cast<std::uint32_t>(magnitude < kBeyond ? magnitude : kBeyond);
  const std::uint32_t normal = (bounded - kExponentShift + 0xfffU + ((bounded >> 13) & 1U)) >> 13;
  // The last bit of 0.5 is float16's smallest number.
  const std::uint32_t subnormal = bits_of(from_bits<float>(bounded) + 0.5F) - 0x3f000000U;
  const std::uint32_t rounded = sign | (magnitude < kSmallestNormal ? subnormal : normal);
  return static_cast<std::uint16_t>(is_nan_bits(bits) ? 0x7e00U : rounded);
}
PD_CODEC_ELEMENT std::uint16_t to_float16(double value) {
  return to_float16(rounded_to_float<10, -14, 15>(value));
}
PD_CODEC_ELEMENT float from_float16(std::uint16_t bits) {
  constexpr std::uint32_t kExponentShift = 112U << 23;
  constexpr std::uint32_t kSmallestNormal = 113U << 23;
  const std::uint32_t sign = (static_cast<std::uint32_t>(bits) & 0x8000U) << 16;
  const std::uint32_t shifted = (static_cast<std::uint32_t>(bits) & 0x7fffU) << 13;
  const std::uint32_t exponent = shifted & (0x7c00U << 13);
  const std::uint32_t special = shifted + 2 * kExponentShift;
  const std::uint32_t normal = shifted + kExponentShift;
  const std::uint32_t subnormal =
      bits_of(from_bits<float>(shifted + kSmallestNormal) - from_bits<float>(kSmallestNormal));
  const std::uint32_t magnitude =
      exponent == (0x7c00U << 13) ? special : (exponent == 0 ? subnormal : normal);
  return from_bits<float>(sign | magnitude);
}

// ---- Elements and numbers ----

PD_CODEC_ELEMENT float number_of(float element) { return element; }
PD_CODEC_ELEMENT double number_of(double element) { return element; }
PD_CODEC_ELEMENT float number_of(BFloat16 element) { return from_bfloat16(element.bits); }
PD_CODEC_ELEMENT float number_of(Float16 element) { return from_float16(element.bits); }

// Rounded to nearest even; what is too large becomes infinite.
template <class T, class Number>
PD_CODEC_ELEMENT T element_of(Number number) {
  if constexpr (std::is_same_v<T, BFloat16>) {
    return {to_bfloat16(number)};
  } else if constexpr (std::is_same_v<T, Float16>) {
    return {to_float16(number)};
  } else {
    return static_cast<T>(number);
  }
}

// ---- int8 ----

// A block with an infinity or a NaN has a NaN for scale, and so for every element that is decoded.
PD_CODEC_ELEMENT float int8_scale(std::uint32_t largest_magnitude_bits) {
  if (largest_magnitude_bits >= FloatLayout<float>::kInfinity) return from_bits<float>(0x7fc00000U);
  return from_bits<float>(largest_magnitude_bits) / 127.0F;
}

// scale is no NaN; 0 for a block of zeros, or where 127 of the smallest float32 are more than its largest.
PD_CODEC_ELEMENT std::int8_t to_int8(float value, float scale) {
  const float divisor = scale > 0.0F ? scale : 1.0F;
  const float quotient = value / divisor;
  // Beyond 127 only where scale has lost its bits, near the smallest float32.
  const float not_above = quotient < 127.0F ? quotient : 127.0F;
  const float bounded = not_above > -127.0F ? not_above : -127.0F;
  // The last bit of 1.5 x 2^23 is one: the sum is rounded, to nearest even, and its low bits are the integer.
  return static_cast<std::int8_t>(bits_of(bounded + 12582912.0F) & 0xffU);
}

// ---- topk ----

// What the largest are chosen by. A NaN is as large as infinity.
template <class T>
PD_CODEC_ELEMENT typename FloatLayout<T>::Bits magnitude_key(T value) {
  const typename FloatLayout<T>::Bits magnitude = bits_of(value) & FloatLayout<T>::kMagnitude;
  return magnitude < FloatLayout<T>::kInfinity ? magnitude : FloatLayout<T>::kInfinity;
}

// Of a number without a finite key, an infinity or a NaN, the residual keeps nothing, whether it was sent
// or not: all later items would be infinite there.
template <class T>
PD_CODEC_ELEMENT bool is_finite_key(typename FloatLayout<T>::Bits key) {
  return key < FloatLayout<T>::kInfinity;
}

// What the residual keeps of an element that was sent: the rounding error, where sending rounds. Nothing of
// an element that arrives infinite or NaN, or it would be sent for ever.
template <class Number, class Sent>
PD_CODEC_ELEMENT Number rest_of_sent(Number number, Sent sent) {
  if constexpr (std::is_same_v<Number, Sent>) return Number(0);
  const Number rest = number - static_cast<Number>(number_of(sent));
  return rest - rest == Number(0) ? rest : Number(0);
}

// Keys are examined from the top in digits of this many bits; the last may have fewer.
constexpr int kTopKDigitBits = 11;
constexpr std::size_t kTopKBuckets = std::size_t{1} << kTopKDigitBits;

PD_CODEC_ELEMENT constexpr int next_digit_shift(int shift) {
  return shift > kTopKDigitBits ? shift - kTopKDigitBits : 0;
}

// The host's sample of a tensor: runs of neighbours, one somewhere in each of equal parts. Few of a small
// one.
constexpr std::size_t kTopKRunElements = 16;
constexpr std::size_t kTopKSampleMax = 4096;
constexpr std::size_t kTopKSampledShare = 32;  // at most one element of so many

PD_CODEC_ELEMENT std::size_t topk_sample_runs(std::size_t num_elements) {
  const std::size_t num_sampled = num_elements / kTopKSampledShare;
  return (num_sampled < kTopKSampleMax ? num_sampled : kTopKSampleMax) / kTopKRunElements;
}
// The run's first element. Apart by no fixed number: rows and channels of a tensor are.
PD_CODEC_ELEMENT std::size_t topk_sample_at(std::size_t num_elements, std::size_t run) {
  const std::size_t part_elements = num_elements / topk_sample_runs(num_elements);
  const std::size_t mixed = static_cast<std::size_t>((run * 0x9e3779b97f4a7c15U) >> 32U);
  return run * part_elements + mixed % (part_elements - kTopKRunElements + 1);
}

}  // namespace pipedream
