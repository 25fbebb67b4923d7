// Declares functions that launch the codecs' kernels. nvcc compiles them in the .cu file;
// cuda_stream_codec.cc calls them. Internal to csrc/codec/cuda. C++17; results are cudaError_t as int. Any
// thread on which the device is current.
#pragma once

#include <cstddef>
#include <cstdint>

#include "codec/codec_kernels.h"

namespace pipedream {

// The most parts into which topk cuts a tensor. For each part the elements are counted and gathered
// separately.
constexpr std::size_t kTopKPartsMax = 1024;

// A bucket among whose keys topk still has to choose. It has all keys that begin with the digits of `key`
// that were examined so far.
struct TopKBucket {
  std::uint64_t key;            // all keys above the bucket are chosen
  std::uint32_t num_equal_max;  // the number of the bucket's keys that are chosen, too
  std::uint32_t is_final;       // 1: all keys of the bucket are chosen
};

constexpr std::size_t kTopKDigitsMax = 6;
static_assert(kTopKDigitsMax * kTopKDigitBits >= FloatLayout<double>::kMagnitudeBits);

// Device memory, zero before the first topk.
struct TopKScratch {
  TopKBucket buckets[kTopKDigitsMax + 1];              // indexed by the number of digits examined
  std::uint32_t counts[kTopKDigitsMax][kTopKBuckets];  // of each digit, by bucket; zero again after each topk
  std::uint32_t num_above[kTopKPartsMax];  // how many keys are above the smallest chosen key, for each part
  std::uint32_t num_equal[kTopKPartsMax];
};

// Loads all kernels, because their first launch would hold up other threads (cuda_launch.h).
int load_codec_kernels();

// These functions do on the device what the codecs' host functions do. They are defined for T = float and
// double; those of int8 and topk also for BFloat16 and Float16. num_elements must not be 0.
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
// Writes zeros, then the chosen elements.
template <class T>
int launch_decode_topk(std::size_t num_elements, std::size_t num_chosen, const std::uint32_t* indices,
                       const SentOf<T>* chosen_values, T* values, std::uintptr_t stream);

}  // namespace pipedream
