// The optimizer kernels for CUDA: grid-stride loops over 16-byte packs where the pointers allow it. Memory
// bound, so options are uniform branches instead of template parameters. See element_math.h for the
// arithmetic; compiled without contraction, so that it is the host's to the bit.
//
//   grid.x  blocks that share a tensor's elements
//   grid.y  tensors of the launch; blocks beyond a small tensor's end leave at once
#include <cuda_runtime_api.h>

#include "device/cuda/cuda_launch.h"
#include "weights/cuda/cuda_kernels.h"

namespace pipedream {
namespace {

constexpr int kBlockThreads = 256;
// Per tensor: several waves on the largest device, so that the last one does not leave it half idle.
constexpr std::int64_t kNumBlocksMax = 4096;

template <class T>
struct alignas(16) Pack {
  static constexpr int kElements = 16 / static_cast<int>(sizeof(T));
  T values[kElements];
};

template <class T>
__device__ Pack<T> load_pack(const T* values, std::int64_t pack_index) {
  return reinterpret_cast<const Pack<T>*>(values)[pack_index];
}

template <class T>
__device__ void store_pack(T* values, std::int64_t pack_index, const Pack<T>& pack) {
  reinterpret_cast<Pack<T>*>(values)[pack_index] = pack;
}

// Null counts as aligned: it is not dereferenced.
template <class... Pointers>
__device__ bool all_aligned(Pointers... pointers) {
  return ((reinterpret_cast<std::uintptr_t>(pointers) | ...) % 16) == 0;
}

__device__ std::int64_t first_index() {
  return static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
}

__device__ std::int64_t index_stride() { return static_cast<std::int64_t>(gridDim.x) * blockDim.x; }

template <class T>
__device__ void sgd_one(const SgdFlags& flags, const SgdFactors<T>& factors, const CudaSgdTensor<T>& tensor,
                        std::int64_t i) {
  T momentum = flags.has_momentum && !flags.first_step ? tensor.momentum_buffer[i] : T(0);
  tensor.weight_out[i] = sgd_element(flags, factors, tensor.weight_in[i], tensor.gradient[i], &momentum);
  if (flags.has_momentum) tensor.momentum_buffer[i] = momentum;
}

template <class T>
__device__ void sgd_pack(const SgdFlags& flags, const SgdFactors<T>& factors, const CudaSgdTensor<T>& tensor,
                         std::int64_t pack_index) {
  Pack<T> weight = load_pack(tensor.weight_in, pack_index);
  const Pack<T> gradient = load_pack(tensor.gradient, pack_index);
  Pack<T> momentum{};
  if (flags.has_momentum && !flags.first_step) momentum = load_pack(tensor.momentum_buffer, pack_index);
#pragma unroll
  for (int i = 0; i < Pack<T>::kElements; ++i) {
    weight.values[i] = sgd_element(flags, factors, weight.values[i], gradient.values[i], &momentum.values[i]);
  }
  store_pack(tensor.weight_out, pack_index, weight);
  if (flags.has_momentum) store_pack(tensor.momentum_buffer, pack_index, momentum);
}

template <class T>
__global__ void __launch_bounds__(kBlockThreads)
    sgd_kernel(SgdFlags flags, SgdFactors<T> factors, CudaTensors<CudaSgdTensor<T>> tensors) {
  const CudaSgdTensor<T>& tensor = tensors.tensors[blockIdx.y];
  const bool packed =
      all_aligned(tensor.weight_in, tensor.weight_out, tensor.gradient, tensor.momentum_buffer);
  const std::int64_t num_packs = packed ? tensor.num_elements / Pack<T>::kElements : 0;
  for (std::int64_t i = first_index(); i < num_packs; i += index_stride())
    sgd_pack(flags, factors, tensor, i);
  for (std::int64_t i = num_packs * Pack<T>::kElements + first_index(); i < tensor.num_elements;
       i += index_stride()) {
    sgd_one(flags, factors, tensor, i);
  }
}

template <class T>
__device__ void adam_one(const AdamFlags& flags, const AdamFactors<T>& factors,
                         const CudaAdamTensor<T>& tensor, std::int64_t i) {
  T moment = tensor.exp_avg[i];
  T square = tensor.exp_avg_sq[i];
  T largest = flags.amsgrad ? tensor.max_exp_avg_sq[i] : T(0);
  tensor.weight_out[i] =
      adam_element(flags, factors, tensor.weight_in[i], tensor.gradient[i], &moment, &square, &largest);
  tensor.exp_avg[i] = moment;
  tensor.exp_avg_sq[i] = square;
  if (flags.amsgrad) tensor.max_exp_avg_sq[i] = largest;
}

template <class T>
__device__ void adam_pack(const AdamFlags& flags, const AdamFactors<T>& factors,
                          const CudaAdamTensor<T>& tensor, std::int64_t pack_index) {
  Pack<T> weight = load_pack(tensor.weight_in, pack_index);
  const Pack<T> gradient = load_pack(tensor.gradient, pack_index);
  Pack<T> moment = load_pack(tensor.exp_avg, pack_index);
  Pack<T> square = load_pack(tensor.exp_avg_sq, pack_index);
  Pack<T> largest{};
  if (flags.amsgrad) largest = load_pack(tensor.max_exp_avg_sq, pack_index);
#pragma unroll
  for (int i = 0; i < Pack<T>::kElements; ++i) {
    weight.values[i] = adam_element(flags, factors, weight.values[i], gradient.values[i], &moment.values[i],
                                    &square.values[i], &largest.values[i]);
  }
  store_pack(tensor.weight_out, pack_index, weight);
  store_pack(tensor.exp_avg, pack_index, moment);
  store_pack(tensor.exp_avg_sq, pack_index, square);
  if (flags.amsgrad) store_pack(tensor.max_exp_avg_sq, pack_index, largest);
}

template <class T>
__global__ void __launch_bounds__(kBlockThreads)
    adam_kernel(AdamFlags flags, AdamFactors<T> factors, CudaTensors<CudaAdamTensor<T>> tensors) {
  const CudaAdamTensor<T>& tensor = tensors.tensors[blockIdx.y];
  const bool packed = all_aligned(tensor.weight_in, tensor.weight_out, tensor.gradient, tensor.exp_avg,
                                  tensor.exp_avg_sq, tensor.max_exp_avg_sq);
  const std::int64_t num_packs = packed ? tensor.num_elements / Pack<T>::kElements : 0;
  for (std::int64_t i = first_index(); i < num_packs; i += index_stride())
    adam_pack(flags, factors, tensor, i);
  for (std::int64_t i = num_packs * Pack<T>::kElements + first_index(); i < tensor.num_elements;
       i += index_stride()) {
    adam_one(flags, factors, tensor, i);
  }
}

template <class T, class Tensor>
dim3 grid_of(const CudaTensors<Tensor>& tensors) {
  std::int64_t largest = 1;
  for (int i = 0; i < tensors.num_tensors; ++i) {
    if (tensors.tensors[i].num_elements > largest) largest = tensors.tensors[i].num_elements;
  }
  constexpr std::int64_t kElementsPerBlock = kBlockThreads * Pack<T>::kElements;
  const std::int64_t num_blocks = (largest + kElementsPerBlock - 1) / kElementsPerBlock;
  return dim3(static_cast<unsigned>(num_blocks < kNumBlocksMax ? num_blocks : kNumBlocksMax),
              static_cast<unsigned>(tensors.num_tensors));
}

cudaStream_t stream_of(std::uintptr_t stream) { return reinterpret_cast<cudaStream_t>(stream); }

}  // namespace

int load_sgd_and_adam() {
  return load_kernels(sgd_kernel<float>, sgd_kernel<double>, adam_kernel<float>, adam_kernel<double>);
}

template <class T>
int launch_sgd(const SgdFlags& flags, const SgdFactors<T>& factors,
               const CudaTensors<CudaSgdTensor<T>>& tensors, std::uintptr_t stream) {
  PD_LAUNCH((sgd_kernel<T>), grid_of<T>(tensors), kBlockThreads, stream_of(stream), flags, factors, tensors);
  return cudaGetLastError();
}

template <class T>
int launch_adam(const AdamFlags& flags, const AdamFactors<T>& factors,
                const CudaTensors<CudaAdamTensor<T>>& tensors, std::uintptr_t stream) {
  PD_LAUNCH((adam_kernel<T>), grid_of<T>(tensors), kBlockThreads, stream_of(stream), flags, factors, tensors);
  return cudaGetLastError();
}

#define PD_INSTANTIATE(T)                                                                                 \
  template int launch_sgd<T>(const SgdFlags&, const SgdFactors<T>&, const CudaTensors<CudaSgdTensor<T>>&, \
                             std::uintptr_t);                                                             \
  template int launch_adam<T>(const AdamFlags&, const AdamFactors<T>&,                                    \
                              const CudaTensors<CudaAdamTensor<T>>&, std::uintptr_t);
PD_INSTANTIATE(float)
PD_INSTANTIATE(double)
#undef PD_INSTANTIATE

}  // namespace pipedream
