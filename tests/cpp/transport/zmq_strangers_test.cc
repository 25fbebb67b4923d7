// Tests that strangers who connect to a listener are refused and counted, and that the true peer can still
// connect. Also tests peers that know the endpoint but send nothing.
#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <ifaddrs.h>
#include <netinet/in.h>

#include <future>
#include <iterator>
#include <latch>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "transport/endpoint.h"
#include "transport/raw_peer.h"
#include "transport/recorder.h"
#include "transport/zmq/bind_address.h"

namespace pipedream {
namespace {

class ZmqStrangers : public testing::TestWithParam<std::string> {
 protected:
  void SetUp() override {
    listen(TransportOptions{}.peer_timeout_s);
    if (!listening_) GTEST_SKIP() << "libzmq is not available, or not asked for";
  }

  void listen(double peer_timeout_s) {
    TransportOptions options;
    options.peer_timeout_s = peer_timeout_s;
    listening_ = make_transport(GetParam(), options);
    if (!listening_) return;
    link_ = &listening_->listen(link_options("stage 0 (rank 0)"), recorder_);
    address_ = parse_endpoint(link_->endpoint()).address;
  }

  [[nodiscard]] bool wait_refused(std::uint64_t num_refused) const {
    return wait_until([&] { return link_->counters().num_refused >= num_refused; });
  }
  void expect_true_peer_gets_through() {
    Recorder at_connector;
    const std::unique_ptr<Transport> connecting = make_transport(GetParam());
    connecting->connect(link_options(), link_->endpoint(), at_connector).send(credit_frame(7));
    EXPECT_TRUE(recorder_.wait_frames(1));
    connecting->shutdown(10);
    EXPECT_TRUE(recorder_.wait_closed());
    EXPECT_EQ(recorder_.frames().size(), 1u);
    EXPECT_EQ(recorder_.num_failures(), 0u);
    EXPECT_EQ(at_connector.num_failures(), 0u);
  }

  void expect_no_hello(const std::string& within) {
    const Failure failure = recorder_.wait_failure();
    EXPECT_EQ(failure.kind, FailureKind::kTimeout);
    EXPECT_EQ(failure.message, "stage 0 (rank 0) connected to " + address_ + " but said no HELLO within " +
                                   within + " (activations of stage 0 to stage 1)");
  }

