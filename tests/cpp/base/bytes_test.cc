// Tests that sizes are formatted in binary units, with two digits after the point.
#include "base/bytes.h"

#include <gtest/gtest.h>

#include <cstdint>

namespace pipedream {
namespace {

TEST(FormatBytes, BelowOneKibibyteCountsBytes) {
  EXPECT_EQ(format_bytes(0), "0 bytes");
  EXPECT_EQ(format_bytes(1023), "1023 bytes");
}

TEST(FormatBytes, UnitsAreBinary) {
  EXPECT_EQ(format_bytes(1024), "1.00 KiB");
  EXPECT_EQ(format_bytes(1536), "1.50 KiB");
  EXPECT_EQ(format_bytes(std::size_t{16} << 30), "16.00 GiB");
  EXPECT_EQ(format_bytes(SIZE_MAX), "16.00 EiB");
}

TEST(FormatBytes, NeverPrintsAThousandAndTwentyFourOfAUnit) {
  EXPECT_EQ(format_bytes((std::size_t{1} << 20) - 1), "1.00 MiB");
}

}  // namespace
}  // namespace pipedream
