// Launches of the codecs' kernels: what the .cu file, compiled by nvcc, offers to cuda_stream_codec.cc.
// Internal to csrc/codec/cuda. C++17; results are cudaError_t as int. Any thread, the device is current.
#pragma once

#include <cstddef>
#include <cstdint>

#include "codec/codec_kernels.h"

namespace pipedream {

// topk's tensor is cut into at most so many parts, in order; each counts and gathers its own.
constexpr std::size_t kTopKPartsMax = 1024;

// The keys that topk still has to choose from after some digits: those that begin as `key`.
struct TopKBucket {
  std::uint64_t key;            // all keys above it are chosen,
  std::uint32_t num_equal_max;  // and so many of those in the bucket
  std::uint32_t is_final;       // all of them
};

constexpr std::size_t kTopKDigitsMax = 6;
static_assert(kTopKDigitsMax * kTopKDigitBits >= FloatLayout<double>::kMagnitudeBits);

// Device memory, zero before the first topk.
struct TopKScratch {
  TopKBucket buckets[kTopKDigitsMax + 1];              // after so many digits
  std::uint32_t counts[kTopKDigitsMax][kTopKBuckets];  // of each digit; zero again after each topk
  std::uint32_t num_above[kTopKPartsMax];              // of each part
  std::uint32_t num_equal[kTopKPartsMax];
};

// Loads all of them: see cuda_launch.h.
int load_codec_kernels();

// Defined for T of float and double, int8 and topk for BFloat16 and Float16, too. num_elements is not 0;
// otherwise as the host's.
template <class T>
int launch_encode_bfloat16(std::size_t num_elements, const T* values, std::uint16_t* encoded,
                           std::uintptr_t stream);
template <class T>
int launch_decode_bfloat16(std::size_t num_elements, const std::uint16_t* encoded, T* values,
                           std::uintptr_t stream);
template <class T>
int launch_encode_float16(std::size_t num_elements, const T* values, std::uint16_t* encoded,
                          std::uintptr_t stream);
template <class T>
int launch_decode_float16(std::size_t num_elements, const std::uint16_t* encoded, T* values,
                          std::uintptr_t stream);
template <class T>
int launch_encode_int8(std::size_t num_elements, const T* values, std::byte* encoded, std::uintptr_t stream);
template <class T>
int launch_decode_int8(std::size_t num_elements, const std::byte* encoded, T* values, std::uintptr_t stream);
template <class T>
int launch_encode_topk(const TopKEncode<T>& work, TopKScratch* scratch, std::uintptr_t stream);
// Zeros, then the chosen ones.
template <class T>
int launch_decode_topk(std::size_t num_elements, std::size_t num_chosen, const std::uint32_t* indices,
                       const SentOf<T>* chosen_values, T* values, std::uintptr_t stream);

}  // namespace pipedream
