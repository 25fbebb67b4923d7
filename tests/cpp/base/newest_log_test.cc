// Tests which items a NewestLog keeps, and in which order.
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

TEST(NewestLog, FindsAnItemByItsNumberAsLongAsItIsKept) {
  NewestLog<int> log(3);
  EXPECT_EQ(log.find(0), nullptr);
  for (int item = 0; item < 8; ++item) {
    log.add(10 * item);
    EXPECT_EQ(log.num_added(), static_cast<std::uint64_t>(item) + 1);
    for (int number = 0; number < 10; ++number) {
      const int* const found = log.find(static_cast<std::uint64_t>(number));
      const bool is_kept = number <= item && number > item - 3;
      ASSERT_EQ(found != nullptr, is_kept) << number << " of " << item;
      if (is_kept) {
        EXPECT_EQ(*found, 10 * number);
      }
    }
  }
}

TEST(NewestLog, OfNoneKeepsNothing) {
  NewestLog<int> log(0);
  log.add(1);
  EXPECT_EQ(log.find(0), nullptr);
  EXPECT_TRUE(log.items().empty());
}

}  // namespace
}  // namespace pipedream
