// Converts elements of tensors, among them 16-bit floats, to the numbers that they stand for, and back with
// rounding. Host and device compile this same text, so it is C++17 (for nvcc) and includes no other file of
// this project. Pure; any thread.
//
// All functions have internal linkage. The host kernels are compiled once per instruction set. If the linker
// shared one copy of a function between them, that copy might use instructions that the processor lacks.
//
// The code selects values and does not branch, so that loops vectorise. Floating point leaves open which NaN
// results from an operation. Where that matters the code uses integers, so that all processors give the same
// bits.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#if defined(__CUDACC__)
#define PD_ELEMENT static __host__ __device__ __forceinline__
#else
#define PD_ELEMENT static inline __attribute__((always_inline))
#endif

namespace pipedream {

// These types hold 16-bit floats as they lie in memory. Arithmetic on them is done in float32.
struct BFloat16 {
  std::uint16_t bits;
};
struct Float16 {
  std::uint16_t bits;
};

// NumberOf<T> is the type for arithmetic on an element of type T. It is also the type of state that belongs
// to the element, such as its momentum. It is double for double, and float for all other types.
template <class T>
using NumberOf = std::conditional_t<std::is_same_v<T, double>, double, float>;

// Describes the bits of a float type. If the sign bit is masked out, larger bits mean a larger magnitude.
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
PD_ELEMENT typename FloatLayout<T>::Bits bits_of(T value) {
  typename FloatLayout<T>::Bits bits = 0;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits;
}

template <class T>
PD_ELEMENT T from_bits(typename FloatLayout<T>::Bits bits) {
  T value = 0;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

// ---- Rounding to 16 bits ----

// Rounds a float64 to kMantissaBits bits of mantissa, to nearest even. A float32 holds the result exactly. A
// conversion of the float64 to float32 first would round twice.
//
// The rounding is done by adding and subtracting `magic`, because the lowest bit of `magic` has the value of
// the lowest bit to keep. kExponentMin and kExponentMax are the smallest and the largest exponent of the
// narrow format. Numbers below 2^kExponentMin have fewer bits in that format.
template <int kMantissaBits, int kExponentMin, int kExponentMax>
PD_ELEMENT float rounded_to_float(double value) {
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

PD_ELEMENT bool is_nan_bits(std::uint32_t bits) {
  return static_cast<std::int32_t>(bits & FloatLayout<float>::kMagnitude) >
         static_cast<std::int32_t>(FloatLayout<float>::kInfinity);
}

// Rounds to nearest even. Every NaN becomes the same NaN.
PD_ELEMENT std::uint16_t to_bfloat16(float value) {
  const std::uint32_t bits = bits_of(value);
  const std::uint32_t rounded = (bits + 0x7fffU + ((bits >> 16) & 1U)) >> 16;
  return static_cast<std::uint16_t>(is_nan_bits(bits) ? 0x7fc0U : rounded);
}
PD_ELEMENT std::uint16_t to_bfloat16(double value) {
  return to_bfloat16(rounded_to_float<7, -126, 127>(value));
}
PD_ELEMENT float from_bfloat16(std::uint16_t bits) {
  return from_bits<float>(static_cast<std::uint32_t>(bits) << 16);
}

// Rounds to float16, which has 5 bits of exponent (with bias 15) and 10 bits of mantissa.
PD_ELEMENT std::uint16_t to_float16(float value) {
  constexpr std::int32_t kSmallestNormal = 0x38800000;  // 2^-14
  constexpr std::int32_t kBeyond = 0x47800000;          // 2^16, infinite in float16
  // The difference between the biases of the two formats, 127 - 15.
  constexpr std::uint32_t kExponentShift = 112U << 23;
  const std::uint32_t bits = bits_of(value);
  const std::uint32_t sign = (bits >> 16) & 0x8000U;
  const auto magnitude = static_cast<std::int32_t>(bits & FloatLayout<float>::kMagnitude);
  const auto bounded = static_cast<std::uint32_t>(magnitude < kBeyond ? magnitude : kBeyond);
  const std::uint32_t normal = (bounded - kExponentShift + 0xfffU + ((bounded >> 13) & 1U)) >> 13;
  // The last bit of the float32 0.5 is worth 2^-24, which is float16's smallest number. So adding 0.5 rounds
  // to a multiple of that number.
  const std::uint32_t subnormal = bits_of(from_bits<float>(bounded) + 0.5F) - 0x3f000000U;
  const std::uint32_t rounded = sign | (magnitude < kSmallestNormal ? subnormal : normal);
  return static_cast<std::uint16_t>(is_nan_bits(bits) ? 0x7e00U : rounded);
}
PD_ELEMENT std::uint16_t to_float16(double value) { return to_float16(rounded_to_float<10, -14, 15>(value)); }
PD_ELEMENT float from_float16(std::uint16_t bits) {
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

PD_ELEMENT float number_of(float element) { return element; }
PD_ELEMENT double number_of(double element) { return element; }
PD_ELEMENT float number_of(BFloat16 element) { return from_bfloat16(element.bits); }
PD_ELEMENT float number_of(Float16 element) { return from_float16(element.bits); }

// Converts a number to an element, rounding to nearest even. A number that is too large becomes infinite.
template <class T, class Number>
PD_ELEMENT T element_of(Number number) {
  if constexpr (std::is_same_v<T, BFloat16>) {
    return {to_bfloat16(number)};
  } else if constexpr (std::is_same_v<T, Float16>) {
    return {to_float16(number)};
  } else {
    return static_cast<T>(number);
  }
}

}  // namespace pipedream
