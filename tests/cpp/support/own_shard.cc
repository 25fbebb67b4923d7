// The shard that ctest gives a test executable is its own: programs that its tests start, often itself with
// another filter, do not inherit it. In every test executable; runs after GoogleTest has read the shard,
// before the first test.
#include <gtest/gtest.h>

#include <cstdlib>

namespace pipedream {
namespace {

class OwnShard : public testing::Environment {
  void SetUp() override {
    ::unsetenv("GTEST_TOTAL_SHARDS");
    ::unsetenv("GTEST_SHARD_INDEX");
  }
};

// GoogleTest owns it.
const testing::Environment* const g_own_shard = testing::AddGlobalTestEnvironment(new OwnShard);

}  // namespace
}  // namespace pipedream
