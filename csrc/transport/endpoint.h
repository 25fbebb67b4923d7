// An endpoint says where a link listens and what a connector needs to enter. It is one line of text that
// travels through the rendezvous:
//
//   tcp://10.0.0.1:40001 curve=<Z85 public key> rings=<address of shared memory> memory=<another>
//   tcp://127.0.0.1:40001 token=<32 hexadecimal digits>
//
// With keys there is a curve=, over tcp without keys a token=, and within one process neither. rings= and
// memory= are optional and come last. No part contains blanks. Plain values; any thread.
#pragma once

#include <cstddef>
#include <string>

namespace pipedream {

inline constexpr std::size_t kTokenChars = 32;  // 128 bits

struct Endpoint {
  std::string address{};     // "tcp://127.0.0.1:40001", "inproc://7"
  std::string server_key{};  // the listener's public key; empty without CURVE
  std::string token{};       // a connector must show it if there are no keys, see zmq/token.h
  std::string rings{};   // the rings' memory (frame_rings.h); empty if all frames travel by the connection
  std::string memory{};  // memory of the receive channel's slots (shared_memory.h); empty when not shared

  friend bool operator==(const Endpoint&, const Endpoint&) = default;
};

[[nodiscard]] std::string to_string(const Endpoint& endpoint);
// Throws UserError naming what is wrong with the text.
[[nodiscard]] Endpoint parse_endpoint(const std::string& text);

}  // namespace pipedream
