// Tests two boards in one process. A board lies in memory that the processes of a host share. It has a mark
// for each link whose ring (frame_rings.h) has a frame, and a bell that wakes the reader. Each mark is found
// once, and a reader that asks to be woken is woken once.
#include "transport/ring_board.h"

#include <gtest/gtest.h>
#include <poll.h>

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <random>
#include <set>
#include <stdexcept>
#include <thread>
#include <vector>

namespace pipedream {
namespace {

bool is_rung(RingBoard& board, int patience_ms = 0) {
  pollfd poll_fd{.fd = board.bell().fd(), .events = POLLIN, .revents = 0};
  return ::poll(&poll_fd, 1, patience_ms) == 1;
}

std::set<std::uint32_t> taken(RingBoard& board, bool only_quick = false) {
  std::set<std::uint32_t> numbers;
  board.take_marks(only_quick, [&](std::uint32_t number) { EXPECT_TRUE(numbers.insert(number).second); });
  return numbers;
}

bool sees_wished(RingBoard& board, std::optional<Patience> patience) {
  board.wish(patience);
  std::atomic_thread_fence(std::memory_order_seq_cst);
  return board.has_wished();
}

class Board : public testing::Test {
 protected:
  void SetUp() override {
    peer_ = RingBoardOfPeer::open(board_.address());
    ASSERT_NE(peer_, nullptr);
  }
  std::uint32_t new_link(bool is_quick = true) { return board_.take_number(is_quick).value(); }

