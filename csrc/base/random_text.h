// Makes random texts for secrets. Any thread.
#pragma once

#include <cstddef>
#include <string>

namespace pipedream {

// Returns random bytes from the kernel as lower-case hexadecimal digits. num_digits must be even.
[[nodiscard]] std::string random_hex(std::size_t num_digits);

}  // namespace pipedream
