// Makes views of gradients and of their pieces.
#include "param_server/exchange_spec.h"

#include "base/check.h"

namespace pipedream {

TensorView flat_view(DType dtype, std::byte* data, std::size_t num_bytes) {
  TensorView view;
  view.dtype = dtype;
  view.num_dims = 1;
  view.shape[0] = static_cast<std::int64_t>(num_bytes / dtype_bytes(dtype));
  view.data = data;
  return view;
}

TensorView Gradient::piece(const ExchangePiece& piece) const {
  if (content.data == nullptr) return {};
  const std::size_t offset = static_cast<std::size_t>(piece.first_element) * dtype_bytes(piece.dtype);
  PD_CHECK(content.dtype == piece.dtype && offset + piece.num_bytes() <= content.size_bytes(),
           to_string(content) << " of parameter " << piece.parameter_index);
  return flat_view(piece.dtype, content.data + offset, piece.num_bytes());
}

}  // namespace pipedream
