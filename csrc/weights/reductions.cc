// Reductions over host memory: parts of a fixed size, shared among threads, added in order. See reductions.h.
#include "weights/reductions.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>

#include "base/check.h"
#include "weights/host_kernels.h"
#include "weights/tensor_ranges.h"

namespace pipedream {
namespace {

constexpr std::int64_t kNumPartsMax = 512;

// Parts depend on the number of elements alone, so sums do too.
struct Parts {
  explicit Parts(std::int64_t num_elements)
      : part_elements(std::max(kTaskElements, (num_elements + kNumPartsMax - 1) / kNumPartsMax)),
        num_parts((num_elements + part_elements - 1) / part_elements) {}

  std::int64_t part_elements;
  std::int64_t num_parts;
};

// body(part_index, first, count)
template <class Body>
void run_over_parts(std::int64_t num_elements, int num_threads, const Body& body) {
  const Parts parts(num_elements);
  const int num_threads_used = num_elements < kParallelElementsMin ? 1 : num_threads;
  ThreadTeam::of_process().run(num_threads_used, parts.num_parts, [&](std::int64_t part_index) {
    const std::int64_t first = part_index * parts.part_elements;
    body(part_index, first, std::min(parts.part_elements, num_elements - first));
  });
}

template <class T>
double squared_norm(std::int64_t num_elements, const T* values, int num_threads) {
  std::array<double, kNumPartsMax> sums{};
  run_over_parts(
      num_elements, num_threads, [&](std::int64_t part_index, std::int64_t first, std::int64_t count) {
        sums[static_cast<std::size_t>(part_index)] = host_kernels<T>().squared_sum(count, values + first);
      });
  double sum = 0;
  for (const double part : sums) sum += part;
  return sum;
}

template <class T>
bool all_finite(std::int64_t num_elements, const T* values, int num_threads) {
  std::atomic<bool> finite{true};
  run_over_parts(num_elements, num_threads,
                 [&](std::int64_t /*part_index*/, std::int64_t first, std::int64_t count) {
                   if (!finite.load(std::memory_order_relaxed)) return;
                   if (!host_kernels<T>().all_finite(count, values + first))
                     finite.store(false, std::memory_order_relaxed);
                 });
  return finite.load(std::memory_order_relaxed);
}

void check_values(DType dtype, std::int64_t num_elements, const void* values) {
  PD_CHECK(dtype == DType::kFloat32 || dtype == DType::kFloat64, "dtype " << dtype_name(dtype));
  PD_CHECK(num_elements >= 0, "num_elements " << num_elements);
  PD_CHECK(values != nullptr || num_elements == 0, num_elements << " elements at null");
}

}  // namespace

double squared_norm_host(DType dtype, std::int64_t num_elements, const void* values, int num_threads) {
  check_values(dtype, num_elements, values);
  if (dtype == DType::kFloat32)
    return squared_norm(num_elements, static_cast<const float*>(values), num_threads);
  return squared_norm(num_elements, static_cast<const double*>(values), num_threads);
}

bool all_finite_host(DType dtype, std::int64_t num_elements, const void* values, int num_threads) {
  check_values(dtype, num_elements, values);
  if (dtype == DType::kFloat32)
    return all_finite(num_elements, static_cast<const float*>(values), num_threads);
  return all_finite(num_elements, static_cast<const double*>(values), num_threads);
}

}  // namespace pipedream
