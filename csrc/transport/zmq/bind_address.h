// Rules of where a listener may bind and a connector may connect to: loopback freely, elsewhere with keys or
// with insecure=true. Any thread; pure.
#pragma once

#include <string>

#include "transport/transport.h"

namespace pipedream {

// Every name of loopback that libzmq or a resolver knows: 127.0.0.0/8, ::1, localhost, the interface lo.
[[nodiscard]] bool is_loopback(const std::string& host);

// The form of options.bind_host that zmq_bind takes, without the port: "tcp://127.0.0.1". Throws UserError
// for an address that nobody could connect to, and for one that others reach where links are not encrypted.
[[nodiscard]] std::string bind_address(const TransportOptions& options);

// address: "tcp://127.0.0.1:40001", as a listener's endpoint has it. It comes from a store in which others
// may write: without keys or insecure=true it must be a loopback address and nothing else, no name that a
// resolver is asked for and none of libzmq's further forms (a source address before a ';'). Throws UserError.
void check_connect_address(const TransportOptions& options, const std::string& address);

}  // namespace pipedream
