// Implements out-of-place Adam and AdamW: a step reads version v and writes version v+1 into another slot, in
// one pass over memory. The arithmetic is that of torch.optim.Adam and AdamW (Kingma and Ba, ICLR'15;
// Loshchilov and Hutter, ICLR'19; amsgrad: Reddi et al., ICLR'18), t counting steps from 1:
//   g = gradient_scale * gradient (+ weight_decay * w, unless decoupled)
//   w = (1 - lr * weight_decay) * w, where decoupled
//   m = m + (1 - beta1) * (g - m)
//   v = beta2 * v + (1 - beta2) * g * g
//   u = amsgrad ? max(largest v so far, v) : v
//   w' = w - lr / (1 - beta1^t) * m / (sqrt(u) / sqrt(1 - beta2^t) + eps)
// NAdam (Dozat, ICLR'16 workshop; torch.optim.NAdam) moves by an estimate of the next step's first moment:
//   mu(t) = beta1 * (1 - 0.5 * 0.96^(t * momentum_decay)),  p(t) = mu(1) * ... * mu(t)
//   w' = w - lr * ((1 - mu(t)) / (1 - p(t)) * g + mu(t+1) / (1 - p(t+1)) * m) / (sqrt(u) / sqrt(1 - beta2^t)
//   + eps)
// weight_in == weight_out is allowed (in place); gradient and the moments overlap nothing.
#pragma once

#include <cstdint>
#include <span>

#include "base/dtype.h"

namespace pipedream {

struct AdamOptions {
  double lr = 1e-3;
  double beta1 = 0.9;
  double beta2 = 0.999;
  double eps = 1e-8;
  double weight_decay = 0;
  bool decoupled_weight_decay = false;  // true for AdamW
  bool amsgrad = false;
  bool maximize = false;
  bool nesterov = false;  // true for NAdam; it has no amsgrad, and its weight decay must be decoupled
  double momentum_decay = 4e-3;
  double momentum_product = 0;  // p(t) of this step
};

// One parameter of a step, with pointers as in SgdTensor (sgd.h). The moments are zero before the first step.
// They are float32 if the dtype is bfloat16.
struct AdamTensor {
  std::int64_t num_elements = 0;
  const void* weight_in = nullptr;
  void* weight_out = nullptr;
  const void* gradient = nullptr;
  void* exp_avg = nullptr;
  void* exp_avg_sq = nullptr;
  void* max_exp_avg_sq = nullptr;  // may be null without amsgrad
  void* master = nullptr;          // only for bfloat16
};

// Throws UserError, as torch.optim.Adam does, if lr, eps, weight_decay or momentum_decay is negative or not
// finite, or if a beta is outside [0, 1).
void check_adam_options(const AdamOptions& options);

// step: 1 for the first step. The other arguments are those of sgd_step_host and sgd_step_cuda (sgd.h).
void adam_step_host(const AdamOptions& options, DType dtype, std::span<const AdamTensor> tensors,
                    std::int64_t step, double gradient_scale = 1, int num_threads = 1);
void adam_step_cuda(const AdamOptions& options, DType dtype, std::span<const AdamTensor> tensors,
                    std::int64_t step, double gradient_scale, std::uintptr_t stream);

}  // namespace pipedream
