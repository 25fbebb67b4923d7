// What only ZeroMQ over TCP can show: killed and stopped processes, strangers, raw messages that break the
// protocol, and how libzmq is found.
#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <spawn.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <csignal>
#include <cstdlib>
#include <string>
#include <vector>

#include "recorder.h"
#include "transport/link_core.h"
#include "transport/zmq/libzmq.h"

extern char** environ;

namespace pipedream {
namespace {

constexpr const char* kChildVariable = "PIPEDREAM_TEST_PEER_ENDPOINT";

// The peer process: connects, sends three frames, then waits to be killed.
[[noreturn]] void run_peer(const std::string& endpoint) {
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);
  Recorder recorder;
  const std::unique_ptr<Transport> transport = make_zmq_transport({});
  Link& link = transport->connect(link_options(), endpoint, recorder);
  for (std::uint64_t index = 0; index < 3; ++index) link.send(credit_frame(index));
  for (;;) ::pause();
}

// This executable, started again, is the peer: a context must not be shared over a fork.
class PeerEnvironment final : public testing::Environment {
 public:
  void SetUp() override {
    if (const char* const endpoint = std::getenv(kChildVariable)) run_peer(endpoint);
  }
};

[[maybe_unused]] testing::Environment* const peer_environment =
    testing::AddGlobalTestEnvironment(std::make_unique<PeerEnvironment>().release());

// Killed at the latest when it goes out of scope.
class PeerProcess {
 public:
  explicit PeerProcess(const std::string& endpoint) {
    std::string executable = "/proc/self/exe";
    std::string variable = std::string(kChildVariable) + "=" + endpoint;
    std::vector<char*> arguments = {executable.data(), nullptr};
    std::vector<char*> variables = {variable.data()};
    for (char** entry = environ; *entry != nullptr; ++entry) variables.push_back(*entry);
    variables.push_back(nullptr);
    started_ =
        ::posix_spawn(&pid_, executable.c_str(), nullptr, nullptr, arguments.data(), variables.data()) == 0;
  }
  PeerProcess(const PeerProcess&) = delete;
  PeerProcess& operator=(const PeerProcess&) = delete;
  ~PeerProcess() {
    if (!started_) return;
    signal(SIGKILL);
    ::waitpid(pid_, nullptr, 0);
  }
  void signal(int number) const { ::kill(pid_, number); }

 private:
  pid_t pid_ = 0;
  bool started_ = false;
};

class ZmqTransport : public testing::Test {
 protected:
  void SetUp() override {
    transport_ = make_transport("zmq", options_);
    if (!transport_) GTEST_SKIP() << "libzmq is not available, or not asked for";
  }

  Link& listen() { return transport_->listen(link_options("stage 0 (rank 0)"), recorder_); }

