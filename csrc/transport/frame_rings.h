// How frames without a payload travel between the two ends of a link on one host: a ring each way, in memory
// that both map, and a bell for whoever sleeps.
//
//   sender                                      receiver, who drives              receiver, who sleeps
//   1 push(): the frame into a free cell
//     nobody sleeps, or it can wait  -------->  take()
//     else 2 ring the bell           ----------------------------------------->  3 drives: take()
//
// Nothing is lost between the two: a receiver says which frames it wants to be woken for (wish()), then looks
// once more (has_wished(), behind one fence for all its rings), and sleeps only if there are none; a sender
// pushes first and reads the wish then.
//
// The listener makes the memory, the connector opens it and claims it before it says HELLO. What finds no
// free cell takes the connection: a frame says how many before it did, and waits for them.
// Threads: what is not said to be on any is on who drives the transport of its side.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "transport/bell.h"
#include "transport/shared_memory.h"
#include "transport/transport.h"
#include "wire/frame.h"

namespace pipedream {

// What a receiver is to be woken for.
enum class BellWish : std::uint32_t {
  kNothing = 0,  // somebody drives, and looks before it stops; who is rung all the same looks in vain
  kUrgent = 1,   // what cannot wait until a thread of its own accord looks
  kAll = 2,
};

struct RingWay;         // one way's ring, in the shared memory
struct FrameRingsPlan;  // what lies there

class alignas(64) FrameRings {
 public:
  static constexpr std::size_t kNumCells = 256;  // each way

  // The listener's. bell: who is to be woken here; outlives the rings. Throws UserError for want of memory.
  [[nodiscard]] static std::unique_ptr<FrameRings> make(const LinkIdentity& identity, const Bell& bell);
  // The connector's. Null where the memory or the bell cannot be opened: the connection carries all.
  [[nodiscard]] static std::unique_ptr<FrameRings> open(const std::string& address,
                                                        const LinkIdentity& identity, const Bell& bell);
  ~FrameRings();
  FrameRings(const FrameRings&) = delete;
  FrameRings& operator=(const FrameRings&) = delete;

  [[nodiscard]] std::string address() const { return memory_->address(); }  // the listener's
  // From the peer's HELLO on: whether the rings are in use.
  [[nodiscard]] bool begin();

  // False: it must take the connection. is_urgent: the receiver does not let it wait.
  [[nodiscard]] bool push(const FrameHeaderBytes& header, bool is_urgent);
  // One that takes the connection: here, and there.
  void note_carried() { ++num_carried_; }
  void note_brought() {
    ++num_brought_;
    is_blocked_.store(false);
  }
  // Moves the oldest out. False when there is none, or when the connection has yet to bring one before it.
  [[nodiscard]] bool take(FrameHeaderBytes& header);

  // Of frames that are not urgent. Any thread.
  void let_wait(Patience patience) { patience_.store(patience); }
  [[nodiscard]] Patience patience() const { return patience_.load(); }
  // From now on, and until the bell was rung once. Any thread, one at a time, which calls look_after_wishes()
  // when it has wished of all rings, and has_wished() of each.
  void wish(BellWish wished);
  static void look_after_wishes() { std::atomic_thread_fence(std::memory_order_seq_cst); }
  [[nodiscard]] bool has_wished() const { return has(wished_); }
  // Whether there is anything to take of what is wished for. Any thread.
  [[nodiscard]] bool has(BellWish wished) const;

 private:
  FrameRings(std::unique_ptr<SharedMemory> memory, FrameRingsPlan& plan, bool is_listener);

  // In one line of the cache: what every turn reads of every link.
  RingWay& in_;
  std::atomic<std::uint64_t> num_taken_{0};
  std::atomic<std::uint64_t> num_urgent_taken_{0};
  std::atomic<Patience> patience_{Patience::kNone};
  BellWish wished_ = BellWish::kNothing;  // the last time; since then the bell may have been rung
  std::atomic<bool> is_blocked_{false};

  const bool is_listener_;
  RingWay& out_;
  FrameRingsPlan& plan_;
  const std::unique_ptr<SharedMemory> memory_;
  std::unique_ptr<BellRope> rope_;  // null: not opened, or nobody can be woken

  // What this side has done.
  std::uint64_t num_pushed_ = 0;
  std::uint64_t num_urgent_pushed_ = 0;
  std::uint64_t num_free_ = kNumCells;  // at least: the other side is asked only when there seem to be none
  std::uint64_t num_carried_ = 0;
  std::uint64_t num_brought_ = 0;
};

}  // namespace pipedream
