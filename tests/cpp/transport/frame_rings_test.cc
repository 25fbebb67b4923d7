// Tests two ends of a ring in one process. A ring is shared memory through which frames without a payload
// travel on one host. Each frame that is pushed is found once, and in order. ring_board_test.cc tests which
// reader is woken.
#include "transport/frame_rings.h"

#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "transport/ring_board.h"

namespace pipedream {
namespace {

constexpr LinkIdentity kIdentity{.run_id = 7, .incarnation = 1, .channel_id = 3};

FrameHeaderBytes frame(std::uint64_t sequence) {
  FrameHeader header;
  header.kind = FrameKind::kCredit;
  header.sequence = sequence;
  FrameHeaderBytes bytes;
  encode(header, bytes);
  return bytes;
}

// Takes the oldest frame and returns its number, or nothing if there is no frame.
std::optional<std::uint64_t> taken(FrameRings& rings) {
  FrameHeaderBytes bytes;
  if (!rings.take(bytes)) return std::nullopt;
  return decode(bytes).value().sequence;
}

class Rings : public testing::Test {
 protected:
  void SetUp() override {
    listener_ = FrameRings::make(kIdentity, listener_board_, /*is_quick=*/true);
    connector_ = FrameRings::open(listener_->address(), kIdentity, connector_board_, /*is_quick=*/true);
    ASSERT_NE(connector_, nullptr);
    ASSERT_TRUE(listener_->begin(listener_board_));
    ASSERT_TRUE(connector_->begin(connector_board_));
  }

  RingBoard listener_board_;
  RingBoard connector_board_;
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
  listener_->note_brought();
  EXPECT_TRUE(listener_->has_frames());
  EXPECT_EQ(taken(*listener_), 2u);
  EXPECT_FALSE(listener_->has_frames());
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

TEST_F(Rings, BeginMarksTheLinkForWhatCameBefore) {
  std::vector<std::uint32_t> marked;
  listener_board_.take_marks(/*only_quick=*/true, [&](std::uint32_t number) { marked.push_back(number); });
  EXPECT_EQ(marked, std::vector<std::uint32_t>{listener_->number()});
}

TEST(RingsOfOthers, AreNotOpenedByAnotherIdentityOrAnAddressOfNothing) {
  RingBoard board;
  const auto rings = FrameRings::make(kIdentity, board, /*is_quick=*/true);
  EXPECT_FALSE(rings->begin(board)) << "nobody has claimed them";
  LinkIdentity other = kIdentity;
  other.channel_id = 4;
  EXPECT_EQ(FrameRings::open(rings->address(), other, board, /*is_quick=*/true), nullptr);
  EXPECT_EQ(FrameRings::open("1:2:3:4", kIdentity, board, /*is_quick=*/true), nullptr);
  EXPECT_FALSE(rings->begin(board));
}

TEST(RingsOfOthers, AreNotMadeOnceTheBoardHasNoNumberLeft) {
  RingBoard board;
  for (std::uint32_t link = 0; link < RingBoard::kNumLinksMax / 2; ++link) {
    ASSERT_TRUE(board.take_number(/*is_quick=*/true));
  }
  EXPECT_EQ(FrameRings::make(kIdentity, board, /*is_quick=*/true), nullptr);
  EXPECT_NE(FrameRings::make(kIdentity, board, /*is_quick=*/false), nullptr);
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

// A write into a pipe that no process reads sends SIGPIPE, which ends the process unless it is ignored.
TEST(Bells, RingingAfterTheOtherHasEndedDoesNothing) {
  auto bell = std::make_unique<Bell>();
  const auto rope = BellRope::open(bell->address());
  ASSERT_NE(rope, nullptr);
  bell.reset();
  for (int count = 0; count < 100'000; ++count) rope->ring();
}

}  // namespace
}  // namespace pipedream
