// Behaves like a slow line to a listener. All TCP connections through it together carry a limited number of
// bytes per second towards the listener. The other direction is not slowed down.
#pragma once

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "base/clock.h"

namespace pipedream {

class SlowRelay {
 public:
  // address: "tcp://127.0.0.1:40001"
  SlowRelay(const std::string& address, double bytes_per_s)
      : to_port_(static_cast<std::uint16_t>(std::stoi(address.substr(address.rfind(':') + 1)))),
        bytes_per_s_(bytes_per_s),
        listener_(checked(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0))) {
    const int buffer_bytes = 1 << 16;  // bounds what the relay takes from the sender at once
    checked(::setsockopt(listener_, SOL_SOCKET, SO_RCVBUF, &buffer_bytes, sizeof(buffer_bytes)));
    sockaddr_in here = loopback(0);
    checked(::bind(listener_, reinterpret_cast<sockaddr*>(&here), sizeof(here)));
    checked(::listen(listener_, 16));
    socklen_t num_bytes = sizeof(here);
    checked(::getsockname(listener_, reinterpret_cast<sockaddr*>(&here), &num_bytes));
    address_ = "tcp://127.0.0.1:" + std::to_string(ntohs(here.sin_port));
    acceptor_ = std::thread([this] { accept_all(); });
  }
  // Closes the connections that the two ends have not closed yet.
  ~SlowRelay() {
    ::shutdown(listener_, SHUT_RDWR);
    acceptor_.join();
    for (const int fd : connections_) ::shutdown(fd, SHUT_RDWR);
    for (std::thread& relay : relays_) relay.join();
    for (const int fd : connections_) ::close(fd);
    ::close(listener_);
  }
  SlowRelay(const SlowRelay&) = delete;
  SlowRelay& operator=(const SlowRelay&) = delete;

  [[nodiscard]] const std::string& address() const { return address_; }

 private:
  static constexpr std::size_t kPieceBytes = 4096;

  static int checked(int result) {
    if (result < 0) throw std::runtime_error("a relay's socket failed");
    return result;
  }
  static sockaddr_in loopback(std::uint16_t port) {
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    address.sin_port = htons(port);
    return address;
  }

  void accept_all() {
    for (;;) {
      const int from = ::accept4(listener_, nullptr, nullptr, SOCK_CLOEXEC);
      if (from < 0) return;
      const int to = checked(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
      sockaddr_in there = loopback(to_port_);
      checked(::connect(to, reinterpret_cast<sockaddr*>(&there), sizeof(there)));
      connections_.insert(connections_.end(), {from, to});
      relays_.emplace_back([this, from, to] { relay(from, to, /*is_slow=*/true); });
      relays_.emplace_back([this, from, to] { relay(to, from, /*is_slow=*/false); });
    }
  }

  void relay(int from, int to, bool is_slow) {
    std::array<std::byte, kPieceBytes> piece;
    for (;;) {
      const ssize_t num_read = ::recv(from, piece.data(), piece.size(), 0);
      if (num_read <= 0) break;
      if (is_slow) wait_for_turn(static_cast<std::size_t>(num_read));
      if (::send(to, piece.data(), static_cast<std::size_t>(num_read), MSG_NOSIGNAL) != num_read) break;
    }
    ::shutdown(to, SHUT_WR);
  }
  // Waits until the line has carried these bytes. The line carries the pieces of all connections one after
  // the other.
  void wait_for_turn(std::size_t num_bytes) {
    Deadline end;
    {
      const std::lock_guard lock(mutex_);
      const std::chrono::duration<double> takes(static_cast<double>(num_bytes) / bytes_per_s_);
      end = std::max(line_free_at_, Clock::now()) + std::chrono::duration_cast<Clock::duration>(takes);
      line_free_at_ = end;
    }
    std::this_thread::sleep_until(end);
  }

  const std::uint16_t to_port_;
  const double bytes_per_s_;
  const int listener_;
  std::string address_;
  std::vector<int> connections_;     // used by acceptor_, then by the destructor
  std::vector<std::thread> relays_;  // used by acceptor_, then by the destructor
  std::mutex mutex_;                 // guards line_free_at_
  Deadline line_free_at_;
  std::thread acceptor_;
};

}  // namespace pipedream
