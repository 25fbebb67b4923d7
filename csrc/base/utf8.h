// Text that came from elsewhere, as Python can read it. Pure; any thread.
#pragma once

#include <string>
#include <string_view>

namespace pipedream {

// The text with U+FFFD for every byte that belongs to no character of UTF-8 (RFC 3629).
[[nodiscard]] std::string as_utf8(std::string_view text);

}  // namespace pipedream
