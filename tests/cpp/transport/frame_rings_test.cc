// Two ends of one process: what is pushed is found once, in order, and who asks to be woken is, once.
#include "transport/frame_rings.h"

#include <gtest/gtest.h>
#include <poll.h>

#include <cstddef>
#include <memory>
#include <optional>
#include <thread>

#include "transport/bell.h"

namespace pipedream {
namespace {

constexpr LinkIdentity kIdentity{.run_id = 7, .incarnation = 1, .channel_id = 3};

bool is_rung(const Bell& bell) {
  pollfd poll_fd{.fd = bell.fd(), .events = POLLIN, .revents = 0};
  return ::poll(&poll_fd, 1, 0) == 1;
}

FrameHeaderBytes frame(std::uint64_t sequence) {
  FrameHeader header;
  header.kind = FrameKind::kCredit;
  header.sequence = sequence;
  FrameHeaderBytes bytes;
  encode(header, bytes);
  return bytes;
}

// Of the oldest frame, which is taken; none when there is none.
std::optional<std::uint64_t> taken(FrameRings& rings) {
  FrameHeaderBytes bytes;
  if (!rings.take(bytes)) return std::nullopt;
  return decode(bytes).value().sequence;
}

class Rings : public testing::Test {
 protected:
  void SetUp() override {
    listener_ = FrameRings::make(kIdentity, listener_bell_);
    connector_ = FrameRings::open(listener_->address(), kIdentity, connector_bell_);
    ASSERT_NE(connector_, nullptr);
    ASSERT_TRUE(listener_->begin());
    ASSERT_TRUE(connector_->begin());
  }

