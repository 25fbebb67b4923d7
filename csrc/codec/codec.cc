// Implements the codecs' names and sizes, encoding and decoding on the host, and the receiver's checks. Pure;
// any thread.
#include "codec/codec.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <cstring>
#include <limits>

#include "base/check.h"
#include "base/failure.h"
#include "codec/codec_elements.h"
#include "codec/codec_kernels.h"

namespace pipedream {
namespace {

static_assert(kInt8Block == kInt8BlockElements);

constexpr std::string_view kTopKName = "topk";

[[noreturn]] void refuse_name(std::string_view name) {
  throw UserError("codec '" + std::string(name) +
                  "' is none of none, bf16, fp16, int8, topk and topk:SHARE, where SHARE is above 0 and at "
                  "most 1, e.g. topk:0.05");
}

double share_from(std::string_view text, std::string_view name) {
  double share = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), share);
  const bool is_number = error == std::errc() && end == text.data() + text.size();
  if (!is_number || !(share > 0 && share <= 1)) refuse_name(name);
  return share;
}

std::string share_text(double share) {
  std::array<char, 32> text{};
  const auto [end, error] = std::to_chars(text.data(), text.data() + text.size(), share);
  PD_CHECK(error == std::errc(), "share " << share);
  return {text.data(), end};
}

std::size_t topk_entry_bytes(DType dtype) {
  return with_element_type(dtype, [](auto element) {
    return sizeof(std::uint32_t) + sizeof(SentOf<typename decltype(element)::Type>);
  });
}

void check_work(const CodecWork& work) {
  PD_CHECK(applies_to(work.codec.kind, work.dtype), codec_name(work.codec)
                                                        << " of " << dtype_name(work.dtype));
  PD_CHECK(work.num_elements == 0 || (work.values != nullptr && work.encoded != nullptr),
           work.num_elements << " elements at null");
}

template <class T>
void encode_topk(const CodecWork& work) {
  PD_CHECK(work.residual != nullptr, "topk without a residual");
  const std::size_t num_sent = topk_num_chosen(work.codec, work.num_elements);
  auto* const indices = reinterpret_cast<std::uint32_t*>(work.encoded);
  codec_kernels<T>().encode_topk({work.num_elements, num_sent, reinterpret_cast<const T*>(work.values),
                                  reinterpret_cast<NumberOf<T>*>(work.residual), indices,
                                  reinterpret_cast<SentOf<T>*>(indices + num_sent)});
}

template <class T>
void decode_topk(const CodecWork& work) {
  const std::size_t num_sent = topk_num_chosen(work.codec, work.num_elements);
  const auto* const indices = reinterpret_cast<const std::uint32_t*>(work.encoded);
  const auto* const sent = reinterpret_cast<const SentOf<T>*>(indices + num_sent);
  auto* const values = reinterpret_cast<T*>(work.values);
  std::memset(work.values, 0, work.num_elements * sizeof(T));
  for (std::size_t i = 0; i < num_sent; ++i) values[indices[i]] = element_of<T>(number_of(sent[i]));
}

template <class T>
void encode_elements(const CodecWork& work) {
  const CodecKernels<T>& kernels = codec_kernels<T>();
  const auto* const values = reinterpret_cast<const T*>(work.values);
  auto* const halves = reinterpret_cast<std::uint16_t*>(work.encoded);
  switch (work.codec.kind) {
    case CodecKind::kNone:
      break;  // encode_host copies
    case CodecKind::kBFloat16:
      return kernels.encode_bfloat16(work.num_elements, values, halves);
    case CodecKind::kFloat16:
      return kernels.encode_float16(work.num_elements, values, halves);
    case CodecKind::kInt8:
      return kernels.encode_int8(work.num_elements, values, work.encoded);
    case CodecKind::kTopK:
      return encode_topk<T>(work);
  }
  PD_CHECK(false, "codec " << static_cast<int>(work.codec.kind));
}

template <class T>
void decode_elements(const CodecWork& work) {
  const CodecKernels<T>& kernels = codec_kernels<T>();
  auto* const values = reinterpret_cast<T*>(work.values);
  const auto* const halves = reinterpret_cast<const std::uint16_t*>(work.encoded);
  switch (work.codec.kind) {
    case CodecKind::kNone:
      break;  // decode_host copies
    case CodecKind::kBFloat16:
      return kernels.decode_bfloat16(work.num_elements, halves, values);
    case CodecKind::kFloat16:
      return kernels.decode_float16(work.num_elements, halves, values);
    case CodecKind::kInt8:
      return kernels.decode_int8(work.num_elements, work.encoded, values);
    case CodecKind::kTopK:
      return decode_topk<T>(work);
  }
  PD_CHECK(false, "codec " << static_cast<int>(work.codec.kind));
}

// Describes the first index that does not ascend. There must be such an index.
std::string order_violation(std::span<const std::uint32_t> indices) {
  std::size_t entry = 1;
  while (indices[entry] > indices[entry - 1]) ++entry;
  return "index " + std::to_string(indices[entry]) + " of entry " + std::to_string(entry) +
         " does not ascend from " + std::to_string(indices[entry - 1]);
}

}  // namespace

