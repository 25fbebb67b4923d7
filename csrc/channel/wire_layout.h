// How the tensors of a work item lie in a slot on the wire: as they are, or encoded. Both ends compute it
// from the plan. Plain values; any thread.
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
  // Some tensor travels encoded.
  [[nodiscard]] bool encodes() const { return num_elements_max_ > 0; }
  // The codec that the tensor travels by: the channel's, or none if that does not apply to it.
  [[nodiscard]] const Codec& codec(std::size_t tensor_index) const { return codecs_.at(tensor_index); }
  // Most elements of an encoded tensor.
  [[nodiscard]] std::size_t num_elements_max() const { return num_elements_max_; }

  [[nodiscard]] std::size_t slot_bytes() const { return wire_.slot_bytes(); }
  [[nodiscard]] std::size_t offset_bytes(std::size_t tensor_index) const {
    return wire_.offset_bytes(tensor_index);
  }
  // On the wire, of a tensor that has so many bytes itself.
  [[nodiscard]] std::size_t wire_bytes(std::size_t tensor_index, std::size_t tensor_bytes) const;

  // Bytes that the sender keeps between items: the codec's residual.
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
  ItemSpec wire_;      // each tensor with its bytes on the wire
  ItemSpec residual_;  // each tensor with those that it keeps
};

}  // namespace pipedream
