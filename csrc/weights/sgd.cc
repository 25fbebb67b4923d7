// SGD over host memory: options to factors, tensors to the kernels' ranges. See sgd.h for the arithmetic,
// element_math.h for its text and host_kernels.h for the loops.
#include "weights/sgd.h"

#include <cstddef>
#include <string>

#include "base/check.h"
#include "base/failure.h"
#include "weights/host_kernels.h"
#include "weights/step_factors.h"
#include "weights/tensor_ranges.h"

namespace pipedream {
namespace {

template <class T>
void sgd_step(const SgdOptions& options, std::span<const SgdTensor> tensors, bool first_step,
              double gradient_scale, int num_threads) {
  const SgdFlags flags = sgd_flags(options, first_step);
  const SgdFactors<T> factors = sgd_factors<T>(options, gradient_scale);
  const HostKernels<T>& kernels = host_kernels<T>();
  const std::size_t num_streams = flags.has_momentum ? 4 : 3;
  const bool exceeds_caches =
      worth_streaming(static_cast<std::size_t>(sum_of_elements(tensors)) * sizeof(T) * num_streams);
  run_over_tensors(
      tensors, num_threads, [&](const SgdTensor& tensor, std::int64_t first, std::int64_t count) {
        auto* const momentum_buffer = static_cast<T*>(tensor.momentum_buffer);
        const SgdRange<T> range{count, static_cast<const T*>(tensor.weight_in) + first,
                                static_cast<T*>(tensor.weight_out) + first,
                                static_cast<const T*>(tensor.gradient) + first,
                                flags.has_momentum ? momentum_buffer + first : nullptr};
        kernels.sgd(flags, factors, range, exceeds_caches && tensor.weight_in != tensor.weight_out);
      });
}

}  // namespace

void check_sgd_options(const SgdOptions& options) {
  check_number("lr", options.lr, false);
  check_number("momentum", options.momentum, false);
  check_number("dampening", options.dampening, true);
  check_number("weight_decay", options.weight_decay, false);
  if (options.nesterov && (options.momentum == 0 || options.dampening != 0)) {
    throw UserError("nesterov needs a momentum above 0 and no dampening; momentum is " +
                    std::to_string(options.momentum) + ", dampening " + std::to_string(options.dampening));
  }
}

void check_sgd_tensors(const SgdOptions& options, DType dtype, std::span<const SgdTensor> tensors) {
  for (const SgdTensor& tensor : tensors) {
    check_tensor(dtype, tensor);
    PD_CHECK(tensor.momentum_buffer != nullptr || options.momentum == 0 || tensor.num_elements == 0,
             "momentum " << options.momentum << " without a buffer");
  }
}

void sgd_step_host(const SgdOptions& options, DType dtype, std::span<const SgdTensor> tensors,
                   bool first_step, double gradient_scale, int num_threads) {
  check_sgd_tensors(options, dtype, tensors);
  if (dtype == DType::kFloat32) {
    sgd_step<float>(options, tensors, first_step, gradient_scale, num_threads);
  } else {
    sgd_step<double>(options, tensors, first_step, gradient_scale, num_threads);
  }
}

}  // namespace pipedream
