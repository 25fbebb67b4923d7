// Tests which addresses a listener may bind to, in all notations. A transport makes this check before it
// binds.
#include "transport/zmq/bind_address.h"

#include <gtest/gtest.h>

#include <string>

#include "base/failure.h"
#include "transport/recorder.h"

namespace pipedream {
namespace {

TransportOptions bound_to(const std::string& host) {
  TransportOptions options;
  options.bind_host = host;
  return options;
}

std::string refusal_of(const TransportOptions& options) {
  try {
    return "not refused: " + bind_address(options);
  } catch (const UserError& error) {
    return error.what();
  }
}

TEST(BindAddress, EveryNameOfLoopbackIsLoopback) {
  for (const char* host :
       {"127.0.0.1", "127.255.0.9", "::1", "[::1]", "0:0:0:0:0:0:0:1", "localhost", "lo"}) {
    EXPECT_TRUE(is_loopback(host)) << host;
    EXPECT_NO_THROW(static_cast<void>(bind_address(bound_to(host)))) << host;
  }
}

TEST(BindAddress, NothingElseIsLoopback) {
  for (const char* host : {"128.0.0.1", "126.255.255.255", "10.0.0.1", "::2", "fe80::1", "eth0", "lo0",
                           "local", "localhost.example.com", "", "127", "0x7f"}) {
    EXPECT_FALSE(is_loopback(host)) << host;
  }
}

TEST(BindAddress, IsWhatLibzmqBinds) {
  EXPECT_EQ(bind_address(bound_to("127.0.0.1")), "tcp://127.0.0.1");
  EXPECT_EQ(bind_address(bound_to("localhost")), "tcp://127.0.0.1");
  EXPECT_EQ(bind_address(bound_to("lo")), "tcp://lo");
  EXPECT_EQ(bind_address(bound_to("::1")), "tcp://[::1]");
  EXPECT_EQ(bind_address(bound_to("[::1]")), "tcp://[::1]");
}

TEST(BindAddress, AddressThatOthersReachNeedsKeysOrAnExplicitWord) {
  for (const std::string host : {"10.0.0.1", "eth0", "fe80::1", "host.example.com"}) {
    TransportOptions options = bound_to(host);
    const std::string refusal = refusal_of(options);
    for (const std::string& part : {"'" + host + "'", std::string("keys"), std::string("insecure=True")}) {
      EXPECT_NE(refusal.find(part), std::string::npos) << refusal;
    }
    options.insecure = true;
    EXPECT_NO_THROW(static_cast<void>(bind_address(options))) << host;
    options.insecure = false;
    options.keys = CurveKeys{};
    EXPECT_NO_THROW(static_cast<void>(bind_address(options))) << host;
  }
}

TEST(BindAddress, AddressThatNobodyCanConnectToIsRefusedEvenWithKeys) {
  for (const char* host : {"0.0.0.0", "*", "::", "[::]", "0", "0:0::0"}) {
    TransportOptions options = bound_to(host);
    options.keys = CurveKeys{};
    options.insecure = true;
    const std::string refusal = refusal_of(options);
    EXPECT_NE(refusal.find("'" + std::string(host) + "'"), std::string::npos) << refusal;
    EXPECT_NE(refusal.find("give the one address"), std::string::npos) << refusal;
  }
}

bool may_connect(const TransportOptions& options, const std::string& address) {
  try {
    check_connect_address(options, address);
    return true;
  } catch (const UserError&) {
    return false;
  }
}

TEST(ConnectAddress, LoopbackNeedsNothingAndEverythingElseKeysOrAnExplicitWord) {
  for (const char* address : {"tcp://127.0.0.1:40001", "tcp://127.255.0.9:1", "tcp://[::1]:40001"}) {
    EXPECT_TRUE(may_connect({}, address)) << address;
  }
  TransportOptions insecure;
  insecure.insecure = true;
  TransportOptions with_keys;
  with_keys.keys = CurveKeys{};
  // These are addresses that a stranger who can write to the rendezvous store could name. Some are in forms
  // that only libzmq or the resolver knows.
  for (const char* address :
       {"tcp://10.0.0.1:40001", "tcp://[fe80::1]:40001", "tcp://host.example.com:40001",
        "tcp://localhost:40001", "tcp://127.0.0.1:0;10.0.0.1:40001", "tcp://127.0.0.1 ;10.0.0.1:40001",
        "tcp://lo;10.0.0.1:40001", "tcp://127.0.0.1:40001;10.0.0.1:x", "tcp://127.1:40001", "tcp://127.0.0.1",
        "tcp://:40001", "tcp://", "tcp://127.0.0.1:"}) {
    EXPECT_FALSE(may_connect({}, address)) << address;
    EXPECT_TRUE(may_connect(insecure, address)) << address;
    EXPECT_TRUE(may_connect(with_keys, address)) << address;
  }
}

TEST(ConnectAddress, TransportAsksBeforeItConnects) {
  Recorder recorder;
  const std::unique_ptr<Transport> transport = make_transport("zmq");
  if (!transport) GTEST_SKIP() << "libzmq is not available, or not asked for";
  // The endpoint has a token, as a stranger's endpoint would have. Only its address is wrong.
  const std::string endpoint = "tcp://192.0.2.1:40001 token=00112233445566778899aabbccddeeff";
  try {
    transport->connect(link_options(), endpoint, recorder);
    ADD_FAILURE() << "not refused";
  } catch (const UserError& error) {
    EXPECT_NE(std::string(error.what()).find("refuses to connect to 'tcp://192.0.2.1:40001'"),
              std::string::npos)
        << error.what();
  }
}

TEST(BindAddress, TransportAsksBeforeItListens) {
  for (const char* host : {"0.0.0.0", "192.0.2.1"}) {
    Recorder recorder;
    const std::unique_ptr<Transport> transport = make_transport("zmq", bound_to(host));
    if (!transport) GTEST_SKIP() << "libzmq is not available, or not asked for";
    EXPECT_THROW(transport->listen(link_options(), recorder), UserError) << host;
  }
}

TEST(BindAddress, EveryNameOfLoopbackCanBeListenedAtAndReached) {
  for (const char* host : {"127.0.0.1", "127.0.0.2", "localhost", "lo"}) {
    Recorder at_listener;
    Recorder at_connector;
    const std::unique_ptr<Transport> listening = make_transport("zmq", bound_to(host));
    if (!listening) GTEST_SKIP() << "libzmq is not available, or not asked for";
    const std::unique_ptr<Transport> connecting = make_transport("zmq");
    const Link& link = listening->listen(link_options(), at_listener);
    EXPECT_TRUE(link.endpoint().starts_with("tcp://127.0.0.")) << link.endpoint();
    connecting->connect(link_options(), link.endpoint(), at_connector);
    EXPECT_TRUE(at_connector.wait_open()) << host;
  }
}

}  // namespace
}  // namespace pipedream
