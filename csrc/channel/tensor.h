// Describes a tensor by its pointer, dtype and shape. Also describes which tensors the plan allows in an item
// of a channel. Plain values; any thread. Tensors are contiguous, row-major.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "base/dtype.h"
#include "base/failure.h"
#include "wire/frame.h"

namespace pipedream {

struct TensorView {
  DType dtype = DType::kFloat32;
  std::uint8_t num_dims = 0;
  std::array<std::int64_t, kNumDimsMax> shape{};
  std::byte* data = nullptr;

  [[nodiscard]] std::size_t size_bytes() const;
};

// "float32[64, 3, 32, 32]"
[[nodiscard]] std::string to_string(const TensorView& tensor);

// The plan's limits for one tensor of an item. A tensor that is sent has this dtype, this number of
// dimensions and at most bytes_max bytes: a short last batch has fewer. A tensor without bytes may have
// another number of dimensions, because it may stand for a missing gradient.
struct TensorSpec {
  DType dtype = DType::kFloat32;
  std::uint8_t num_dims = 0;
  std::size_t bytes_max = 0;
};

// The limits for all tensors of one item. The tensors travel together and share one slot.
class ItemSpec {
 public:
  ItemSpec() = default;
  // Throws UserError for no tensors, more than kNumTensorsMax of them or more than kNumDimsMax dimensions.
  explicit ItemSpec(std::vector<TensorSpec> tensors);

  static constexpr std::size_t kNumTensorsMax = 1024;
  static constexpr std::size_t kTensorAlignment = 64;

  [[nodiscard]] std::size_t num_tensors() const { return tensors_.size(); }
  [[nodiscard]] const std::vector<TensorSpec>& tensors() const { return tensors_; }
  [[nodiscard]] std::size_t slot_bytes() const { return slot_bytes_; }
  [[nodiscard]] std::size_t offset_bytes(std::size_t tensor_index) const { return offsets_.at(tensor_index); }

  // The reason why the plan forbids this tensor as the one at tensor_index; empty if the plan allows it.
  [[nodiscard]] std::optional<std::string> mismatch(std::size_t tensor_index, DType dtype,
                                                    std::uint8_t num_dims, std::size_t tensor_bytes) const;

 private:
  std::vector<TensorSpec> tensors_;
  std::vector<std::size_t> offsets_;
  std::size_t slot_bytes_ = 0;
};

}  // namespace pipedream
