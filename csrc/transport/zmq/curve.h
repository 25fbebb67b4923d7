// Checks and decodes the keys of CURVE (CurveZMQ, ZeroMQ RFC 26), and gives them to sockets. Any thread;
// plain values.
//
// Both ends prove who they are. A connector knows the listener's key from its endpoint, and libzmq talks to
// no one else. A listener learns the connector's key in the handshake, and the ZAP handler (zap_handler.h)
// lets in connectors with an allowed key. Secret keys never appear in a message.
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
// The number of bytes that encryption adds to a message part: the command's name, the nonce, the
// authenticator and the flags.
inline constexpr std::size_t kCurveBytesPerPart = 33;
// An upper bound of the size of a handshake command.
inline constexpr std::size_t kCurveHandshakeBytesMax = 1024;

using CurveKey = std::array<unsigned char, kCurveKeyBytes>;

// Decodes a key from Z85 text (ZeroMQ RFC 32). Empty if the text is not a key.
[[nodiscard]] std::optional<CurveKey> decode_curve_key(std::string_view text);

// Throws UserError naming the key that is malformed, a pair that does not match, an empty list of allowed
// keys, or a libzmq without CURVE.
void check_curve_keys(const CurveKeys& keys, const LibZmq& zmq);

// The allowed keys, which check_curve_keys() has checked.
[[nodiscard]] std::vector<CurveKey> allowed_curve_keys(const CurveKeys& keys);

// Throws UserError unless neither end has keys, or both have and `keys` allows the listener's key,
// server_key.
void check_server_key(const std::optional<CurveKeys>& keys, const std::string& server_key,
                      const std::string& address);

// set_curve_server() and set_curve_client() make a socket the listening or the connecting side of a link with
// keys. The socket must not be bound or connected yet.
void set_curve_server(const LibZmq& zmq, void* socket, const CurveKeys& keys);
void set_curve_client(const LibZmq& zmq, void* socket, const CurveKeys& keys, const std::string& server_key);

}  // namespace pipedream
