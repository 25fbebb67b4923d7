#include "channel/wire_layout.h"

#include <algorithm>
#include <string>
#include <utility>

#include "base/failure.h"

namespace pipedream {

WireLayout::WireLayout(const ItemSpec& item, const Codec& codec) {
  std::vector<TensorSpec> wire;
  std::vector<TensorSpec> residual;
  for (const TensorSpec& tensor : item.tensors()) {
    const std::size_t tensor_index = wire.size();
    dtypes_.push_back(tensor.dtype);
    codecs_.push_back(codec_for(codec, tensor.dtype));
    const std::size_t num_elements = tensor.bytes_max / dtype_bytes(tensor.dtype);
    if (codecs_.back().kind == CodecKind::kTopK && num_elements > kTopKElementsMax) {
      throw UserError(codec_name(codec) + " of a tensor of " + std::to_string(num_elements) +
                      " elements: it counts " + std::to_string(kTopKElementsMax) +
                      " at most; use int8, or cut the model elsewhere");
    }
    if (codecs_.back().kind != CodecKind::kNone) {
      num_elements_max_ = std::max(num_elements_max_, num_elements);
    }
    wire.push_back({tensor.dtype, tensor.num_dims, wire_bytes(tensor_index, tensor.bytes_max)});
    residual.push_back({tensor.dtype, tensor.num_dims,
                        pipedream::residual_bytes(codecs_.back(), tensor.dtype, num_elements)});
  }
  wire_ = ItemSpec(std::move(wire));
  residual_ = ItemSpec(std::move(residual));
}

std::size_t WireLayout::wire_bytes(std::size_t tensor_index, std::size_t tensor_bytes) const {
  const Codec& codec = codecs_.at(tensor_index);
  if (codec.kind == CodecKind::kNone || tensor_bytes == 0) return tensor_bytes;
  const DType dtype = dtypes_.at(tensor_index);
  return encoded_bytes(codec, dtype, tensor_bytes / dtype_bytes(dtype));
}

}  // namespace pipedream
