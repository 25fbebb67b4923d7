// Implements out-of-place SGD: a step reads version v and writes version v+1 into another slot, in one pass
// over memory. The arithmetic is that of torch.optim.SGD:
//   g = gradient_scale * gradient + weight_decay * w
//   b = g on the first step, else momentum * b + (1 - dampening) * g
//   d = nesterov ? g + momentum * b : b          (momentum == 0: d = g)
//   w' = w - lr * d
// weight_in == weight_out is allowed (in place); gradient and momentum_buffer overlap nothing.
#pragma once

#include <cstdint>
#include <span>

#include "base/dtype.h"

namespace pipedream {

struct SgdOptions {
  double lr = 1e-3;
  double momentum = 0;
  double dampening = 0;
  double weight_decay = 0;
  bool nesterov = false;
  bool maximize = false;
};

// One parameter of a step. Each pointer leads to num_elements elements, in the same order. Weights and
// gradient have the step's dtype. momentum_buffer has the step's dtype, or float32 if that is bfloat16.
struct SgdTensor {
  std::int64_t num_elements = 0;
  const void* weight_in = nullptr;
  void* weight_out = nullptr;
  const void* gradient = nullptr;
  void* momentum_buffer = nullptr;  // may be null when momentum == 0
  // Only for bfloat16: the weights in float32. The step reads version v here and not in weight_in, and
  // overwrites it with version v + 1. weight_out gets version v + 1 rounded to nearest even. Overlaps
  // nothing.
  void* master = nullptr;
};

// Throws UserError, as torch.optim.SGD does, if lr, momentum or weight_decay is negative or not finite, or if
// dampening is not finite, and for nesterov without momentum or with dampening.
void check_sgd_options(const SgdOptions& options);

// Does a step. dtype: kFloat32, kFloat64 or kBFloat16. gradient_scale multiplies the gradients first, so that
// unscaling and clipping need no pass of their own. Runs on the calling thread and at most num_threads - 1
// other threads. The step is done when the call returns.
void sgd_step_host(const SgdOptions& options, DType dtype, std::span<const SgdTensor> tensors,
                   bool first_step, double gradient_scale = 1, int num_threads = 1);

// Does a step as sgd_step_host() does, in device memory. The step is enqueued on the stream (a cudaStream_t
// as an integer) of the current device. The tensors' memory stays valid until the stream is done. Throws
// UserError without CUDA, DeviceError when the device refuses.
void sgd_step_cuda(const SgdOptions& options, DType dtype, std::span<const SgdTensor> tensors,
                   bool first_step, double gradient_scale, std::uintptr_t stream);

}  // namespace pipedream
