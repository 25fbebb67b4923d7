// Tests Result and Failure, which pass on failures of the outside world as values.
#include "base/failure.h"

#include <gtest/gtest.h>

#include <memory>
#include <string>

namespace pipedream {
namespace {

Result<std::string> receive(bool peer_alive) {
  if (!peer_alive) return Failure{FailureKind::kPeerLost, "stage 1, replica 0, last minibatch 12"};
  return std::string("frame");
}

TEST(Result, HoldsAValue) {
  const Result<std::string> received = receive(true);
  ASSERT_TRUE(received.ok());
  EXPECT_TRUE(static_cast<bool>(received));
  EXPECT_EQ(received.value(), "frame");
}

TEST(Result, HoldsAFailureWithItsKindAndMessage) {
  const Result<std::string> received = receive(false);
  ASSERT_FALSE(received.ok());
  EXPECT_EQ(received.failure().kind, FailureKind::kPeerLost);
  EXPECT_EQ(received.failure().message, "stage 1, replica 0, last minibatch 12");
}

TEST(Result, MovesAValueThatCannotBeCopied) {
  Result<std::unique_ptr<int>> made(std::make_unique<int>(3));
  const std::unique_ptr<int> taken = std::move(made.value());
  EXPECT_EQ(*taken, 3);
}

TEST(ResultDeathTest, ValueOfAFailureAbortsWithTheFailuresMessage) {
  const Result<std::string> received = receive(false);
  EXPECT_DEATH((void)received.value(), "stage 1, replica 0, last minibatch 12");
}

TEST(FailureKind, NamesAreThoseOfPythonsExceptions) {
  EXPECT_EQ(failure_kind_name(FailureKind::kPeerLost), "PeerLost");
  EXPECT_EQ(failure_kind_name(FailureKind::kTimeout), "Timeout");
  EXPECT_EQ(failure_kind_name(FailureKind::kCorruptFrame), "CorruptFrame");
  EXPECT_EQ(failure_kind_name(FailureKind::kAborted), "Aborted");
  EXPECT_EQ(failure_kind_name(FailureKind::kClosed), "Closed");
}

}  // namespace
}  // namespace pipedream
