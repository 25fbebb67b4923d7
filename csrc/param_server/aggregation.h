// Computes the mean of the gradients of a stage's replicas. It adds them in the order of the replicas, so
// that the bits do not depend on which replica is late. All memory is host memory. A gradient is read where
// it was received. Any thread.
#pragma once

#include <cstdint>
#include <span>

#include "base/dtype.h"

namespace pipedream {

// float32, float64 and bfloat16.
[[nodiscard]] bool is_aggregated(DType dtype);

// mean[i] = ((parts[0][i] + parts[1][i]) + ...) / num_minibatches. parts: the replicas' gradients; a replica
// without a gradient has no part. bfloat16 gradients are added in float32, and the mean is rounded once. mean
// may be one of the parts; nothing else overlaps. There is at least one part, and is_aggregated() is true for
// the dtype.
void aggregate(DType dtype, std::span<const void* const> parts, std::int64_t num_minibatches, void* mean,
               std::int64_t num_elements, int num_threads);

}  // namespace pipedream
