// Declares the two implementations of crc32c() in frame.h, so that tests can compare them. Any thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace pipedream {

// Looks up one byte at a time in a table. Runs on every processor.
[[nodiscard]] std::uint32_t crc32c_table(std::span<const std::byte> bytes, std::uint32_t seed);

// Returns whether this processor has the SSE4.2 instruction for CRC-32C. Only then may crc32c_instruction()
// be called, which takes eight bytes at a time.
[[nodiscard]] bool has_crc32c_instruction();
[[nodiscard]] std::uint32_t crc32c_instruction(std::span<const std::byte> bytes, std::uint32_t seed);

}  // namespace pipedream
