// A token keeps strangers out of links that have no keys. A listening link makes a random token and names it
// in its endpoint. A connector says it in the handshake, by ZeroMQ's PLAIN mechanism (ZeroMQ RFC 24). So only
// processes that can read the run's rendezvous store get past the handshake.
//
// The token travels unencrypted, and the listener proves nothing. So it keeps out strangers and mistakes,
// such as a connector of another run. It does not keep out someone who reads the network or the store; keys
// do (curve.h).
//
// Any thread; plain values.
#pragma once

#include <string>
#include <string_view>

#include "transport/zmq/libzmq.h"

namespace pipedream {

// Compares in constant time.
[[nodiscard]] bool is_same_token(std::string_view said, std::string_view token);

// Throws UserError when the endpoint names no token.
void check_token(const std::string& token, const std::string& address);

// set_token_server() and set_token_client() make a socket the listening or the connecting side of a link with
// a token. The socket must not be bound or connected yet.
void set_token_server(const LibZmq& zmq, void* socket);
void set_token_client(const LibZmq& zmq, void* socket, const std::string& token);

}  // namespace pipedream
