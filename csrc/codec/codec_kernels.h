// Declares the codecs' loops over host memory. They are compiled once for each instruction set, and the
// fastest set that the processor can run is chosen. All sets give the same bits. Internal to csrc/codec;
// pure, any thread.
//
//   int8 encoded   | scale 0 | 256 elements | scale 1 | 256 elements | ... the last block may be shorter
//   topk encoded   | k indices | k values |
#pragma once

#include <cstddef>
#include <cstdint>

#include "codec/codec_math.h"

namespace pipedream {

constexpr std::size_t kInt8Block = 256;  // equals kInt8BlockElements of codec.h, which nvcc does not read
constexpr std::size_t kInt8BlockBytes = sizeof(float) + kInt8Block;

template <class T>
struct TopKEncode {
  std::size_t num_elements;
  std::size_t num_chosen;  // 1 to num_elements
  const T* values;
  NumberOf<T>* residual;
  std::uint32_t* indices;
  // The values follow the indices. Before they are written, the list of candidates may use their memory.
  SentOf<T>* chosen_values;
};

// The arguments' memory does not overlap, and encoded bytes are 4-byte aligned. The first four functions are
// null for BFloat16 and Float16.
template <class T>
struct CodecKernels {
  void (*encode_bfloat16)(std::size_t num_elements, const T* values, std::uint16_t* encoded);
  void (*decode_bfloat16)(std::size_t num_elements, const std::uint16_t* encoded, T* values);
  void (*encode_float16)(std::size_t num_elements, const T* values, std::uint16_t* encoded);
  void (*decode_float16)(std::size_t num_elements, const std::uint16_t* encoded, T* values);
  void (*encode_int8)(std::size_t num_elements, const T* values, std::byte* encoded);
  void (*decode_int8)(std::size_t num_elements, const std::byte* encoded, T* values);
  void (*encode_topk)(const TopKEncode<T>& work);
};

// The kernels of one instruction set; null pointers if this build does not have them.
struct CodecKernelSet {
  const char* name;
  const CodecKernels<float>* for_float32;
  const CodecKernels<double>* for_float64;
  const CodecKernels<BFloat16>* for_bfloat16;
  const CodecKernels<Float16>* for_float16;
};
[[nodiscard]] CodecKernelSet baseline_codec_kernels();
[[nodiscard]] CodecKernelSet avx2_codec_kernels();

// The sets that this build has and this processor can run. The fastest set is the last.
struct CodecKernelSets {
  CodecKernelSet sets[2];
  std::size_t num_sets;
};
[[nodiscard]] CodecKernelSets codec_kernel_sets();
template <class T>
[[nodiscard]] const CodecKernels<T>& codec_kernels();

}  // namespace pipedream
