// Implements token.h: compares tokens, and sets libzmq's PLAIN options. Any thread.
#include "transport/zmq/token.h"

#include <cstddef>

#include "base/check.h"
#include "base/failure.h"
#include "transport/endpoint.h"
#include "wire/frame.h"

namespace pipedream {
namespace {

// PLAIN needs a user's name, but the ZAP handler checks only the token.
constexpr std::string_view kUsername = "pipedream";

// The size of PLAIN's HELLO: the command's name in 6 bytes, then the length and the text of user's name and
// token. It must fit the smallest limit that a link sets for message parts, which is a frame header's size.
constexpr std::size_t kPlainHelloBytes = 6 + 1 + kUsername.size() + 1 + kTokenChars;
static_assert(kPlainHelloBytes <= kFrameHeaderBytes);

void set_text(const LibZmq& zmq, void* socket, int option, std::string_view text) {
  PD_CHECK(zmq.setsockopt(socket, option, text.data(), text.size()) == 0,
           "socket option " << option << ": " << zmq.last_error());
}

}  // namespace

bool is_same_token(std::string_view said, std::string_view token) {
  if (said.size() != token.size()) return false;
  unsigned difference = 0;
  for (std::size_t index = 0; index < token.size(); ++index) {
    difference |= static_cast<unsigned>(static_cast<unsigned char>(said[index]) ^
                                        static_cast<unsigned char>(token[index]));
  }
  return difference == 0;
}

void check_token(const std::string& token, const std::string& address) {
  if (!token.empty()) return;
  throw UserError("cannot connect to '" + address +
                  "': its endpoint names no token; give the endpoint as the listener published it");
}

void set_token_server(const LibZmq& zmq, void* socket) {
  const int is_server = 1;
  PD_CHECK(zmq.setsockopt(socket, zmq::kPlainServer, &is_server, sizeof(is_server)) == 0, zmq.last_error());
}

void set_token_client(const LibZmq& zmq, void* socket, const std::string& token) {
  set_text(zmq, socket, zmq::kPlainUsername, kUsername);
  set_text(zmq, socket, zmq::kPlainPassword, token);
}

}  // namespace pipedream