  Recorder recorder_;
  std::unique_ptr<Transport> listening_;
  Link* link_ = nullptr;
  std::string address_;
};

TEST_P(ZmqStrangers, ConnectionsThatSayNothingDoNotKeepThePeerOut) {
  for (int index = 0; index < 3; ++index) const TcpStranger passes_by(address_);
  const TcpStranger silent(address_);
  ASSERT_TRUE(wait_refused(3));
  expect_true_peer_gets_through();
}

// The thread that drives is held up. So nobody reads what libzmq reports about connections.
TEST_P(ZmqStrangers, ManyOfThemHoldUpNoConnectionWhileNobodyLooks) {
  std::latch held(1);
  std::latch leaves(1);
  listening_->post([&] {
    held.count_down();
    leaves.wait();
  });
  held.wait();
  for (int index = 0; index < 1500; ++index) {
    TcpStranger passes_by(address_);
    EXPECT_EQ(passes_by.hear(1).size(), 1U) << index;  // receives libzmq's greeting
  }
  leaves.count_down();
  expect_true_peer_gets_through();
}

TEST_P(ZmqStrangers, StrangersThatLeaveAreNotMistakenForThePeer) {
  auto silent = std::make_unique<TcpStranger>(address_);
  Recorder at_connector;
  const std::unique_ptr<Transport> connecting = make_transport(GetParam());
  Link& connector = connecting->connect(link_options(), link_->endpoint(), at_connector);
  connector.send(credit_frame(7));
  ASSERT_TRUE(recorder_.wait_frames(1));
  silent.reset();
  ASSERT_TRUE(wait_refused(1));
  connector.send(credit_frame(8));
  EXPECT_TRUE(recorder_.wait_frames(2));
  EXPECT_EQ(recorder_.num_failures(), 0u);
}

TEST_P(ZmqStrangers, PeerThatIsLostWhileStrangersComeAndGoIsNoticed) {
  listen(3600);  // silent strangers stay
  Recorder at_connector;
  const std::unique_ptr<Transport> connecting = make_transport(GetParam());
  connecting->connect(link_options(), link_->endpoint(), at_connector);
  ASSERT_TRUE(recorder_.wait_open());
  std::vector<TcpStranger> strangers(40);
  std::latch gone(1);
  std::latch held(1);
  listening_->post([&] {  // the listener learns of all events at once
    held.count_down();
    gone.wait();
  });
  held.wait();
  core_of(*connecting).abandon();
  // The strangers' sockets exist already. So the listener's end of one stranger's connection gets the
  // descriptor number of the connection that has ended.
  for (TcpStranger& stranger : strangers) {
    stranger.connect(address_);
    stranger.hear(1);
  }
  gone.count_down();
  EXPECT_EQ(recorder_.wait_failure().kind, FailureKind::kPeerLost);
}

TEST_P(ZmqStrangers, GarbageIsRefusedAndCounted) {
  const std::string garbage[] = {
      "GET / HTTP/1.1\r\nHost: localhost\r\n\r\n and more than a greeting has bytes",
      std::string(1000, '\0'),
      std::string(1000, '\xFF'),
      zmtp_greeting().substr(0, 12) + std::string(100, '!'),
      zmtp_greeting("NULL"),
      zmtp_greeting("GSSAPI"),
  };
  for (const std::string& bytes : garbage) {
    TcpStranger stranger(address_);
    stranger.say(bytes);
    stranger.wait_until_refused();
  }
  ASSERT_TRUE(wait_refused(std::size(garbage)));
  EXPECT_EQ(link_->counters().num_refused, std::size(garbage));
  expect_true_peer_gets_through();
}

TEST_P(ZmqStrangers, GreetingThatIsCutOffIsRefusedAndCounted) {
  const std::string greeting = zmtp_greeting();
  const std::size_t lengths[] = {1, 10, 11, 12, 33, greeting.size()};
  for (const std::size_t num_bytes : lengths) {
    TcpStranger stranger(address_);
    stranger.say(std::string_view(greeting).substr(0, num_bytes));
  }
  ASSERT_TRUE(wait_refused(std::size(lengths)));
  expect_true_peer_gets_through();
}

TEST_P(ZmqStrangers, ManyAtOnceDoNotKeepThePeerOut) {
  constexpr std::size_t kNumStrangers = 120;
  std::vector<std::unique_ptr<TcpStranger>> strangers;
  for (std::size_t index = 0; index < kNumStrangers; ++index) {
    strangers.push_back(std::make_unique<TcpStranger>(address_));
    if (index % 3 == 1) strangers.back()->say(std::string(200, 'x'));
    if (index % 3 == 2) strangers.back()->say(zmtp_greeting());
  }
  expect_true_peer_gets_through();
}

TEST_P(ZmqStrangers, ManyThatLeaveAreAllCounted) {
  constexpr std::size_t kNumStrangers = 120;
  {
    std::vector<std::unique_ptr<TcpStranger>> strangers;
    for (std::size_t index = 0; index < kNumStrangers; ++index) {
      strangers.push_back(std::make_unique<TcpStranger>(address_));
      strangers.back()->say(zmtp_greeting());
      strangers.back()->hear(1);  // the listener has accepted it
    }
  }
  ASSERT_TRUE(wait_refused(kNumStrangers));
  EXPECT_EQ(link_->counters().num_refused, kNumStrangers);
  expect_true_peer_gets_through();
}

TEST_P(ZmqStrangers, SilentOnesAreTurnedAwayInTime) {
  listen(0.3);
  TcpStranger silent(address_);
  silent.wait_until_refused();
  EXPECT_TRUE(wait_refused(1));
}

TEST_P(ZmqStrangers, ZeroMqWithoutAMechanismIsRefusedAndCounted) {
  RawPeer stranger;
  stranger.connect(address_);
  stranger.offer(hello_bytes());
  ASSERT_TRUE(wait_refused(1));
  EXPECT_EQ(recorder_.num_calls(), 0u);
  expect_true_peer_gets_through();
}

// libzmq limits the size of one part of a message, but collects any number of parts. So a stranger must not
// be able to send parts before the handshake is over.
TEST_P(ZmqStrangers, PartsWithoutEndAreNotTakenFromAStranger) {
  constexpr std::size_t kFloodBytesMax = std::size_t{256} << 20;  // far more than the sockets' buffers hold
  // A part, flagged to be followed by more.
  const std::string part = std::string("\3\0\0\0\0\0\1\0\0", 9) + std::string(1 << 16, 'x');
  for (const std::string& begins :
       {zmtp_greeting("NULL") + zmtp_ready(), zmtp_greeting("PLAIN"),
        zmtp_greeting("PLAIN") + plain_hello(std::string(kTokenChars, '0')), zmtp_greeting("CURVE")}) {
    TcpStranger stranger(address_);
    stranger.say(begins);
    EXPECT_LT(stranger.say_without_end(part, kFloodBytesMax), kFloodBytesMax) << begins.substr(12, 5);
  }
  ASSERT_TRUE(wait_refused(4));
  expect_true_peer_gets_through();
}

TEST_P(ZmqStrangers, ListenerThatHasSeenOnlyStrangersWaitsOn) {
  for (int index = 0; index < 3; ++index) const TcpStranger passes_by(address_);
  ASSERT_TRUE(wait_refused(3));
  std::promise<bool> has_deadline;
  listening_->post(
      [&] { has_deadline.set_value(dynamic_cast<LinkCore&>(*link_).hello_deadline().has_value()); });
  EXPECT_FALSE(has_deadline.get_future().get());
}

TEST_P(ZmqStrangers, PeerThatIsLetInAndLeavesBeforeHelloIsATimeout) {
  listen(0.3);
  {
    RawPeer peer;
    if (GetParam() == "zmq_curve") peer.take_keys(keys_of_tests(), keys_of_tests().public_key);
    peer.connect_and_shake_hands(link_->endpoint());
  }
  expect_no_hello("0.3 s");
}

INSTANTIATE_TEST_SUITE_P(Transports, ZmqStrangers, testing::Values("zmq", "zmq_curve"),
                         [](const auto& parameter) { return parameter.param; });

// ---- Tokens ----

class ZmqTokens : public ZmqStrangers {
 protected:
  // Returns a connection that knows the token, after its handshake.
  [[nodiscard]] std::unique_ptr<TcpStranger> let_in() const {
    auto peer = std::make_unique<TcpStranger>(address_);
    peer->say(zmtp_greeting("PLAIN") + plain_hello(token()));
    peer->hear(zmtp_greeting().size() + plain_welcome().size());
    return peer;
  }
  [[nodiscard]] std::string token() const { return parse_endpoint(link_->endpoint()).token; }
  [[nodiscard]] std::string endpoint_with(const std::string& token) const {
    return to_string(Endpoint{.address = address_, .token = token});
  }
  // Returns the failure with which an attempt to connect ends.
  [[nodiscard]] Failure failure_of(const std::string& endpoint) const {
    Recorder recorder;
    const std::unique_ptr<Transport> connecting = make_transport(GetParam());
    connecting->connect(link_options(), endpoint, recorder);
    return recorder.wait_failure();
  }
};

TEST_P(ZmqTokens, EndpointNamesATokenThatNoOtherLinkHas) {
  std::set<std::string> tokens;
  std::vector<std::unique_ptr<Recorder>> recorders;
  std::vector<std::unique_ptr<Transport>> transports;
  for (int index = 0; index < 2; ++index) {
    transports.push_back(make_transport(GetParam()));
    for (int link = 0; link < 2; ++link) {
      recorders.push_back(std::make_unique<Recorder>());
      const std::string endpoint = transports.back()->listen(link_options(), *recorders.back()).endpoint();
      tokens.insert(parse_endpoint(endpoint).token);
    }
  }
  tokens.insert(token());
  EXPECT_EQ(tokens.size(), 5u);
  EXPECT_EQ(tokens.count(""), 0u);
  EXPECT_EQ(link_->endpoint(), address_ + " token=" + token());
  transports.clear();  // before their recorders
}

TEST_P(ZmqTokens, ConnectorWithTheTokenOfAnotherRunIsToldSoAndThePeerStillComes) {
  std::string other = token();
  other.back() = other.back() == '0' ? '1' : '0';
  const Failure failure = failure_of(endpoint_with(other));
  EXPECT_EQ(failure.kind, FailureKind::kPeerLost);
  EXPECT_NE(
      failure.message.find("stage 1 (rank 1) is lost: it refused the connection to " + address_ +
                           ": the token of the endpoint is not its own, so the endpoint is of another run"),
      std::string::npos)
      << failure.message;
  EXPECT_EQ(failure.message.find(other), std::string::npos) << failure.message;
  ASSERT_TRUE(wait_refused(1));
  expect_true_peer_gets_through();
  EXPECT_EQ(link_->counters().num_refused, 1u);
}

TEST_P(ZmqTokens, WhatIsNearlyTheTokenIsRefusedAndCounted) {
  const std::string near_misses[] = {"", token().substr(1), token().substr(0, kTokenChars - 1), token() + "0",
                                     std::string(200, '0')};
  for (const std::string& said : near_misses) {
    TcpStranger stranger(address_);
    stranger.say(zmtp_greeting("PLAIN") + plain_hello(said));
    // The stranger is told that it is refused. It may then stay connected for as long as a handshake may
    // take.
    const std::string answer = stranger.hear(zmtp_greeting().size() + kPlainErrorBytesMin);
    EXPECT_NE(answer.find("RROR"), std::string::npos);
  }
  ASSERT_TRUE(wait_refused(std::size(near_misses)));
  expect_true_peer_gets_through();
}

TEST_P(ZmqTokens, OneWhoKnowsTheTokenAfterThePeerIsTurnedAway) {
  Recorder at_connector;
  const std::unique_ptr<Transport> connecting = make_transport(GetParam());
  connecting->connect(link_options(), link_->endpoint(), at_connector);
  ASSERT_TRUE(recorder_.wait_open());
  EXPECT_NE(failure_of(link_->endpoint()).message.find("it has its peer already"), std::string::npos);
  EXPECT_EQ(recorder_.num_failures(), 0u);
}

TEST_P(ZmqTokens, EndpointWithoutATokenIsTheUsersMistake) {
  const std::unique_ptr<Transport> connecting = make_transport(GetParam());
  try {
    connecting->connect(link_options(), address_, recorder_);
    ADD_FAILURE() << "it was accepted";
  } catch (const UserError& error) {
    EXPECT_NE(std::string(error.what()).find(address_ + "': its endpoint names no token"), std::string::npos)
        << error.what();
  }
}

TEST_P(ZmqTokens, PeerThatIsLetInAndSaysNothingIsATimeout) {
  listen(0.3);
  RawPeer peer;
  peer.connect_and_shake_hands(link_->endpoint());
  expect_no_hello("0.3 s");
}

TEST_P(ZmqTokens, PeerThatIsLetInAndNeverEndsTheHandshakeIsATimeout) {
  listen(0.3);
  const std::unique_ptr<TcpStranger> peer = let_in();
  expect_no_hello("0.3 s");
}

TEST_P(ZmqTokens, FrameThatIsCutOffBeforeHelloIsATimeout) {
  listen(0.3);
  {
    const std::unique_ptr<TcpStranger> peer = let_in();
    peer->say(plain_initiate());
    peer->say(std::string("\0\xD0", 2) + std::string(100, 'x'));  // 100 of 208 bytes
  }
  expect_no_hello("0.3 s");
}

TEST_P(ZmqTokens, FrameLongerThanPlannedIsRefusedUnread) {
  const std::unique_ptr<TcpStranger> peer = let_in();
  peer->say(plain_initiate());
  peer->say(std::string("\2\0\0\1\0\0\0\0\0", 9));  // announces a frame of 1 TiB
  peer->wait_until_refused();
  EXPECT_TRUE(wait_refused(1));
}

INSTANTIATE_TEST_SUITE_P(Transports, ZmqTokens, testing::Values("zmq"),
                         [](const auto& parameter) { return parameter.param; });

// ---- Beyond loopback ----

// Returns an address of this machine that others may reach, or "" if there is none.
std::string address_for_others() {
  ifaddrs* interfaces = nullptr;
  if (::getifaddrs(&interfaces) != 0) return "";
  std::string found;
  for (const ifaddrs* each = interfaces; each != nullptr; each = each->ifa_next) {
    if (each->ifa_addr == nullptr || each->ifa_addr->sa_family != AF_INET) continue;
    char text[INET_ADDRSTRLEN] = {};
    ::inet_ntop(AF_INET, &reinterpret_cast<const sockaddr_in*>(each->ifa_addr)->sin_addr, text, sizeof(text));
    if (!is_loopback(text)) found = text;
  }
  ::freeifaddrs(interfaces);
  return found;
}

TEST(InsecureListener, LetsInOnlyWhoKnowsTheTokenToo) {
  TransportOptions options;
  options.bind_host = address_for_others();
  options.insecure = true;
  Recorder recorder;
  Recorder at_connector;
  Recorder at_stranger;
  const std::unique_ptr<Transport> connecting = make_transport("zmq", options);
  if (!connecting) GTEST_SKIP() << "libzmq is not available, or not asked for";
  if (options.bind_host.empty()) GTEST_SKIP() << "this machine has loopback alone";
  const std::unique_ptr<Transport> listening = make_transport("zmq", options);
  const Link& link = listening->listen(link_options(), recorder);
  Endpoint endpoint = parse_endpoint(link.endpoint());
  EXPECT_TRUE(endpoint.address.starts_with("tcp://" + options.bind_host + ":")) << endpoint.address;
  endpoint.token = std::string(kTokenChars, '0');
  connecting->connect(link_options(), to_string(endpoint), at_stranger);
  EXPECT_NE(at_stranger.wait_failure().message.find("is of another run"), std::string::npos);
  connecting->connect(link_options(), link.endpoint(), at_connector);
  EXPECT_TRUE(at_connector.wait_open());
  connecting->shutdown(10);
  listening->shutdown(10);  // the recorders are destroyed before the transports
}

}  // namespace
}  // namespace pipedream
