// Tests that both implementations of CRC-32C give the same value at every length and alignment.
#include "wire/crc32c.h"

#include <gtest/gtest.h>

#include <random>
#include <vector>

namespace pipedream {
namespace {

TEST(Crc32cImplementations, AgreeAtEveryLengthAndAlignment) {
  if (!has_crc32c_instruction()) GTEST_SKIP() << "this processor has no CRC-32C instruction";
  std::mt19937_64 random(3);
  std::vector<std::byte> bytes(600);
  for (std::byte& byte : bytes) byte = static_cast<std::byte>(random());
  for (std::size_t start = 0; start < 9; ++start) {
    for (std::size_t length = 0; length + start <= bytes.size(); length += 1 + length / 16) {
      const auto part = std::span<const std::byte>(bytes).subspan(start, length);
      ASSERT_EQ(crc32c_instruction(part, 77), crc32c_table(part, 77)) << "from " << start << ", " << length;
    }
  }
}

TEST(Crc32cImplementations, TableGivesTheKnownVector) {
  const char text[] = {'1', '2', '3', '4', '5', '6', '7', '8', '9'};
  EXPECT_EQ(crc32c_table(std::as_bytes(std::span(text)), 0), 0xE3069283u);
}

}  // namespace
}  // namespace pipedream
