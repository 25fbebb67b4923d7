// Defines the optimizer kernels for CUDA: grid-stride loops, over packs of 16 bytes if the pointers are
// aligned. Memory limits their speed, so options are plain branches that all threads take alike, and no
// template parameters. element_math.h has the arithmetic. The compiler does not contract multiply-adds, so
// the bits are those of the host.
//
//   grid.x  blocks that share a tensor's elements
//   grid.y  tensors of the launch; blocks beyond a small tensor's end return at once
#include <cuda_runtime_api.h>

#include "device/cuda/cuda_launch.h"
#include "weights/cuda/cuda_kernels.h"

namespace pipedream {
namespace {

constexpr int kBlockThreads = 256;
// The most blocks per tensor. So many blocks run as several waves even on the largest device, so a last wave
// that is not full costs little.
constexpr std::int64_t kNumBlocksMax = 4096;

// The number of elements in a pack: as many as there are numbers of the arithmetic's type in 16 bytes.
template <class Element>
constexpr int kPackElements = 16 / static_cast<int>(sizeof(NumberOf<Element>));

template <class T, int kElements>
struct alignas(sizeof(T) * kElements) Pack {
  T values[kElements];
};

template <int kElements, class T>
__device__ Pack<T, kElements> load_pack(const T* values, std::int64_t pack_index) {
  return reinterpret_cast<const Pack<T, kElements>*>(values)[pack_index];
}

template <int kElements, class T>
__device__ void store_pack(T* values, std::int64_t pack_index, const Pack<T, kElements>& pack) {
  reinterpret_cast<Pack<T, kElements>*>(values)[pack_index] = pack;
}

// Returns whether all pointers are aligned to 16 bytes. Null, which is never dereferenced, counts as aligned.
template <class... Pointers>
__device__ bool all_aligned(Pointers... pointers) {
  return ((reinterpret_cast<std::uintptr_t>(pointers) | ...) % 16) == 0;
}

// A pack of weights in the type of the arithmetic.
template <class Element>
using WeightPack = Pack<NumberOf<Element>, kPackElements<Element>>;

// Loads a pack of weights of version v; weight_before() loads a single weight.
template <class Element, template <class> class Tensor>
__device__ WeightPack<Element> load_weights(const Tensor<Element>& tensor, std::int64_t pack_index) {
  if constexpr (kHasMaster<Element>) {
    return load_pack<kPackElements<Element>>(tensor.master, pack_index);
  } else {
    return load_pack<kPackElements<Element>>(tensor.weight_in, pack_index);
  }
}

// Stores a pack of weights of version v + 1; keep_weight() stores a single weight.
template <class Element, template <class> class Tensor>
__device__ void store_weights(const Tensor<Element>& tensor, std::int64_t pack_index,
                              const WeightPack<Element>& weight) {
  if constexpr (kHasMaster<Element>) store_pack(tensor.master, pack_index, weight);
  Pack<Element, kPackElements<Element>> elements;
#pragma unroll
  for (int i = 0; i < kPackElements<Element>; ++i) elements.values[i] = element_of<Element>(weight.values[i]);
  store_pack(tensor.weight_out, pack_index, elements);
}

__device__ std::int64_t first_index() {
  return static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
}

__device__ std::int64_t index_stride() { return static_cast<std::int64_t>(gridDim.x) * blockDim.x; }

template <class Element>
__device__ void sgd_one(const SgdFlags& flags, const SgdFactors<NumberOf<Element>>& factors,
                        const CudaSgdTensor<Element>& tensor, std::int64_t i) {
  using Number = NumberOf<Element>;
  Number momentum = flags.has_momentum && !flags.first_step ? tensor.momentum_buffer[i] : Number(0);
  const Number before = weight_before(tensor.weight_in, tensor.master, i);
  const Number weight = sgd_element(flags, factors, before, number_of(tensor.gradient[i]), &momentum);
  keep_weight(weight, tensor.weight_out, tensor.master, i);
  if (flags.has_momentum) tensor.momentum_buffer[i] = momentum;
}

template <class Element>
__device__ void sgd_pack(const SgdFlags& flags, const SgdFactors<NumberOf<Element>>& factors,
                         const CudaSgdTensor<Element>& tensor, std::int64_t pack_index) {
  constexpr int kElements = kPackElements<Element>;
  WeightPack<Element> weight = load_weights(tensor, pack_index);
  const auto gradient = load_pack<kElements>(tensor.gradient, pack_index);
  Pack<NumberOf<Element>, kElements> momentum{};
  if (flags.has_momentum && !flags.first_step)
    momentum = load_pack<kElements>(tensor.momentum_buffer, pack_index);
#pragma unroll
  for (int i = 0; i < kElements; ++i) {
    weight.values[i] =
        sgd_element(flags, factors, weight.values[i], number_of(gradient.values[i]), &momentum.values[i]);
  }
  store_weights(tensor, pack_index, weight);
  if (flags.has_momentum) store_pack(tensor.momentum_buffer, pack_index, momentum);
}

template <class Element>
__global__ void __launch_bounds__(kBlockThreads)
    sgd_kernel(SgdFlags flags, SgdFactors<NumberOf<Element>> factors,
               CudaTensors<CudaSgdTensor<Element>> tensors) {
  const CudaSgdTensor<Element>& tensor = tensors.tensors[blockIdx.y];
  const bool packed = all_aligned(tensor.weight_in, tensor.weight_out, tensor.gradient,
                                  tensor.momentum_buffer, tensor.master);
  const std::int64_t num_packs = packed ? tensor.num_elements / kPackElements<Element> : 0;
  for (std::int64_t i = first_index(); i < num_packs; i += index_stride())
    sgd_pack(flags, factors, tensor, i);
  for (std::int64_t i = num_packs * kPackElements<Element> + first_index(); i < tensor.num_elements;
       i += index_stride()) {
    sgd_one(flags, factors, tensor, i);
  }
}

template <class Element>
__device__ void adam_one(const AdamFlags& flags, const AdamFactors<NumberOf<Element>>& factors,
                         const CudaAdamTensor<Element>& tensor, std::int64_t i) {
  using Number = NumberOf<Element>;
  Number moment = tensor.exp_avg[i];
  Number square = tensor.exp_avg_sq[i];
  Number largest = flags.amsgrad ? tensor.max_exp_avg_sq[i] : Number(0);
  const Number before = weight_before(tensor.weight_in, tensor.master, i);
  const Number weight =
      adam_element(flags, factors, before, number_of(tensor.gradient[i]), &moment, &square, &largest);
  keep_weight(weight, tensor.weight_out, tensor.master, i);
  tensor.exp_avg[i] = moment;
  tensor.exp_avg_sq[i] = square;
  if (flags.amsgrad) tensor.max_exp_avg_sq[i] = largest;
}

template <class Element>
__device__ void adam_pack(const AdamFlags& flags, const AdamFactors<NumberOf<Element>>& factors,
                          const CudaAdamTensor<Element>& tensor, std::int64_t pack_index) {
  constexpr int kElements = kPackElements<Element>;
  WeightPack<Element> weight = load_weights(tensor, pack_index);
  const auto gradient = load_pack<kElements>(tensor.gradient, pack_index);
  auto moment = load_pack<kElements>(tensor.exp_avg, pack_index);
  auto square = load_pack<kElements>(tensor.exp_avg_sq, pack_index);
  Pack<NumberOf<Element>, kElements> largest{};
  if (flags.amsgrad) largest = load_pack<kElements>(tensor.max_exp_avg_sq, pack_index);
#pragma unroll
  for (int i = 0; i < kElements; ++i) {
    weight.values[i] = adam_element(flags, factors, weight.values[i], number_of(gradient.values[i]),
                                    &moment.values[i], &square.values[i], &largest.values[i]);
  }
  store_weights(tensor, pack_index, weight);
  store_pack(tensor.exp_avg, pack_index, moment);
  store_pack(tensor.exp_avg_sq, pack_index, square);
  if (flags.amsgrad) store_pack(tensor.max_exp_avg_sq, pack_index, largest);
}

template <class Element>
__global__ void __launch_bounds__(kBlockThreads)
    adam_kernel(AdamFlags flags, AdamFactors<NumberOf<Element>> factors,
                CudaTensors<CudaAdamTensor<Element>> tensors) {
  const CudaAdamTensor<Element>& tensor = tensors.tensors[blockIdx.y];
  const bool packed = all_aligned(tensor.weight_in, tensor.weight_out, tensor.gradient, tensor.exp_avg,
                                  tensor.exp_avg_sq, tensor.max_exp_avg_sq, tensor.master);
  const std::int64_t num_packs = packed ? tensor.num_elements / kPackElements<Element> : 0;
  for (std::int64_t i = first_index(); i < num_packs; i += index_stride())
    adam_pack(flags, factors, tensor, i);
  for (std::int64_t i = num_packs * kPackElements<Element> + first_index(); i < tensor.num_elements;
       i += index_stride()) {
    adam_one(flags, factors, tensor, i);
  }
}

template <class Element, class Tensor>
dim3 grid_of(const CudaTensors<Tensor>& tensors) {
  std::int64_t largest = 1;
  for (int i = 0; i < tensors.num_tensors; ++i) {
    if (tensors.tensors[i].num_elements > largest) largest = tensors.tensors[i].num_elements;
  }
  constexpr std::int64_t kElementsPerBlock = kBlockThreads * kPackElements<Element>;
  const std::int64_t num_blocks = (largest + kElementsPerBlock - 1) / kElementsPerBlock;
  return dim3(static_cast<unsigned>(num_blocks < kNumBlocksMax ? num_blocks : kNumBlocksMax),
              static_cast<unsigned>(tensors.num_tensors));
}

cudaStream_t stream_of(std::uintptr_t stream) { return reinterpret_cast<cudaStream_t>(stream); }

}  // namespace

int load_sgd_and_adam() {
  return load_kernels(sgd_kernel<float>, sgd_kernel<double>, sgd_kernel<BFloat16>, adam_kernel<float>,
                      adam_kernel<double>, adam_kernel<BFloat16>);
}

template <class Element>
int launch_sgd(const SgdFlags& flags, const SgdFactors<NumberOf<Element>>& factors,
               const CudaTensors<CudaSgdTensor<Element>>& tensors, std::uintptr_t stream) {
  PD_LAUNCH((sgd_kernel<Element>), grid_of<Element>(tensors), kBlockThreads, stream_of(stream), flags,
            factors, tensors);
  return cudaGetLastError();
}

template <class Element>
int launch_adam(const AdamFlags& flags, const AdamFactors<NumberOf<Element>>& factors,
                const CudaTensors<CudaAdamTensor<Element>>& tensors, std::uintptr_t stream) {
  PD_LAUNCH((adam_kernel<Element>), grid_of<Element>(tensors), kBlockThreads, stream_of(stream), flags,
            factors, tensors);
  return cudaGetLastError();
}

#define PD_INSTANTIATE(Element)                                                                 \
  template int launch_sgd<Element>(const SgdFlags&, const SgdFactors<NumberOf<Element>>&,       \
                                   const CudaTensors<CudaSgdTensor<Element>>&, std::uintptr_t); \
  template int launch_adam<Element>(const AdamFlags&, const AdamFactors<NumberOf<Element>>&,    \
                                    const CudaTensors<CudaAdamTensor<Element>>&, std::uintptr_t);
PD_INSTANTIATE(float)
PD_INSTANTIATE(double)
PD_INSTANTIATE(BFloat16)
#undef PD_INSTANTIATE

}  // namespace pipedream
