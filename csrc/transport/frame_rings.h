// How frames without a payload travel between the two ends of a link on one host: a ring each way, in memory
// that both map. The board of each side's transport (ring_board.h) says that a ring has frames, and wakes who
// sleeps.
//
// The listener makes the memory, the connector opens it and claims it before it says HELLO. What finds no
// free cell takes the connection: a frame says how many before it did, and waits for them.
// Threads: what is not said to be on any is on who drives the transport of its side.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "transport/ring_board.h"
#include "transport/shared_memory.h"
#include "transport/transport.h"
#include "wire/frame.h"

namespace pipedream {

struct RingEnd;         // in the shared memory: where a side is told of frames
struct RingWay;         // likewise: one way's ring
struct FrameRingsPlan;  // what lies there

class FrameRings {
 public:
  static constexpr std::size_t kNumCells = 256;  // each way

  // board: this side's. is_quick: LinkHandler::is_quick() of this side.
  // The listener's. Throws UserError for want of memory; null where the board has no number left.
  [[nodiscard]] static std::unique_ptr<FrameRings> make(const LinkIdentity& identity, RingBoard& board,
                                                        bool is_quick);
  // The connector's. Null where the memory or the other board cannot be opened: the connection carries all.
  [[nodiscard]] static std::unique_ptr<FrameRings> open(const std::string& address,
                                                        const LinkIdentity& identity, RingBoard& board,
                                                        bool is_quick);
  ~FrameRings();
  FrameRings(const FrameRings&) = delete;
  FrameRings& operator=(const FrameRings&) = delete;

  [[nodiscard]] std::string address() const { return memory_->address(); }  // the listener's
  [[nodiscard]] std::uint32_t number() const { return number_; }            // on this side's board
  // From the peer's HELLO on: whether the rings are in use.
  [[nodiscard]] bool begin(RingBoard& board);

  // False: it must take the connection. is_urgent: the receiver does not let it wait.
  [[nodiscard]] bool push(const FrameHeaderBytes& header, bool is_urgent);
  // One that takes the connection: here, and there.
  void note_carried() { ++num_carried_; }
  void note_brought() { ++num_brought_; }
  // Moves the oldest out. False when there is none, or when the connection has yet to bring one before it.
  [[nodiscard]] bool take(FrameHeaderBytes& header);
  // Whether there is one, be it that take() refuses it.
  [[nodiscard]] bool has_frames() const;

 private:
  FrameRings(std::unique_ptr<SharedMemory> memory, FrameRingsPlan& plan, bool is_listener,
             std::uint32_t number);

  [[nodiscard]] bool find_peer(RingBoard& board, const RingEnd& peer);

  const std::unique_ptr<SharedMemory> memory_;
  FrameRingsPlan& plan_;
  const bool is_listener_;
  RingWay& in_;
  RingWay& out_;
  const std::uint32_t number_;
  std::shared_ptr<RingBoardOfPeer> board_of_peer_;  // null: not opened, or nobody can be told
  std::uint32_t number_at_peer_ = 0;

  // Counts of this side.
  std::uint64_t num_taken_ = 0;
  std::uint64_t num_pushed_ = 0;
  std::uint64_t num_free_ = kNumCells;  // at least: the other side is asked only when there seem to be none
  std::uint64_t num_carried_ = 0;
  std::uint64_t num_brought_ = 0;
};

}  // namespace pipedream
