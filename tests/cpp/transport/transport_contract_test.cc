// Tests what every transport promises. Frames come in order and exactly once. Peers are who they claim to be.
// A farewell is distinguished from a loss.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <latch>
#include <limits>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "recorder.h"
#include "transport/endpoint.h"
#include "transport/link_core.h"

namespace pipedream {
namespace {

// Holds a transport's own thread, so that it does no work until it is released.
class HeldThread {
 public:
  explicit HeldThread(Transport& transport) {
    transport.post([state = state_] {
      state->begun.count_down();
      state->released.wait();
    });
    state_->begun.wait();
  }
  HeldThread(const HeldThread&) = delete;
  HeldThread& operator=(const HeldThread&) = delete;
  ~HeldThread() { release(); }

  void release() {
    if (!std::exchange(is_released_, true)) state_->released.count_down();
  }

 private:
  struct State {
    std::latch begun{1};
    std::latch released{1};
  };
  std::shared_ptr<State> state_ = std::make_shared<State>();  // shared, because the thread may need it longer
  bool is_released_ = false;
};

class TransportContract : public testing::TestWithParam<std::string> {
 protected:
  void SetUp() override {
    listening_ = make_transport(GetParam());
    if (!listening_) GTEST_SKIP() << GetParam() << " is not available";
    connecting_ = make_transport(GetParam());
  }

  // Opens a link between the two transports, on both sides.
  void open_link(LinkOptions listener_options = link_options("stage 0 (rank 0)"),
                 LinkOptions connector_options = link_options()) {
    make_link(std::move(listener_options), std::move(connector_options));
    ASSERT_TRUE(at_listener_.wait_open());
    ASSERT_TRUE(at_connector_.wait_open());
  }
  void make_link(LinkOptions listener_options = link_options("stage 0 (rank 0)"),
                 LinkOptions connector_options = link_options()) {
    listener_ = &listening_->listen(std::move(listener_options), at_listener_);
    connector_ = &connecting_->connect(std::move(connector_options), listener_->endpoint(), at_connector_);
  }

  // Sends a frame with this header from the connector, unchecked.
  void inject(const FrameHeader& header, std::vector<std::byte> payload = {}) {
    FrameHeaderBytes bytes;
    encode(header, bytes);
    inject_bytes(bytes, std::move(payload));
  }
  void inject_bytes(const FrameHeaderBytes& bytes, std::vector<std::byte> payload = {}) {
    connecting_->post([this, bytes, payload = std::move(payload)] {
      dynamic_cast<LinkCore&>(*connector_).inject(bytes, payload);
    });
  }
  // Returns the header that the connector's link would send next after num_sent frames, HELLO included.
  FrameHeader next_header(std::uint64_t num_sent, FrameKind kind = FrameKind::kCredit) {
    FrameHeader header;
    header.kind = kind;
    header.identity = link_options().identity;
    header.sequence = num_sent;
    return header;
  }

  void expect_listener_refuses(const std::string& what) {
    const Failure failure = at_listener_.wait_failure();
    EXPECT_EQ(failure.kind, FailureKind::kCorruptFrame) << failure.message;
    EXPECT_NE(failure.message.find(what), std::string::npos) << failure.message;
    EXPECT_NE(failure.message.find("stage 0 (rank 0)"), std::string::npos) << failure.message;
    EXPECT_NE(failure.message.find("activations of stage 0 to stage 1"), std::string::npos)
        << failure.message;
    EXPECT_EQ(failure.message.find('\n'), std::string::npos) << failure.message;
    EXPECT_EQ(listener_->counters().num_refused, 1u);
  }
  // Makes both transports again, with beats. A beat is a frame that says that its sender is alive.
  void make_transports_with_beats(double peer_timeout_s, bool connector_beats = true) {
    TransportOptions options;
    options.beats = true;
    options.peer_timeout_s = peer_timeout_s;
    listening_ = make_transport(GetParam(), options);
    options.beats = connector_beats;
    connecting_ = make_transport(GetParam(), options);
  }

