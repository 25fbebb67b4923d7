// The rules for where a listener may bind and a connector may connect: freely on loopback; elsewhere only
// with keys or insecure=true. Any thread; pure.
#pragma once

#include <string>

#include "transport/transport.h"

namespace pipedream {

// Whether the host is an address of 127.0.0.0/8, ::1, the name localhost or the interface lo.
[[nodiscard]] bool is_loopback(const std::string& host);

// The form of options.bind_host that zmq_bind takes, without the port: "tcp://127.0.0.1". Throws UserError
// for an address that nobody could connect to, and for an address that other hosts can reach if links have no
// keys and insecure is false.
[[nodiscard]] std::string bind_address(const TransportOptions& options);

// Checks the address of a listener's endpoint, such as "tcp://127.0.0.1:40001". It comes from a store to
// which strangers may write. So without keys or insecure=true it must be a plain loopback address: no name
// for a resolver, and none of libzmq's further forms (a source address before a ';'). Throws UserError.
void check_connect_address(const TransportOptions& options, const std::string& address);

}  // namespace pipedream
