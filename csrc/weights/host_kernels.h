// The inner loops of the native optimizers over host memory, one set per instruction set, and the choice
// between them. Internal to csrc/weights; pure, any thread.
//
// All sets give the same bits: no multiply-add is contracted, and sums have a fixed number of lanes. So a run
// gives the same numbers whatever mix of processors it is on.
#pragma once

#include <cstdint>

#include "weights/element_math.h"

namespace pipedream {

// weight_in may equal weight_out; nothing else overlaps.
template <class T>
struct SgdRange {
  std::int64_t num_elements;
  const T* weight_in;
  T* weight_out;
  const T* gradient;
  T* momentum_buffer;
};

template <class T>
struct AdamRange {
  std::int64_t num_elements;
  const T* weight_in;
  T* weight_out;
  const T* gradient;
  T* exp_avg;
  T* exp_avg_sq;
  T* max_exp_avg_sq;
};

// streaming: weight_out is written past the caches, which saves reading its lines first; worth it only
// where the step's memory exceeds the caches. It is not read before the call returns.
template <class T>
struct HostKernels {
  void (*sgd)(SgdFlags flags, const SgdFactors<T>& factors, const SgdRange<T>& range, bool streaming);
  void (*adam)(AdamFlags flags, const AdamFactors<T>& factors, const AdamRange<T>& range, bool streaming);
};

// One per instruction set; null where this build has none such.
struct HostKernelSet {
  const char* name;
  const HostKernels<float>* for_float32;
  const HostKernels<double>* for_float64;
};
[[nodiscard]] HostKernelSet baseline_kernels();
[[nodiscard]] HostKernelSet avx2_kernels();

// The best set that this processor runs.
[[nodiscard]] bool processor_has_avx2();
template <class T>
[[nodiscard]] const HostKernels<T>& host_kernels();

}  // namespace pipedream
