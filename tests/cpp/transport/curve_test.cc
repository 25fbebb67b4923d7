// Tests keys: which keys are refused, which peers may talk to each other, and that each refusal says its
// reason.
#include "transport/zmq/curve.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/failure.h"
#include "transport/endpoint.h"
#include "transport/raw_peer.h"
#include "transport/recorder.h"

namespace pipedream {
namespace {

constexpr const char* kKeyText = "rq:rM>}U?@Lns47E1%kR.o@n%FcmmsL/@{H8]yf7";

TEST(CurveKey, IsDecodedAsRfc32Says) {
  const CurveKey expected = {0x54, 0xfc, 0xba, 0x24, 0xe9, 0x32, 0x49, 0x96, 0x93, 0x16, 0xfb,
                             0x61, 0x7c, 0x87, 0x2b, 0xb0, 0xc1, 0xd1, 0xff, 0x14, 0x80, 0x04,
                             0x27, 0xc5, 0x94, 0xcb, 0xfa, 0xcf, 0x1b, 0xc2, 0xd6, 0x52};
  EXPECT_EQ(decode_curve_key(kKeyText), expected);
  EXPECT_EQ(decode_curve_key(std::string(40, '0')), CurveKey{});
}

TEST(CurveKey, OfAnotherLengthOrAlphabetOrBeyond32BitsIsNone) {
  const std::string good = kKeyText;
  std::string blank = good;
  blank[7] = ' ';
  std::string comma = good;
  comma[39] = ',';
  for (const std::string& text : {std::string(), good.substr(1), good + "0", blank, comma,
                                  std::string(40, '#'), std::string(40, '\0'), std::string(40, '\x80')}) {
    EXPECT_FALSE(decode_curve_key(text)) << text;
  }
}

class CurveTransports : public testing::Test {
 protected:
  void SetUp() override {
    if (!make_transport("zmq_curve")) GTEST_SKIP() << "libzmq is not available, or not asked for";
    keys_ = make_keys();
    link_ = &listen(keys_);
  }

  static std::unique_ptr<Transport> transport(const std::optional<CurveKeys>& keys) {
    TransportOptions options;
    options.keys = keys;
    return make_zmq_transport(options);
  }
  Link& listen(const std::optional<CurveKeys>& keys) {
    listening_ = transport(keys);
    return listening_->listen(link_options("stage 0 (rank 0)"), at_listener_);
  }
  static std::string refusal_of_keys(const CurveKeys& keys) {
    try {
      static_cast<void>(transport(keys));
      return "not refused";
    } catch (const UserError& error) {
      return error.what();
    }
  }
  static std::string refusal_of_endpoint(const std::optional<CurveKeys>& keys, const std::string& endpoint) {
    Recorder recorder;
    const std::unique_ptr<Transport> connecting = transport(keys);
    try {
      connecting->connect(link_options(), endpoint, recorder);
      return "not refused";
    } catch (const UserError& error) {
      return error.what();
    }
  }
  // Returns the failure with which an attempt to connect ends.
  static Failure failure_of(const std::optional<CurveKeys>& keys, const std::string& endpoint) {
    Recorder recorder;
    const std::unique_ptr<Transport> connecting = transport(keys);
    connecting->connect(link_options(), endpoint, recorder);
    Failure failure = recorder.wait_failure();
    EXPECT_EQ(recorder.num_calls(), 1u);
    return failure;
  }
  static void expect_lost(const Failure& failure, const std::string& how) {
    EXPECT_EQ(failure.kind, FailureKind::kPeerLost) << failure.message;
    EXPECT_NE(failure.message.find("stage 1 (rank 1) is lost: "), std::string::npos) << failure.message;
    EXPECT_NE(failure.message.find(how), std::string::npos) << failure.message;
  }
  void expect_refused_and_the_peer_gets_through(std::uint64_t num_refused) {
    EXPECT_TRUE(wait_until([&] { return link_->counters().num_refused == num_refused; }));
    EXPECT_EQ(at_listener_.num_calls(), 0u);
    Recorder at_connector;
    const std::unique_ptr<Transport> connecting = transport(keys_);
    connecting->connect(link_options(), link_->endpoint(), at_connector).send(credit_frame(7));
    EXPECT_TRUE(at_listener_.wait_frames(1));
    connecting->shutdown(10);
  }
  [[nodiscard]] std::string address() const { return parse_endpoint(link_->endpoint()).address; }

