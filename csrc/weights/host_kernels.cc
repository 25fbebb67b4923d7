// Chooses the host kernels once, by the processor's instruction sets. Pure; any thread.
#include "weights/host_kernels.h"

namespace pipedream {
namespace {

HostKernelSet best_kernels() {
  const HostKernelSet avx2 = avx2_kernels();
  return avx2.for_float32 != nullptr && processor_has_avx2() ? avx2 : baseline_kernels();
}

const HostKernelSet& chosen_kernels() {
  static const HostKernelSet kernels = best_kernels();
  return kernels;
}

}  // namespace

bool processor_has_avx2() {
#if defined(__x86_64__)
  return __builtin_cpu_supports("avx2") != 0;
#else
  return false;
#endif
}

template <>
const HostKernels<float>& host_kernels<float>() {
  return *chosen_kernels().for_float32;
}

template <>
const HostKernels<double>& host_kernels<double>() {
  return *chosen_kernels().for_float64;
}

template <>
const HostKernels<BFloat16>& host_kernels<BFloat16>() {
  return *chosen_kernels().for_bfloat16;
}

}  // namespace pipedream
