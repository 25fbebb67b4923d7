#include "base/random_text.h"

#include <sys/random.h>

#include <cerrno>
#include <cstring>
#include <vector>

#include "base/check.h"

namespace pipedream {

std::string random_hex(std::size_t num_digits) {
  std::vector<unsigned char> bytes(num_digits / 2);
  ssize_t num_bytes = 0;
  do {
    num_bytes = ::getrandom(bytes.data(), bytes.size(), 0);
  } while (num_bytes < 0 && errno == EINTR);
  // getrandom(2) always returns such a small number of bytes in full.
  PD_CHECK(num_bytes == static_cast<ssize_t>(bytes.size()), "getrandom: " << std::strerror(errno));
  constexpr std::string_view kDigits = "0123456789abcdef";
  std::string text;
  for (const unsigned char byte : bytes) {
    text += kDigits[byte >> 4];
    text += kDigits[byte & 0xF];
  }
  return text;
}

}  // namespace pipedream
