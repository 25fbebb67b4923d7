// A transport's board says which of its rings (frame_rings.h) have frames, and for which of these frames one
// of its threads wants to be woken. The board lies in memory that the peers on this host map, too. So the
// thread that drives the transport reads only the rings of links with new frames.
//
//   sender                              receiver's driving thread   receiver's thread that goes to sleep
//
//   1 writes the frame into the ring    A takes the link's mark     a says what is to wake it: wish()
//   2 marks the link: tell()            B reads the link's ring     b a full fence
//   3 reads the wish, and rings the       until it is empty         c looks at the marks once more:
//     bell if it is wished for                                        has_wished()
//
// No frame is lost, whichever side is faster; tell(), unmark() and wish() in ring_board.cc say why.
//
// All peers are processes of the same user. A peer that writes nonsense here may delay other peers' frames or
// waste this process's time. Everything read from the board is checked before use.
#pragma once

#include <array>
#include <atomic>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>

#include "transport/bell.h"
#include "transport/shared_memory.h"
#include "transport/transport.h"

namespace pipedream {

// The marks of links with neighbouring numbers. They have one bit per link and share one cache line.
struct alignas(64) MarkedLinks {
  static constexpr std::uint32_t kNumLinks = 64;

  std::atomic<std::uint64_t> urgent;   // links with an urgent frame, or marked by the receiver itself
  std::atomic<std::uint64_t> patient;  // links with a frame that is not urgent
  // The receiver writes these two. until_one_waits has the links with Patience::kUntilOneWaits or
  // kUntilOneDrives; until_one_drives has the links with kUntilOneDrives.
  std::atomic<std::uint64_t> until_one_waits;
  std::atomic<std::uint64_t> until_one_drives;
};

struct RingBoardPlan;

// A peer's board, as a sender uses it. Any thread.
class RingBoardOfPeer {
 public:
  // Null when the board cannot be opened. Then its process has ended, or belongs to another host, user or
  // namespace.
  [[nodiscard]] static std::shared_ptr<RingBoardOfPeer> open(const std::string& address);

  // Tells the peer that the ring of its link `number` has a frame. number is below kNumLinksMax.
  void tell(std::uint32_t number, bool is_urgent);

 private:
  RingBoardOfPeer(std::unique_ptr<SharedMemory> memory, std::unique_ptr<BellRope> rope);

  const std::unique_ptr<SharedMemory> memory_;
  RingBoardPlan& plan_;
  const std::unique_ptr<BellRope> rope_;
};

// A transport's own board. Functions whose comment names no thread run on the thread that drives the
// transport.
class RingBoard {
 public:
  // The most numbers that a board ever gives to links, half of them to quick ones (LinkHandler::is_quick()).
  // A link without a number has no rings.
  static constexpr std::uint32_t kNumLinksMax = 4096;

  RingBoard();  // throws UserError
  ~RingBoard();
  RingBoard(const RingBoard&) = delete;
  RingBoard& operator=(const RingBoard&) = delete;

  [[nodiscard]] std::string address() const { return memory_->address(); }  // any thread
  [[nodiscard]] Bell& bell() { return bell_; }
  // The peer's board at this address. Links that use it at the same time share one object. Null if
  // RingBoardOfPeer::open() returns null. Any thread.
  [[nodiscard]] std::shared_ptr<RingBoardOfPeer> board_of_peer(const std::string& address);

  // Gives one link a number for good. Empty when none is left. Any thread.
  [[nodiscard]] std::optional<std::uint32_t> take_number(bool is_quick);
  // Lets the link's frames that are not urgent lie unnoticed for as long as `patience` says. Before the first
  // call they are noticed at once.
  void let_wait(std::uint32_t number, Patience patience);
  // Marks the link, so that the next thread that drives reads its ring.
  void mark(std::uint32_t number);
  // Removes the marks of all links, or only of the quick links. Calls look(number) for each link whose mark
  // was removed. If look() throws, this link and the links after it are still marked.
  template <class Look>
  void take_marks(bool only_quick, Look look) {
    for (const Half& half : halves_) {
      const std::uint32_t end = half.end.load(std::memory_order_relaxed);
      for (std::uint32_t first = half.first; first < end; first += MarkedLinks::kNumLinks) {
        for (std::uint64_t marks = marks_of(first); marks != 0; marks &= marks - 1) {
          const std::uint32_t number = first + static_cast<std::uint32_t>(std::countr_zero(marks));
          unmark(number);
          try {
            look(number);
          } catch (...) {
            mark(number);
            throw;
          }
        }
      }
      if (only_quick) return;
    }
  }

  // Says which frames may ring the bell, until it has been rung once: urgent frames, and all frames of links
  // whose patience is at most `patience`. nullopt: no frame rings it. Any thread, one at a time.
  void wish(std::optional<Patience> patience);
  // Whether some marked link has a frame that may ring the bell after the last wish(). Any thread, after this
  // wish() and a fence.
  [[nodiscard]] bool has_wished() const;

 private:
  // The numbers of the quick links, or the numbers of all other links.
  struct Half {
    std::uint32_t first;
    std::atomic<std::uint32_t> end;  // one past the last number taken
  };

  [[nodiscard]] MarkedLinks& links_with(std::uint32_t number) const;
  [[nodiscard]] std::uint64_t marks_of(std::uint32_t first) const;
  void unmark(std::uint32_t number);

  Bell bell_;
  const std::unique_ptr<SharedMemory> memory_;
  RingBoardPlan& plan_;
  std::array<Half, 2> halves_;
  std::optional<Patience> wished_;  // the argument of the last wish(); the bell may have been rung since

  std::mutex mutex_;  // guards peers_
  std::map<std::string, std::weak_ptr<RingBoardOfPeer>> peers_;
};

}  // namespace pipedream
