// Where a link listens, as one line of text that travels through the rendezvous:
//
//   tcp://10.0.0.1:40001 curve=<Z85 public key> memory=<address of shared memory>
//
// The last two are optional, in this order. Z85 has no blanks. Plain values; any thread.
#pragma once

#include <string>

namespace pipedream {

struct Endpoint {
  std::string address;     // "tcp://127.0.0.1:40001", "inproc://7"
  std::string server_key;  // the listener's public key; empty without CURVE
  std::string memory;      // of the receive channel's slots, see shared_memory.h; empty when not shared

  friend bool operator==(const Endpoint&, const Endpoint&) = default;
};

[[nodiscard]] std::string to_string(const Endpoint& endpoint);
// Throws UserError naming what is wrong with the text.
[[nodiscard]] Endpoint parse_endpoint(const std::string& text);

}  // namespace pipedream
