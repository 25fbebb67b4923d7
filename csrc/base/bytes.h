// Formats sizes for people. Pure; any thread.
#pragma once

#include <cstddef>
#include <string>

namespace pipedream {

// "512 bytes", "1.50 KiB", "16.00 GiB": binary units, two digits.
[[nodiscard]] std::string format_bytes(std::size_t num_bytes);

}  // namespace pipedream
