// Implements the CUDA part of sgd.h and adam.h: checks tensors, batches them and launches kernels. Any
// thread; the stream's device is current.
#include <cuda_runtime_api.h>

#include <string>

#include "device/cuda/cuda_calls.h"
#include "device/device.h"
#include "weights/adam.h"
#include "weights/cuda/cuda_kernels.h"
#include "weights/optimizer_kernels.h"
#include "weights/sgd.h"
#include "weights/step_factors.h"
#include "weights/tensor_ranges.h"

namespace pipedream {
namespace {

void throw_if_failed(int status, const char* call) {
  const auto error = static_cast<cudaError_t>(status);
  if (error == cudaSuccess) return;
  (void)cudaGetLastError();  // the next call must not report this one again
  throw DeviceError(std::string(call) + " failed: " + cudaGetErrorString(error) + " (" +
                    cudaGetErrorName(error) +
                    "); it may come from earlier work on this device, CUDA_LAUNCH_BLOCKING=1 finds it");
}

template <class Element>
CudaSgdTensor<Element> typed(const SgdTensor& tensor) {
  using Number = NumberOf<Element>;
  return {tensor.num_elements,
          static_cast<const Element*>(tensor.weight_in),
          static_cast<Element*>(tensor.weight_out),
          static_cast<const Element*>(tensor.gradient),
          static_cast<Number*>(tensor.momentum_buffer),
          static_cast<Number*>(tensor.master)};
}

template <class Element>
CudaAdamTensor<Element> typed(const AdamTensor& tensor) {
  using Number = NumberOf<Element>;
  return {tensor.num_elements,
          static_cast<const Element*>(tensor.weight_in),
          static_cast<Element*>(tensor.weight_out),
          static_cast<const Element*>(tensor.gradient),
          static_cast<Number*>(tensor.exp_avg),
          static_cast<Number*>(tensor.exp_avg_sq),
          static_cast<Number*>(tensor.max_exp_avg_sq),
          static_cast<Number*>(tensor.master)};
}

// Calls launch(batch) for batches of at most kTensorsPerLaunch tensors. Empty tensors are left out.
template <class Element, class Tensor, class Launch>
void launch_in_batches(std::span<const Tensor> tensors, const Launch& launch) {
  CudaTensors<decltype(typed<Element>(Tensor{}))> batch{};
  for (const Tensor& tensor : tensors) {
    if (tensor.num_elements == 0) continue;
    batch.tensors[batch.num_tensors++] = typed<Element>(tensor);
    if (batch.num_tensors < kTensorsPerLaunch) continue;
    launch(batch);
    batch.num_tensors = 0;
  }
  if (batch.num_tensors > 0) launch(batch);
}

template <class Element>
void sgd_step(const SgdOptions& options, std::span<const SgdTensor> tensors, bool first_step,
              double gradient_scale, std::uintptr_t stream) {
  const SgdFlags flags = sgd_flags(options, first_step);
  const SgdFactors<NumberOf<Element>> factors = sgd_factors<NumberOf<Element>>(options, gradient_scale);
  launch_in_batches<Element>(tensors, [&](const CudaTensors<CudaSgdTensor<Element>>& batch) {
    throw_if_failed(launch_sgd<Element>(flags, factors, batch, stream), "the SGD kernel");
  });
}

template <class Element>
void adam_step(const AdamOptions& options, std::span<const AdamTensor> tensors, std::int64_t step,
               double gradient_scale, std::uintptr_t stream) {
  const AdamFlags flags = adam_flags(options);
  const AdamFactors<NumberOf<Element>> factors =
      adam_factors<NumberOf<Element>>(options, step, gradient_scale);
  launch_in_batches<Element>(tensors, [&](const CudaTensors<CudaAdamTensor<Element>>& batch) {
    throw_if_failed(launch_adam<Element>(flags, factors, batch, stream), "the Adam kernel");
  });
}

}  // namespace

void load_optimizer_kernels(int device_index) {
  const DeviceScope scope(device_index);
  throw_if_failed(static_cast<cudaError_t>(load_sgd_and_adam()), "loading the optimizers' kernels",
                  device_index);
}

void sgd_step_cuda(const SgdOptions& options, DType dtype, std::span<const SgdTensor> tensors,
                   bool first_step, double gradient_scale, std::uintptr_t stream) {
  check_sgd_tensors(options, dtype, tensors);
  with_element_of(dtype, [&](auto element) {
    sgd_step<decltype(element)>(options, tensors, first_step, gradient_scale, stream);
  });
}

void adam_step_cuda(const AdamOptions& options, DType dtype, std::span<const AdamTensor> tensors,
                    std::int64_t step, double gradient_scale, std::uintptr_t stream) {
  check_adam_tensors(options, dtype, tensors, step);
  with_element_of(dtype, [&](auto element) {
    adam_step<decltype(element)>(options, tensors, step, gradient_scale, stream);
  });
}

}  // namespace pipedream