  Bell listener_bell_;
  Bell connector_bell_;
  std::unique_ptr<FrameRings> listener_;
  std::unique_ptr<FrameRings> connector_;
};

TEST_F(Rings, FramesArriveBothWaysInOrder) {
  for (std::uint64_t sequence = 0; sequence < 3; ++sequence) {
    ASSERT_TRUE(connector_->push(frame(sequence), /*is_urgent=*/false));
    ASSERT_TRUE(listener_->push(frame(10 + sequence), /*is_urgent=*/false));
  }
  for (std::uint64_t sequence = 0; sequence < 3; ++sequence) {
    EXPECT_EQ(taken(*listener_), sequence);
    EXPECT_EQ(taken(*connector_), 10 + sequence);
  }
  EXPECT_EQ(taken(*listener_), std::nullopt);
  EXPECT_EQ(taken(*connector_), std::nullopt);
}

TEST_F(Rings, FrameWaitsForThoseBeforeItThatTookTheConnection) {
  ASSERT_TRUE(connector_->push(frame(0), /*is_urgent=*/false));
  connector_->note_carried();
  ASSERT_TRUE(connector_->push(frame(2), /*is_urgent=*/false));
  EXPECT_EQ(taken(*listener_), 0u);
  EXPECT_EQ(taken(*listener_), std::nullopt);
  EXPECT_FALSE(listener_->has(BellWish::kAll)) << "nobody need look before the connection brings something";
  listener_->note_brought();
  EXPECT_TRUE(listener_->has(BellWish::kAll));
  EXPECT_EQ(taken(*listener_), 2u);
}

TEST_F(Rings, FullRingRefusesUntilOneIsTaken) {
  for (std::size_t index = 0; index < FrameRings::kNumCells; ++index) {
    ASSERT_TRUE(connector_->push(frame(index), /*is_urgent=*/false));
  }
  EXPECT_FALSE(connector_->push(frame(0), /*is_urgent=*/false));
  EXPECT_EQ(taken(*listener_), 0u);
  EXPECT_TRUE(connector_->push(frame(0), /*is_urgent=*/false));
  EXPECT_FALSE(connector_->push(frame(0), /*is_urgent=*/false));
}

TEST_F(Rings, BellIsRungOnceForWhatWasWishedFor) {
  ASSERT_TRUE(connector_->push(frame(0), /*is_urgent=*/true));
  EXPECT_FALSE(is_rung(listener_bell_)) << "nobody asked";
  EXPECT_EQ(taken(*listener_), 0u);

  listener_->wish(BellWish::kUrgent);
  ASSERT_TRUE(connector_->push(frame(1), /*is_urgent=*/false));
  EXPECT_FALSE(is_rung(listener_bell_)) << "it can wait";
  ASSERT_TRUE(connector_->push(frame(2), /*is_urgent=*/true));
  EXPECT_TRUE(is_rung(listener_bell_));
  listener_bell_.clear();
  ASSERT_TRUE(connector_->push(frame(3), /*is_urgent=*/true));
  EXPECT_FALSE(is_rung(listener_bell_)) << "it was rung already";

  listener_->wish(BellWish::kAll);
  ASSERT_TRUE(connector_->push(frame(4), /*is_urgent=*/false));
  EXPECT_TRUE(is_rung(listener_bell_));
  EXPECT_FALSE(is_rung(connector_bell_));
}

TEST_F(Rings, WhoIsAboutToSleepSeesWhatHasComeOfItsWish) {
  EXPECT_FALSE(listener_->has(BellWish::kAll));
  ASSERT_TRUE(connector_->push(frame(0), /*is_urgent=*/false));
  EXPECT_TRUE(listener_->has(BellWish::kAll));
  EXPECT_FALSE(listener_->has(BellWish::kUrgent));
  EXPECT_FALSE(listener_->has(BellWish::kNothing));
  ASSERT_TRUE(connector_->push(frame(1), /*is_urgent=*/true));
  EXPECT_TRUE(listener_->has(BellWish::kUrgent));
  EXPECT_EQ(taken(*listener_), 0u);
  EXPECT_TRUE(listener_->has(BellWish::kUrgent));
  EXPECT_EQ(taken(*listener_), 1u);
  EXPECT_FALSE(listener_->has(BellWish::kUrgent));
  EXPECT_FALSE(listener_->has(BellWish::kAll));
}

// Every sleep ends by a frame or a bell: a lost one would leave the reader asleep.
TEST_F(Rings, ReaderThatSleepsMissesNothing) {
  constexpr std::uint64_t kNumFrames = 20'000;
  std::thread sender([this] {
    for (std::uint64_t sequence = 0; sequence < kNumFrames; ++sequence) {
      while (!connector_->push(frame(sequence), /*is_urgent=*/false)) std::this_thread::yield();
    }
  });
  for (std::uint64_t due = 0; due < kNumFrames;) {
    if (const std::optional<std::uint64_t> sequence = taken(*listener_)) {
      EXPECT_EQ(*sequence, due++);
      continue;
    }
    listener_->wish(BellWish::kAll);
    FrameRings::look_after_wishes();
    if (listener_->has_wished()) continue;
    constexpr int kPatienceMs = 60'000;
    pollfd poll_fd{.fd = listener_bell_.fd(), .events = POLLIN, .revents = 0};
    ASSERT_EQ(::poll(&poll_fd, 1, kPatienceMs), 1) << "asleep at frame " << due;
    listener_bell_.clear();
  }
  sender.join();
}

TEST(RingsOfOthers, AreNotOpenedByAnotherIdentityOrAnAddressOfNothing) {
  const Bell bell;
  const auto rings = FrameRings::make(kIdentity, bell);
  EXPECT_FALSE(rings->begin()) << "nobody has claimed them";
  LinkIdentity other = kIdentity;
  other.channel_id = 4;
  EXPECT_EQ(FrameRings::open(rings->address(), other, bell), nullptr);
  EXPECT_EQ(FrameRings::open("1:2:3:4", kIdentity, bell), nullptr);
  EXPECT_FALSE(rings->begin());
}

TEST(Bells, AreOpenedOnlyWhereTheirPipeIs) {
  const Bell bell;
  EXPECT_NE(BellRope::open(bell.address()), nullptr);
  BellAddress address = bell.address();
  ++address.inode;
  EXPECT_EQ(BellRope::open(address), nullptr);
  address = bell.address();
  address.fd = 100'000;
  EXPECT_EQ(BellRope::open(address), nullptr);
}

// A write into a pipe that nobody reads ends the process unless it is prevented.
TEST(Bells, RingingAfterTheOtherHasEndedDoesNothing) {
  auto bell = std::make_unique<Bell>();
  const auto rope = BellRope::open(bell->address());
  ASSERT_NE(rope, nullptr);
  bell.reset();
  for (int count = 0; count < 100'000; ++count) rope->ring();
}

}  // namespace
}  // namespace pipedream
