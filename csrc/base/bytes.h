// Formats sizes for people. Pure; any thread.
#pragma once

#include <cstddef>
#include <string>

namespace pipedream {

// Returns the size in binary units with two decimals: "512 bytes", "1.50 KiB", "16.00 GiB".
[[nodiscard]] std::string format_bytes(std::size_t num_bytes);

}  // namespace pipedream
