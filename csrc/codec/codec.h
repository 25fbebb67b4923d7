// A codec encodes a tensor in fewer bytes for a slow link, and loses precision as listed here. These
// functions work on bytes in host memory; stream_codec.h runs codecs on a device's stream. Pure functions;
// any thread.
//
//   none   the bytes as they are
//   bf16   each element rounded to bfloat16, to nearest even
//   fp16   each element rounded to float16; an element that is too large becomes infinite
//   int8   blocks of kInt8BlockElements: one float32 scale (largest magnitude / 127), then elements / scale
//          rounded to nearest even; a block with a NaN, or with an element that is infinite as a float32,
//          decodes to NaN
//   topk   the `share` of the elements that are largest in magnitude: first their indices (uint32, in
//          ascending order), then their values (float32, or the tensor's own 16 bits)
//
// topk keeps in `residual` the elements that it did not send, and the rounding errors of those that it sent.
// The sender adds this to the channel's next tensor (error feedback: Seide et al. 2014; Stich et al. 2018). A
// sum of element and residual that is an infinity or a NaN leaves nothing in `residual`. A sum that is too
// large for its sent type arrives as an infinity.
//
// All codecs apply to float32 and float64 tensors. int8 and topk also apply to bfloat16 and float16; bf16 and
// fp16 would not make such tensors smaller. Tensors of every other dtype are sent unchanged. The number of
// encoded bytes depends only on codec, dtype and number of elements, so both ends can plan it.
#pragma once

#include <cstddef>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "base/dtype.h"
#include "wire/codec_kind.h"

namespace pipedream {

struct Codec {
  CodecKind kind = CodecKind::kNone;
  double share = 0.01;  // kTopK: share of the elements, above 0, at most 1; at least one element is sent

  friend bool operator==(const Codec&, const Codec&) = default;
};

inline constexpr std::size_t kInt8BlockElements = 256;

// "none", "bf16", "fp16", "int8", "topk" or "topk:0.05". Throws UserError naming the choices.
[[nodiscard]] Codec codec_from_name(std::string_view name);
[[nodiscard]] std::string codec_name(const Codec& codec);

// The codec for tensors of this dtype: the given codec, or kNone if it does not apply to the dtype.
[[nodiscard]] Codec codec_for(const Codec& codec, DType dtype);

// The number of bytes of topk's residual, whose elements are float64 for float64 tensors and float32 for all
// others. 0 for all other codecs. The codec must apply to dtype.
[[nodiscard]] std::size_t residual_bytes(const Codec& codec, DType dtype, std::size_t num_elements);

inline constexpr std::size_t kTopKElementsMax = 0xFFFFFFFF;  // an index has 32 bits

// The number of elements that topk sends. num_elements may be at most kTopKElementsMax (checked).
[[nodiscard]] std::size_t topk_num_chosen(const Codec& codec, std::size_t num_elements);

// The exact number of encoded bytes. The codec must apply to dtype. For topk num_elements may be at most
// kTopKElementsMax (checked).
[[nodiscard]] std::size_t encoded_bytes(const Codec& codec, DType dtype, std::size_t num_elements);

struct CodecWork {
  Codec codec;  // one that applies to dtype, or none
  DType dtype = DType::kFloat32;
  std::size_t num_elements = 0;
  std::byte* values = nullptr;    // read by encode, written by decode
  std::byte* encoded = nullptr;   // encoded_bytes() long; written by encode, read by decode
  std::byte* residual = nullptr;  // residual_bytes() long, zero at first; null unless topk encodes
};

// Encodes the values. topk ranks a NaN like an infinity. Vectorised; allocates nothing.
void encode_host(const CodecWork& work);
// Decodes bytes that encoding_violation() has accepted.
void decode_host(const CodecWork& work);

// Checks bytes from the wire before they are decoded: topk's indices must ascend and lie within the tensor.
// The caller has checked the length.
[[nodiscard]] std::optional<std::string> encoding_violation(const Codec& codec, DType dtype,
                                                            std::size_t num_elements,
                                                            std::span<const std::byte> encoded);

}  // namespace pipedream