  CurveKeys keys_;
  Recorder at_listener_;
  std::unique_ptr<Transport> listening_;
  Link* link_ = nullptr;
};

// ---- Keys ----

TEST_F(CurveTransports, KeysThatAreMadeAreNewAndMatch) {
  const auto [public_key, secret_key] = make_curve_keys();
  EXPECT_TRUE(decode_curve_key(public_key) && decode_curve_key(secret_key));
  EXPECT_NE(make_curve_keys().second, secret_key);
  EXPECT_EQ(refusal_of_keys({public_key, secret_key, {public_key}}), "not refused");
}

TEST_F(CurveTransports, MalformedKeysAreNamedAndSecretsAreNotShown) {
  const std::string bad = keys_.secret_key.substr(1);
  const std::pair<CurveKeys, std::string> cases[] = {
      {{bad, keys_.secret_key, keys_.allowed}, "keys.public_key is not a CURVE key"},
      {{keys_.public_key, bad, keys_.allowed}, "keys.secret_key is not a CURVE key"},
      {{keys_.public_key, keys_.secret_key, {keys_.public_key, bad}}, "keys.allowed[1] is not a CURVE key"},
      {{keys_.public_key, keys_.secret_key, {}}, "keys.allowed is empty"},
      {{make_keys().public_key, keys_.secret_key, keys_.allowed}, "does not belong to keys.secret_key"},
  };
  for (const auto& [keys, what] : cases) {
    const std::string refusal = refusal_of_keys(keys);
    EXPECT_NE(refusal.find(what), std::string::npos) << refusal;
    EXPECT_EQ(refusal.find(bad), std::string::npos) << refusal;
  }
}

TEST_F(CurveTransports, LibraryWithoutCurveIsTheUsersMistake) {
  LibZmq without = load_libzmq("");
  without.has = [](const char*) { return 0; };
  try {
    check_curve_keys(keys_, without);
    ADD_FAILURE() << "it was accepted";
  } catch (const UserError& error) {
    EXPECT_NE(std::string(error.what()).find("without CURVE"), std::string::npos) << error.what();
  }
}

// ---- Endpoints ----

TEST_F(CurveTransports, EndpointNamesTheListenersKeyAndNoToken) {
  EXPECT_EQ(link_->endpoint(), address() + " curve=" + keys_.public_key);
}

TEST_F(CurveTransports, MemoryOfAnEndpointIsIgnored) {
  Recorder at_connector;
  const std::unique_ptr<Transport> connecting = transport(keys_);
  const Link& link = connecting->connect(link_options(), link_->endpoint() + " memory=1:2:3:4", at_connector);
  EXPECT_TRUE(at_connector.wait_open());
  EXPECT_EQ(link.endpoint(), link_->endpoint());
}

TEST_F(CurveTransports, EndpointWithoutAKeyIsRefusedByAWorkerWithKeys) {
  const std::string refusal = refusal_of_endpoint(keys_, address());
  EXPECT_NE(refusal.find(address() + "': it has no key and this worker has"), std::string::npos) << refusal;
  EXPECT_NE(refusal.find("start all workers with keys, or none"), std::string::npos) << refusal;
}

TEST_F(CurveTransports, EndpointWithAKeyIsRefusedByAWorkerWithout) {
  const std::string refusal = refusal_of_endpoint(std::nullopt, link_->endpoint());
  EXPECT_NE(refusal.find("it has a key and this worker has none"), std::string::npos) << refusal;
  EXPECT_NE(refusal.find("start all workers with keys, or none"), std::string::npos) << refusal;
}

TEST_F(CurveTransports, EndpointWhoseKeyIsNotAllowedIsRefused) {
  const std::string refusal = refusal_of_endpoint(make_keys(), link_->endpoint());
  EXPECT_NE(refusal.find("its key " + keys_.public_key + " is not allowed"), std::string::npos) << refusal;
  EXPECT_NE(refusal.find("keys.allowed"), std::string::npos) << refusal;
}

// ---- Handshakes that fail ----

TEST_F(CurveTransports, ListenerWithAnotherKeyThanItsEndpointNamesIsNotTalkedTo) {
  CurveKeys keys = keys_;
  keys.allowed.push_back(make_keys().public_key);
  const Failure failure = failure_of(keys, address() + " curve=" + keys.allowed.back());
  expect_lost(failure, "does not have the key that its endpoint names");
  expect_refused_and_the_peer_gets_through(1);
}

TEST_F(CurveTransports, ConnectorWhoseKeyIsNotAllowedIsToldSo) {
  const Failure failure = failure_of(make_keys({keys_.public_key}), link_->endpoint());
  expect_lost(failure, "this worker's key is not in its keys.allowed");
  expect_refused_and_the_peer_gets_through(1);
}

TEST_F(CurveTransports, ConnectorWithoutKeysIsRefused) {
  const std::string token(kTokenChars, '0');
  expect_lost(failure_of(std::nullopt, address() + " token=" + token), "has keys and this worker has none");
  expect_refused_and_the_peer_gets_through(1);
}

TEST_F(CurveTransports, ListenerWithoutKeysIsRefused) {
  Recorder recorder;
  const std::unique_ptr<Transport> listening = transport(std::nullopt);
  const Link& link = listening->listen(link_options(), recorder);
  const std::string address = parse_endpoint(link.endpoint()).address;
  const Failure failure = failure_of(keys_, address + " curve=" + keys_.public_key);
  expect_lost(failure, "the handshake with " + address + " failed: it ");
  EXPECT_TRUE(wait_until([&] { return link.counters().num_refused == 1; }));
  EXPECT_EQ(recorder.num_calls(), 0u);
}

TEST_F(CurveTransports, RefusedConnectorsDoNotTakeThePeersPlace) {
  constexpr int kNumStrangers = 10;
  std::vector<std::unique_ptr<Recorder>> recorders;
  std::vector<std::unique_ptr<Transport>> strangers;
  for (int index = 0; index < kNumStrangers; ++index) {
    recorders.push_back(std::make_unique<Recorder>());
    strangers.push_back(transport(make_keys({keys_.public_key})));
    strangers.back()->connect(link_options(), link_->endpoint(), *recorders.back());
  }
  for (const auto& recorder : recorders) expect_lost(recorder->wait_failure(), "not in its keys.allowed");
  expect_refused_and_the_peer_gets_through(kNumStrangers);
}

TEST_F(CurveTransports, WorkersWithAPairEachTalkWhenEachAllowsTheOther) {
  CurveKeys one = make_keys();
  CurveKeys other = make_keys();
  one.allowed = {other.public_key};
  other.allowed = {one.public_key};
  Recorder at_connector;
  const Link& link = listen(one);
  const std::unique_ptr<Transport> connecting = transport(other);
  connecting->connect(link_options(), link.endpoint(), at_connector);
  EXPECT_TRUE(at_connector.wait_open());
}

// ---- What is on the wire ----

TEST_F(CurveTransports, SmallestPayloadLimitLeavesRoomForHandshakeAndEncryption) {
  LinkOptions options = link_options();
  options.payload_bytes_max = 1;
  Recorder at_connector;
  Recorder at_listener;
  const std::vector<std::byte> payload(1);
  const Link& link = listening_->listen(options, at_listener);
  const std::unique_ptr<Transport> connecting = transport(keys_);
  connecting->connect(options, link.endpoint(), at_connector).send(tensor_frame(0, payload));
  EXPECT_TRUE(at_listener.wait_frames(1));
  connecting->shutdown(10);
  listening_->shutdown(10);  // its recorder is destroyed before the transport
}

TEST_F(CurveTransports, LargestPayloadArrivesEncrypted) {
  const std::vector<std::byte> payload = patterned_bytes(link_options().payload_bytes_max, 1);
  Recorder at_connector;
  const std::unique_ptr<Transport> connecting = transport(keys_);
  connecting->connect(link_options(), link_->endpoint(), at_connector).send(tensor_frame(0, payload));
  ASSERT_TRUE(at_listener_.wait_frames(1));
  EXPECT_EQ(at_listener_.frames()[0].payload, payload);
  connecting->shutdown(10);
}

}  // namespace
}  // namespace pipedream
