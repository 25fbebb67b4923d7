// Implements SGD over host memory: turns options into factors, and tensors into ranges for the kernels. See
// sgd.h for the arithmetic, element_math.h for its code and host_kernels.h for the loops.
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

template <class Element>
void sgd_step(const SgdOptions& options, std::span<const SgdTensor> tensors, bool first_step,
              double gradient_scale, int num_threads) {
  const SgdFlags flags = sgd_flags(options, first_step);
  using Number = NumberOf<Element>;
  const SgdFactors<Number> factors = sgd_factors<Number>(options, gradient_scale);
  const HostKernels<Element>& kernels = host_kernels<Element>();
  const std::size_t num_streams = flags.has_momentum ? 4 : 3;
  const bool exceeds_caches =
      worth_streaming(static_cast<std::size_t>(sum_of_elements(tensors)) * sizeof(Number) * num_streams);
  run_over_tensors(
      tensors, num_threads, [&](const SgdTensor& tensor, std::int64_t first, std::int64_t count) {
        auto* const master = static_cast<Number*>(tensor.master);
        auto* const momentum_buffer = static_cast<Number*>(tensor.momentum_buffer);
        const SgdRange<Element> range{count,
                                      static_cast<const Element*>(tensor.weight_in) + first,
                                      static_cast<Element*>(tensor.weight_out) + first,
                                      static_cast<const Element*>(tensor.gradient) + first,
                                      flags.has_momentum ? momentum_buffer + first : nullptr,
                                      kHasMaster<Element> ? master + first : nullptr};
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
  with_element_of(dtype, [&](auto element) {
    sgd_step<decltype(element)>(options, tensors, first_step, gradient_scale, num_threads);
  });
}

}  // namespace pipedream
