// The board says which rings of a process (frame_rings.h) have frames, and what its receiver is to be woken
// for. It lies in memory that its peers on the host map, too. So a turn looks at the links on which something
// came, and at no others.
//
//   sender                              receiver, who drives        receiver, who goes to sleep
//
//   1 writes the frame into the ring    A takes the link's mark     a says what is to wake it: wish()
//   2 marks the link: tell()            B reads the link's ring     b a full fence
//   3 reads the wish, and rings the       until it is empty         c looks at the marks once more:
//     bell if it is wished for                                        has_wished()
//
// No frame is lost, whoever is faster:
//
//   2 and A   They change one word atomically. Either A takes the mark that 2 has set, and then B finds the
//             frame, or 2 comes after A, and then the mark stays for the next turn. A receiver that leaves
//             frames in a ring marks the link itself. A ring that has to wait for the connection is read by
//             whoever reads that next (ZmqLink::receive_one).
//   3 and a   Between 2 and 3, and between a and c, there is a full barrier. So the sender sees the wish, or
//             the receiver sees the mark. The patience of a link works like a part of the wish: let_wait()
//             comes before a.
//   no 3      The sender leaves 3 out where the link was marked already: whoever marked it has done 3, and
//             until A the receiver sees the mark in c.
//   the bell  Whoever rings takes the wish back, so the others do not ring. Whoever is woken looks at all
//             marks before anybody sleeps with a new wish. A sender that is stopped between the two leaves
//             the board without a wish until it goes on or the next beat comes.
//
// All peers are processes of the same user. One that writes nonsense here may delay frames of others or cost
// this process time; what is read is checked before it is used.
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

// The links with neighbouring numbers, a bit each, in one line of the cache.
struct alignas(64) MarkedLinks {
  static constexpr std::uint32_t kNumLinks = 64;

  std::atomic<std::uint64_t> urgent;   // an urgent frame has come
  std::atomic<std::uint64_t> patient;  // another one has
  // The receiver's: the links whose frames wake nobody before one waits, and nobody at all.
  std::atomic<std::uint64_t> until_one_waits;
  std::atomic<std::uint64_t> until_one_drives;
};

struct RingBoardPlan;

// A peer's board, as a sender sees it. Any thread.
class RingBoardOfPeer {
 public:
  // Null where it cannot be opened: another host, user or namespace, or its process has ended.
  [[nodiscard]] static std::shared_ptr<RingBoardOfPeer> open(const std::string& address);

  // A frame has come into the ring of the peer's link of this number, which is below kNumLinksMax.
  void tell(std::uint32_t number, bool is_urgent);

 private:
  RingBoardOfPeer(std::unique_ptr<SharedMemory> memory, std::unique_ptr<BellRope> rope);

  const std::unique_ptr<SharedMemory> memory_;
  RingBoardPlan& plan_;
  const std::unique_ptr<BellRope> rope_;
};

// A transport's own board. Calls without a note are on the thread that drives the transport.
class RingBoard {
 public:
  // Counts all links that a transport ever has, half of them quick ones (LinkHandler::is_quick()).
  static constexpr std::uint32_t kNumLinksMax = 4096;

  RingBoard();  // throws UserError
  ~RingBoard();
  RingBoard(const RingBoard&) = delete;
  RingBoard& operator=(const RingBoard&) = delete;

  [[nodiscard]] std::string address() const { return memory_->address(); }  // any thread
  [[nodiscard]] Bell& bell() { return bell_; }
  // A peer's board, opened once for all who hold it at a time; null as for open(). Any thread.
  [[nodiscard]] std::shared_ptr<RingBoardOfPeer> board_of_peer(const std::string& address);

  // Gives one link a number for good. Empty when none is left. Any thread.
  [[nodiscard]] std::optional<std::uint32_t> take_number(bool is_quick);
  // Lets the link's frames that are not urgent lie so long. Before the first call they may not lie at all.
  void let_wait(std::uint32_t number, Patience patience);
  // Has the next turn look at the link.
  void mark(std::uint32_t number);
  // Takes all marks, or those of quick links, and calls look(number) for each link without its mark. If
  // look() throws, that link and those after it stay marked.
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

  // Lets urgent frames, and frames of links that are at most so patient, ring the bell until it has been rung
  // once; nullopt: no frame rings it. Any thread, one at a time.
  void wish(std::optional<Patience> patience);
  // Whether a link is marked for which the last wish() asked. Any thread, after that wish and a fence.
  [[nodiscard]] bool has_wished() const;

 private:
  // The numbers of the quick links, or of the others.
  struct Half {
    std::uint32_t first;
    std::atomic<std::uint32_t> end;  // of those that were taken
  };

  [[nodiscard]] MarkedLinks& links_with(std::uint32_t number) const;
  [[nodiscard]] std::uint64_t marks_of(std::uint32_t first) const;
  void unmark(std::uint32_t number);

  Bell bell_;
  const std::unique_ptr<SharedMemory> memory_;
  RingBoardPlan& plan_;
  std::array<Half, 2> halves_;
  std::optional<Patience> wished_;  // the last time; since then the bell may have been rung

  std::mutex mutex_;  // guards peers_
  std::map<std::string, std::weak_ptr<RingBoardOfPeer>> peers_;
};

}  // namespace pipedream
