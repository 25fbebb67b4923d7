// A token keeps strangers out of links that have no keys: a listening link makes a random one and names it in
// its endpoint; a connector says it in the handshake, by ZeroMQ's PLAIN mechanism (ZeroMQ RFC 24). So who
// cannot read the run's rendezvous store does not get past the handshake.
//
// What it is not: the token travels in the clear, and the listener proves nothing. It keeps out strangers and
// mistakes, such as a connector of another run, and nobody who reads the network or the store; keys do that
// (curve.h).
//
// Any thread; plain values.
#pragma once

#include <string>
#include <string_view>

#include "transport/zmq/libzmq.h"

namespace pipedream {

// 128 bits from the kernel, as kTokenChars hexadecimal digits.
[[nodiscard]] std::string make_token();

// In a time that does not depend on where they differ.
[[nodiscard]] bool is_same_token(std::string_view said, std::string_view token);

// Throws UserError when the endpoint names no token.
void check_token(const std::string& token, const std::string& address);

// Makes a socket that is neither bound nor connected yet the listening or connecting side.
void set_token_server(const LibZmq& zmq, void* socket);
void set_token_client(const LibZmq& zmq, void* socket, const std::string& token);

}  // namespace pipedream
