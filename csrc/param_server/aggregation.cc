#include "param_server/aggregation.h"

#include <algorithm>

#include "base/check.h"
#include "base/element.h"
#include "weights/thread_team.h"

namespace pipedream {
namespace {

// The elements of a block. A block is so small that its sum stays in the cache while the gradients of all
// replicas are added to it. A thread claims kTaskBlocks blocks at a time.
constexpr std::int64_t kBlockElements = 4096;
constexpr std::int64_t kTaskBlocks = 16;

template <class Element>
void add_block(std::span<const void* const> parts, NumberOf<Element> num_minibatches, Element* mean,
               std::int64_t first, std::int64_t count) {
  alignas(64) NumberOf<Element> sum[kBlockElements];
  const Element* const part_0 = static_cast<const Element*>(parts[0]) + first;
  for (std::int64_t i = 0; i < count; ++i) sum[i] = number_of(part_0[i]);
  for (const void* const part : parts.subspan(1)) {
    const Element* const added = static_cast<const Element*>(part) + first;
    for (std::int64_t i = 0; i < count; ++i) sum[i] += number_of(added[i]);
  }
  Element* const target = mean + first;
  for (std::int64_t i = 0; i < count; ++i) target[i] = element_of<Element>(sum[i] / num_minibatches);
}

template <class Element>
void aggregate_as(std::span<const void* const> parts, std::int64_t num_minibatches, Element* mean,
                  std::int64_t num_elements, int num_threads) {
  constexpr std::int64_t kTaskElements = kTaskBlocks * kBlockElements;
  const std::int64_t num_tasks = (num_elements + kTaskElements - 1) / kTaskElements;
  ThreadTeam::of_process().run(num_threads, num_tasks, [&](std::int64_t task) {
    const std::int64_t end = std::min(num_elements, (task + 1) * kTaskElements);
    for (std::int64_t first = task * kTaskElements; first < end; first += kBlockElements) {
      add_block(parts, static_cast<NumberOf<Element>>(num_minibatches), mean, first,
                std::min(kBlockElements, end - first));
    }
  });
}

}  // namespace

bool is_aggregated(DType dtype) {
  return dtype == DType::kFloat32 || dtype == DType::kFloat64 || dtype == DType::kBFloat16;
}

void aggregate(DType dtype, std::span<const void* const> parts, std::int64_t num_minibatches, void* mean,
               std::int64_t num_elements, int num_threads) {
  PD_CHECK(
      !parts.empty() && num_minibatches >= 1 && num_elements >= 0,
      parts.size() << " parts of " << num_minibatches << " minibatches, " << num_elements << " elements");
  PD_CHECK(is_aggregated(dtype), dtype_name(dtype));
  if (dtype == DType::kFloat32) {
    aggregate_as(parts, num_minibatches, static_cast<float*>(mean), num_elements, num_threads);
  } else if (dtype == DType::kBFloat16) {
    aggregate_as(parts, num_minibatches, static_cast<BFloat16*>(mean), num_elements, num_threads);
  } else {
    aggregate_as(parts, num_minibatches, static_cast<double*>(mean), num_elements, num_threads);
  }
}

}  // namespace pipedream
