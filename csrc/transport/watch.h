// A thread that drives a transport sleeps on its Watch. wake() of this Watch ends the sleep, and so does a
// readable descriptor. Several watches share the descriptors. Owned by the transport.
//
// A descriptor that becomes readable wakes only one of the sleeping threads (EPOLLEXCLUSIVE): the one to
// whose watch the descriptor was added first. If no thread sleeps, the next sleep on each watch reports it.
// The descriptor is reported once (EPOLLET), perhaps to the woken thread alone. So the woken thread must read
// until the descriptor is empty, or remember that it has not.
//
// Threads: any thread may call wake(). add() and remove() may be called by one thread at a time. sleep() may
// be called by one thread at a time, while other threads call the other functions.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

#include "base/clock.h"

namespace pipedream {

// The wake-up of one thread: an eventfd, a counter in the kernel. Any thread.
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

// A timeout for Watch::sleep(), rounded up, because a thread that wakes early would have to sleep again.
[[nodiscard]] int milliseconds_until(Deadline deadline);

class Watch {
 public:
  Watch();  // throws UserError
  ~Watch();
  Watch(const Watch&) = delete;
  Watch& operator=(const Watch&) = delete;

  // The most names that sleep() returns at a time.
  static constexpr std::size_t kNumNamesMax = 64;

  // name: the value that sleep() returns when fd is readable; not 0.
  void add(int fd, std::uint64_t name);
  void remove(int fd);  // called before fd is closed

  void wake() { wake_fd_.set(); }
  // Sleeps until wake(), until a descriptor is readable, until timeout_ms have passed (-1: no limit), or
  // until a signal arrives. One wake() ends one sleep. Returns the names of the readable descriptors, valid
  // until the next call. If there are kNumNamesMax names or one fewer, more descriptors may be readable, and
  // the thread must call again.
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
