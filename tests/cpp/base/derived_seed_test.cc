#include "base/derived_seed.h"

#include <gtest/gtest.h>

#include <limits>

namespace pipedream {
namespace {

// If these numbers changed, every seeded run would have another result.
TEST(DerivedSeed, IsTheSameInEveryVersion) {
  EXPECT_EQ(derived_seed(8103633286890876180U, 0), 6911414149145771423);
  EXPECT_EQ(derived_seed(8103633286890876180U, 3), 9102970675557795364);
  EXPECT_EQ(derived_seed(std::numeric_limits<std::int64_t>::max(), 1'000'000'000), 316343507550776033);
}

}  // namespace
}  // namespace pipedream
