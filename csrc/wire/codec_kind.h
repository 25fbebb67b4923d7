// Defines the number by which a frame names its codec, and the dtypes that each codec encodes. codec/codec.h
// has the codecs themselves. Pure functions; any thread.
#pragma once

#include <cstdint>

#include "base/dtype.h"

namespace pipedream {

// Values are part of the wire format.
enum class CodecKind : std::uint8_t { kNone = 0, kBFloat16 = 1, kFloat16 = 2, kInt8 = 3, kTopK = 4 };

[[nodiscard]] bool is_known_codec(std::uint8_t code);

// Returns whether the codec can encode tensors of this dtype. kNone applies to every dtype.
[[nodiscard]] bool applies_to(CodecKind kind, DType dtype);

}  // namespace pipedream
