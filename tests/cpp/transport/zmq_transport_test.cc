// Tests the parts of a transport that only ZeroMQ over TCP has: killed and stopped processes, raw messages
// that break the protocol, and the search for libzmq.
#include <gtest/gtest.h>
#include <spawn.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstdlib>
#include <string>
#include <vector>

#include "transport/endpoint.h"
#include "transport/raw_peer.h"
#include "transport/recorder.h"
#include "transport/slow_relay.h"

extern char** environ;

namespace pipedream {
namespace {

constexpr const char* kChildVariable = "PIPEDREAM_TEST_PEER_ENDPOINT";
constexpr const char* kBeatsVariable = "PIPEDREAM_TEST_PEER_BEATS";

TransportOptions options_with_beats() {
  TransportOptions options;
  options.peer_timeout_s = 2;
  options.beats = true;
  return options;
}

// Runs the peer process. It connects, sends three frames, and waits to be killed.
[[noreturn]] void run_peer(const std::string& endpoint) {
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);
  Recorder recorder;
  const bool beats = std::getenv(kBeatsVariable) != nullptr;
  const std::unique_ptr<Transport> transport =
      make_zmq_transport(beats ? options_with_beats() : TransportOptions{});
  Link& link = transport->connect(link_options(), endpoint, recorder);
  for (std::uint64_t index = 0; index < 3; ++index) link.send(credit_frame(index));
  for (;;) ::pause();
}

// Runs this executable again as the peer if an environment variable asks for it. A fork alone would not do,
// because a ZeroMQ context must not be used on both sides of a fork.
class PeerEnvironment final : public testing::Environment {
 public:
  void SetUp() override {
    if (const char* const endpoint = std::getenv(kChildVariable)) run_peer(endpoint);
  }
};

[[maybe_unused]] testing::Environment* const peer_environment =
    testing::AddGlobalTestEnvironment(std::make_unique<PeerEnvironment>().release());

// The peer process. The destructor kills it if it still runs.
class PeerProcess {
 public:
  explicit PeerProcess(const std::string& endpoint, bool beats = false) {
    std::string executable = "/proc/self/exe";
    std::string variable = std::string(kChildVariable) + "=" + endpoint;
    std::vector<char*> arguments = {executable.data(), nullptr};
    std::string beats_variable = std::string(kBeatsVariable) + "=1";
    std::vector<char*> variables = {variable.data()};
    if (beats) variables.push_back(beats_variable.data());
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

TEST_F(ZmqTransport, StoppedProcessIsALostPeerByItsBeats) {
  options_ = options_with_beats();
  transport_ = make_transport("zmq", options_);
  const Link& link = listen();
  const PeerProcess peer(link.endpoint(), /*beats=*/true);
  ASSERT_TRUE(recorder_.wait_frames(3));
  peer.signal(SIGSTOP);
  const Failure failure = recorder_.wait_failure();
  EXPECT_EQ(failure.kind, FailureKind::kPeerLost);
  EXPECT_NE(failure.message.find("nothing has come from it for 1 s"), std::string::npos) << failure.message;
}

TEST_F(ZmqTransport, StoppedProcessIsALostPeerEvenWhenSendsFillTheConnection) {
  options_ = options_with_beats();
  transport_ = make_transport("zmq", options_);
  Link& link = listen();
  const PeerProcess peer(link.endpoint(), /*beats=*/true);
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
  // libzmq drops the whole message before it allocates memory. So no header is left whose field the failure
  // could name.
  EXPECT_EQ(recorder_.wait_failure().kind, FailureKind::kPeerLost);
  EXPECT_TRUE(recorder_.frames().empty());
}

TEST_F(ZmqTransport, ListenerThatSaysNoHelloIsATimeout) {
  options_.peer_timeout_s = 0.3;
  transport_ = make_transport("zmq", options_);
  const SilentListener listener;
  transport_->connect(link_options(), listener.endpoint(), recorder_);
  listener.serve_one();
  const Failure failure = recorder_.wait_failure();
  EXPECT_EQ(failure.kind, FailureKind::kTimeout);
  EXPECT_NE(failure.message.find("no HELLO"), std::string::npos) << failure.message;
}

TEST_F(ZmqTransport, ShutdownIsBoundedWhenThePeerNeverReads) {
  Link& link = listen();
  RawPeer peer;
  peer.set_option(zmq::kRcvHwm, 1);  // keeps libzmq from reading for the peer
  peer.connect(link.endpoint());
  peer.send({hello_bytes()});
  ASSERT_TRUE(recorder_.wait_open());
  const std::vector<std::byte> payload(std::size_t{4} << 20);
  for (int index = 0; index < 32; ++index) link.send(tensor_frame(index, payload, sent_.callback()));
  transport_->shutdown(0.1);
  EXPECT_EQ(sent_.count(), 32);
  EXPECT_EQ(recorder_.num_failures(), 0u);
}

TEST_F(ZmqTransport, PeerThatNeitherReadsNorBeatsIsLost) {
  options_ = options_with_beats();
  transport_ = make_transport("zmq", options_);
  Link& link = listen();
  RawPeer peer;
  peer.set_option(zmq::kRcvHwm, 1);
  peer.connect(link.endpoint());
  peer.send({hello_bytes()});
  ASSERT_TRUE(recorder_.wait_open());
  const std::vector<std::byte> payload(std::size_t{4} << 20);
  for (int index = 0; index < 32; ++index) link.send(tensor_frame(index, payload, sent_.callback()));
  EXPECT_EQ(recorder_.wait_failure().kind, FailureKind::kPeerLost);
  EXPECT_TRUE(sent_.wait(32));
}

// Beats say that the peer is alive, but here they wait behind the payload. For about as long as the peer
// timeout no frame is complete, and only bytes of one arrive.
TEST_F(ZmqTransport, PeerOnASlowLineLivesWhileBytesOfAFrameCome) {
  constexpr std::size_t kPayloadBytes = std::size_t{256} << 10;
  options_ = options_with_beats();
  transport_ = make_transport("zmq", options_);
  const std::unique_ptr<Transport> connecting = make_transport("zmq", options_);
  Endpoint endpoint = parse_endpoint(listen().endpoint());
  const SlowRelay relay(endpoint.address, /*bytes_per_s=*/kPayloadBytes / 2.0);
  endpoint.address = relay.address();
  Recorder at_connector;
  Link& link = connecting->connect(link_options(), to_string(endpoint), at_connector);
  ASSERT_TRUE(at_connector.wait_open());
  const std::vector<std::byte> payload(kPayloadBytes);
  link.send(tensor_frame(0, payload, sent_.callback()));
  const bool came_or_failed = wait_until([&] {
    transport_->pulse(1);
    connecting->pulse(1);
    return !recorder_.frames().empty() || recorder_.num_failures() > 0;
  });
  EXPECT_TRUE(came_or_failed);
  EXPECT_EQ(recorder_.num_failures() > 0 ? recorder_.wait_failure().message : "", "");
  connecting->shutdown(0);
  transport_->shutdown(0);
}

// ---- Set-up ----

TEST_F(ZmqTransport, AddressThatIsNotThisMachinesIsTheUsersMistake) {
  for (const std::string host : {"192.0.2.1", "no.such.interface"}) {
    TransportOptions options;
    options.bind_host = host;
    options.insecure = true;
    const std::unique_ptr<Transport> transport = make_transport("zmq", options);
    try {
      transport->listen(link_options(), recorder_);
      ADD_FAILURE() << host << " was accepted";
    } catch (const UserError& error) {
      EXPECT_NE(std::string(error.what()).find(host), std::string::npos) << error.what();
    }
  }
}

// Returns ports of loopback at which nothing listens now. The system has chosen them.
PortRange free_ports(int num_ports) {
  const std::unique_ptr<Transport> transport = make_transport("zmq");
  Recorder recorder;
  for (;;) {
    const std::string endpoint = transport->listen(link_options(), recorder).endpoint();
    const int first = std::stoi(endpoint.substr(endpoint.find(':', 6) + 1)) + 1;
    if (first + num_ports > 65'536) continue;
    TransportOptions options;
    options.ports =
        PortRange{static_cast<std::uint16_t>(first), static_cast<std::uint16_t>(first + num_ports - 1)};
    options.peer_timeout_s = 0.01;
    const std::unique_ptr<Transport> trial = make_transport("zmq", options);
    try {
      for (int index = 0; index < num_ports; ++index) trial->listen(link_options(), recorder);
    } catch (const UserError&) {
      continue;
    }
    return *options.ports;
  }
}

TEST_F(ZmqTransport, ListensAtThePortsOfItsRangeAlone) {
  TransportOptions options;
  options.ports = free_ports(3);
  options.peer_timeout_s = 0.05;
  const std::unique_ptr<Transport> transport = make_transport("zmq", options);
  for (unsigned port = options.ports->first; port <= options.ports->last; ++port) {
    const std::string endpoint = transport->listen(link_options(), recorder_).endpoint();
    EXPECT_TRUE(endpoint.starts_with("tcp://127.0.0.1:" + std::to_string(port) + " ")) << endpoint;
  }
  try {
    transport->listen(link_options(), recorder_);
    ADD_FAILURE() << "a fourth listens, too";
  } catch (const UserError& error) {
    const std::string range =
        std::to_string(options.ports->first) + "-" + std::to_string(options.ports->last);
    EXPECT_EQ(error.what(), "all ports of " + range +
                                " are taken at 'tcp://127.0.0.1', by other programs or other runs: give "
                                "another range, or a larger one");
  }
}

TEST_F(ZmqTransport, ListenerWaitsForAPortOfItsRangeThatIsStillTaken) {
  TransportOptions options;
  options.ports = free_ports(1);
  std::unique_ptr<Transport> before = make_transport("zmq", options);
  before->listen(link_options(), recorder_);
  std::thread ends([&] { before.reset(); });
  EXPECT_NO_THROW(make_transport("zmq", options)->listen(link_options(), recorder_));
  ends.join();
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
