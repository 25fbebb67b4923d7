// Out-of-place SGD: reads version v, writes version v+1 into another slot, in one pass over memory.
// Same arithmetic as torch.optim.SGD:
//   g = gradient + weight_decay * w
//   b = g on the first step, else momentum * b + (1 - dampening) * g
//   d = nesterov ? g + momentum * b : b          (momentum == 0: d = g)
//   w' = w - lr * d
// weight_in == weight_out is allowed (in place); gradient and momentum_buffer overlap nothing.
#pragma once

#include <cstdint>

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

// Throws UserError, as torch.optim.SGD does, for a negative or not finite lr, momentum, weight_decay, a
// dampening that is not finite, and nesterov without momentum or with dampening.
void check_sgd_options(const SgdOptions& options);

// dtype: kFloat32 or kFloat64, for all pointers. momentum_buffer may be null when momentum == 0.
// Host memory; runs on the calling thread.
void sgd_step_host(const SgdOptions& options, DType dtype, std::int64_t num_elements, const void* weight_in,
                   void* weight_out, const void* gradient, void* momentum_buffer, bool first_step);

}  // namespace pipedream