  RingBoard board_;
  std::shared_ptr<RingBoardOfPeer> peer_;
};

TEST_F(Board, MarkIsTakenOnce) {
  std::vector<std::uint32_t> links;
  for (int link = 0; link < 200; ++link) links.push_back(new_link());
  peer_->tell(links[3], /*is_urgent=*/false);
  peer_->tell(links[3], /*is_urgent=*/true);
  peer_->tell(links[150], /*is_urgent=*/true);
  EXPECT_EQ(taken(board_), (std::set{links[3], links[150]}));
  EXPECT_EQ(taken(board_), std::set<std::uint32_t>{});
}

// A mark that is set while its link is read must stay. Its frame may have come after the reader last looked
// into the ring.
TEST_F(Board, MarkThatComesWhileItsLinkIsReadStays) {
  const std::uint32_t link = new_link();
  peer_->tell(link, /*is_urgent=*/false);
  board_.take_marks(/*only_quick=*/false,
                    [&](std::uint32_t number) { peer_->tell(number, /*is_urgent=*/false); });
  EXPECT_EQ(taken(board_), std::set{link});
}

TEST_F(Board, PosterLeavesTheMarksOfLinksThatAreNotQuick) {
  const std::uint32_t quick = new_link();
  const std::uint32_t slow = new_link(/*is_quick=*/false);
  peer_->tell(quick, /*is_urgent=*/false);
  peer_->tell(slow, /*is_urgent=*/false);
  EXPECT_EQ(taken(board_, /*only_quick=*/true), std::set{quick});
  EXPECT_TRUE(sees_wished(board_, Patience::kNone));
  EXPECT_EQ(taken(board_), std::set{slow});
}

TEST_F(Board, ErrorOfALookLeavesThatLinkAndThoseAfterItMarked) {
  std::vector<std::uint32_t> links = {new_link(), new_link(), new_link(), new_link(/*is_quick=*/false)};
  for (const std::uint32_t link : links) peer_->tell(link, /*is_urgent=*/false);
  const auto look = [&](std::uint32_t number) {
    if (number == links[1]) throw std::runtime_error("a device's");
  };
  EXPECT_THROW(board_.take_marks(/*only_quick=*/false, look), std::runtime_error);
  EXPECT_EQ(taken(board_), (std::set{links[1], links[2], links[3]}));
}

TEST_F(Board, BellIsRungOnceForWhatWasWishedFor) {
  const std::uint32_t link = new_link();
  board_.let_wait(link, Patience::kUntilOneWaits);
  peer_->tell(link, /*is_urgent=*/true);
  EXPECT_FALSE(is_rung(board_)) << "nobody asked";
  static_cast<void>(taken(board_));

  board_.wish(Patience::kNone);
  peer_->tell(link, /*is_urgent=*/false);
  EXPECT_FALSE(is_rung(board_)) << "it can wait";
  peer_->tell(link, /*is_urgent=*/true);
  EXPECT_TRUE(is_rung(board_));
  board_.bell().clear();
  static_cast<void>(taken(board_));
  peer_->tell(link, /*is_urgent=*/true);
  EXPECT_FALSE(is_rung(board_)) << "it was rung already";
  static_cast<void>(taken(board_));

  board_.wish(Patience::kUntilOneWaits);
  peer_->tell(link, /*is_urgent=*/false);
  EXPECT_TRUE(is_rung(board_));
}

TEST_F(Board, FramesOfALinkWakeNobodyWhoWantsLessPatientOnes) {
  constexpr std::array kAll = {Patience::kNone, Patience::kUntilOneWaits, Patience::kUntilOneDrives};
  const std::uint32_t link = new_link();
  for (const Patience patience : kAll) {
    board_.let_wait(link, patience);
    for (const Patience wished : kAll) {
      const bool is_wished = patience <= wished;
      board_.wish(wished);
      peer_->tell(link, /*is_urgent=*/false);
      EXPECT_EQ(is_rung(board_), is_wished) << static_cast<int>(patience) << ", " << static_cast<int>(wished);
      board_.bell().clear();
      EXPECT_EQ(sees_wished(board_, wished), is_wished);
      EXPECT_FALSE(sees_wished(board_, std::nullopt));
      static_cast<void>(taken(board_));
      EXPECT_FALSE(sees_wished(board_, wished));
      board_.wish(std::nullopt);
    }
  }
}

TEST_F(Board, LinkThatNoLongerWaitsIsSeenWithTheFrameThatItLetWait) {
  const std::uint32_t link = new_link();
  board_.let_wait(link, Patience::kUntilOneDrives);
  peer_->tell(link, /*is_urgent=*/false);
  EXPECT_FALSE(sees_wished(board_, Patience::kNone));
  board_.let_wait(link, Patience::kNone);
  EXPECT_TRUE(sees_wished(board_, Patience::kNone));
}

TEST_F(Board, IsOpenedOnceByAllLinksToOnePeer) {
  RingBoard other;
  const auto one = other.board_of_peer(board_.address());
  EXPECT_EQ(one, other.board_of_peer(board_.address()));
  EXPECT_EQ(other.board_of_peer("1:2:3:4"), nullptr);
}

// Several peers have many links to a reader that sleeps whenever it may. If a mark or a bell were lost, the
// reader would stay asleep. Each link counts the frames of its peer, as a ring does.
TEST_F(Board, ReaderThatSleepsMissesNoLinkOfMany) {
  constexpr int kNumPeers = 3;
  constexpr std::size_t kNumLinks = 200;
  constexpr std::uint64_t kNumFrames = 60'000;
  constexpr int kPatienceMs = 60'000;
  std::vector<std::atomic<std::uint64_t>> sent(RingBoard::kNumLinksMax);
  std::vector<std::uint32_t> links;
  for (std::size_t link = 0; link < kNumLinks; ++link) links.push_back(new_link(/*is_quick=*/link % 2 == 0));
  std::vector<std::thread> peers;
  for (int peer = 0; peer < kNumPeers; ++peer) {
    peers.emplace_back([&, peer] {
      std::mt19937 random(static_cast<unsigned>(peer));
      for (std::uint64_t frame = 0; frame < kNumFrames; ++frame) {
        const std::uint32_t link = links[random() % kNumLinks];
        sent[link].fetch_add(1, std::memory_order_release);
        peer_->tell(link, /*is_urgent=*/random() % 8 == 0);
      }
    });
  }
  std::vector<std::uint64_t> read(RingBoard::kNumLinksMax);
  std::uint64_t num_read = 0;
  std::mt19937 random(42);
  while (num_read < kNumPeers * kNumFrames) {
    const bool only_quick = random() % 2 == 0;
    board_.take_marks(only_quick, [&](std::uint32_t link) {
      const std::uint64_t now = sent[link].load(std::memory_order_acquire);
      num_read += now - std::exchange(read[link], now);
      board_.let_wait(link, random() % 2 == 0 ? Patience::kNone : Patience::kUntilOneWaits);
    });
    if (sees_wished(board_, Patience::kUntilOneWaits)) continue;
    if (num_read == kNumPeers * kNumFrames) break;
    ASSERT_TRUE(is_rung(board_, kPatienceMs)) << "asleep after " << num_read << " frames";
    board_.bell().clear();
  }
  for (std::thread& peer : peers) peer.join();
}

}  // namespace
}  // namespace pipedream
