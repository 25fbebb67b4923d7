#include "base/utf8.h"

#include <cstddef>
#include <cstdint>

namespace pipedream {
namespace {

// Returns the number of bytes of the character at the text's beginning, or 0 if it is not valid UTF-8.
std::size_t character_bytes(std::string_view text) {
  const auto first = static_cast<unsigned char>(text.front());
  if (first < 0x80) return 1;
  const std::size_t num_bytes = first >= 0xF0 ? 4 : first >= 0xE0 ? 3 : 2;
  if (first < 0xC0 || first >= 0xF8 || text.size() < num_bytes) return 0;
  std::uint32_t character = first & (0x7FU >> num_bytes);
  for (const char byte : text.substr(1, num_bytes - 1)) {
    const auto bits = static_cast<unsigned char>(byte);
    if ((bits & 0xC0U) != 0x80U) return 0;
    character = character << 6 | (bits & 0x3FU);
  }
  constexpr std::uint32_t kFirstOfLength[] = {0, 0, 0x80, 0x800, 0x10000};
  const bool is_surrogate = character >= 0xD800 && character <= 0xDFFF;
  if (character < kFirstOfLength[num_bytes] || character > 0x10FFFF || is_surrogate) return 0;
  return num_bytes;
}

}  // namespace

std::string as_utf8(std::string_view text) {
  std::string readable;
  readable.reserve(text.size());
  while (!text.empty()) {
    const std::size_t num_bytes = character_bytes(text);
    readable += num_bytes > 0 ? text.substr(0, num_bytes) : std::string_view("\xEF\xBF\xBD");
    text.remove_prefix(num_bytes > 0 ? num_bytes : 1);
  }
  return readable;
}

}  // namespace pipedream
