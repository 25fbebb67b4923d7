// The keys of CURVE (CurveZMQ, ZeroMQ RFC 26): checked, decoded, given to sockets. Any thread; plain values.
//
// Who proves what: a connector knows the listener's key from its endpoint and talks to nobody else; libzmq
// sees to that. A listener learns the connector's key in the handshake; the ZAP handler (zap_handler.h) lets
// in the allowed ones. Secret keys never appear in a message.
#pragma once

#include <array>
#include <cstddef>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "transport/transport.h"
#include "transport/zmq/libzmq.h"

namespace pipedream {

inline constexpr std::size_t kCurveKeyBytes = 32;
inline constexpr std::size_t kCurveKeyChars = 40;  // as Z85 text
// Bytes that encryption adds to a part: its name, nonce, authenticator and flags.
inline constexpr std::size_t kCurveBytesPerPart = 33;
// The longest command of the handshake is below.
inline constexpr std::size_t kCurveHandshakeBytesMax = 1024;

using CurveKey = std::array<unsigned char, kCurveKeyBytes>;

// Empty unless the text is a Z85 key (ZeroMQ RFC 32).
[[nodiscard]] std::optional<CurveKey> decode_curve_key(std::string_view text);

// Throws UserError naming the key that is malformed, a pair that does not match, or a libzmq without CURVE.
void check_curve_keys(const CurveKeys& keys, const LibZmq& zmq);

// The allowed keys, which were checked.
[[nodiscard]] std::vector<CurveKey> allowed_curve_keys(const CurveKeys& keys);

// Throws UserError when the two ends do not both have keys, or these may not talk to each other.
void check_server_key(const std::optional<CurveKeys>& keys, const std::string& server_key,
                      const std::string& address);

// Makes a socket that is neither bound nor connected yet the listening or connecting side.
void set_curve_server(const LibZmq& zmq, void* socket, const CurveKeys& keys);
void set_curve_client(const LibZmq& zmq, void* socket, const CurveKeys& keys, const std::string& server_key);

}  // namespace pipedream
