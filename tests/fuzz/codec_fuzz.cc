// Fuzzes the codecs with bytes from a stranger. If encoding_violation() accepts encoded bytes, decoding must
// not write outside the tensor. Any values must encode to bytes that encoding_violation() accepts and that
// can be decoded.
#include <bit>
#include <cmath>
#include <iterator>
#include <string>
#include <vector>

#include "codec/codec.h"
#include "fuzz.h"

namespace pipedream {
namespace {

constexpr std::size_t kNumElementsMax = 4096;
constexpr std::byte kGuard{0xA5};
constexpr std::size_t kNumGuardBytes = 64;

// Memory of num_bytes with guard bytes behind it, which the destructor checks. A sanitizer finds more.
class Guarded {
 public:
  explicit Guarded(std::size_t num_bytes)
      : num_bytes_(num_bytes), bytes_(num_bytes + kNumGuardBytes, std::byte{0}) {
    std::fill(bytes_.begin() + static_cast<std::ptrdiff_t>(num_bytes), bytes_.end(), kGuard);
  }
  ~Guarded() {
    for (std::size_t at = num_bytes_; at < bytes_.size(); ++at) PD_CHECK(bytes_[at] == kGuard, at);
  }
  Guarded(const Guarded&) = delete;
  Guarded& operator=(const Guarded&) = delete;

  [[nodiscard]] std::byte* data() { return bytes_.data(); }
  [[nodiscard]] std::span<std::byte> span() { return std::span(bytes_).first(num_bytes_); }

 private:
  std::size_t num_bytes_;
  std::vector<std::byte> bytes_;
};

void fill(std::span<std::byte> to, FuzzInput& input) {
  const auto bytes = input.take_bytes(to.size());
  std::copy(bytes.begin(), bytes.end(), to.begin());
}

// The first two dtypes keep the numbers 0 and 1, because old inputs of the corpus use them.
DType take_dtype(FuzzInput& input) {
  constexpr DType kDTypes[] = {DType::kFloat32, DType::kFloat64, DType::kBFloat16, DType::kFloat16};
  return kDTypes[input.take<std::uint8_t>() % std::size(kDTypes)];
}

Codec take_codec(FuzzInput& input) {
  constexpr std::uint8_t kNumKinds = 5;
  Codec codec;
  codec.kind = static_cast<CodecKind>(input.take<std::uint8_t>() % kNumKinds);
  codec.share = (1.0 + input.take<std::uint8_t>()) / 256.0;
  return codec;
}

}  // namespace
}  // namespace pipedream

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t num_bytes) {
  using namespace pipedream;
  FuzzInput input(data, num_bytes);
  const Codec given = take_codec(input);
  const DType dtype = take_dtype(input);
  const Codec codec = codec_for(given, dtype);
  const std::size_t num_elements = input.take<std::uint16_t>() % (kNumElementsMax + 1);
  const bool decodes_first = input.take<std::uint8_t>() % 2 == 0;

  Guarded values(num_elements * dtype_bytes(dtype));
  Guarded encoded(encoded_bytes(codec, dtype, num_elements));
  Guarded residual(residual_bytes(codec, dtype, num_elements));
  CodecWork work{codec, dtype, num_elements, values.data(), encoded.data(), nullptr};
  if (decodes_first) {
    fill(encoded.span(), input);
    if (!encoding_violation(codec, dtype, num_elements, encoded.span())) decode_host(work);
    return 0;
  }
  fill(values.span(), input);
  if (codec.kind == CodecKind::kTopK) work.residual = residual.data();
  encode_host(work);
  const auto violation = encoding_violation(codec, dtype, num_elements, encoded.span());
  PD_CHECK(!violation, *violation);
  decode_host(work);
  return 0;
}
