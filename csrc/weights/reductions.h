// What gradient clipping and loss scaling ask of a gradient: its squared 2-norm, and whether it is finite.
#pragma once

#include <cstdint>

#include "base/dtype.h"

namespace pipedream {

// The sum of the squares, accumulated in double. The order of the additions depends on num_elements alone,
// so neither the number of threads nor the processor changes the result. dtype: kFloat32 or kFloat64.
// Returns when the result is there; on the calling thread and num_threads - 1 others at most.
[[nodiscard]] double squared_norm_host(DType dtype, std::int64_t num_elements, const void* values,
                                       int num_threads = 1);
// False when a value is infinite or NaN; stops early then.
[[nodiscard]] bool all_finite_host(DType dtype, std::int64_t num_elements, const void* values,
                                   int num_threads = 1);

// The same over device memory, in the order of the stream (a cudaStream_t as an integer) of the device that
// is current; the calling thread waits for the result. Throws UserError without CUDA, DeviceError when the
// device refuses. The norm's additions are in another order than the host's.
[[nodiscard]] double squared_norm_cuda(DType dtype, std::int64_t num_elements, const void* values,
                                       std::uintptr_t stream);
[[nodiscard]] bool all_finite_cuda(DType dtype, std::int64_t num_elements, const void* values,
                                   std::uintptr_t stream);

}  // namespace pipedream
