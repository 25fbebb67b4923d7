// Makes peers that do not follow our protocol: a bare ZeroMQ socket, and a bare TCP connection at either end.
#pragma once

#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "transport/endpoint.h"
#include "transport/link_core.h"
#include "transport/recorder.h"
#include "transport/zmq/curve.h"
#include "transport/zmq/libzmq.h"
#include "transport/zmq/token.h"

namespace pipedream {

// A PAIR socket that does not follow our protocol. It sends the token if the endpoint has one.
class RawPeer {
 public:
  RawPeer() : zmq_(load_libzmq("")), context_(zmq_.ctx_new()), socket_(zmq_.socket(context_, zmq::kPair)) {
    set_option(zmq::kLinger, 0);
    set_option(zmq::kReconnectIvl, -1);
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
  // Gives the socket the keys that it needs if the listener has keys.
  void take_keys(const CurveKeys& keys, const std::string& server_key) {
    set_curve_client(zmq_, socket_, keys, server_key);
  }
  void connect(const std::string& endpoint) {
    const auto [address, server_key, token, rings, memory] = parse_endpoint(endpoint);
    if (!token.empty()) set_token_client(zmq_, socket_, token);
    ASSERT_EQ(zmq_.connect(socket_, address.c_str()), 0);
  }
  // Connects, and returns when ZeroMQ's handshake is over.
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
  void send(const std::vector<std::vector<std::byte>>& parts) {
    for (std::size_t part = 0; part < parts.size(); ++part) {
      const int flags = part + 1 < parts.size() ? zmq::kSndMore : 0;
      ASSERT_GE(zmq_.send(socket_, parts[part].data(), parts[part].size(), flags), 0);
    }
  }
  // Sends one part. Does nothing if the other end has gone already, where send() would wait for ever.
  void offer(const std::vector<std::byte>& part) {
    if (zmq_.send(socket_, part.data(), part.size(), zmq::kDontWait) >= 0) return;
    EXPECT_EQ(zmq_.errno_of_thread(), EAGAIN) << zmq_.last_error();
  }

 private:
  const LibZmq& zmq_;
  void* const context_;
  void* const socket_;
};

inline std::vector<std::byte> header_bytes(FrameKind kind, std::uint64_t sequence,
                                           std::uint64_t plan_hash = 0) {
  FrameHeader header;
  header.kind = kind;
  header.identity = link_options().identity;
  header.sequence = sequence;
  header.plan_hash = plan_hash;
  FrameHeaderBytes bytes;
  encode(header, bytes);
  return {bytes.begin(), bytes.end()};
}

inline std::vector<std::byte> hello_bytes() {
  return header_bytes(FrameKind::kHello, 0, link_options().plan_hash);
}

// A TCP connection to an endpoint on loopback. It sends only the bytes that the test gives it, whether they
// follow ZeroMQ's protocol or not. The destructor closes it.
class TcpStranger {
 public:
  TcpStranger() : fd_(::socket(AF_INET, SOCK_STREAM, 0)) {}
  explicit TcpStranger(const std::string& address) : TcpStranger() { connect(address); }
  explicit TcpStranger(int fd) : fd_(fd) {}
  TcpStranger(const TcpStranger&) = delete;
  TcpStranger& operator=(const TcpStranger&) = delete;
  ~TcpStranger() { ::close(fd_); }

