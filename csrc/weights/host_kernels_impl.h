// Contains the code of the host kernels. For each instruction set one source file includes it, and is
// compiled with its own flags (pd_vectorise() in cmake/PipedreamTargets.cmake). So everything here has
// internal linkage, and only headers without shared inline functions may be included, for the reason in
// base/element.h. Pure; any thread.
//
// Every option that would be a branch per element is a constant of the flags' type, so each combination is
// one loop that the compiler vectorises.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(__SSE2__)
#include <emmintrin.h>
#endif

#include "weights/host_kernels.h"

// Tells the compiler that the next loop reads and writes element i only at step i, even if two pointers are
// equal.
#if defined(__clang__)
#define PD_INDEPENDENT _Pragma("clang loop vectorize(assume_safety)")
#else
#define PD_INDEPENDENT _Pragma("GCC ivdep")
#endif

namespace pipedream {
namespace {

template <bool weight_decay, bool momentum, bool is_nesterov, bool is_first_step>
struct StaticSgdFlags {
  static constexpr bool has_weight_decay = weight_decay;
  static constexpr bool has_momentum = momentum;
  static constexpr bool nesterov = is_nesterov;
  static constexpr bool first_step = is_first_step;
};

template <bool weight_decay, bool has_amsgrad, bool from_gradient, bool is_nesterov>
struct StaticAdamFlags {
  static constexpr bool has_weight_decay = weight_decay;
  static constexpr bool amsgrad = has_amsgrad;
  static constexpr bool lerp_from_gradient = from_gradient;
  static constexpr bool nesterov = is_nesterov;
};

constexpr std::int64_t kCacheLineBytes = 64;
template <class T>
constexpr std::int64_t kLineElements = kCacheLineBytes / sizeof(T);

// Copies a cache line of values past the caches; `to` is aligned. Only fence_streams() orders these writes.
template <class T>
void stream_line(const T* from, T* to) {
#if defined(__AVX2__)
  for (std::int64_t i = 0; i < kLineElements<T>; i += 32 / sizeof(T)) {
    const __m256i pack = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + i));
    _mm256_stream_si256(reinterpret_cast<__m256i*>(to + i), pack);
  }
#elif defined(__SSE2__)
  for (std::int64_t i = 0; i < kLineElements<T>; i += 16 / sizeof(T)) {
    const __m128i pack = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i));
    _mm_stream_si128(reinterpret_cast<__m128i*>(to + i), pack);
  }
#else
  std::memcpy(to, from, kCacheLineBytes);
#endif
}

void fence_streams() {
#if defined(__SSE2__)
  _mm_sfence();
#endif
}

// Returns the number of elements before the first whole cache line.
template <class T>
std::int64_t elements_to_line(const T* address) {
  const auto past_line = static_cast<std::int64_t>(reinterpret_cast<std::uintptr_t>(address) %
                                                   static_cast<std::uintptr_t>(kCacheLineBytes));
  return past_line == 0 ? 0 : (kCacheLineBytes - past_line) / static_cast<std::int64_t>(sizeof(T));
}

// Calls compute(first, count, target) for pieces of the range. compute() writes the new weights of `count`
// elements, from `first` on, to target. Without streaming, target is weight_out itself. With streaming it is
// a buffer of one cache line, which is then streamed to weight_out. Larger buffers were slower by half,
// because memory reads and writes overlap only if they alternate often.
template <class T, class Compute>
void for_each_piece(std::int64_t num_elements, T* weight_out, bool streaming, Compute compute) {
  if (!streaming) return compute(0, num_elements, weight_out);
  std::int64_t first = elements_to_line(weight_out);
  if (first > num_elements) first = num_elements;
  compute(0, first, weight_out);
  for (; first + kLineElements<T> <= num_elements; first += kLineElements<T>) {
    alignas(kCacheLineBytes) T line[kLineElements<T>];
    compute(first, kLineElements<T>, static_cast<T*>(line));
    stream_line(static_cast<const T*>(line), weight_out + first);
  }
  compute(first, num_elements - first, weight_out + first);
  fence_streams();
}

template <class Flags, class Element>
void sgd_loop(const SgdFactors<NumberOf<Element>>& factors_in, const SgdRange<Element>& range,
              bool streaming) {
  using Number = NumberOf<Element>;
  const SgdFactors<Number> factors = factors_in;
  for_each_piece(
      range.num_elements, range.weight_out, streaming,
      [&](std::int64_t first, std::int64_t count, Element* target) {
        const Element* const weight = kHasMaster<Element> ? nullptr : range.weight_in + first;
        Number* const master = kHasMaster<Element> ? range.master + first : nullptr;
        const Element* const gradient = range.gradient + first;
        Number* const momentum_buffer = Flags::has_momentum ? range.momentum_buffer + first : nullptr;
        PD_INDEPENDENT
        for (std::int64_t i = 0; i < count; ++i) {
          Number momentum = Flags::has_momentum && !Flags::first_step ? momentum_buffer[i] : Number{};
          const Number before = weight_before(weight, master, i);
          keep_weight(sgd_element(Flags{}, factors, before, number_of(gradient[i]), &momentum), target,
                      master, i);
          if (Flags::has_momentum) momentum_buffer[i] = momentum;
        }
      });
}

