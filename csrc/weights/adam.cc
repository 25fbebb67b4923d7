// Implements Adam over host memory: turns options into factors, and tensors into ranges for the kernels. See
// adam.h for the arithmetic, element_math.h for its code and host_kernels.h for the loops.
#include "weights/adam.h"

#include <cstddef>
#include <string>

#include "base/check.h"
#include "base/failure.h"
#include "weights/host_kernels.h"
#include "weights/step_factors.h"
#include "weights/tensor_ranges.h"

namespace pipedream {
namespace {

template <class Element>
void adam_step(const AdamOptions& options, std::span<const AdamTensor> tensors, std::int64_t step,
               double gradient_scale, int num_threads) {
  const AdamFlags flags = adam_flags(options);
  using Number = NumberOf<Element>;
  const AdamFactors<Number> factors = adam_factors<Number>(options, step, gradient_scale);
  const HostKernels<Element>& kernels = host_kernels<Element>();
  const std::size_t num_streams = flags.amsgrad ? 6 : 5;
  const bool exceeds_caches =
      worth_streaming(static_cast<std::size_t>(sum_of_elements(tensors)) * sizeof(Number) * num_streams);
  run_over_tensors(
      tensors, num_threads, [&](const AdamTensor& tensor, std::int64_t first, std::int64_t count) {
        auto* const master = static_cast<Number*>(tensor.master);
        auto* const max_exp_avg_sq = static_cast<Number*>(tensor.max_exp_avg_sq);
        const AdamRange<Element> range{count,
                                       static_cast<const Element*>(tensor.weight_in) + first,
                                       static_cast<Element*>(tensor.weight_out) + first,
                                       static_cast<const Element*>(tensor.gradient) + first,
                                       static_cast<Number*>(tensor.exp_avg) + first,
                                       static_cast<Number*>(tensor.exp_avg_sq) + first,
                                       flags.amsgrad ? max_exp_avg_sq + first : nullptr,
                                       kHasMaster<Element> ? master + first : nullptr};
        kernels.adam(flags, factors, range, exceeds_caches && tensor.weight_in != tensor.weight_out);
      });
}

void check_beta(const char* name, double value) {
  if (value >= 0 && value < 1) return;
  throw UserError(std::string(name) + " is " + std::to_string(value) + "; it must be at least 0 and below 1");
}

}  // namespace

void check_adam_options(const AdamOptions& options) {
  check_number("lr", options.lr, false);
  check_number("eps", options.eps, false);
  check_number("weight_decay", options.weight_decay, false);
  check_beta("beta1", options.beta1);
  check_beta("beta2", options.beta2);
  check_number("momentum_decay", options.momentum_decay, false);
}

void check_adam_tensors(const AdamOptions& options, DType dtype, std::span<const AdamTensor> tensors,
                        std::int64_t step) {
  PD_CHECK(step >= 1, "step " << step);
  PD_CHECK(!options.nesterov || (options.decoupled_weight_decay && !options.amsgrad),
           "NAdam with amsgrad or with weight decay that is added to the gradient");
  for (const AdamTensor& tensor : tensors) {
    check_tensor(dtype, tensor);
    if (tensor.num_elements == 0) continue;
    PD_CHECK(tensor.exp_avg != nullptr && tensor.exp_avg_sq != nullptr,
             tensor.exp_avg << ", " << tensor.exp_avg_sq);
    PD_CHECK(tensor.max_exp_avg_sq != nullptr || !options.amsgrad, "amsgrad without its maximum");
  }
}

void adam_step_host(const AdamOptions& options, DType dtype, std::span<const AdamTensor> tensors,
                    std::int64_t step, double gradient_scale, int num_threads) {
  check_adam_tensors(options, dtype, tensors, step);
  with_element_of(dtype, [&](auto element) {
    adam_step<decltype(element)>(options, tensors, step, gradient_scale, num_threads);
  });
}

}  // namespace pipedream
