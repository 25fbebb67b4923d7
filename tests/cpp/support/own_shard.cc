// Hides the shard of ctest from programs that the tests start. ctest tells a test executable by environment
// variables which shard of the tests to run. The tests often start the same executable with another filter,
// which must not apply the shard. Every test executable links this file. It runs after GoogleTest has read
// the shard, and before the first test.
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