template <bool kWeightDecay, class Element>
void sgd_by_momentum(SgdFlags flags, const SgdFactors<NumberOf<Element>>& factors,
                     const SgdRange<Element>& range, bool streaming) {
  if (!flags.has_momentum)
    return sgd_loop<StaticSgdFlags<kWeightDecay, false, false, false>>(factors, range, streaming);
  if (flags.nesterov) {
    if (flags.first_step)
      return sgd_loop<StaticSgdFlags<kWeightDecay, true, true, true>>(factors, range, streaming);
    return sgd_loop<StaticSgdFlags<kWeightDecay, true, true, false>>(factors, range, streaming);
  }
  if (flags.first_step)
    return sgd_loop<StaticSgdFlags<kWeightDecay, true, false, true>>(factors, range, streaming);
  return sgd_loop<StaticSgdFlags<kWeightDecay, true, false, false>>(factors, range, streaming);
}

template <class Element>
void sgd_kernel(SgdFlags flags, const SgdFactors<NumberOf<Element>>& factors, const SgdRange<Element>& range,
                bool streaming) {
  if (flags.has_weight_decay) return sgd_by_momentum<true>(flags, factors, range, streaming);
  return sgd_by_momentum<false>(flags, factors, range, streaming);
}

template <class Flags, class Element>
void adam_loop(const AdamFactors<NumberOf<Element>>& factors_in, const AdamRange<Element>& range,
               bool streaming) {
  using Number = NumberOf<Element>;
  const AdamFactors<Number> factors = factors_in;
  for_each_piece(range.num_elements, range.weight_out, streaming,
                 [&](std::int64_t first, std::int64_t count, Element* target) {
                   const Element* const weight = kHasMaster<Element> ? nullptr : range.weight_in + first;
                   Number* const master = kHasMaster<Element> ? range.master + first : nullptr;
                   const Element* const gradient = range.gradient + first;
                   Number* const exp_avg = range.exp_avg + first;
                   Number* const exp_avg_sq = range.exp_avg_sq + first;
                   Number* const max_exp_avg_sq = Flags::amsgrad ? range.max_exp_avg_sq + first : nullptr;
                   PD_INDEPENDENT
                   for (std::int64_t i = 0; i < count; ++i) {
                     Number moment = exp_avg[i];
                     Number square = exp_avg_sq[i];
                     Number largest = Flags::amsgrad ? max_exp_avg_sq[i] : Number{};
                     const Number before = weight_before(weight, master, i);
                     keep_weight(adam_element(Flags{}, factors, before, number_of(gradient[i]), &moment,
                                              &square, &largest),
                                 target, master, i);
                     exp_avg[i] = moment;
                     exp_avg_sq[i] = square;
                     if (Flags::amsgrad) max_exp_avg_sq[i] = largest;
                   }
                 });
}

template <bool kWeightDecay, bool kAmsgrad, bool kNesterov, class Element>
void adam_by_lerp(AdamFlags flags, const AdamFactors<NumberOf<Element>>& factors,
                  const AdamRange<Element>& range, bool streaming) {
  if (flags.lerp_from_gradient)
    return adam_loop<StaticAdamFlags<kWeightDecay, kAmsgrad, true, kNesterov>>(factors, range, streaming);
  return adam_loop<StaticAdamFlags<kWeightDecay, kAmsgrad, false, kNesterov>>(factors, range, streaming);
}

template <class Element>
void adam_kernel(AdamFlags flags, const AdamFactors<NumberOf<Element>>& factors,
                 const AdamRange<Element>& range, bool streaming) {
  if (flags.nesterov) return adam_by_lerp<false, false, true>(flags, factors, range, streaming);
  if (flags.has_weight_decay) {
    if (flags.amsgrad) return adam_by_lerp<true, true, false>(flags, factors, range, streaming);
    return adam_by_lerp<true, false, false>(flags, factors, range, streaming);
  }
  if (flags.amsgrad) return adam_by_lerp<false, true, false>(flags, factors, range, streaming);
  return adam_by_lerp<false, false, false>(flags, factors, range, streaming);
}

template <class Element>
constexpr HostKernels<Element> kHostKernels = {sgd_kernel<Element>, adam_kernel<Element>};

}  // namespace
}  // namespace pipedream
