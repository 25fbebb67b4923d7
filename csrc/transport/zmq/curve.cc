// Implements curve.h: decodes Z85 and sets libzmq's CURVE options. Any thread.
#include "transport/zmq/curve.h"

#include <algorithm>
#include <cstdint>
#include <limits>

#include "base/check.h"
#include "base/failure.h"

namespace pipedream {
namespace {

constexpr std::string_view kZ85 =
    "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.-:+=^!/*?&<>()[]{}@%$#";
static_assert(kZ85.size() == 85);
constexpr std::size_t kCharsPerWord = 5;
constexpr std::size_t kBytesPerWord = 4;
static_assert(kCurveKeyChars / kCharsPerWord == kCurveKeyBytes / kBytesPerWord);

constexpr const char* kKeysRemedy = "; `pipedream keys` makes a pair";
constexpr const char* kSameForAll = ": start all workers with keys, or none";

// Decodes the Z85 characters of one word, big endian. Empty if a character is not Z85, or the value has more
// than 32 bits.
std::optional<std::uint32_t> decode_word(std::string_view chars) {
  std::uint64_t word = 0;
  for (const char character : chars) {
    const std::size_t digit = kZ85.find(character);
    if (digit == std::string_view::npos) return std::nullopt;
    word = word * kZ85.size() + digit;
  }
  if (word > std::numeric_limits<std::uint32_t>::max()) return std::nullopt;
  return static_cast<std::uint32_t>(word);
}

// The message gives only the key's length, because the key may be secret.
void check_key(const std::string& text, const std::string& which) {
  if (decode_curve_key(text)) return;
  throw UserError(which + " is not a CURVE key: it must be Z85 text of " + std::to_string(kCurveKeyChars) +
                  " characters, this has " + std::to_string(text.size()) + kKeysRemedy);
}

void check_curve_is_there(const LibZmq& zmq) {
  if (zmq.has("curve") == 1) return;
  throw UserError("libzmq '" + zmq.path +
                  "' was built without CURVE, so links cannot be encrypted; install pyzmq, or name another "
                  "libzmq with PIPEDREAM_LIBZMQ");
}

void check_pair(const CurveKeys& keys, const LibZmq& zmq) {
  std::array<char, kCurveKeyChars + 1> derived{};
  PD_CHECK(zmq.curve_public(derived.data(), keys.secret_key.c_str()) == 0, zmq.last_error());
  if (keys.public_key == derived.data()) return;
  throw UserError("keys.public_key " + keys.public_key + " does not belong to keys.secret_key" + kKeysRemedy);
}

bool is_allowed(const CurveKeys& keys, const std::string& public_key) {
  return std::find(keys.allowed.begin(), keys.allowed.end(), public_key) != keys.allowed.end();
}

void set_key(const LibZmq& zmq, void* socket, int option, const std::string& key) {
  PD_CHECK(zmq.setsockopt(socket, option, key.c_str(), kCurveKeyChars + 1) == 0,
           "socket option " << option << ": " << zmq.last_error());
}

}  // namespace

std::optional<CurveKey> decode_curve_key(std::string_view text) {
  if (text.size() != kCurveKeyChars) return std::nullopt;
  CurveKey key{};
  for (std::size_t index = 0; index < kCurveKeyChars / kCharsPerWord; ++index) {
    const std::optional<std::uint32_t> word = decode_word(text.substr(index * kCharsPerWord, kCharsPerWord));
    if (!word) return std::nullopt;
    for (std::size_t byte = 0; byte < kBytesPerWord; ++byte) {
      key[index * kBytesPerWord + byte] =
          static_cast<unsigned char>(*word >> (8 * (kBytesPerWord - 1 - byte)));
    }
  }
  return key;
}

void check_curve_keys(const CurveKeys& keys, const LibZmq& zmq) {
  check_curve_is_there(zmq);
  check_key(keys.public_key, "keys.public_key");
  check_key(keys.secret_key, "keys.secret_key");
  if (keys.allowed.empty()) {
    throw UserError(
        "keys.allowed is empty, so nobody could connect; it lists the public keys of the other workers, "
        "one's "
        "own where all share a pair");
  }
  for (std::size_t index = 0; index < keys.allowed.size(); ++index) {
    check_key(keys.allowed[index], "keys.allowed[" + std::to_string(index) + "]");
  }
  check_pair(keys, zmq);
}

std::vector<CurveKey> allowed_curve_keys(const CurveKeys& keys) {
  std::vector<CurveKey> allowed;
  for (const std::string& text : keys.allowed) {
    const std::optional<CurveKey> key = decode_curve_key(text);
    PD_CHECK(key, "an allowed key was not checked");
    allowed.push_back(*key);
  }
  return allowed;
}

void check_server_key(const std::optional<CurveKeys>& keys, const std::string& server_key,
                      const std::string& address) {
  const std::string refusal = "cannot connect to '" + address + "': ";
  if (!keys && server_key.empty()) return;
  if (!keys) throw UserError(refusal + "it has a key and this worker has none" + kSameForAll);
  if (server_key.empty()) throw UserError(refusal + "it has no key and this worker has" + kSameForAll);
  check_key(server_key, refusal + "the key of the endpoint");
  if (!is_allowed(*keys, server_key)) {
    throw UserError(refusal + "its key " + server_key +
                    " is not allowed; add it to keys.allowed if that worker is yours");
  }
}

void set_curve_server(const LibZmq& zmq, void* socket, const CurveKeys& keys) {
  const int is_server = 1;
  PD_CHECK(zmq.setsockopt(socket, zmq::kCurveServer, &is_server, sizeof(is_server)) == 0, zmq.last_error());
  set_key(zmq, socket, zmq::kCurvePublicKey, keys.public_key);
  set_key(zmq, socket, zmq::kCurveSecretKey, keys.secret_key);
}

void set_curve_client(const LibZmq& zmq, void* socket, const CurveKeys& keys, const std::string& server_key) {
  set_key(zmq, socket, zmq::kCurvePublicKey, keys.public_key);
  set_key(zmq, socket, zmq::kCurveSecretKey, keys.secret_key);
  set_key(zmq, socket, zmq::kCurveServerKey, server_key);
}

std::pair<std::string, std::string> make_curve_keys(const std::string& libzmq_path) {
  const LibZmq& zmq = load_libzmq(libzmq_path);
  check_curve_is_there(zmq);
  std::array<char, kCurveKeyChars + 1> public_key{};
  std::array<char, kCurveKeyChars + 1> secret_key{};
  PD_CHECK(zmq.curve_keypair(public_key.data(), secret_key.data()) == 0, zmq.last_error());
  return {public_key.data(), secret_key.data()};
}

}  // namespace pipedream