  void connect(const std::string& address) {
    sockaddr_in there{};
    there.sin_family = AF_INET;
    there.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    there.sin_port =
        htons(static_cast<std::uint16_t>(std::stoi(address.substr(address.find_last_of(':') + 1))));
    EXPECT_EQ(::connect(fd_, reinterpret_cast<const sockaddr*>(&there), sizeof(there)), 0);
  }
  void say(std::string_view bytes) {
    EXPECT_EQ(::send(fd_, bytes.data(), bytes.size(), MSG_NOSIGNAL), static_cast<ssize_t>(bytes.size()));
  }
  // Sends the bytes again and again until the other side has closed, or until about num_bytes_max are sent.
  // Returns how many were sent.
  std::size_t say_without_end(std::string_view bytes, std::size_t num_bytes_max) {
    std::size_t num_said = 0;
    while (num_said < num_bytes_max) {
      const ssize_t num_sent = ::send(fd_, bytes.data(), bytes.size(), MSG_NOSIGNAL);
      if (num_sent != static_cast<ssize_t>(bytes.size())) break;
      num_said += bytes.size();
    }
    return num_said;
  }
  // Receives until this many bytes have come or the other side has closed.
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

// Returns the first bytes that a peer with this mechanism sends, by ZMTP 3.1 (ZeroMQ RFC 37).
inline std::string zmtp_greeting(const std::string& mechanism = "NULL", bool is_server = false) {
  std::string greeting("\xFF\0\0\0\0\0\0\0\1\x7F\3\1", 12);
  greeting += mechanism + std::string(20 - mechanism.size(), '\0');
  return greeting + static_cast<char>(is_server) + std::string(31, '\0');
}

// Returns a command of at most 255 bytes. A longer command would need a different header.
inline std::string zmtp_command(const std::string& body) {
  return std::string("\4") + static_cast<char>(body.size()) + body;
}

inline std::string zmtp_ready() { return zmtp_command(std::string("\5READY\xBSocket-Type\0\0\0\4PAIR", 26)); }

// These are the messages of PLAIN (ZeroMQ RFC 24): a connector's HELLO, and the answer of a listener that
// accepts it.
inline std::string plain_hello(const std::string& token) {
  return zmtp_command("\5HELLO\4name" + std::string(1, static_cast<char>(token.size())) + token);
}
inline std::string plain_initiate() {
  return zmtp_command(std::string("\x8INITIATE\xBSocket-Type\0\0\0\4PAIR", 29));
}
inline std::string plain_welcome() { return zmtp_command("\7WELCOME"); }
// The smallest size of a refusal. libzmq 4.3.5 sends "^RROR": an escape sequence in its source swallows the
// first letter of the name.
inline constexpr std::size_t kPlainErrorBytesMin = 11;

// Listens on loopback with the handshake of PLAIN, accepts any token, and never sends our protocol's HELLO.
class SilentListener {
 public:
  SilentListener() : fd_(::socket(AF_INET, SOCK_STREAM, 0)) {
    address_.sin_family = AF_INET;
    address_.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t num_bytes = sizeof(address_);
    auto* const address = reinterpret_cast<sockaddr*>(&address_);
    EXPECT_EQ(::bind(fd_, address, num_bytes), 0);
    EXPECT_EQ(::listen(fd_, 1), 0);
    EXPECT_EQ(::getsockname(fd_, address, &num_bytes), 0);
  }
  ~SilentListener() { ::close(fd_); }
  SilentListener(const SilentListener&) = delete;
  SilentListener& operator=(const SilentListener&) = delete;

  [[nodiscard]] std::string endpoint() const {
    return to_string(Endpoint{.address = "tcp://127.0.0.1:" + std::to_string(ntohs(address_.sin_port)),
                              .token = std::string(kTokenChars, '0')});
  }
  // Shakes hands on one connection, and then only receives until the connection ends.
  void serve_one() const {
    TcpStranger connection(::accept(fd_, nullptr, nullptr));
    connection.say(zmtp_greeting("PLAIN", true));
    connection.hear(zmtp_greeting().size());
    hear_one(connection);  // HELLO
    connection.say(plain_welcome());
    hear_one(connection);  // INITIATE
    connection.say(zmtp_ready());
    while (!hear_one(connection).empty()) {
    }
  }

 private:
  // Receives a command or frame of less than 256 bytes. Returns "" if the connection has ended.
  static std::string hear_one(TcpStranger& connection) {
    const std::string start = connection.hear(2);  // the flags, and the length
    return start.size() < 2 ? "" : connection.hear(static_cast<unsigned char>(start[1]));
  }

  const int fd_;
  sockaddr_in address_{};
};

}  // namespace pipedream
