// Tests PD_CHECK: it does nothing if the condition is true, and otherwise aborts with place, condition and
// values.
#include "base/check.h"

#include <gtest/gtest.h>

namespace pipedream {
namespace {

TEST(CheckDeathTest, FailureNamesFileConditionAndValues) {
  const int slot = 7;
  EXPECT_DEATH(PD_CHECK(slot < 4, "slot " << slot << " of 4, minibatch " << 12),
               "check_test\\.cc:[0-9]+: check failed: slot < 4 \\(slot 7 of 4, minibatch 12\\)");
}

TEST(Check, ConditionIsEvaluatedOnceAndValuesOnlyOnFailure) {
  int num_conditions = 0;
  int num_values = 0;
  PD_CHECK(++num_conditions == 1, ++num_values);
  EXPECT_EQ(num_conditions, 1);
  EXPECT_EQ(num_values, 0);
}

TEST(Check, IsOneStatementInAnIfWithoutBraces) {
  bool otherwise = false;
  if (false)
    PD_CHECK(false, "never reached");
  else
    otherwise = true;
  EXPECT_TRUE(otherwise);
}

}  // namespace
}  // namespace pipedream
