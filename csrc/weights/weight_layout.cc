// Computes the offsets of a version's parameters, in the given order. See weight_layout.h.
#include "weights/weight_layout.h"

#include <limits>
#include <utility>

#include "base/check.h"

namespace pipedream {
namespace {

constexpr std::size_t round_up(std::size_t num_bytes) {
  return (num_bytes + kParameterAlignment - 1) / kParameterAlignment * kParameterAlignment;
}

}  // namespace

WeightLayout::WeightLayout(std::vector<ParameterSpec> parameters) : parameters_(std::move(parameters)) {
  offsets_.reserve(parameters_.size());
  for (const ParameterSpec& parameter : parameters_) {
    PD_CHECK(parameter.num_elements >= 0, parameter.name << " has " << parameter.num_elements << " elements");
    const auto num_elements = static_cast<std::size_t>(parameter.num_elements);
    const std::size_t room_bytes =
        std::numeric_limits<std::size_t>::max() - kParameterAlignment - slot_bytes_;
    PD_CHECK(num_elements <= room_bytes / dtype_bytes(parameter.dtype),
             parameter.name << " of " << num_elements << " elements overflows the slot");
    offsets_.push_back(slot_bytes_);
    slot_bytes_ = round_up(slot_bytes_ + num_elements * dtype_bytes(parameter.dtype));
  }
}

}  // namespace pipedream
