// Computes where a work item's tensors lie in one slot on the wire, either unchanged or encoded. Both ends
// compute the layout from the plan. Plain values; any thread.
#pragma once

#include <cstddef>
#include <vector>

#include "channel/tensor.h"
#include "codec/codec.h"

namespace pipedream {

class WireLayout {
 public:
  WireLayout(const ItemSpec& item, const Codec& codec);

  [[nodiscard]] std::size_t num_tensors() const { return codecs_.size(); }
  // Whether at least one tensor travels encoded.
  [[nodiscard]] bool encodes() const { return num_elements_max_ > 0; }
  // The tensor's codec: the channel's codec, or kNone if that codec does not apply to the tensor's dtype.
  [[nodiscard]] const Codec& codec(std::size_t tensor_index) const { return codecs_.at(tensor_index); }
  // The number of elements of the largest encoded tensor.
  [[nodiscard]] std::size_t num_elements_max() const { return num_elements_max_; }

  [[nodiscard]] std::size_t slot_bytes() const { return wire_.slot_bytes(); }
  [[nodiscard]] std::size_t offset_bytes(std::size_t tensor_index) const {
    return wire_.offset_bytes(tensor_index);
  }
  // The number of bytes that a tensor has on the wire if it has tensor_bytes in memory.
  [[nodiscard]] std::size_t wire_bytes(std::size_t tensor_index, std::size_t tensor_bytes) const;

  // The bytes that the sender keeps between items for the codec's residual.
  [[nodiscard]] std::size_t residual_bytes() const { return residual_.slot_bytes(); }
  [[nodiscard]] bool has_residual(std::size_t tensor_index) const {
    return codecs_.at(tensor_index).kind == CodecKind::kTopK;
  }
  [[nodiscard]] std::size_t residual_offset_bytes(std::size_t tensor_index) const {
    return residual_.offset_bytes(tensor_index);
  }
  [[nodiscard]] std::size_t residual_bytes(std::size_t tensor_index) const {
    return residual_.tensors().at(tensor_index).bytes_max;
  }

 private:
  std::vector<DType> dtypes_;
  std::vector<Codec> codecs_;
  std::size_t num_elements_max_ = 0;
  ItemSpec wire_;      // bytes_max: the tensor's bytes on the wire
  ItemSpec residual_;  // bytes_max: the bytes of the tensor's residual
};

}  // namespace pipedream