  TransportOptions options_;
  Recorder recorder_;
  SentCount sent_;
  std::unique_ptr<Transport> transport_;
};

// A PAIR socket without our protocol.
class RawPeer {
 public:
  RawPeer() : zmq_(load_libzmq("")), context_(zmq_.ctx_new()), socket_(zmq_.socket(context_, zmq::kPair)) {
    const int linger = 0;
    EXPECT_EQ(zmq_.setsockopt(socket_, zmq::kLinger, &linger, sizeof(linger)), 0);
  }
  ~RawPeer() {
    EXPECT_EQ(zmq_.close(socket_), 0);
    EXPECT_EQ(zmq_.ctx_term(context_), 0);
  }
  RawPeer(const RawPeer&) = delete;
  RawPeer& operator=(const RawPeer&) = delete;

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

std::vector<std::byte> header_bytes(FrameKind kind, std::uint64_t sequence, std::uint64_t tag = 0) {
  FrameHeader header;
  header.kind = kind;
  header.identity = link_options().identity;
  header.sequence = sequence;
  header.tag = tag;
  FrameHeaderBytes bytes;
  encode(header, bytes);
  return {bytes.begin(), bytes.end()};
}

std::vector<std::byte> hello_bytes() { return header_bytes(FrameKind::kHello, 0, link_options().plan_hash); }

int connect_tcp(const std::string& endpoint) {
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  address.sin_port = htons(static_cast<std::uint16_t>(std::stoi(endpoint.substr(endpoint.rfind(':') + 1))));
  const int fd = ::socket(AF_INET, SOCK_STREAM, 0);
  EXPECT_EQ(::connect(fd, reinterpret_cast<const sockaddr*>(&address), sizeof(address)), 0);
  return fd;
}

// ---- Processes ----

TEST_F(ZmqTransport, KilledProcessIsALostPeerAfterItsFramesWereDelivered) {
  const Link& link = listen();
  const PeerProcess peer(link.endpoint());
  ASSERT_TRUE(recorder_.wait_frames(3));
  peer.signal(SIGKILL);
  const Failure failure = recorder_.wait_failure();
  EXPECT_EQ(failure.kind, FailureKind::kPeerLost);
  EXPECT_NE(failure.message.find("stage 0 (rank 0)"), std::string::npos) << failure.message;
  EXPECT_EQ(recorder_.frames().size(), 3u);
  EXPECT_EQ(recorder_.num_closed(), 0);
}

TEST_F(ZmqTransport, StoppedProcessIsALostPeerByItsHeartbeats) {
  options_.peer_timeout_s = 2;
  transport_ = make_transport("zmq", options_);
  const Link& link = listen();
  const PeerProcess peer(link.endpoint());
  ASSERT_TRUE(recorder_.wait_frames(3));
  peer.signal(SIGSTOP);
  EXPECT_EQ(recorder_.wait_failure().kind, FailureKind::kPeerLost);
}

TEST_F(ZmqTransport, StoppedProcessIsALostPeerEvenWhenSendsFillTheConnection) {
  options_.peer_timeout_s = 2;
  transport_ = make_transport("zmq", options_);
  Link& link = listen();
  const PeerProcess peer(link.endpoint());
  ASSERT_TRUE(recorder_.wait_frames(3));
  peer.signal(SIGSTOP);
  const std::vector<std::byte> payload(std::size_t{4} << 20);
  for (int index = 0; index < 16; ++index) link.send(tensor_frame(index, payload, sent_.callback()));
  EXPECT_EQ(recorder_.wait_failure().kind, FailureKind::kPeerLost);
  transport_->shutdown(0);
  EXPECT_EQ(sent_.count(), 16);
}

TEST_F(ZmqTransport, ShutdownIsBoundedWhenThePeerIsStopped) {
  Link& link = listen();
  const PeerProcess peer(link.endpoint());
  ASSERT_TRUE(recorder_.wait_frames(3));
  peer.signal(SIGSTOP);
  const std::vector<std::byte> payload(std::size_t{4} << 20);
  for (int index = 0; index < 16; ++index) link.send(tensor_frame(index, payload, sent_.callback()));
  transport_->shutdown(0.1);
  EXPECT_EQ(sent_.count(), 16);
  EXPECT_EQ(recorder_.num_failures(), 0u);
}

// ---- Strangers ----

TEST_F(ZmqTransport, ConnectionsThatSayNothingDoNotKeepThePeerOut) {
  const Link& link = listen();
  for (int index = 0; index < 3; ++index) ::close(connect_tcp(link.endpoint()));
  const int silent_fd = connect_tcp(link.endpoint());
  const int garbage_fd = connect_tcp(link.endpoint());
  const std::string garbage = "GET / HTTP/1.1\r\nHost: localhost\r\n\r\n and more than a greeting has bytes";
  EXPECT_EQ(::write(garbage_fd, garbage.data(), garbage.size()), static_cast<ssize_t>(garbage.size()));
  char byte = 0;
  while (::read(garbage_fd, &byte, 1) > 0) {
  }  // until it is refused
  Recorder at_connector;
  const std::unique_ptr<Transport> connecting = make_transport("zmq");
  Link& connector = connecting->connect(link_options(), link.endpoint(), at_connector);
  connector.send(credit_frame(7));
  EXPECT_TRUE(recorder_.wait_frames(1));
  // Strangers that leave now are not mistaken for the peer.
  ::close(silent_fd);
  ::close(garbage_fd);
  connector.send(credit_frame(8));
  EXPECT_TRUE(recorder_.wait_frames(2));
  EXPECT_EQ(recorder_.num_failures(), 0u);
}

TEST_F(ZmqTransport, StrangerThatLeavesBeforeHelloLeavesTheListenerListening) {
  const Link& link = listen();
  {
    RawPeer stranger;
    stranger.connect_and_shake_hands(link.endpoint());
  }
  // Until libzmq has told the listener that the stranger left, the place is taken.
  bool opened = false;
  for (const Deadline deadline = Clock::now() + kPatience; !opened && Clock::now() < deadline;) {
    Recorder at_connector;
    const std::unique_ptr<Transport> connecting = make_transport("zmq");
    connecting->connect(link_options(), link.endpoint(), at_connector);
    opened = at_connector.wait_open_or_failure();
    connecting->shutdown(1);
  }
  EXPECT_TRUE(opened);
  EXPECT_TRUE(recorder_.wait_closed());
  EXPECT_EQ(recorder_.num_failures(), 0u);
}

// ---- Raw messages ----

TEST_F(ZmqTransport, MessageThatIsNoFrameIsRefused) {
  const Link& link = listen();
  RawPeer peer;
  peer.connect(link.endpoint());
  peer.send({{std::byte{1}, std::byte{2}}});
  const Failure failure = recorder_.wait_failure();
  EXPECT_EQ(failure.kind, FailureKind::kCorruptFrame);
  EXPECT_NE(failure.message.find("length 2"), std::string::npos) << failure.message;
}

TEST_F(ZmqTransport, FrameBeforeHelloIsRefused) {
  const Link& link = listen();
  RawPeer peer;
  peer.connect(link.endpoint());
  peer.send({header_bytes(FrameKind::kCredit, 0)});
  const Failure failure = recorder_.wait_failure();
  EXPECT_EQ(failure.kind, FailureKind::kCorruptFrame);
  EXPECT_NE(failure.message.find("CREDIT before HELLO"), std::string::npos) << failure.message;
}

TEST_F(ZmqTransport, MessageOfThreePartsIsRefused) {
  const Link& link = listen();
  RawPeer peer;
  peer.connect(link.endpoint());
  peer.send({hello_bytes()});
  peer.send({header_bytes(FrameKind::kCredit, 1), {}, {}});
  EXPECT_NE(recorder_.wait_failure().message.find("more than two parts"), std::string::npos);
}

TEST_F(ZmqTransport, MessageLongerThanPlannedEndsTheConnectionUnread) {
  const Link& link = listen();
  RawPeer peer;
  peer.connect(link.endpoint());
  peer.send({hello_bytes()});
  ASSERT_TRUE(recorder_.wait_open());
  peer.send(
      {header_bytes(FrameKind::kCredit, 1), std::vector<std::byte>(link_options().payload_bytes_max + 1)});
  // libzmq drops the whole message before it allocates, so there is no header left to name a field.
  EXPECT_EQ(recorder_.wait_failure().kind, FailureKind::kPeerLost);
  EXPECT_TRUE(recorder_.frames().empty());
}

TEST_F(ZmqTransport, ListenerThatSaysNoHelloIsATimeout) {
  options_.peer_timeout_s = 0.3;
  transport_ = make_transport("zmq", options_);
  RawPeer peer;
  transport_->connect(link_options(), peer.bind(), recorder_);
  const Failure failure = recorder_.wait_failure();
  EXPECT_EQ(failure.kind, FailureKind::kTimeout);
  EXPECT_NE(failure.message.find("no HELLO"), std::string::npos) << failure.message;
}

// ---- Set-up ----

TEST_F(ZmqTransport, AddressThatIsNotThisMachinesIsTheUsersMistake) {
  for (const std::string host : {"192.0.2.1", "no.such.interface"}) {
    TransportOptions options;
    options.bind_host = host;
    const std::unique_ptr<Transport> transport = make_transport("zmq", options);
    try {
      transport->listen(link_options(), recorder_);
      ADD_FAILURE() << host << " was accepted";
    } catch (const UserError& error) {
      EXPECT_NE(std::string(error.what()).find(host), std::string::npos) << error.what();
    }
  }
}

TEST_F(ZmqTransport, ListensOnLoopbackUnlessToldOtherwise) {
  EXPECT_TRUE(listen().endpoint().starts_with("tcp://127.0.0.1:"));
  EXPECT_EQ(transport_->name(), "zmq/tcp");
}

TEST(LibZmq, MissingLibraryIsNamedWithTheRemedy) {
  try {
    static_cast<void>(make_zmq_transport({}, "/nonexistent/libzmq.so"));
    ADD_FAILURE() << "it was loaded";
  } catch (const UserError& error) {
    EXPECT_NE(std::string(error.what()).find("/nonexistent/libzmq.so"), std::string::npos) << error.what();
    EXPECT_NE(std::string(error.what()).find("PIPEDREAM_LIBZMQ"), std::string::npos) << error.what();
  }
}

TEST(LibZmq, LibraryThatIsNotZmqIsRefused) {
  EXPECT_THROW(static_cast<void>(make_zmq_transport({}, "libm.so.6")), UserError);
}

}  // namespace
}  // namespace pipedream
