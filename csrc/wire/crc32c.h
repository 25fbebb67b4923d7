// The two implementations of crc32c() in frame.h, declared here so that tests can compare them. Any thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace pipedream {

// Looks up one byte at a time in a table. Runs on every processor.
[[nodiscard]] std::uint32_t crc32c_table(std::span<const std::byte> bytes, std::uint32_t seed);

// Uses the SSE4.2 instruction for eight bytes at a time. Call it only if has_crc32c_instruction().
[[nodiscard]] bool has_crc32c_instruction();
[[nodiscard]] std::uint32_t crc32c_instruction(std::span<const std::byte> bytes, std::uint32_t seed);

}  // namespace pipedream
