// Cuts a step over many tensors into tasks for the thread team, as if all tensors were one row of elements. A
// task may have several small tensors, or a part of a large tensor. Internal to csrc/weights; pure, any
// thread.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>

#include "base/check.h"
#include "base/dtype.h"
#include "base/element.h"
#include "weights/thread_team.h"

namespace pipedream {

// The number of elements of one task, which take 5 to 20 us on one core. That is much longer than claiming a
// task, and much shorter than a step.
inline constexpr std::int64_t kTaskElements = 1 << 15;
// Steps with fewer elements, that is below four tasks, run on one thread. For them waking another thread
// costs about as much as it saves.
inline constexpr std::int64_t kParallelElementsMin = 1 << 17;

// All tensors' elements form one row. Calls body(tensor, first, count) for each tensor that has elements in
// the range [begin, end) of the row.
template <class Tensor, class Body>
void for_each_part(std::span<const Tensor> tensors, std::int64_t begin, std::int64_t end, const Body& body) {
  std::int64_t tensor_begin = 0;
  for (const Tensor& tensor : tensors) {
    if (tensor_begin >= end) return;
    const std::int64_t first = std::max<std::int64_t>(begin - tensor_begin, 0);
    const std::int64_t last = std::min(end - tensor_begin, tensor.num_elements);
    if (first < last) body(tensor, first, last - first);
    tensor_begin += tensor.num_elements;
  }
}

template <class Tensor>
std::int64_t sum_of_elements(std::span<const Tensor> tensors) {
  std::int64_t num_elements = 0;
  for (const Tensor& tensor : tensors) num_elements += tensor.num_elements;
  return num_elements;
}

// Calls body(tensor, first, count) for parts that cover all elements. Uses at most num_threads threads, and
// one for a small step.
template <class Tensor, class Body>
void run_over_tensors(std::span<const Tensor> tensors, int num_threads, const Body& body) {
  const std::int64_t num_elements = sum_of_elements(tensors);
  if (num_threads <= 1 || num_elements < kParallelElementsMin)
    return for_each_part(tensors, 0, num_elements, body);
  const std::int64_t num_tasks = (num_elements + kTaskElements - 1) / kTaskElements;
  ThreadTeam::of_process().run(num_threads, num_tasks, [&](std::int64_t task_index) {
    const std::int64_t begin = task_index * kTaskElements;
    for_each_part(tensors, begin, std::min(begin + kTaskElements, num_elements), body);
  });
}

// Calls body(Element{}) with the element type of the dtype, which check_tensor() has accepted.
template <class Body>
void with_element_of(DType dtype, const Body& body) {
  if (dtype == DType::kFloat32) return body(float{});
  if (dtype == DType::kFloat64) return body(double{});
  body(BFloat16{});
}

// True when two ranges of num_bytes share a byte.
inline bool overlap(const void* a, const void* b, std::size_t num_bytes) {
  const auto* a_bytes = static_cast<const std::byte*>(a);
  const auto* b_bytes = static_cast<const std::byte*>(b);
  const std::less<> before;
  return num_bytes > 0 && before(a_bytes, b_bytes + num_bytes) && before(b_bytes, a_bytes + num_bytes);
}

// Aborts unless the dtype is one that steps take and, if the tensor has elements, it has weights, a gradient
// and, for bfloat16, a master copy. Also aborts if weight_in and weight_out overlap and are not equal.
template <class Tensor>
void check_tensor(DType dtype, const Tensor& tensor) {
  PD_CHECK(dtype == DType::kFloat32 || dtype == DType::kFloat64 || dtype == DType::kBFloat16,
           "dtype " << dtype_name(dtype));
  PD_CHECK(tensor.num_elements >= 0, "num_elements " << tensor.num_elements);
  if (tensor.num_elements == 0) return;
  PD_CHECK(tensor.weight_in != nullptr && tensor.weight_out != nullptr && tensor.gradient != nullptr,
           tensor.weight_in << ", " << tensor.weight_out << ", " << tensor.gradient);
  PD_CHECK(tensor.master != nullptr || dtype != DType::kBFloat16, "bfloat16 weights without a master");
  const std::size_t num_bytes = static_cast<std::size_t>(tensor.num_elements) * dtype_bytes(dtype);
  PD_CHECK(tensor.weight_in == tensor.weight_out || !overlap(tensor.weight_in, tensor.weight_out, num_bytes),
           "weights at " << tensor.weight_in << " and " << tensor.weight_out << " overlap over " << num_bytes
                         << " bytes");
}

// Returns whether a step that touches num_bytes should write its weights past the caches. It should if the
// last-level cache has fewer bytes.
[[nodiscard]] bool worth_streaming(std::size_t num_bytes);

}  // namespace pipedream
