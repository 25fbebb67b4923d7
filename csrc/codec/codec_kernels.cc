// Chooses the host kernels once, by the processor's instruction sets. Pure; any thread.
#include "codec/codec_kernels.h"

namespace pipedream {
namespace {

bool processor_runs_avx2() {
#if defined(__x86_64__)
  return __builtin_cpu_supports("avx2") != 0;
#else
  return false;
#endif
}

const CodecKernelSet& chosen_kernels() {
  static const CodecKernelSets sets = codec_kernel_sets();
  return sets.sets[sets.num_sets - 1];
}

}  // namespace

CodecKernelSets codec_kernel_sets() {
  CodecKernelSets sets = {{baseline_codec_kernels(), avx2_codec_kernels()}, 1};
  if (sets.sets[1].for_float32 != nullptr && processor_runs_avx2()) sets.num_sets = 2;
  return sets;
}

template <>
const CodecKernels<float>& codec_kernels<float>() {
  return *chosen_kernels().for_float32;
}

template <>
const CodecKernels<double>& codec_kernels<double>() {
  return *chosen_kernels().for_float64;
}

template <>
const CodecKernels<BFloat16>& codec_kernels<BFloat16>() {
  return *chosen_kernels().for_bfloat16;
}

template <>
const CodecKernels<Float16>& codec_kernels<Float16>() {
  return *chosen_kernels().for_float16;
}

}  // namespace pipedream
