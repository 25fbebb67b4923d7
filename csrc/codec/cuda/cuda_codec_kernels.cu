// Implements the codecs for CUDA. They are memory bound, so the kernels are plain grid-stride loops. They
// write whole words where they can, because `encoded` may be in pinned host memory. See codec_math.h for the
// arithmetic. The compiler does not contract multiply-adds, so the bits are those of the host.
//
// topk needs these launches, in stream order. A bucket holds all keys that begin with the same digits.
//   1 count   one launch per digit: counts the keys of the bucket chosen so far by their next digit. The
//             first launch also adds the values to the residual. Later launches do nothing once all keys of
//             the chosen bucket are to be sent
//   2 part    counts for each part of the tensor the keys above the smallest chosen key, and the keys equal
//             to it
//   3 gather  each part writes its chosen elements, in order. The residual drops the values that are sent,
//             and those that are not finite
//
// Each block computes for itself what it needs from the launch before: the bucket after a digit, or the sums
// of the parts before its own part. That saves launches of a single block in between.
#include <cuda_runtime_api.h>

#include "codec/cuda/cuda_codec_kernels.h"
#include "device/cuda/cuda_launch.h"

namespace pipedream {
namespace {

constexpr unsigned kBlockThreads = 256;
constexpr unsigned kWarpThreads = 32;
constexpr unsigned kBlockWarps = kBlockThreads / kWarpThreads;
constexpr unsigned kAllLanes = 0xffffffffU;
// The most blocks of a launch. These are several waves on the largest device, so that the last wave does not
// leave it half idle.
constexpr std::size_t kNumBlocksMax = 4096;
// The most blocks of a count launch. They are few, because each block adds its own histogram to the common
// one.
constexpr std::size_t kNumCountBlocksMax = 512;
constexpr unsigned kThreadBuckets = kTopKBuckets / kBlockThreads;  // buckets of each thread in narrow()
constexpr unsigned kGroupThreads = 16;
static_assert(kBlockThreads == kGroupThreads * kGroupThreads);

__device__ std::size_t first_index() {
  return static_cast<std::size_t>(blockIdx.x) * blockDim.x + threadIdx.x;
}

__device__ std::size_t index_stride() { return static_cast<std::size_t>(gridDim.x) * blockDim.x; }

unsigned num_blocks_for(std::size_t num_threads, std::size_t num_blocks_max = kNumBlocksMax) {
  const std::size_t num_blocks = (num_threads + kBlockThreads - 1) / kBlockThreads;
  return static_cast<unsigned>(num_blocks < num_blocks_max ? num_blocks : num_blocks_max);
}

cudaStream_t stream_of(std::uintptr_t stream) { return reinterpret_cast<cudaStream_t>(stream); }

// ---- bf16 and fp16 ----

struct ToBFloat16 {
  template <class T>
  static __device__ std::uint32_t encode(T value) {
    return to_bfloat16(value);
  }
  static __device__ float decode(std::uint16_t bits) { return from_bfloat16(bits); }
};

struct ToFloat16 {
  template <class T>
  static __device__ std::uint32_t encode(T value) {
    return to_float16(value);
  }
  static __device__ float decode(std::uint16_t bits) { return from_float16(bits); }
};

// Each thread writes two elements as one word. If the number of elements is odd, the first thread also writes
// the last element.
template <class Format, class T>
__global__ void __launch_bounds__(kBlockThreads)
    encode_half_kernel(std::size_t num_elements, const T* values, std::uint16_t* encoded) {
  auto* const words = reinterpret_cast<std::uint32_t*>(encoded);
  const std::size_t num_words = num_elements / 2;
  for (std::size_t i = first_index(); i < num_words; i += index_stride())
    words[i] = Format::encode(values[2 * i]) | Format::encode(values[2 * i + 1]) << 16;
  if (first_index() == 0 && num_elements % 2 != 0)
    encoded[num_elements - 1] = static_cast<std::uint16_t>(Format::encode(values[num_elements - 1]));
}

template <class Format, class T>
__global__ void __launch_bounds__(kBlockThreads)
    decode_half_kernel(std::size_t num_elements, const std::uint16_t* encoded, T* values) {
  const auto* const words = reinterpret_cast<const std::uint32_t*>(encoded);
  const std::size_t num_words = num_elements / 2;
  for (std::size_t i = first_index(); i < num_words; i += index_stride()) {
    const std::uint32_t word = words[i];
    values[2 * i] = static_cast<T>(Format::decode(static_cast<std::uint16_t>(word & 0xffffU)));
    values[2 * i + 1] = static_cast<T>(Format::decode(static_cast<std::uint16_t>(word >> 16)));
  }
  if (first_index() == 0 && num_elements % 2 != 0)
    values[num_elements - 1] = static_cast<T>(Format::decode(encoded[num_elements - 1]));
}

// ---- int8: one warp per int8 block; each lane takes four neighbouring elements, twice ----

constexpr unsigned kLaneElements = 4;
constexpr unsigned kRowElements = kWarpThreads * kLaneElements;
constexpr unsigned kNumRows = kInt8Block / kRowElements;

__device__ std::uint32_t largest_of_warp(std::uint32_t value) {
  for (unsigned width = kWarpThreads / 2; width > 0; width /= 2) {
    const std::uint32_t other = __shfl_xor_sync(kAllLanes, value, static_cast<int>(width));
    value = other > value ? other : value;
  }
  return value;
}

// Stores four encoded elements at a word's address, or fewer at the tensor's end.
__device__ void store_int8(std::byte* to, const float* values, unsigned count, float scale) {
  const bool is_special = is_nan_bits(bits_of(scale));
  std::uint32_t word = 0;
  for (unsigned i = 0; i < kLaneElements; ++i) {
    const auto element = static_cast<std::uint8_t>(is_special ? std::int8_t{0} : to_int8(values[i], scale));
    word |= static_cast<std::uint32_t>(element) << (8 * i);
    if (count < kLaneElements && i < count) to[i] = static_cast<std::byte>(element);
  }
  if (count >= kLaneElements) *reinterpret_cast<std::uint32_t*>(to) = word;
}

template <class T>
__global__ void __launch_bounds__(kBlockThreads)
    encode_int8_kernel(std::size_t num_elements, const T* values, std::byte* encoded) {
  const unsigned lane = threadIdx.x % kWarpThreads;
  const std::size_t num_blocks = (num_elements + kInt8Block - 1) / kInt8Block;
  for (std::size_t block = first_index() / kWarpThreads; block < num_blocks;
       block += index_stride() / kWarpThreads) {
    const std::size_t first = block * kInt8Block;
    const auto count =
        static_cast<unsigned>(num_elements - first < kInt8Block ? num_elements - first : kInt8Block);
    float own[kNumRows][kLaneElements];
    std::uint32_t largest = 0;
    for (unsigned row = 0; row < kNumRows; ++row) {
      for (unsigned i = 0; i < kLaneElements; ++i) {
        const unsigned element = row * kRowElements + lane * kLaneElements + i;
        own[row][i] = element < count ? static_cast<float>(number_of(values[first + element])) : 0.0F;
        const std::uint32_t magnitude = bits_of(own[row][i]) & FloatLayout<float>::kMagnitude;
        largest = magnitude > largest ? magnitude : largest;
      }
    }
    const float scale = int8_scale(largest_of_warp(largest));
    std::byte* const to = encoded + block * kInt8BlockBytes;
    if (lane == 0) *reinterpret_cast<float*>(to) = scale;
    for (unsigned row = 0; row < kNumRows; ++row) {
      const unsigned element = row * kRowElements + lane * kLaneElements;
      if (element < count) store_int8(to + sizeof(float) + element, own[row], count - element, scale);
    }
  }
}

// Each thread decodes four neighbouring elements, which are in the same int8 block.
template <class T>
__global__ void __launch_bounds__(kBlockThreads)
    decode_int8_kernel(std::size_t num_elements, const std::byte* encoded, T* values) {
  const std::size_t num_fours = (num_elements + kLaneElements - 1) / kLaneElements;
  for (std::size_t four = first_index(); four < num_fours; four += index_stride()) {
    const std::size_t first = four * kLaneElements;
    const std::byte* const block = encoded + first / kInt8Block * kInt8BlockBytes;
    const std::byte* const from = block + sizeof(float) + first % kInt8Block;
    const auto factor = static_cast<NumberOf<T>>(*reinterpret_cast<const float*>(block));
    for (unsigned i = 0; i < kLaneElements && first + i < num_elements; ++i)
      values[first + i] = element_of<T>(factor * static_cast<NumberOf<T>>(static_cast<std::int8_t>(from[i])));
  }
}

// ---- topk ----

// The sum of `value` over the block's threads before this one. A kernel may call it once.
__device__ std::uint32_t sum_before_thread(std::uint32_t value) {
  __shared__ std::uint32_t sums[kBlockThreads];
  __shared__ std::uint32_t group_sums[kGroupThreads];
  sums[threadIdx.x] = value;
  __syncthreads();
  if (threadIdx.x < kGroupThreads) {
    std::uint32_t sum = 0;
    for (unsigned i = 0; i < kGroupThreads; ++i) sum += sums[threadIdx.x * kGroupThreads + i];
    group_sums[threadIdx.x] = sum;
  }
  __syncthreads();
  const unsigned group = threadIdx.x / kGroupThreads;
  std::uint32_t sum = 0;
  for (unsigned i = 0; i < group; ++i) sum += group_sums[i];
  for (unsigned i = group * kGroupThreads; i < threadIdx.x; ++i) sum += sums[i];
  return sum;
}

// Finds the bucket of the smallest chosen key after num_digits digits. Reads the counts of the last of these
// digits, which begins at bit `shift`. A kernel may call it once.
__device__ TopKBucket narrow(unsigned num_digits, int shift, TopKScratch* scratch) {
  __shared__ TopKBucket found;
  const TopKBucket before = scratch->buckets[num_digits - 1];
  const std::uint32_t* const counts = scratch->counts[num_digits - 1];
  if (before.is_final != 0) {
    if (first_index() == 0) scratch->buckets[num_digits] = before;
    return before;
  }
  // The first thread has the highest buckets.
  const unsigned end = static_cast<unsigned>(kTopKBuckets) - threadIdx.x * kThreadBuckets;
  std::uint32_t num_own = 0;
  for (unsigned i = 1; i <= kThreadBuckets; ++i) num_own += counts[end - i];
  std::uint32_t num_before = sum_before_thread(num_own);
  const std::uint32_t num_wanted = before.num_equal_max;
  if (num_before < num_wanted && num_wanted <= num_before + num_own) {
    unsigned bucket = end - 1;
    for (; num_before + counts[bucket] < num_wanted; --bucket) num_before += counts[bucket];
    const std::uint32_t num_left = num_wanted - num_before;
    found.key = before.key | static_cast<std::uint64_t>(bucket) << shift;
    found.num_equal_max = num_left;
    found.is_final = num_left == counts[bucket] ? 1U : 0U;
    if (blockIdx.x == 0) scratch->buckets[num_digits] = found;
  }
  __syncthreads();
  return found;
}

// Counts the keys by one digit: the bits from `shift` up to shift_before. digit: its number, counted from 0.
// The digit's counts must be 0 before.
template <class T>
__global__ void __launch_bounds__(kBlockThreads)
    topk_count_kernel(TopKEncode<T> work, unsigned digit, int shift_before, int shift, TopKScratch* scratch) {
  using Bits = typename FloatLayout<NumberOf<T>>::Bits;
  __shared__ std::uint32_t counts[kTopKBuckets];
  for (unsigned bucket = threadIdx.x; bucket < kTopKBuckets; bucket += kBlockThreads) counts[bucket] = 0;
  const bool is_first = digit == 0;
  TopKBucket chosen = {0, static_cast<std::uint32_t>(work.num_chosen), 0};
  if (!is_first) chosen = narrow(digit, shift_before, scratch);
  if (is_first && first_index() == 0) scratch->buckets[0] = chosen;
  if (chosen.is_final != 0) return;
  __syncthreads();
  const Bits prefix = static_cast<Bits>(chosen.key) >> shift_before;
  const Bits digit_mask = (Bits{1} << (shift_before - shift)) - 1;
  for (std::size_t i = first_index(); i < work.num_elements; i += index_stride()) {
    if (is_first) work.residual[i] += number_of(work.values[i]);
    const Bits key = magnitude_key(work.residual[i]);
    if (key >> shift_before == prefix) atomicAdd(&counts[(key >> shift) & digit_mask], 1U);
  }
  __syncthreads();
  for (unsigned bucket = threadIdx.x; bucket < kTopKBuckets; bucket += kBlockThreads) {
    if (counts[bucket] != 0) atomicAdd(&scratch->counts[digit][bucket], counts[bucket]);
  }
}

// The range of elements in one part of the tensor. Both kernels that work by parts use the same parts, with
// one block for each part.
struct Part {
  std::size_t first;
  std::size_t end;
};

__device__ Part part_of_block(std::size_t num_elements) {
  const std::size_t num_rows = (num_elements + kBlockThreads - 1) / kBlockThreads;
  const std::size_t part_elements = (num_rows + gridDim.x - 1) / gridDim.x * kBlockThreads;
  const std::size_t first = blockIdx.x * part_elements;
  const std::size_t end = first + part_elements;
  return {first < num_elements ? first : num_elements, end < num_elements ? end : num_elements};
}

template <class Number>
__global__ void __launch_bounds__(kBlockThreads)
    topk_part_kernel(std::size_t num_elements, const Number* residual, unsigned num_digits,
                     TopKScratch* scratch) {
  using Bits = typename FloatLayout<Number>::Bits;
  __shared__ std::uint32_t num_above;
  __shared__ std::uint32_t num_equal;
  if (threadIdx.x == 0) num_above = num_equal = 0;
  const Bits threshold = static_cast<Bits>(narrow(num_digits, 0, scratch).key);
  __syncthreads();
  const Part part = part_of_block(num_elements);
  std::uint32_t own_above = 0;
  std::uint32_t own_equal = 0;
  for (std::size_t i = part.first + threadIdx.x; i < part.end; i += kBlockThreads) {
    const Bits key = magnitude_key(residual[i]);
    own_above += key > threshold ? 1U : 0U;
    own_equal += key == threshold ? 1U : 0U;
  }
  atomicAdd(&num_above, own_above);
  atomicAdd(&num_equal, own_equal);
  __syncthreads();
  if (threadIdx.x != 0) return;
  scratch->num_above[blockIdx.x] = num_above;
  scratch->num_equal[blockIdx.x] = num_equal;
}

// The number of keys above the smallest chosen key, and the number of keys equal to it.
struct PartSums {
  std::uint32_t num_above;
  std::uint32_t num_equal;
};

// Sums over the parts before this block's part. A kernel may call it once.
__device__ PartSums sums_before_part(const TopKScratch* scratch) {
  __shared__ std::uint32_t num_above;
  __shared__ std::uint32_t num_equal;
  if (threadIdx.x == 0) num_above = num_equal = 0;
  __syncthreads();
  std::uint32_t own_above = 0;
  std::uint32_t own_equal = 0;
  for (unsigned part = threadIdx.x; part < blockIdx.x; part += kBlockThreads) {
    own_above += scratch->num_above[part];
    own_equal += scratch->num_equal[part];
  }
  atomicAdd(&num_above, own_above);
  atomicAdd(&num_equal, own_equal);
  __syncthreads();
  return {num_above, num_equal};
}

// Returns for how many of the block's threads before this one `yes` is true. Adds the number of all threads
// of the block for which it is true to *total. warp_sums has kBlockWarps places; a barrier must come before
// warp_sums is used again.
__device__ std::uint32_t count_before_thread(bool yes, std::uint32_t* warp_sums, std::uint32_t* total) {
  const unsigned lane = threadIdx.x % kWarpThreads;
  const unsigned warp = threadIdx.x / kWarpThreads;
  const unsigned mask = __ballot_sync(kAllLanes, yes);
  if (lane == 0) warp_sums[warp] = static_cast<std::uint32_t>(__popc(mask));
  __syncthreads();
  auto num_before = static_cast<std::uint32_t>(__popc(mask & ((1U << lane) - 1)));
  for (unsigned other = 0; other < kBlockWarps; ++other) {
    if (other < warp) num_before += warp_sums[other];
    *total += warp_sums[other];
  }
  return num_before;
}

template <class T>
__global__ void __launch_bounds__(kBlockThreads)
    topk_gather_kernel(TopKEncode<T> work, unsigned num_digits, TopKScratch* scratch) {
  using Number = NumberOf<T>;
  using Bits = typename FloatLayout<Number>::Bits;
  __shared__ std::uint32_t above_sums[kBlockWarps];
  __shared__ std::uint32_t equal_sums[kBlockWarps];
  const Bits threshold = static_cast<Bits>(scratch->buckets[num_digits].key);
  const std::uint32_t num_equal_max = scratch->buckets[num_digits].num_equal_max;
  auto [num_above, num_equal] = sums_before_part(scratch);
  // Sets the counts to 0 for the next encoding, because nobody reads them any more.
  for (std::size_t i = first_index(); i < num_digits * kTopKBuckets; i += index_stride())
    scratch->counts[i / kTopKBuckets][i % kTopKBuckets] = 0;
  const Part part = part_of_block(work.num_elements);
  for (std::size_t row = part.first; row < part.end; row += kBlockThreads) {
    const std::size_t i = row + threadIdx.x;
    const bool inside = i < part.end;
    const Number number = inside ? work.residual[i] : Number(0);
    const Bits key = magnitude_key(number);
    const bool is_above = inside && key > threshold;
    const bool is_equal = inside && key == threshold;
    std::uint32_t above_before = num_above;
    std::uint32_t equal_before = num_equal;
    above_before += count_before_thread(is_above, above_sums, &num_above);
    equal_before += count_before_thread(is_equal, equal_sums, &num_equal);
    if (is_above || (is_equal && equal_before < num_equal_max)) {
      const std::uint32_t place =
          above_before + (equal_before < num_equal_max ? equal_before : num_equal_max);
      const auto sent = element_of<SentOf<T>>(number);
      work.indices[place] = static_cast<std::uint32_t>(i);
      work.chosen_values[place] = sent;
      work.residual[i] = rest_of_sent(number, sent);
    } else if (!is_finite_key<Number>(key)) {
      work.residual[i] = Number(0);
    }
    // No barrier is needed here. above_sums and equal_sums are used in turn, and the barrier in the count
    // with one array separates two uses of the other.
  }
}

template <class T>
__global__ void __launch_bounds__(kBlockThreads)
    topk_scatter_kernel(std::size_t num_chosen, const std::uint32_t* indices, const SentOf<T>* chosen_values,
                        T* values) {
  for (std::size_t i = first_index(); i < num_chosen; i += index_stride())
    values[indices[i]] = element_of<T>(number_of(chosen_values[i]));
}

template <class T>
cudaError_t load_kernels_of() {
  return load_kernels(encode_int8_kernel<T>, decode_int8_kernel<T>, topk_count_kernel<T>,
                      topk_part_kernel<NumberOf<T>>, topk_gather_kernel<T>, topk_scatter_kernel<T>);
}

template <class T>
cudaError_t load_rounding_kernels_of() {
  return load_kernels(encode_half_kernel<ToBFloat16, T>, decode_half_kernel<ToBFloat16, T>,
                      encode_half_kernel<ToFloat16, T>, decode_half_kernel<ToFloat16, T>);
}

}  // namespace

int load_codec_kernels() {
  for (const auto load :
       {load_rounding_kernels_of<float>, load_rounding_kernels_of<double>, load_kernels_of<float>,
        load_kernels_of<double>, load_kernels_of<BFloat16>, load_kernels_of<Float16>}) {
    if (const cudaError_t status = load(); status != cudaSuccess) return status;
  }
  return cudaSuccess;
}

template <class T>
int launch_encode_bfloat16(std::size_t num_elements, const T* values, std::uint16_t* encoded,
                           std::uintptr_t stream) {
  PD_LAUNCH((encode_half_kernel<ToBFloat16, T>), num_blocks_for(num_elements), kBlockThreads,
            stream_of(stream), num_elements, values, encoded);
  return cudaGetLastError();
}

template <class T>
int launch_decode_bfloat16(std::size_t num_elements, const std::uint16_t* encoded, T* values,
                           std::uintptr_t stream) {
  PD_LAUNCH((decode_half_kernel<ToBFloat16, T>), num_blocks_for(num_elements), kBlockThreads,
            stream_of(stream), num_elements, encoded, values);
  return cudaGetLastError();
}

template <class T>
int launch_encode_float16(std::size_t num_elements, const T* values, std::uint16_t* encoded,
                          std::uintptr_t stream) {
  PD_LAUNCH((encode_half_kernel<ToFloat16, T>), num_blocks_for(num_elements), kBlockThreads,
            stream_of(stream), num_elements, values, encoded);
  return cudaGetLastError();
}

template <class T>
int launch_decode_float16(std::size_t num_elements, const std::uint16_t* encoded, T* values,
                          std::uintptr_t stream) {
  PD_LAUNCH((decode_half_kernel<ToFloat16, T>), num_blocks_for(num_elements), kBlockThreads,
            stream_of(stream), num_elements, encoded, values);
  return cudaGetLastError();
}

template <class T>
int launch_encode_int8(std::size_t num_elements, const T* values, std::byte* encoded, std::uintptr_t stream) {
  const std::size_t num_threads = (num_elements + kInt8Block - 1) / kInt8Block * kWarpThreads;
  PD_LAUNCH((encode_int8_kernel<T>), num_blocks_for(num_threads), kBlockThreads, stream_of(stream),
            num_elements, values, encoded);
  return cudaGetLastError();
}

template <class T>
int launch_decode_int8(std::size_t num_elements, const std::byte* encoded, T* values, std::uintptr_t stream) {
  PD_LAUNCH((decode_int8_kernel<T>), num_blocks_for(num_elements), kBlockThreads, stream_of(stream),
            num_elements, encoded, values);
  return cudaGetLastError();
}

template <class T>
int launch_encode_topk(const TopKEncode<T>& work, TopKScratch* scratch, std::uintptr_t stream) {
  using Number = NumberOf<T>;
  const unsigned num_count_blocks = num_blocks_for(work.num_elements, kNumCountBlocksMax);
  const unsigned num_parts = num_blocks_for(work.num_elements, kTopKPartsMax);
  unsigned num_digits = 0;
  for (int shift_before = FloatLayout<Number>::kMagnitudeBits; shift_before > 0;) {
    const int shift = next_digit_shift(shift_before);
    PD_LAUNCH((topk_count_kernel<T>), num_count_blocks, kBlockThreads, stream_of(stream), work, num_digits,
              shift_before, shift, scratch);
    shift_before = shift;
    ++num_digits;
  }
  PD_LAUNCH((topk_part_kernel<Number>), num_parts, kBlockThreads, stream_of(stream), work.num_elements,
            work.residual, num_digits, scratch);
  PD_LAUNCH((topk_gather_kernel<T>), num_parts, kBlockThreads, stream_of(stream), work, num_digits, scratch);
  return cudaGetLastError();
}

template <class T>
int launch_decode_topk(std::size_t num_elements, std::size_t num_chosen, const std::uint32_t* indices,
                       const SentOf<T>* chosen_values, T* values, std::uintptr_t stream) {
  const cudaError_t zeroed = cudaMemsetAsync(values, 0, num_elements * sizeof(T), stream_of(stream));
  if (zeroed != cudaSuccess) return zeroed;
  PD_LAUNCH((topk_scatter_kernel<T>), num_blocks_for(num_chosen), kBlockThreads, stream_of(stream),
            num_chosen, indices, chosen_values, values);
  return cudaGetLastError();
}

#define PD_INSTANTIATE(T)                                                                                  \
  template int launch_encode_int8<T>(std::size_t, const T*, std::byte*, std::uintptr_t);                   \
  template int launch_decode_int8<T>(std::size_t, const std::byte*, T*, std::uintptr_t);                   \
  template int launch_encode_topk<T>(const TopKEncode<T>&, TopKScratch*, std::uintptr_t);                  \
  template int launch_decode_topk<T>(std::size_t, std::size_t, const std::uint32_t*, const SentOf<T>*, T*, \
                                     std::uintptr_t);
#define PD_INSTANTIATE_ROUNDING(T)                                                               \
  template int launch_encode_bfloat16<T>(std::size_t, const T*, std::uint16_t*, std::uintptr_t); \
  template int launch_decode_bfloat16<T>(std::size_t, const std::uint16_t*, T*, std::uintptr_t); \
  template int launch_encode_float16<T>(std::size_t, const T*, std::uint16_t*, std::uintptr_t);  \
  template int launch_decode_float16<T>(std::size_t, const std::uint16_t*, T*, std::uintptr_t);
PD_INSTANTIATE(float)
PD_INSTANTIATE(double)
PD_INSTANTIATE(BFloat16)
PD_INSTANTIATE(Float16)
PD_INSTANTIATE_ROUNDING(float)
PD_INSTANTIATE_ROUNDING(double)
#undef PD_INSTANTIATE
#undef PD_INSTANTIATE_ROUNDING

}  // namespace pipedream
