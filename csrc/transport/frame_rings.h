// Frames without a payload travel between the two ends of a link on one host through a ring each way, in
// memory that both map. The board of the receiver's transport (ring_board.h) says that a ring has frames and
// wakes the receiver.
//
// The listener makes the memory; the connector opens it and claims it before it says HELLO. A frame that
// finds no free cell takes the connection instead. To keep the order, each frame in a ring says how many
// frames took the connection before it, and waits for them. Threads: functions run on the thread that drives
// the transport of their side, unless they say otherwise.
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

struct RingEnd;         // in the shared memory: the board and link number of one side
struct RingWay;         // in the shared memory: the ring of one direction
struct FrameRingsPlan;  // the layout of the shared memory

class FrameRings {
 public:
  static constexpr std::size_t kNumCells = 256;  // of the ring in each direction

  // Called by the listener. board, is_quick: the board and the LinkHandler::is_quick() of the calling side.
  // Throws UserError when memory is short. Null when the board has no link number left.
  [[nodiscard]] static std::unique_ptr<FrameRings> make(const LinkIdentity& identity, RingBoard& board,
                                                        bool is_quick);
  // Called by the connector. Null when the memory or the other side's board cannot be opened, or when this
  // side's board has no link number left. Then the connection carries all frames.
  [[nodiscard]] static std::unique_ptr<FrameRings> open(const std::string& address,
                                                        const LinkIdentity& identity, RingBoard& board,
                                                        bool is_quick);
  ~FrameRings();
  FrameRings(const FrameRings&) = delete;
  FrameRings& operator=(const FrameRings&) = delete;

  // The address of the rings' memory, for the connector. number(): the link's number on this side's board.
  [[nodiscard]] std::string address() const { return memory_->address(); }
  [[nodiscard]] std::uint32_t number() const { return number_; }
  // Called when the peer's HELLO arrives. Returns whether the rings are in use from now on.
  [[nodiscard]] bool begin(RingBoard& board);

  // Puts a frame into the ring. False: the frame must be sent on the connection. is_urgent: the receiver must
  // not let it wait.
  [[nodiscard]] bool push(const FrameHeaderBytes& header, bool is_urgent);
  // Counts a frame that this side sends on the connection. note_brought() counts a frame that this side
  // receives on the connection.
  void note_carried() { ++num_carried_; }
  void note_brought() { ++num_brought_; }
  // Moves the oldest frame out. False when there is none, or when a frame that the connection carries comes
  // before it.
  [[nodiscard]] bool take(FrameHeaderBytes& header);
  // Whether the ring has a frame, even a frame that take() does not return yet.
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
  // Null while the peer's board is not open, or if it cannot be opened.
  std::shared_ptr<RingBoardOfPeer> board_of_peer_;
  std::uint32_t number_at_peer_ = 0;

  // Counts of this side.
  std::uint64_t num_taken_ = 0;
  std::uint64_t num_pushed_ = 0;
  std::uint64_t num_free_ = kNumCells;  // a lower bound; the shared counter is read only when it is 0
  std::uint64_t num_carried_ = 0;
  std::uint64_t num_brought_ = 0;
};

}  // namespace pipedream
