// Implements the table of codecs and the dtypes that they encode. Pure functions; any thread.
#include "wire/codec_kind.h"

namespace pipedream {

bool is_known_codec(std::uint8_t code) { return code <= static_cast<std::uint8_t>(CodecKind::kTopK); }

bool applies_to(CodecKind kind, DType dtype) {
  if (kind == CodecKind::kNone) return true;
  switch (dtype) {
    case DType::kFloat32:
    case DType::kFloat64:
      return true;
    case DType::kBFloat16:
    case DType::kFloat16:
      return kind == CodecKind::kInt8 || kind == CodecKind::kTopK;
    default:
      return false;
  }
}

}  // namespace pipedream
