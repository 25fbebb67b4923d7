// Describes the place of each parameter inside a version's flat slot. A parameter that several modules share
// has one place. Plain values; any thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "base/dtype.h"

namespace pipedream {

struct ParameterSpec {
  std::string name;
  DType dtype = DType::kFloat32;
  std::int64_t num_elements = 0;
};

// The alignment of each parameter in bytes. A separate allocation of the parameter would have the same
// alignment; kernels and BLAS may rely on it.
inline constexpr std::size_t kParameterAlignment = 64;

class WeightLayout {
 public:
  explicit WeightLayout(std::vector<ParameterSpec> parameters);

  [[nodiscard]] std::size_t slot_bytes() const { return slot_bytes_; }
  [[nodiscard]] std::size_t offset_bytes(std::size_t parameter_index) const {
    return offsets_.at(parameter_index);
  }
  [[nodiscard]] const std::vector<ParameterSpec>& parameters() const { return parameters_; }

 private:
  std::vector<ParameterSpec> parameters_;
  std::vector<std::size_t> offsets_;
  std::size_t slot_bytes_ = 0;
};

}  // namespace pipedream
