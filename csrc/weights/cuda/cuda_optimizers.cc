// The CUDA part of sgd.h and adam.h: checks, batches of tensors, launches. Any thread; the stream's device is
// current.
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

template <class T>
CudaSgdTensor<T> typed(const SgdTensor& tensor) {
  return {tensor.num_elements, static_cast<const T*>(tensor.weight_in), static_cast<T*>(tensor.weight_out),
          static_cast<const T*>(tensor.gradient), static_cast<T*>(tensor.momentum_buffer)};
}

template <class T>
CudaAdamTensor<T> typed(const AdamTensor& tensor) {
  return {tensor.num_elements,
          static_cast<const T*>(tensor.weight_in),
          static_cast<T*>(tensor.weight_out),
          static_cast<const T*>(tensor.gradient),
          static_cast<T*>(tensor.exp_avg),
          static_cast<T*>(tensor.exp_avg_sq),
          static_cast<T*>(tensor.max_exp_avg_sq)};
}

// launch(batch) for every kTensorsPerLaunch tensors that are not empty.
template <class T, class Tensor, class Launch>
void launch_in_batches(std::span<const Tensor> tensors, const Launch& launch) {
  CudaTensors<decltype(typed<T>(Tensor{}))> batch{};
  for (const Tensor& tensor : tensors) {
    if (tensor.num_elements == 0) continue;
    batch.tensors[batch.num_tensors++] = typed<T>(tensor);
    if (batch.num_tensors < kTensorsPerLaunch) continue;
    launch(batch);
    batch.num_tensors = 0;
  }
  if (batch.num_tensors > 0) launch(batch);
}

template <class T>
void sgd_step(const SgdOptions& options, std::span<const SgdTensor> tensors, bool first_step,
              double gradient_scale, std::uintptr_t stream) {
  const SgdFlags flags = sgd_flags(options, first_step);
  const SgdFactors<T> factors = sgd_factors<T>(options, gradient_scale);
  launch_in_batches<T>(tensors, [&](const CudaTensors<CudaSgdTensor<T>>& batch) {
    throw_if_failed(launch_sgd<T>(flags, factors, batch, stream), "the SGD kernel");
  });
}

template <class T>
void adam_step(const AdamOptions& options, std::span<const AdamTensor> tensors, std::int64_t step,
               double gradient_scale, std::uintptr_t stream) {
  const AdamFlags flags = adam_flags(options);
  const AdamFactors<T> factors = adam_factors<T>(options, step, gradient_scale);
  launch_in_batches<T>(tensors, [&](const CudaTensors<CudaAdamTensor<T>>& batch) {
    throw_if_failed(launch_adam<T>(flags, factors, batch, stream), "the Adam kernel");
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
  if (dtype == DType::kFloat32) {
    sgd_step<float>(options, tensors, first_step, gradient_scale, stream);
  } else {
    sgd_step<double>(options, tensors, first_step, gradient_scale, stream);
  }
}

void adam_step_cuda(const AdamOptions& options, DType dtype, std::span<const AdamTensor> tensors,
                    std::int64_t step, double gradient_scale, std::uintptr_t stream) {
  check_adam_tensors(options, dtype, tensors, step);
  if (dtype == DType::kFloat32) {
    adam_step<float>(options, tensors, step, gradient_scale, stream);
  } else {
    adam_step<double>(options, tensors, step, gradient_scale, stream);
  }
}

}  // namespace pipedream