  // The recorders are declared first, so that they outlive the transports.
  Recorder at_listener_;
  Recorder at_connector_;
  SentCount sent_;
  std::vector<std::vector<std::byte>> payloads_;
  std::unique_ptr<Transport> listening_;
  std::unique_ptr<Transport> connecting_;
  Link* listener_ = nullptr;
  Link* connector_ = nullptr;
};

// ---- Order and content ----

TEST_P(TransportContract, FramesOfEverySizeArriveInOrderAndUnchanged) {
  open_link();
  const std::vector<std::size_t> sizes = {0,
                                          1,
                                          kFrameHeaderBytes - 1,
                                          kFrameHeaderBytes,
                                          kFrameHeaderBytes + 1,
                                          4096,
                                          65536,
                                          (1 << 20) + 1,
                                          0,
                                          8 << 20,
                                          7};
  for (std::size_t index = 0; index < sizes.size(); ++index) {
    payloads_.push_back(patterned_bytes(sizes[index], static_cast<std::uint32_t>(index)));
  }
  for (std::size_t index = 0; index < sizes.size(); ++index) {
    OutgoingFrame frame = tensor_frame(static_cast<std::int64_t>(index), payloads_[index], sent_.callback());
    frame.header.fields.data_fingerprint = 1000 + index;
    connector_->send(std::move(frame));
  }
  ASSERT_TRUE(at_listener_.wait_frames(sizes.size()));
  const std::vector<Recorder::Frame> frames = at_listener_.frames();
  for (std::size_t index = 0; index < sizes.size(); ++index) {
    EXPECT_EQ(frames[index].header.minibatch, MinibatchId(static_cast<std::int64_t>(index)));
    EXPECT_EQ(frames[index].header.fields.data_fingerprint, 1000 + index);
    EXPECT_EQ(frames[index].header.sequence, 1 + index);  // HELLO had number 0
    EXPECT_EQ(frames[index].header.identity, link_options().identity);
    EXPECT_EQ(frames[index].payload, payloads_[index]) << "frame " << index;
  }
  EXPECT_TRUE(sent_.wait(static_cast<int>(sizes.size())));
}

TEST_P(TransportContract, BothDirectionsKeepTheirOrderAtOnce) {
  open_link();
  constexpr int kNumFrames = 2000;
  const auto send_all = [](Link& link) {
    for (int index = 0; index < kNumFrames; ++index)
      link.send(credit_frame(static_cast<std::uint64_t>(index)));
  };
  std::thread one([&] { send_all(*connector_); });
  std::thread other([&] { send_all(*listener_); });
  one.join();
  other.join();
  for (Recorder* recorder : {&at_listener_, &at_connector_}) {
    ASSERT_TRUE(recorder->wait_frames(kNumFrames));
    const std::vector<Recorder::Frame> frames = recorder->frames();
    for (std::uint64_t index = 0; index < kNumFrames; ++index)
      ASSERT_EQ(number_of(frames[index].header), index);
  }
}

TEST_P(TransportContract, FramesSentBeforeTheLinkIsOpenWaitForItInOrder) {
  listener_ = &listening_->listen(link_options("stage 0 (rank 0)"), at_listener_);
  for (std::uint64_t index = 0; index < 5; ++index) listener_->send(credit_frame(index, sent_.callback()));
  EXPECT_EQ(sent_.count(), 0);
  connector_ = &connecting_->connect(link_options(), listener_->endpoint(), at_connector_);
  for (std::uint64_t index = 0; index < 5; ++index) connector_->send(credit_frame(index, sent_.callback()));
  ASSERT_TRUE(at_connector_.wait_frames(5));
  ASSERT_TRUE(at_listener_.wait_frames(5));
  for (std::uint64_t index = 0; index < 5; ++index) {
    EXPECT_EQ(number_of(at_connector_.frames()[index].header), index);
    EXPECT_EQ(number_of(at_listener_.frames()[index].header), index);
  }
  EXPECT_TRUE(sent_.wait(10));
}

TEST_P(TransportContract, PayloadIsNotReadAfterOnSent) {
  open_link();
  constexpr int kNumFrames = 20;
  for (int index = 0; index < kNumFrames; ++index) {
    payloads_.push_back(patterned_bytes(std::size_t{256} << 10, static_cast<std::uint32_t>(index)));
  }
  const std::vector<std::vector<std::byte>> originals = payloads_;
  for (int index = 0; index < kNumFrames; ++index) {
    std::vector<std::byte>& payload = payloads_[static_cast<std::size_t>(index)];
    connector_->send(
        tensor_frame(index, payload, [&payload] { std::fill(payload.begin(), payload.end(), std::byte{}); }));
  }
  ASSERT_TRUE(at_listener_.wait_frames(kNumFrames));
  for (std::size_t index = 0; index < kNumFrames; ++index) {
    EXPECT_EQ(at_listener_.frames()[index].payload, originals[index]) << "frame " << index;
  }
}

TEST_P(TransportContract, ManyLinksOfTwoTransportsDoNotMix) {
  constexpr std::size_t kNumLinks = 40;
  constexpr std::uint64_t kNumFrames = 50;
  std::vector<Recorder> at_listeners(kNumLinks);
  std::vector<Recorder> at_connectors(kNumLinks);
  std::vector<Link*> connectors;
  for (std::size_t index = 0; index < kNumLinks; ++index) {
    LinkOptions options = link_options();
    options.identity.channel_id = static_cast<std::uint32_t>(index);
    const Link& listener = listening_->listen(options, at_listeners[index]);
    connectors.push_back(&connecting_->connect(options, listener.endpoint(), at_connectors[index]));
  }
  for (std::uint64_t frame = 0; frame < kNumFrames; ++frame) {
    for (std::size_t index = 0; index < kNumLinks; ++index)
      connectors[index]->send(credit_frame(index * 1000 + frame));
  }
  for (std::size_t index = 0; index < kNumLinks; ++index) {
    ASSERT_TRUE(at_listeners[index].wait_frames(kNumFrames)) << "link " << index;
    const std::vector<Recorder::Frame> frames = at_listeners[index].frames();
    for (std::uint64_t frame = 0; frame < kNumFrames; ++frame)
      ASSERT_EQ(number_of(frames[frame].header), index * 1000 + frame);
  }
  listening_.reset();  // this test's recorders are destroyed before the members
  connecting_.reset();
}

TEST_P(TransportContract, CountersCountFramesAndTheirBytes) {
  open_link();
  payloads_.push_back(patterned_bytes(5000, 1));
  connector_->send(tensor_frame(0, payloads_[0]));
  connector_->send(credit_frame(1));
  ASSERT_TRUE(at_listener_.wait_frames(2));
  const LinkCounters sent = connector_->counters();
  const LinkCounters received = listener_->counters();
  EXPECT_EQ(sent.frames_sent, 3u);  // with HELLO
  EXPECT_EQ(sent.bytes_sent, 3 * kFrameHeaderBytes + 5000);
  EXPECT_EQ(received.frames_received, sent.frames_sent);
  EXPECT_EQ(received.bytes_received, sent.bytes_sent);
  EXPECT_EQ(received.frames_sent, 1u);
  EXPECT_EQ(received.bytes_sent, kFrameHeaderBytes);
  EXPECT_EQ(sent.num_refused + received.num_refused, 0u);
}

TEST_P(TransportContract, CallbacksMaySend) {
  at_connector_.when_open = [](Link& link) { link.send(credit_frame(100)); };
  at_listener_.when_frame = [](Link& link, const FrameHeader& header) {
    link.send(credit_frame(number_of(header) + 1));
    return std::nullopt;
  };
  open_link();
  ASSERT_TRUE(at_connector_.wait_frames(1));
  EXPECT_EQ(number_of(at_connector_.frames()[0].header), 101u);
}

TEST_P(TransportContract, AbortFramesReachTheHandlerWithTheirReason) {
  open_link();
  const std::string why = "stage 0 failed at minibatch 7: loss is not finite";
  OutgoingFrame frame;
  frame.header.kind = FrameKind::kAbort;
  frame.header.payload_bytes = why.size();
  frame.payload = std::as_bytes(std::span(why));
  frame.on_sent = sent_.callback();
  connector_->send(std::move(frame));
  ASSERT_TRUE(at_listener_.wait_frames(1));
  const Recorder::Frame received = at_listener_.frames()[0];
  EXPECT_EQ(received.header.kind, FrameKind::kAbort);
  EXPECT_EQ(std::string(reinterpret_cast<const char*>(received.payload.data()), received.payload.size()),
            why);
  EXPECT_TRUE(sent_.wait(1));
}

// ---- on_sent exactly once ----

TEST_P(TransportContract, OnSentRunsOnceWhenNoPeerEverCame) {
  listener_ = &listening_->listen(link_options(), at_listener_);
  payloads_.push_back(patterned_bytes(100'000, 1));
  for (int index = 0; index < 10; ++index)
    listener_->send(tensor_frame(index, payloads_[0], sent_.callback()));
  listener_->close();
  listening_->shutdown(0.01);
  EXPECT_EQ(sent_.count(), 10);
  EXPECT_EQ(at_listener_.num_calls(), 0u);
}

TEST_P(TransportContract, OnSentRunsOnceWhenThePeerIsLost) {
  open_link();
  payloads_.push_back(patterned_bytes(std::size_t{1} << 20, 1));
  for (int index = 0; index < 20; ++index)
    connector_->send(tensor_frame(index, payloads_[0], sent_.callback()));
  core_of(*listening_).abandon();
  for (int index = 20; index < 40; ++index)
    connector_->send(tensor_frame(index, payloads_[0], sent_.callback()));
  EXPECT_EQ(at_connector_.wait_failure().kind, FailureKind::kPeerLost);
  connector_->send(tensor_frame(40, payloads_[0], sent_.callback()));
  EXPECT_TRUE(sent_.wait(41));
  connecting_->shutdown(0);
  EXPECT_EQ(sent_.count(), 41);
  EXPECT_EQ(at_connector_.num_failures(), 1u);
}

TEST_P(TransportContract, OnSentRunsOnceAfterCloseAndAfterShutdown) {
  open_link();
  payloads_.push_back(patterned_bytes(1000, 1));
  connector_->close();
  connector_->send(tensor_frame(0, payloads_[0], sent_.callback()));
  EXPECT_TRUE(sent_.wait(1));
  connecting_->shutdown(0);
  connector_->send(tensor_frame(1, payloads_[0], sent_.callback()));
  EXPECT_EQ(sent_.count(), 2);
  EXPECT_EQ(at_listener_.frames().size(), 0u);
}

// ---- Who may speak ----

TEST_P(TransportContract, WorkersWithDifferentPlansBothSaySo) {
  LinkOptions other_plan = link_options();
  other_plan.plan_hash = 0xBAD;
  make_link(link_options("stage 0 (rank 0)"), other_plan);
  expect_listener_refuses("another plan");
  const Failure failure = at_connector_.wait_failure();
  EXPECT_EQ(failure.kind, FailureKind::kCorruptFrame);
  EXPECT_NE(failure.message.find("another plan"), std::string::npos) << failure.message;
  EXPECT_EQ(at_listener_.num_opened() + at_connector_.num_opened(), 0);
}

TEST_P(TransportContract, PeerOfAnotherIncarnationIsAStaleWorker) {
  LinkOptions stale = link_options();
  stale.identity.incarnation = 3;
  make_link(link_options("stage 0 (rank 0)"), stale);
  expect_listener_refuses("incarnation 3, this is incarnation 4");
  EXPECT_NE(at_connector_.wait_failure().message.find("stale worker"), std::string::npos);
}

TEST_P(TransportContract, PeerOfAnotherRunIsRefused) {
  LinkOptions other_run = link_options();
  other_run.identity.run_id = 0xF00;
  make_link(link_options("stage 0 (rank 0)"), other_run);
  expect_listener_refuses("belongs to run 0000000000000f00");
}

TEST_P(TransportContract, PeerOfAnotherChannelIsRefused) {
  LinkOptions other_channel = link_options();
  other_channel.identity.channel_id = 18;
  make_link(link_options("stage 0 (rank 0)"), other_channel);
  expect_listener_refuses("channel_id 18");
}

TEST_P(TransportContract, SecondConnectorIsRefusedAndTheFirstGoesOn) {
  open_link();
  Recorder at_second;
  const std::unique_ptr<Transport> second = make_transport(GetParam());
  second->connect(link_options(), listener_->endpoint(), at_second);
  const Failure failure = at_second.wait_failure();
  EXPECT_EQ(failure.kind, FailureKind::kPeerLost) << failure.message;
  EXPECT_NE(failure.message.find("has its peer"), std::string::npos) << failure.message;
  connector_->send(credit_frame(5));
  ASSERT_TRUE(at_listener_.wait_frames(1));
  EXPECT_EQ(at_listener_.num_opened(), 1);
  EXPECT_EQ(at_listener_.num_failures(), 0u);
}

TEST_P(TransportContract, ConnectingToAnEndedListenerIsALostPeer) {
  std::string endpoint;
  {
    const std::unique_ptr<Transport> gone = make_transport(GetParam());
    endpoint = gone->listen(link_options(), at_listener_).endpoint();
  }
  connecting_->connect(link_options(), endpoint, at_connector_);
  const Failure failure = at_connector_.wait_failure();
  EXPECT_EQ(failure.kind, FailureKind::kPeerLost);
  EXPECT_NE(failure.message.find(parse_endpoint(endpoint).address), std::string::npos) << failure.message;
}

// ---- Corrupt frames ----

TEST_P(TransportContract, CorruptHeaderClosesTheLink) {
  open_link();
  FrameHeaderBytes bytes;
  encode(next_header(1), bytes);
  bytes[100] ^= std::byte{4};
  inject_bytes(bytes);
  expect_listener_refuses("header_checksum");
  EXPECT_EQ(at_connector_.wait_failure().kind, FailureKind::kPeerLost);
}

TEST_P(TransportContract, SequenceGapClosesTheLink) {
  open_link();
  inject(next_header(2));
  expect_listener_refuses("frame 2 where frame 1 is due");
}

TEST_P(TransportContract, FrameThatIsRefusedMayBeFollowedByOneWithAPayload) {
  open_link();
  HeldThread until_both_are_there(*listening_);
  inject(next_header(5));
  FrameHeader header = tensor_frame(0, {}, {}).header;
  header.identity = link_options().identity;
  header.sequence = 6;
  header.payload_bytes = 0;
  inject(header, {std::byte{1}});
  std::latch has_left(1);
  connecting_->post([&] { has_left.count_down(); });
  has_left.wait();
  until_both_are_there.release();
  expect_listener_refuses("frame 5 where frame 1 is due");
}

TEST_P(TransportContract, RepeatedFrameClosesTheLink) {
  open_link();
  inject(next_header(1));
  inject(next_header(1));
  expect_listener_refuses("frame 1 where frame 2 is due");
  EXPECT_EQ(at_listener_.frames().size(), 1u);
}

TEST_P(TransportContract, FrameOfAnIncarnationBeforeClosesTheLink) {
  open_link();
  FrameHeader header = next_header(1);
  header.identity.incarnation = 3;
  inject(header);
  expect_listener_refuses("stale worker");
}

TEST_P(TransportContract, SecondHelloClosesTheLink) {
  open_link();
  FrameHeader header = next_header(1, FrameKind::kHello);
  header.plan_hash = link_options().plan_hash;
  inject(header);
  expect_listener_refuses("HELLO twice");
}

TEST_P(TransportContract, PayloadOfAnotherLengthThanTheHeaderSaysClosesTheLink) {
  open_link();
  FrameHeader header = tensor_frame(0, std::vector<std::byte>(10)).header;
  header.identity = link_options().identity;
  header.sequence = 1;
  inject(header, std::vector<std::byte>(9));
  expect_listener_refuses("9 bytes of payload where payload_bytes is 10");
}

TEST_P(TransportContract, PayloadLongerThanPlannedClosesTheLink) {
  LinkOptions small = link_options("stage 0 (rank 0)");
  small.payload_bytes_max = 1000;
  open_link(small);
  FrameHeader header = tensor_frame(0, std::vector<std::byte>(1001)).header;
  header.identity = link_options().identity;
  header.sequence = 1;
  inject(header);
  expect_listener_refuses("payload_bytes 1001");
}

TEST_P(TransportContract, PayloadThatDoesNotMatchItsChecksumClosesTheLink) {
  open_link();
  payloads_.push_back(patterned_bytes(5000, 1));
  OutgoingFrame good = tensor_frame(0, payloads_[0]);
  good.header.has_payload_checksum = true;
  good.header.payload_checksum = crc32c(payloads_[0]);
  OutgoingFrame bad = good;
  bad.header.payload_checksum ^= 1;
  connector_->send(std::move(good));
  connector_->send(std::move(bad));
  expect_listener_refuses("payload_checksum");
  EXPECT_EQ(at_listener_.frames().size(), 1u);
}

TEST_P(TransportContract, PayloadThatChangesOnItsWayIsCaughtByTheLinksOwnChecksum) {
  for (const bool checksums_payloads : {false, true}) {
    Recorder at_listener;
    Recorder at_connector;
    LinkOptions options = link_options();
    options.checksums_payloads = checksums_payloads;
    const Link& listener = listening_->listen(options, at_listener);
    Link& connector = connecting_->connect(options, listener.endpoint(), at_connector);
    ASSERT_TRUE(at_connector.wait_open());
    std::vector<std::byte> payload = patterned_bytes(5000, 1);
    connector.send(tensor_frame(0, payload));
    ASSERT_TRUE(at_listener.wait_frames(1));
    EXPECT_EQ(at_listener.frames()[0].header.has_payload_checksum, checksums_payloads);
    HeldThread until_changed(*connecting_);  // keeps the frame from leaving before the payload is changed
    connector.send(tensor_frame(1, payload));
    payload[2500] ^= std::byte{16};
    until_changed.release();
    if (checksums_payloads) {
      const Failure failure = at_listener.wait_failure();
      EXPECT_EQ(failure.kind, FailureKind::kCorruptFrame);
      EXPECT_NE(failure.message.find("payload_checksum"), std::string::npos) << failure.message;
      EXPECT_EQ(listener.counters().num_refused, 1u);
    } else {
      ASSERT_TRUE(at_listener.wait_frames(2));
      EXPECT_EQ(at_listener.frames()[1].payload, payload);
    }
    connecting_->shutdown(1);  // the payload and the recorders are destroyed first
    listening_->shutdown(1);
    listening_ = make_transport(GetParam());
    connecting_ = make_transport(GetParam());
  }
}

TEST_P(TransportContract, FramesWithoutAPayloadCarryNoChecksum) {
  LinkOptions options = link_options();
  options.checksums_payloads = true;
  open_link(options, options);
  connector_->send(credit_frame(1));
  connector_->send(tensor_frame(0, {}));
  ASSERT_TRUE(at_listener_.wait_frames(2));
  for (const Recorder::Frame& frame : at_listener_.frames()) EXPECT_FALSE(frame.header.has_payload_checksum);
}

TEST_P(TransportContract, NothingFollowsAFailure) {
  open_link();
  inject(next_header(7));
  for (std::uint64_t index = 8; index < 20; ++index) inject(next_header(index));
  inject(next_header(20, FrameKind::kBye));
  expect_listener_refuses("frame 7");
  listening_->shutdown(1);
  EXPECT_EQ(at_listener_.num_calls(), 2u);  // on_open and on_failed
}

TEST_P(TransportContract, FailureThatAHandlerReturnsIsFatalForTheLink) {
  at_listener_.when_frame = [](Link&, const FrameHeader& header) -> std::optional<Failure> {
    if (number_of(header) < 3) return std::nullopt;
    return Failure{FailureKind::kAborted, "the handler refuses item 3"};
  };
  open_link();
  for (std::uint64_t index = 0; index < 10; ++index) connector_->send(credit_frame(index));
  const Failure failure = at_listener_.wait_failure();
  EXPECT_EQ(failure.kind, FailureKind::kAborted);
  EXPECT_EQ(failure.message, "the handler refuses item 3");
  EXPECT_EQ(at_listener_.frames().size(), 4u);
  EXPECT_EQ(at_connector_.wait_failure().kind, FailureKind::kPeerLost);
}

// ---- Farewell and loss ----

TEST_P(TransportContract, FarewellComesAfterEverythingThatWasSent) {
  open_link();
  payloads_.push_back(patterned_bytes(std::size_t{1} << 20, 1));
  for (int index = 0; index < 10; ++index)
    connector_->send(tensor_frame(index, payloads_[0], sent_.callback()));
  connector_->close();
  connector_->close();
  ASSERT_TRUE(at_listener_.wait_closed());
  EXPECT_EQ(at_listener_.frames().size(), 10u);
  listening_->shutdown(1);
  connecting_->shutdown(1);
  EXPECT_EQ(at_listener_.num_calls(), 12u);  // on_open, 10 calls of on_frame, and on_closed
  EXPECT_EQ(at_connector_.num_calls(), 1u);  // on_open only
  EXPECT_EQ(sent_.count(), 10);
}

TEST_P(TransportContract, ListenerSaysFarewellToo) {
  open_link();
  listener_->send(credit_frame(1));
  listener_->close();
  ASSERT_TRUE(at_connector_.wait_closed());
  EXPECT_EQ(at_connector_.frames().size(), 1u);
  EXPECT_EQ(at_connector_.num_failures(), 0u);
}

TEST_P(TransportContract, CloseBeforeTheLinkIsOpenStillDeliversWhatWasSent) {
  listener_ = &listening_->listen(link_options("stage 0 (rank 0)"), at_listener_);
  HeldThread until_closed(*connecting_);  // keeps the link from opening before close()
  connector_ = &connecting_->connect(link_options(), listener_->endpoint(), at_connector_);
  connector_->send(credit_frame(1));
  connector_->send(credit_frame(2));
  connector_->close();
  until_closed.release();
  ASSERT_TRUE(at_listener_.wait_closed());
  EXPECT_EQ(at_listener_.frames().size(), 2u);
  connecting_->shutdown(1);
  EXPECT_EQ(at_connector_.num_calls(), 0u);
}

TEST_P(TransportContract, ListenerClosedBeforeAPeerCameRefusesIt) {
  listener_ = &listening_->listen(link_options("stage 0 (rank 0)"), at_listener_);
  listener_->close();
  std::latch closed(1);
  listening_->post([&] { closed.count_down(); });
  closed.wait();
  connecting_->connect(link_options(), listener_->endpoint(), at_connector_);
  EXPECT_EQ(at_connector_.wait_failure().kind, FailureKind::kPeerLost);
  EXPECT_EQ(at_listener_.num_calls(), 0u);
}

TEST_P(TransportContract, BothSidesMayCloseAtOnce) {
  for (int round = 0; round < 20; ++round) {
    Recorder at_listener;
    Recorder at_connector;
    Link& listener = listening_->listen(link_options(), at_listener);
    Link& connector = connecting_->connect(link_options(), listener.endpoint(), at_connector);
    ASSERT_TRUE(at_listener.wait_open());
    ASSERT_TRUE(at_connector.wait_open());
    std::thread other([&] { listener.close(); });
    connector.close();
    other.join();
    for (Transport* transport : {listening_.get(), connecting_.get()}) {
      std::latch silent(1);  // after it no call of the handlers is running
      transport->post([&] { silent.count_down(); });
      silent.wait();
    }
    EXPECT_EQ(at_listener.num_failures() + at_connector.num_failures(), 0u);
  }
}

TEST_P(TransportContract, CloseFromACallbackEndsTheCallbacks) {
  at_listener_.when_frame = [](Link& link, const FrameHeader& header) {
    if (number_of(header) == 2) link.close();
    return std::nullopt;
  };
  open_link();
  for (std::uint64_t index = 0; index < 100; ++index) connector_->send(credit_frame(index));
  ASSERT_TRUE(at_connector_.wait_closed());
  listening_->shutdown(1);
  EXPECT_EQ(at_listener_.frames().size(), 3u);
  EXPECT_EQ(at_listener_.num_closed(), 0);
  EXPECT_EQ(at_listener_.num_failures(), 0u);
}

TEST_P(TransportContract, LostConnectorIsAFailureThatNamesThePeerAndTheLink) {
  open_link();
  connector_->send(credit_frame(1));
  ASSERT_TRUE(at_listener_.wait_frames(1));
  core_of(*connecting_).abandon();
  const Failure failure = at_listener_.wait_failure();
  EXPECT_EQ(failure.kind, FailureKind::kPeerLost);
  EXPECT_NE(failure.message.find("stage 0 (rank 0)"), std::string::npos) << failure.message;
  EXPECT_NE(failure.message.find("activations of stage 0 to stage 1"), std::string::npos) << failure.message;
  EXPECT_EQ(at_listener_.num_closed(), 0);
}

TEST_P(TransportContract, LostListenerIsAFailureAtTheConnector) {
  open_link();
  core_of(*listening_).abandon();
  const Failure failure = at_connector_.wait_failure();
  EXPECT_EQ(failure.kind, FailureKind::kPeerLost);
  EXPECT_NE(failure.message.find("stage 1 (rank 1)"), std::string::npos) << failure.message;
}

// ---- Signs of life ----

TEST_P(TransportContract, PeerWhoseProgramStopsIsLostAlthoughItsProcessAnswers) {
  make_transports_with_beats(2);
  listening_->pulse(7);  // before any beat is sent
  open_link();
  std::atomic<bool> stop{false};
  std::atomic<bool> other_lives{true};
  std::thread program([&] {
    while (!stop.load()) {
      connecting_->pulse(3);
      if (other_lives.load()) listening_->pulse(7);
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
    }
  });
  EXPECT_TRUE(wait_until([&] { return connector_->counters().frames_received >= 2; }));  // a HELLO and a beat
  other_lives.store(false);
  const Failure failure = at_connector_.wait_failure();
  stop.store(true);
  program.join();
  EXPECT_EQ(failure.kind, FailureKind::kPeerLost);
  EXPECT_NE(
      failure.message.find("stage 1 (rank 1) is lost: its process answers, but its program has shown no "
                           "sign of life for 2 s (7 work items done) (activations of stage 0"),
      std::string::npos)
      << failure.message;
}

TEST_P(TransportContract, PeerThatNeverPulsesIsLost) {
  make_transports_with_beats(2);
  open_link();
  const Failure failures[] = {at_listener_.wait_failure(), at_connector_.wait_failure()};
  for (const Failure& failure : failures) EXPECT_EQ(failure.kind, FailureKind::kPeerLost) << failure.message;
  // The side that notices first ends the connection. So the other side may report something else.
  const std::string both = failures[0].message + failures[1].message;
  EXPECT_NE(both.find("no sign of life for 2 s (0 work items done)"), std::string::npos) << both;
}

// On a slow link beats wait behind frames that were sent before them. In this test the connector sends no
// beat at all.
TEST_P(TransportContract, PeerLivesAsLongAsFramesComeAndIsLostWhenNoneDo) {
  make_transports_with_beats(2, /*connector_beats=*/false);
  open_link();
  for (const Deadline end = Clock::now() + std::chrono::milliseconds(2500); Clock::now() < end;) {
    listening_->pulse(1);
    connector_->send(credit_frame(5));
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  EXPECT_EQ(at_listener_.num_failures(), 0u);
  const Failure failure = at_listener_.wait_failure();
  EXPECT_EQ(failure.kind, FailureKind::kPeerLost);
  EXPECT_NE(failure.message.find("nothing has come from it for 1 s"), std::string::npos) << failure.message;
}

// The links between two processes may share one line. A link may then be silent because another one uses the
// line.
TEST_P(TransportContract, ALinkOnWhichNothingComesLivesWhileAnotherOfItsPeerDoes) {
  make_transports_with_beats(2, /*connector_beats=*/false);
  open_link();
  LinkOptions options = link_options("stage 0 (rank 0)");
  options.identity.channel_id += 1;
  Recorder at_silent_listener;
  Recorder at_silent_connector;
  const Link& silent = listening_->listen(options, at_silent_listener);
  connecting_->connect(options, silent.endpoint(), at_silent_connector);
  ASSERT_TRUE(at_silent_listener.wait_open());
  for (const Deadline end = Clock::now() + std::chrono::milliseconds(2500); Clock::now() < end;) {
    listening_->pulse(1);
    connector_->send(credit_frame(5));
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  EXPECT_EQ(at_silent_listener.num_failures(), 0u);
  // When the peer is silent, both links are lost.
  EXPECT_EQ(at_listener_.wait_failure().kind, FailureKind::kPeerLost);
  EXPECT_EQ(at_silent_listener.wait_failure().kind, FailureKind::kPeerLost);
  // The transports end here, because this test's own handlers are destroyed before them.
  connecting_.reset();
  listening_.reset();
}

TEST_P(TransportContract, PeersThatPulseLiveLongerThanThePeerTimeout) {
  constexpr std::uint64_t kNumBeats = 12;  // more than the eight beats of one peer timeout
  make_transports_with_beats(3);
  open_link();
  const bool beats_came = wait_until([&] {
    listening_->pulse(1);
    connecting_->pulse(2);
    return listener_->counters().frames_received > kNumBeats &&
           connector_->counters().frames_received > kNumBeats;
  });
  EXPECT_TRUE(beats_came);
  connector_->send(credit_frame(5));
  ASSERT_TRUE(at_listener_.wait_frames(1));
  EXPECT_EQ(number_of(at_listener_.frames()[0].header), 5u);  // handlers are not called for beats
  EXPECT_EQ(at_connector_.num_calls(), 1u);
  EXPECT_EQ(at_listener_.num_failures(), 0u);
}

// ---- The transport ----

TEST_P(TransportContract, ShutdownDeliversWhatWasSent) {
  open_link();
  payloads_.push_back(patterned_bytes(std::size_t{1} << 20, 1));
  for (int index = 0; index < 20; ++index)
    connector_->send(tensor_frame(index, payloads_[0], sent_.callback()));
  // The peer sends all the while. Its frames arrive after the farewell, and must not reset the connection.
  for (int index = 0; index < 20; ++index) listener_->send(credit_frame(1));
  connecting_->shutdown(60);
  EXPECT_EQ(sent_.count(), 20);
  ASSERT_TRUE(at_listener_.wait_closed());
  EXPECT_EQ(at_listener_.frames().size(), 20u);
  EXPECT_EQ(at_listener_.num_failures(), 0u);
}

TEST_P(TransportContract, ShutdownIsBoundedWhenNobodyTakesWhatWasSent) {
  listener_ = &listening_->listen(link_options(), at_listener_);
  payloads_.push_back(patterned_bytes(std::size_t{1} << 20, 1));
  for (int index = 0; index < 20; ++index)
    listener_->send(tensor_frame(index, payloads_[0], sent_.callback()));
  listening_->shutdown(0.05);
  EXPECT_EQ(sent_.count(), 20);
}

TEST_P(TransportContract, ShutdownIsIdempotentFromManyThreads) {
  open_link();
  std::vector<std::thread> threads;
  for (int index = 0; index < 4; ++index) threads.emplace_back([&] { connecting_->shutdown(5); });
  for (std::thread& thread : threads) thread.join();
  connecting_->shutdown(5);
  EXPECT_TRUE(at_listener_.wait_closed());
}

TEST_P(TransportContract, NoHandlerIsCalledAfterShutdown) {
  open_link();
  std::atomic<bool> stop{false};
  std::thread sender([&] {
    while (!stop.load()) connector_->send(credit_frame(1));
  });
  ASSERT_TRUE(at_listener_.wait_frames(10));
  listening_->shutdown(0);
  const std::size_t num_calls = at_listener_.num_calls();
  stop.store(true);
  sender.join();
  connecting_->shutdown(0);
  EXPECT_EQ(at_listener_.num_calls(), num_calls);
}

TEST_P(TransportContract, LinksAfterShutdownAreRefused) {
  const std::string endpoint = listening_->listen(link_options(), at_listener_).endpoint();
  connecting_->shutdown(0);
  EXPECT_THROW(connecting_->listen(link_options(), at_connector_), UserError);
  EXPECT_THROW(connecting_->connect(link_options(), endpoint, at_connector_), UserError);
}

TEST_P(TransportContract, PostedFunctionsRunInOrderWhereNobodyElseDrivesOnTheTransportThread) {
  std::vector<int> order;
  std::thread::id thread;
  at_connector_.when_open = [&](Link&) { thread = std::this_thread::get_id(); };
  open_link();
  bool on_transport_thread = true;
  for (int index = 0; index < 100; ++index) {
    connecting_->post([&, index] {
      order.push_back(index);
      on_transport_thread = on_transport_thread && std::this_thread::get_id() == thread;
    });
  }
  connecting_->shutdown(0);
  ASSERT_EQ(order.size(), 100u);
  EXPECT_TRUE(std::is_sorted(order.begin(), order.end()));
  EXPECT_TRUE(on_transport_thread);
  connecting_->post([&] { order.push_back(-1); });
  EXPECT_EQ(order.size(), 100u);
}

TEST_P(TransportContract, EndpointThatCannotBeParsedIsTheUsersMistake) {
  for (const std::string endpoint :
       {"", "nonsense", "inproc://", "inproc://seven", "tcp://", "tcp://127.0.0.1"}) {
    EXPECT_THROW(connecting_->connect(link_options(), endpoint, at_connector_), UserError) << endpoint;
  }
}

TEST_P(TransportContract, PeerTimeoutMustBePositiveAndBounded) {
  for (const double seconds : {0.0, -1.0, 1e9, std::numeric_limits<double>::quiet_NaN()}) {
    TransportOptions options;
    options.peer_timeout_s = seconds;
    EXPECT_THROW(make_transport(GetParam(), options), UserError) << seconds;
  }
}

TEST_P(TransportContract, SendingWhatThePeerWouldRefuseIsOurBug) {
  testing::GTEST_FLAG(death_test_style) = "threadsafe";
  open_link();
  OutgoingFrame frame = credit_frame(1);
  frame.header.payload_bytes = 10;
  EXPECT_DEATH(connector_->send(frame), "payload_bytes 10, payload 0");
  OutgoingFrame beat;
  beat.header.kind = FrameKind::kBeat;
  EXPECT_DEATH(connector_->send(beat), "the link itself says BEAT");
}

INSTANTIATE_TEST_SUITE_P(Transports, TransportContract,
                         testing::Values("inproc", "zmq", "zmq_rings", "zmq_curve"),
                         [](const auto& parameter) { return parameter.param; });

}  // namespace
}  // namespace pipedream
