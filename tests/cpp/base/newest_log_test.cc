// NewestLog: which items are kept, and in which order.
#include "base/newest_log.h"

#include <gtest/gtest.h>

#include <vector>

namespace pipedream {
namespace {

TEST(NewestLog, KeepsTheNewestOldestFirst) {
  NewestLog<int> log(3);
  EXPECT_EQ(log.items(), std::vector<int>{});
  std::vector<int> added;
  for (int item = 0; item < 8; ++item) {
    log.add(item);
    added.push_back(item);
    if (added.size() > 3) added.erase(added.begin());
    EXPECT_EQ(log.items(), added);
  }
}

TEST(NewestLog, OfNoneKeepsNothing) {
  NewestLog<int> log(0);
  log.add(1);
  EXPECT_TRUE(log.items().empty());
}

}  // namespace
}  // namespace pipedream
