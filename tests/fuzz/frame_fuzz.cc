// Fuzzes the decoder of frame headers with bytes from a stranger. It must refuse them, or return a header
// that encodes to the same bytes.
#include <cstring>
#include <string>

#include "fuzz.h"
#include "wire/frame.h"

namespace pipedream {
namespace {

// The offset of the last field, the checksum. It is corrected, because no fuzzer guesses a checksum.
constexpr std::size_t kChecksumOffset = kFrameHeaderBytes - sizeof(std::uint32_t);

void check(std::span<const std::byte> bytes) {
  const Result<FrameHeader> decoded = decode(bytes);
  if (!decoded) {
    PD_CHECK(!decoded.failure().message.empty(), "a refusal without a reason");
    return;
  }
  const FrameHeader& header = decoded.value();
  PD_CHECK(!find_violation(header), find_violation(header)->message);
  PD_CHECK(header.payload_bytes <= kChunkBytesMax, header.payload_bytes);
  PD_CHECK(header.num_dims <= kNumDimsMax, static_cast<int>(header.num_dims));
  std::array<std::byte, kFrameHeaderBytes> again;
  encode(header, again);
  PD_CHECK(std::memcmp(again.data(), bytes.data(), again.size()) == 0, "two encodings of one header");
}

}  // namespace
}  // namespace pipedream

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t num_bytes) {
  using namespace pipedream;
  check(std::as_bytes(std::span(data, num_bytes)));
  if (num_bytes != kFrameHeaderBytes) return 0;
  std::array<std::byte, kFrameHeaderBytes> checksummed;
  std::memcpy(checksummed.data(), data, num_bytes);
  const std::uint32_t checksum = crc32c(std::span(checksummed).first(kChecksumOffset));
  std::memcpy(checksummed.data() + kChecksumOffset, &checksum, sizeof(checksum));
  check(checksummed);
  return 0;
}
