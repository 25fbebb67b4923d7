// Implements Watch by epoll and WakeFd by an eventfd. Threads as in watch.h.
#include "transport/watch.h"

#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <limits>
#include <string>

#include "base/check.h"
#include "base/failure.h"

namespace pipedream {
namespace {

int checked_fd(int fd, const char* what) {
  if (fd < 0) throw UserError(std::string("cannot create ") + what + ": " + std::strerror(errno));
  return fd;
}

}  // namespace

int milliseconds_until(Deadline deadline) {
  const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline - Clock::now()).count();
  return static_cast<int>(std::clamp<std::int64_t>(left, 0, std::numeric_limits<int>::max()));
}

WakeFd::WakeFd() : fd_(checked_fd(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK), "an eventfd")) {}

WakeFd::~WakeFd() { ::close(fd_); }

void WakeFd::set() {
  const std::uint64_t one = 1;
  // A write fails only when the counter is full, and then the thread wakes anyway.
  [[maybe_unused]] const ssize_t written = ::write(fd_, &one, sizeof(one));
}

void WakeFd::clear() {
  std::uint64_t count = 0;
  [[maybe_unused]] const ssize_t num_read = ::read(fd_, &count, sizeof(count));
}

Watch::Watch() : epoll_fd_(checked_fd(::epoll_create1(EPOLL_CLOEXEC), "an epoll descriptor")) {
  epoll_event event{};
  event.events = EPOLLIN;
  event.data.u64 = kWakeName;
  const int added = ::epoll_ctl(epoll_fd_, EPOLL_CTL_ADD, wake_fd_.fd(), &event);
  PD_CHECK(added == 0, std::strerror(errno));
}

Watch::~Watch() { ::close(epoll_fd_); }

void Watch::add(int fd, std::uint64_t name) {
  PD_CHECK(name != kWakeName, "fd " << fd);
  epoll_event event{};
  event.events = EPOLLIN | EPOLLET | EPOLLEXCLUSIVE;
  event.data.u64 = name;
  const int added = ::epoll_ctl(epoll_fd_, EPOLL_CTL_ADD, fd, &event);
  PD_CHECK(added == 0, "fd " << fd << ": " << std::strerror(errno));
}

void Watch::remove(int fd) {
  const int removed = ::epoll_ctl(epoll_fd_, EPOLL_CTL_DEL, fd, nullptr);
  PD_CHECK(removed == 0, "fd " << fd << ": " << std::strerror(errno));
}

// Asks the kernel once more after a timeout or a signal. A descriptor may have been reported to this thread
// just when its sleep ended, and then it is reported to no other thread.
std::span<const std::uint64_t> Watch::sleep(int timeout_ms) {
  num_names_ = 0;
  if (collect(timeout_ms) == 0) static_cast<void>(collect(0));
  return {names_.data(), num_names_};
}

std::size_t Watch::collect(int timeout_ms) {
  std::array<epoll_event, kNumNamesMax> events;
  const int num_events = ::epoll_wait(epoll_fd_, events.data(), static_cast<int>(events.size()), timeout_ms);
  PD_CHECK(num_events >= 0 || errno == EINTR, "epoll_wait: " << std::strerror(errno));
  for (int index = 0; index < num_events; ++index) {
    const std::uint64_t name = events[static_cast<std::size_t>(index)].data.u64;
    if (name == kWakeName) {
      wake_fd_.clear();
    } else {
      names_.at(num_names_++) = name;
    }
  }
  return num_events > 0 ? static_cast<std::size_t>(num_events) : 0;
}

}  // namespace pipedream
