#include "channel/tensor.h"

#include <sstream>

namespace pipedream {

std::size_t TensorView::size_bytes() const {
  std::size_t num_bytes = dtype_bytes(dtype);
  for (std::size_t dim = 0; dim < num_dims; ++dim) num_bytes *= static_cast<std::size_t>(shape.at(dim));
  return num_bytes;
}

std::string to_string(const TensorView& tensor) {
  std::ostringstream text;
  text << dtype_name(tensor.dtype) << '[';
  for (std::size_t dim = 0; dim < tensor.num_dims; ++dim)
    text << (dim == 0 ? "" : ", ") << tensor.shape.at(dim);
  text << ']';
  return text.str();
}

ItemSpec::ItemSpec(std::vector<TensorSpec> tensors) : tensors_(std::move(tensors)) {
  if (tensors_.empty()) throw UserError("a boundary of no tensors: at least one must cross");
  if (tensors_.size() > kNumTensorsMax) {
    throw UserError("a boundary of " + std::to_string(tensors_.size()) + " tensors: at most " +
                    std::to_string(kNumTensorsMax) + " may cross; cut the model elsewhere");
  }
  for (const TensorSpec& tensor : tensors_) {
    if (tensor.num_dims > kNumDimsMax) {
      throw UserError("a boundary tensor of " + std::to_string(tensor.num_dims) + " dimensions: at most " +
                      std::to_string(kNumDimsMax) + " may cross; reshape it or cut the model elsewhere");
    }
    offsets_.push_back(slot_bytes_);
    slot_bytes_ += (tensor.bytes_max + kTensorAlignment - 1) / kTensorAlignment * kTensorAlignment;
  }
}

std::optional<std::string> ItemSpec::mismatch(std::size_t tensor_index, DType dtype, std::uint8_t num_dims,
                                              std::size_t tensor_bytes) const {
  if (tensor_index >= tensors_.size()) {
    return "tensor " + std::to_string(tensor_index) + " of a boundary of " + std::to_string(tensors_.size());
  }
  const TensorSpec& spec = tensors_[tensor_index];
  std::ostringstream text;
  if (dtype != spec.dtype) {
    text << "dtype " << dtype_name(dtype) << ", planned " << dtype_name(spec.dtype);
  } else if (num_dims != spec.num_dims && tensor_bytes > 0) {  // a missing gradient has no bytes
    text << "rank " << int{num_dims} << ", planned " << int{spec.num_dims};
  } else if (tensor_bytes > spec.bytes_max) {
    text << tensor_bytes << " bytes, planned at most " << spec.bytes_max;
  } else {
    return std::nullopt;
  }
  return "tensor " + std::to_string(tensor_index) + " has " + text.str();
}

}  // namespace pipedream
