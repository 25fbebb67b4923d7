// Declares the inner loops of the native optimizers over host memory, with one set for each instruction set,
// and chooses between the sets. Internal to csrc/weights; pure, any thread.
//
// All sets give the same bits, because no multiply-add is contracted. So a run gives the same numbers on
// every mix of processors.
#pragma once

#include <cstdint>

#include "weights/element_math.h"

namespace pipedream {

// weight_in may equal weight_out; nothing else overlaps. If elements have a master copy (kHasMaster), the
// kernel reads it instead of weight_in, and replaces it.
template <class Element>
struct SgdRange {
  std::int64_t num_elements;
  const Element* weight_in;
  Element* weight_out;
  const Element* gradient;
  NumberOf<Element>* momentum_buffer;
  NumberOf<Element>* master = nullptr;
};

template <class Element>
struct AdamRange {
  std::int64_t num_elements;
  const Element* weight_in;
  Element* weight_out;
  const Element* gradient;
  NumberOf<Element>* exp_avg;
  NumberOf<Element>* exp_avg_sq;
  NumberOf<Element>* max_exp_avg_sq;
  NumberOf<Element>* master = nullptr;
};

// streaming: whether to write weight_out past the caches, which saves reading its cache lines first. Use it
// only if the step's memory is larger than the caches. Nobody may read weight_out before the call returns.
template <class Element>
struct HostKernels {
  void (*sgd)(SgdFlags flags, const SgdFactors<NumberOf<Element>>& factors, const SgdRange<Element>& range,
              bool streaming);
  void (*adam)(AdamFlags flags, const AdamFactors<NumberOf<Element>>& factors,
               const AdamRange<Element>& range, bool streaming);
};

// The kernels of one instruction set. The pointers are null if this build does not have them.
struct HostKernelSet {
  const char* name;
  const HostKernels<float>* for_float32;
  const HostKernels<double>* for_float64;
  const HostKernels<BFloat16>* for_bfloat16;
};
[[nodiscard]] HostKernelSet baseline_kernels();
[[nodiscard]] HostKernelSet avx2_kernels();

[[nodiscard]] bool processor_has_avx2();
// Returns the kernels of the best set that this processor runs.
template <class Element>
[[nodiscard]] const HostKernels<Element>& host_kernels();

}  // namespace pipedream
