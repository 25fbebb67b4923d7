// A thread that drives a transport sleeps on a Watch: a wake-up of its own, and descriptors that it shares
// with the watches of other threads. Owned by the transport.
//
// A descriptor that becomes readable wakes one thread, not all: of the watches on which somebody sleeps, the
// one to which it was added first (EPOLLEXCLUSIVE). While nobody sleeps the next one of each watch finds it.
// It is said once (EPOLLET), and to whoever was woken perhaps alone: that thread must read what there is, or
// remember that it has not.
//
// Threads: wake() on any; add() and remove() on one at a time; sleep() on one at a time, beside them.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

#include "base/clock.h"

namespace pipedream {

// One thread's wake-up: a counter in the kernel. Any thread.
class WakeFd {
 public:
  WakeFd();  // throws UserError
  ~WakeFd();
  WakeFd(const WakeFd&) = delete;
  WakeFd& operator=(const WakeFd&) = delete;

  void set();
  void clear();
  [[nodiscard]] int fd() const { return fd_; }

 private:
  const int fd_;
};

// A timeout for Watch::sleep(). Rounded up: a thread that wakes early would sleep again.
[[nodiscard]] int milliseconds_until(Deadline deadline);

class Watch {
 public:
  Watch();  // throws UserError
  ~Watch();
  Watch(const Watch&) = delete;
  Watch& operator=(const Watch&) = delete;

  // The most names that sleep() returns at a time.
  static constexpr std::size_t kNumNamesMax = 64;

  // name: what sleep() says when it is readable; not 0.
  void add(int fd, std::uint64_t name);
  void remove(int fd);  // before it is closed

  void wake() { wake_fd_.set(); }
  // Until wake(), which is used up by that, until a descriptor is readable or timeout_ms have passed (-1: no
  // bound); or a signal came. The names of what is readable, valid until the next call. Where there are
  // kNumNamesMax, or one fewer and a wake-up, there may be more, which this thread must ask for.
  [[nodiscard]] std::span<const std::uint64_t> sleep(int timeout_ms);

 private:
  static constexpr std::uint64_t kWakeName = 0;

  [[nodiscard]] std::size_t collect(int timeout_ms);

  const int epoll_fd_;
  WakeFd wake_fd_;
  std::array<std::uint64_t, kNumNamesMax> names_{};
  std::size_t num_names_ = 0;
};

}  // namespace pipedream
