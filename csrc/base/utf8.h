// Makes text from other programs and processes readable for Python. Pure; any thread.
#pragma once

#include <string>
#include <string_view>

namespace pipedream {

// Returns the text with U+FFFD in place of every byte that belongs to no UTF-8 character (RFC 3629).
[[nodiscard]] std::string as_utf8(std::string_view text);

}  // namespace pipedream
