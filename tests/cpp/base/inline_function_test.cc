// Tests that the captures of an InlineFunction move with it and are destroyed once.
#include "base/inline_function.h"

#include <gtest/gtest.h>

#include <memory>
#include <utility>
#include <vector>

namespace pipedream {
namespace {

using Function = InlineFunction<64>;

TEST(InlineFunction, RunsAsOftenAsItIsCalled) {
  int num_calls = 0;
  Function function([&num_calls] { ++num_calls; });
  ASSERT_TRUE(static_cast<bool>(function));
  function();
  function();
  EXPECT_EQ(num_calls, 2);
}

TEST(InlineFunction, WhatIsCapturedMovesWithItAndDiesOnce) {
  const auto captured = std::make_shared<int>(7);
  int seen = 0;
  {
    Function first([captured, &seen] { seen = *captured; });
    EXPECT_EQ(captured.use_count(), 2);
    Function second(std::move(first));
    EXPECT_FALSE(static_cast<bool>(first));  // NOLINT(bugprone-use-after-move): the test is about this
    EXPECT_EQ(captured.use_count(), 2);
    Function third;
    third = std::move(second);
    third();
    EXPECT_EQ(captured.use_count(), 2);
  }
  EXPECT_EQ(seen, 7);
  EXPECT_EQ(captured.use_count(), 1);
}

TEST(InlineFunction, AssignmentAndResetDropWhatWasCaptured) {
  const auto captured = std::make_shared<int>(7);
  Function function([captured] {});
  function = Function([] {});
  EXPECT_EQ(captured.use_count(), 1);
  function = Function([captured] {});
  function.reset();
  EXPECT_EQ(captured.use_count(), 1);
  EXPECT_FALSE(static_cast<bool>(function));
}

TEST(InlineFunction, MayCaptureWhatCannotBeCopied) {
  int seen = 0;
  Function function(
      [item = std::make_unique<int>(7), &seen]() mutable { seen = *std::exchange(item, nullptr); });
  function();
  EXPECT_EQ(seen, 7);
}

TEST(InlineFunction, GrowsInAVectorWithoutLosingWhatItHolds) {
  const auto captured = std::make_shared<int>(0);
  std::vector<Function> functions;
  for (int i = 0; i < 100; ++i) functions.emplace_back([captured, i] { *captured += i; });
  for (Function& function : functions) function();
  EXPECT_EQ(*captured, 99 * 100 / 2);
  functions.clear();
  EXPECT_EQ(captured.use_count(), 1);
}

TEST(InlineFunctionDeathTest, CallingAnEmptyOneAborts) {
  Function function;
  EXPECT_DEATH(function(), "a function that is empty is called");
}

}  // namespace
}  // namespace pipedream
