// Launches of the optimizer kernels: what the .cu file, compiled by nvcc, offers to cuda_optimizers.cc.
// Internal to csrc/weights/cuda. C++17; results are cudaError_t as int. Any thread, the device is current.
#pragma once

#include <cstdint>

#include "weights/element_math.h"

namespace pipedream {

// Tensors per launch: as many as fit in a kernel's argument, 4 KiB on every device.
inline constexpr int kTensorsPerLaunch = 48;

template <class T>
struct CudaSgdTensor {
  std::int64_t num_elements;
  const T* weight_in;  // may equal weight_out
  T* weight_out;
  const T* gradient;
  T* momentum_buffer;
};

template <class T>
struct CudaAdamTensor {
  std::int64_t num_elements;
  const T* weight_in;  // may equal weight_out
  T* weight_out;
  const T* gradient;
  T* exp_avg;
  T* exp_avg_sq;
  T* max_exp_avg_sq;
};

template <class Tensor>
struct CudaTensors {
  int num_tensors;
  Tensor tensors[kTensorsPerLaunch];
};

// Loads all of them: see cuda_launch.h.
int load_sgd_and_adam();

// Defined for T of float and double.
template <class T>
int launch_sgd(const SgdFlags& flags, const SgdFactors<T>& factors,
               const CudaTensors<CudaSgdTensor<T>>& tensors, std::uintptr_t stream);
template <class T>
int launch_adam(const AdamFlags& flags, const AdamFactors<T>& factors,
                const CudaTensors<CudaAdamTensor<T>>& tensors, std::uintptr_t stream);

}  // namespace pipedream
