// Peers without our protocol: a bare ZeroMQ socket, a bare TCP connection.
#pragma once

#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "transport/link_core.h"
#include "transport/recorder.h"
#include "transport/zmq/libzmq.h"

namespace pipedream {

// A PAIR socket without our protocol.
class RawPeer {
 public:
  RawPeer() : zmq_(load_libzmq("")), context_(zmq_.ctx_new()), socket_(zmq_.socket(context_, zmq::kPair)) {
    set_option(zmq::kLinger, 0);
  }
  ~RawPeer() {
    EXPECT_EQ(zmq_.close(socket_), 0);
    EXPECT_EQ(zmq_.ctx_term(context_), 0);
  }
  RawPeer(const RawPeer&) = delete;
  RawPeer& operator=(const RawPeer&) = delete;

  void set_option(int option, int value) {
    ASSERT_EQ(zmq_.setsockopt(socket_, option, &value, sizeof(value)), 0);
  }
  void connect(const std::string& endpoint) { ASSERT_EQ(zmq_.connect(socket_, endpoint.c_str()), 0); }
  // Returns once the ZeroMQ handshake is over.
  void connect_and_shake_hands(const std::string& endpoint) {
    constexpr int kEventHandshakeSucceeded = 0x1000;
    ASSERT_EQ(zmq_.socket_monitor(socket_, "inproc://monitor", kEventHandshakeSucceeded), 0);
    void* const monitor = zmq_.socket(context_, zmq::kPair);
    ASSERT_EQ(zmq_.connect(monitor, "inproc://monitor"), 0);
    connect(endpoint);
    ZmqMessage event;
    ASSERT_EQ(zmq_.msg_init(&event), 0);
    ASSERT_GE(zmq_.msg_recv(&event, monitor, 0), 0);
    ASSERT_EQ(zmq_.msg_close(&event), 0);
    ASSERT_EQ(zmq_.socket_monitor(socket_, nullptr, 0), 0);
    ASSERT_EQ(zmq_.close(monitor), 0);
  }
  std::string bind() {
    EXPECT_EQ(zmq_.bind(socket_, "tcp://127.0.0.1:*"), 0);
    std::array<char, 256> endpoint{};
    std::size_t num_bytes = endpoint.size();
    EXPECT_EQ(zmq_.getsockopt(socket_, zmq::kLastEndpoint, endpoint.data(), &num_bytes), 0);
    return endpoint.data();
  }
  void send(const std::vector<std::vector<std::byte>>& parts) {
    for (std::size_t part = 0; part < parts.size(); ++part) {
      const int flags = part + 1 < parts.size() ? zmq::kSndMore : 0;
      ASSERT_GE(zmq_.send(socket_, parts[part].data(), parts[part].size(), flags), 0);
    }
  }

 private:
  const LibZmq& zmq_;
  void* const context_;
  void* const socket_;
};

inline std::vector<std::byte> header_bytes(FrameKind kind, std::uint64_t sequence, std::uint64_t tag = 0) {
  FrameHeader header;
  header.kind = kind;
  header.identity = link_options().identity;
  header.sequence = sequence;
  header.tag = tag;
  FrameHeaderBytes bytes;
  encode(header, bytes);
  return {bytes.begin(), bytes.end()};
}

inline std::vector<std::byte> hello_bytes() {
  return header_bytes(FrameKind::kHello, 0, link_options().plan_hash);
}

// A TCP connection to an endpoint on loopback that speaks no ZeroMQ, or its own. Closed when it dies.
class TcpStranger {
 public:
  TcpStranger() : fd_(::socket(AF_INET, SOCK_STREAM, 0)) {}
  explicit TcpStranger(const std::string& endpoint) : TcpStranger() { connect(endpoint); }
  TcpStranger(const TcpStranger&) = delete;
  TcpStranger& operator=(const TcpStranger&) = delete;
  ~TcpStranger() { ::close(fd_); }

  void connect(const std::string& endpoint) {
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    address.sin_port =
        htons(static_cast<std::uint16_t>(std::stoi(endpoint.substr(endpoint.find_last_of(':') + 1))));
    EXPECT_EQ(::connect(fd_, reinterpret_cast<const sockaddr*>(&address), sizeof(address)), 0);
  }
  void say(std::string_view bytes) {
    EXPECT_EQ(::send(fd_, bytes.data(), bytes.size(), MSG_NOSIGNAL), static_cast<ssize_t>(bytes.size()));
  }
  // Until this many bytes have come, or the other side has closed.
  std::string hear(std::size_t num_bytes) {
    std::string bytes(num_bytes, '\0');
    std::size_t num_heard = 0;
    while (num_heard < num_bytes) {
      const ssize_t num_read = ::recv(fd_, bytes.data() + num_heard, num_bytes - num_heard, 0);
      if (num_read <= 0) break;
      num_heard += static_cast<std::size_t>(num_read);
    }
    bytes.resize(num_heard);
    return bytes;
  }
  void wait_until_refused() {
    while (!hear(1).empty()) {
    }
  }

 private:
  const int fd_;
};

// ZMTP 3.1 (ZeroMQ RFC 37): what a peer with this mechanism says first.
inline std::string zmtp_greeting(const std::string& mechanism = "NULL") {
  std::string greeting("\xFF\0\0\0\0\0\0\0\1\x7F\3\1", 12);
  greeting += mechanism + std::string(20 - mechanism.size(), '\0');
  return greeting + std::string(32, '\0');
}

// READY of a PAIR socket, NULL mechanism.
inline std::string zmtp_ready() {
  const std::string body("\5READY\xBSocket-Type\0\0\0\4PAIR", 26);
  return std::string("\4") + static_cast<char>(body.size()) + body;
}

}  // namespace pipedream
