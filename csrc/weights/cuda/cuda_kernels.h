// Declares functions that launch the optimizer kernels. nvcc compiles them in the .cu file;
// cuda_optimizers.cc calls them. Internal to csrc/weights/cuda. C++17; results are cudaError_t as int. Any
// thread on which the device is current.
#pragma once

#include <cstdint>

#include "weights/element_math.h"

namespace pipedream {

// The most tensors per launch. So many fit in a kernel's arguments, which may have 4 KiB on every device.
inline constexpr int kTensorsPerLaunch = 48;

template <class Element>
struct CudaSgdTensor {
  std::int64_t num_elements;
  const Element* weight_in;  // may equal weight_out
  Element* weight_out;
  const Element* gradient;
  NumberOf<Element>* momentum_buffer;
  NumberOf<Element>* master;  // used only if kHasMaster<Element>
};

template <class Element>
struct CudaAdamTensor {
  std::int64_t num_elements;
  const Element* weight_in;  // may equal weight_out
  Element* weight_out;
  const Element* gradient;
  NumberOf<Element>* exp_avg;
  NumberOf<Element>* exp_avg_sq;
  NumberOf<Element>* max_exp_avg_sq;
  NumberOf<Element>* master;  // used only if kHasMaster<Element>
};

template <class Tensor>
struct CudaTensors {
  int num_tensors;
  Tensor tensors[kTensorsPerLaunch];
};

// Loads all kernels; see cuda_launch.h.
int load_sgd_and_adam();

// Defined for Element = float, double and BFloat16.
template <class Element>
int launch_sgd(const SgdFlags& flags, const SgdFactors<NumberOf<Element>>& factors,
               const CudaTensors<CudaSgdTensor<Element>>& tensors, std::uintptr_t stream);
template <class Element>
int launch_adam(const AdamFlags& flags, const AdamFactors<NumberOf<Element>>& factors,
                const CudaTensors<CudaAdamTensor<Element>>& tensors, std::uintptr_t stream);

}  // namespace pipedream
