// Computes CRC-32C (Castagnoli): reflected polynomial 0x82F63B78, initial value and final xor all ones, as in
// iSCSI (RFC 3720, appendix B.4). Any thread.
#include "wire/crc32c.h"

#include <array>
#include <cstring>

#include "base/check.h"
#include "wire/frame.h"

#if defined(__x86_64__)
#include <nmmintrin.h>
#endif

namespace pipedream {
namespace {

constexpr std::uint32_t kPolynomial = 0x82F63B78;

constexpr std::array<std::uint32_t, 256> make_table() {
  std::array<std::uint32_t, 256> table{};
  for (std::uint32_t byte = 0; byte < table.size(); ++byte) {
    std::uint32_t remainder = byte;
    for (int bit = 0; bit < 8; ++bit) {
      remainder = (remainder >> 1) ^ ((remainder & 1) != 0 ? kPolynomial : 0);
    }
    table[byte] = remainder;
  }
  return table;
}

constexpr std::array<std::uint32_t, 256> kTable = make_table();

}  // namespace

std::uint32_t crc32c_table(std::span<const std::byte> bytes, std::uint32_t seed) {
  std::uint32_t crc = ~seed;
  for (const std::byte byte : bytes) {
    crc = (crc >> 8) ^ kTable[(crc ^ std::to_integer<std::uint32_t>(byte)) & 0xFF];
  }
  return ~crc;
}

#if defined(__x86_64__)

bool has_crc32c_instruction() { return __builtin_cpu_supports("sse4.2") != 0; }

__attribute__((target("sse4.2"))) std::uint32_t crc32c_instruction(std::span<const std::byte> bytes,
                                                                   std::uint32_t seed) {
  std::uint64_t crc = ~seed;
  const std::byte* next = bytes.data();
  std::size_t num_left = bytes.size();
  for (; num_left >= sizeof(std::uint64_t); num_left -= sizeof(std::uint64_t)) {
    std::uint64_t word = 0;
    std::memcpy(&word, next, sizeof(word));
    crc = _mm_crc32_u64(crc, word);
    next += sizeof(word);
  }
  auto crc_of_tail = static_cast<std::uint32_t>(crc);
  for (; num_left > 0; --num_left)
    crc_of_tail = _mm_crc32_u8(crc_of_tail, std::to_integer<std::uint8_t>(*next++));
  return ~crc_of_tail;
}

#else

bool has_crc32c_instruction() { return false; }

std::uint32_t crc32c_instruction(std::span<const std::byte> bytes, std::uint32_t /*seed*/) {
  PD_CHECK(false, "no CRC-32C instruction on this processor, " << bytes.size() << " bytes");
}

#endif

std::uint32_t crc32c(std::span<const std::byte> bytes, std::uint32_t seed) {
  static const bool instruction = has_crc32c_instruction();
  return instruction ? crc32c_instruction(bytes, seed) : crc32c_table(bytes, seed);
}

}  // namespace pipedream
