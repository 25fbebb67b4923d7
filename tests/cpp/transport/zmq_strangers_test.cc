// Whoever else connects to a listener: refused and counted, and the true peer still comes.
#include <gtest/gtest.h>

#include <iterator>
#include <latch>
#include <memory>
#include <string>
#include <vector>

#include "transport/endpoint.h"
#include "transport/raw_peer.h"
#include "transport/recorder.h"

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
  // While a stranger is in its place, the peer is told so, and tries again as often as it likes.
  void expect_true_peer_gets_through() {
    bool opened = false;
    for (const Deadline deadline = Clock::now() + kPatience; !opened && Clock::now() < deadline;) {
      Recorder at_connector;
      const std::unique_ptr<Transport> connecting = make_transport(GetParam());
      Link& connector = connecting->connect(link_options(), link_->endpoint(), at_connector);
      opened = at_connector.wait_open_or_failure();
      if (opened) connector.send(credit_frame(7));
      connecting->shutdown(10);
    }
    EXPECT_TRUE(opened);
    EXPECT_TRUE(recorder_.wait_closed());
    EXPECT_EQ(recorder_.frames().size(), 1u);
    EXPECT_EQ(recorder_.num_failures(), 0u);
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
  listening_->post([&] { gone.wait(); });  // it learns of all at once
  core_of(*connecting).abandon();
  // One of them is given the descriptor of the connection that ended: the listener's side takes all that are
  // free, because the strangers have theirs.
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
      zmtp_greeting("PLAIN"),
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
      strangers.back()->hear(1);  // it has been accepted
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

INSTANTIATE_TEST_SUITE_P(Transports, ZmqStrangers, testing::Values("zmq", "zmq_curve"),
                         [](const auto& parameter) { return parameter.param; });

// ---- Strangers that speak ZeroMQ: only keys keep them out ----

class ZmqStrangersWithoutKeys : public ZmqStrangers {
 protected:
  // One that the gate has let in.
  [[nodiscard]] std::unique_ptr<TcpStranger> let_in() const {
    auto stranger = std::make_unique<TcpStranger>(address_);
    stranger->say(zmtp_greeting());
    stranger->say(zmtp_ready());
    stranger->hear(zmtp_greeting().size() + 2);  // its READY has begun
    return stranger;
  }
};

TEST_P(ZmqStrangersWithoutKeys, OneThatLeavesBeforeHelloLeavesTheListenerListening) {
  {
    RawPeer stranger;
    stranger.connect_and_shake_hands(address_);
  }
  expect_true_peer_gets_through();
  EXPECT_GE(link_->counters().num_refused, 1u);
}

TEST_P(ZmqStrangersWithoutKeys, FrameThatIsCutOffIsRefusedAndCounted) {
  {
    const std::unique_ptr<TcpStranger> stranger = let_in();
    stranger->say(std::string("\0\xC0", 2) + std::string(100, 'x'));  // 100 of 192 bytes
  }
  ASSERT_TRUE(wait_refused(1));
  expect_true_peer_gets_through();
}

TEST_P(ZmqStrangersWithoutKeys, FrameLongerThanPlannedIsRefusedUnread) {
  const std::unique_ptr<TcpStranger> stranger = let_in();
  stranger->say(std::string("\2\0\0\1\0\0\0\0\0", 9));  // a frame of 1 TiB follows
  stranger->wait_until_refused();
  ASSERT_TRUE(wait_refused(1));
  expect_true_peer_gets_through();
}

INSTANTIATE_TEST_SUITE_P(Transports, ZmqStrangersWithoutKeys, testing::Values("zmq"),
                         [](const auto& parameter) { return parameter.param; });

}  // namespace
}  // namespace pipedream
