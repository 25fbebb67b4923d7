// The two implementations behind crc32c() of frame.h, apart so that tests compare them. Any thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace pipedream {

// One table look-up a byte. Runs everywhere.
[[nodiscard]] std::uint32_t crc32c_table(std::span<const std::byte> bytes, std::uint32_t seed);

// The SSE4.2 instruction, eight bytes at a time. Only where has_crc32c_instruction().
[[nodiscard]] bool has_crc32c_instruction();
[[nodiscard]] std::uint32_t crc32c_instruction(std::span<const std::byte> bytes, std::uint32_t seed);

}  // namespace pipedream
