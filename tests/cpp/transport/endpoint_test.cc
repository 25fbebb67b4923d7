#include "transport/endpoint.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "base/failure.h"

namespace pipedream {
namespace {

const std::string kKey = "rq:rM>}U?@Lns47E1%kR.o@n%FcmmsL/@{H8]yf7";  // the example of ZeroMQ RFC 32
const std::string kToken = "00112233445566778899aabbccddeeff";
const std::string kMemory = "4711:12:65536:00112233445566778899aabbccddeeff";

std::string refusal_of(const std::string& text) {
  try {
    static_cast<void>(parse_endpoint(text));
    return "it was accepted";
  } catch (const UserError& error) {
    return error.what();
  }
}

TEST(Endpoint, EveryCombinationIsReadAsItWasWritten) {
  for (const std::string address : {"tcp://127.0.0.1:40001", "inproc://7", "tcp://[::1]:1"}) {
    for (const std::string& memory : {std::string(), kMemory}) {
      for (const Endpoint& endpoint : {Endpoint{.address = address, .memory = memory},
                                       Endpoint{.address = address, .server_key = kKey, .memory = memory},
                                       Endpoint{.address = address, .token = kToken, .memory = memory}}) {
        EXPECT_EQ(parse_endpoint(to_string(endpoint)), endpoint) << to_string(endpoint);
      }
    }
  }
  EXPECT_EQ(to_string({.address = "tcp://10.0.0.1:40001", .server_key = kKey, .memory = kMemory}),
            "tcp://10.0.0.1:40001 curve=" + kKey + " memory=" + kMemory);
  EXPECT_EQ(to_string({.address = "tcp://127.0.0.1:1", .token = kToken, .memory = kMemory}),
            "tcp://127.0.0.1:1 token=" + kToken + " memory=" + kMemory);
  EXPECT_EQ(to_string({.address = "inproc://7"}), "inproc://7");
}

TEST(Endpoint, SymbolsThatCannotBeShownAreRefusedInOneLine) {
  for (const char symbol : {'\n', '\0', '\t', '\x7F', '\xC3'}) {
    EXPECT_EQ(refusal_of(std::string("tcp://127.0.0.1") + symbol + ":1"),
              "endpoint 'tcp://127.0.0.1?:1': it has a symbol that does not belong there");
  }
}

TEST(Endpoint, WhatIsNoEndpointIsRefusedByName) {
  const std::string address = "tcp://127.0.0.1:1";
  const std::vector<std::pair<std::string, std::string>> cases = {
      {"", "it must begin with an address"},
      {"127.0.0.1:40001", "it must begin with an address"},
      {"curve=" + kKey, "it must begin with an address"},
      {" " + address, "it must begin with an address"},
      {address + " ",
       "only curve=<key> or token=<token>, then rings=<address>, then memory=<address> may follow"},
      {address + "  memory=" + kMemory, "only curve=<key>"},
      {address + " memory=" + kMemory + " curve=" + kKey, "then memory=<address>"},
      {address + " curve=" + kKey + " curve=" + kKey, "once each"},
      {address + " memory=" + kMemory + " memory=" + kMemory, "once each"},
      {address + " fast=1", "only curve=<key>"},
      {address + " curve=", "not 40 characters of Z85"},
      {address + " curve=" + kKey.substr(1), "not 40 characters of Z85"},
      {address + " curve=" + kKey.substr(1) + "~", "not 40 characters of Z85"},
      {address + " memory=", "nothing follows memory="},
      {address + " memory=" + kMemory + " token=" + kToken, "then memory=<address>"},
      {address + " token=" + kToken + " curve=" + kKey, "only curve=<key> or token=<token>"},
      {address + " curve=" + kKey + " token=" + kToken, "only curve=<key> or token=<token>"},
      {address + " token=" + kToken + " token=" + kToken, "once each"},
      {address + " token=", "not 32 hexadecimal digits"},
      {address + " token=" + kToken.substr(1), "not 32 hexadecimal digits"},
      {address + " token=" + kToken + "0", "not 32 hexadecimal digits"},
      {address + " token=" + kToken.substr(1) + "F", "not 32 hexadecimal digits"},
  };
  for (const auto& [text, why] : cases) {
    EXPECT_NE(refusal_of(text).find(why), std::string::npos) << refusal_of(text);
    const std::string shown = text.substr(0, text.find(' '));
    EXPECT_EQ(refusal_of(text).find("endpoint '" + shown + "': "), 0U) << refusal_of(text);
  }
}

}  // namespace
}  // namespace pipedream