Codec codec_from_name(std::string_view name) {
  if (name == "none") return {CodecKind::kNone};
  if (name == "bf16") return {CodecKind::kBFloat16};
  if (name == "fp16") return {CodecKind::kFloat16};
  if (name == "int8") return {CodecKind::kInt8};
  if (name == kTopKName) return {CodecKind::kTopK};
  if (name.substr(0, kTopKName.size()) != kTopKName || name[kTopKName.size()] != ':') refuse_name(name);
  return {CodecKind::kTopK, share_from(name.substr(kTopKName.size() + 1), name)};
}

std::string codec_name(const Codec& codec) {
  switch (codec.kind) {
    case CodecKind::kNone:
      return "none";
    case CodecKind::kBFloat16:
      return "bf16";
    case CodecKind::kFloat16:
      return "fp16";
    case CodecKind::kInt8:
      return "int8";
    case CodecKind::kTopK:
      return std::string(kTopKName) + ":" + share_text(codec.share);
  }
  PD_CHECK(false, "codec " << static_cast<int>(codec.kind));
}

Codec codec_for(const Codec& codec, DType dtype) { return applies_to(codec.kind, dtype) ? codec : Codec{}; }

std::size_t residual_bytes(const Codec& codec, DType dtype, std::size_t num_elements) {
  if (codec.kind != CodecKind::kTopK) return 0;
  return num_elements * with_element_type(dtype, [](auto element) {
           return sizeof(NumberOf<typename decltype(element)::Type>);
         });
}

std::size_t topk_num_chosen(const Codec& codec, std::size_t num_elements) {
  PD_CHECK(codec.share > 0 && codec.share <= 1, "share " << codec.share);
  PD_CHECK(num_elements <= kTopKElementsMax, num_elements << " elements for topk");
  if (num_elements == 0) return 0;
  const double wanted = std::ceil(codec.share * static_cast<double>(num_elements));
  return std::clamp(static_cast<std::size_t>(wanted), std::size_t{1}, num_elements);
}

std::size_t encoded_bytes(const Codec& codec, DType dtype, std::size_t num_elements) {
  if (codec.kind == CodecKind::kNone) return num_elements * dtype_bytes(dtype);
  PD_CHECK(applies_to(codec.kind, dtype), codec_name(codec) << " of " << dtype_name(dtype));
  switch (codec.kind) {
    case CodecKind::kNone:
      break;
    case CodecKind::kBFloat16:
    case CodecKind::kFloat16:
      return num_elements * sizeof(std::uint16_t);
    case CodecKind::kInt8:
      return num_elements + (num_elements + kInt8Block - 1) / kInt8Block * sizeof(float);
    case CodecKind::kTopK:
      return topk_num_chosen(codec, num_elements) * topk_entry_bytes(dtype);
  }
  PD_CHECK(false, "codec " << static_cast<int>(codec.kind));
}

void encode_host(const CodecWork& work) {
  check_work(work);
  if (work.num_elements == 0) return;
  if (work.codec.kind == CodecKind::kNone) {
    std::memcpy(work.encoded, work.values, encoded_bytes(work.codec, work.dtype, work.num_elements));
    return;
  }
  with_element_type(work.dtype,
                    [&](auto element) { encode_elements<typename decltype(element)::Type>(work); });
}

void decode_host(const CodecWork& work) {
  check_work(work);
  if (work.num_elements == 0) return;
  if (work.codec.kind == CodecKind::kNone) {
    std::memcpy(work.values, work.encoded, encoded_bytes(work.codec, work.dtype, work.num_elements));
    return;
  }
  with_element_type(work.dtype,
                    [&](auto element) { decode_elements<typename decltype(element)::Type>(work); });
}

std::optional<std::string> encoding_violation(const Codec& codec, DType dtype, std::size_t num_elements,
                                              std::span<const std::byte> encoded) {
  const std::size_t expected_bytes = encoded_bytes(codec, dtype, num_elements);
  PD_CHECK(encoded.size() == expected_bytes, encoded.size() << " bytes, expected " << expected_bytes);
  if (codec.kind != CodecKind::kTopK || num_elements == 0) return std::nullopt;
  const std::span<const std::uint32_t> indices(reinterpret_cast<const std::uint32_t*>(encoded.data()),
                                               topk_num_chosen(codec, num_elements));
  // Counts all violations instead of stopping at the first, so that the compiler vectorises the loop.
  std::uint32_t num_wrong = 0;
  for (std::size_t i = 1; i < indices.size(); ++i) num_wrong += indices[i] > indices[i - 1] ? 0U : 1U;
  if (num_wrong != 0) return order_violation(indices);
  if (indices.back() < num_elements) return std::nullopt;
  return "index " + std::to_string(indices.back()) + " is beyond the tensor's " +
         std::to_string(num_elements) + " elements";
}

}  // namespace pipedream
