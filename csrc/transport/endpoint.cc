// Converts endpoints to text and back. Pure functions; any thread.
#include "transport/endpoint.h"

#include <algorithm>
#include <string_view>
#include <vector>

#include "base/failure.h"

namespace pipedream {
namespace {

constexpr std::string_view kCurve = "curve=";
constexpr std::string_view kToken = "token=";
constexpr std::string_view kRings = "rings=";
constexpr std::string_view kMemory = "memory=";
constexpr std::size_t kZ85KeyLength = 40;
constexpr std::string_view kZ85Symbols = ".-:+=^!/*?&<>()[]{}@%$#";  // beside digits and letters (RFC 32)

std::vector<std::string_view> split_at_blanks(std::string_view text) {
  std::vector<std::string_view> words;
  for (std::size_t begin = 0;;) {
    const std::size_t end = text.find(' ', begin);
    words.push_back(text.substr(begin, end - begin));
    if (end == std::string_view::npos) return words;
    begin = end + 1;
  }
}

bool is_printable(char symbol) { return symbol >= ' ' && symbol <= '~'; }

// The text on one line, with '?' for symbols that cannot be printed.
std::string shown(std::string text) {
  std::replace_if(
      text.begin(), text.end(), [](char symbol) { return !is_printable(symbol); }, '?');
  return text;
}

bool is_z85_key(std::string_view key) {
  const auto is_z85 = [](char symbol) {
    return (symbol >= '0' && symbol <= '9') || (symbol >= 'a' && symbol <= 'z') ||
           (symbol >= 'A' && symbol <= 'Z') || kZ85Symbols.find(symbol) != std::string_view::npos;
  };
  return key.size() == kZ85KeyLength && std::all_of(key.begin(), key.end(), is_z85);
}

bool is_token(std::string_view token) {
  const auto is_digit = [](char symbol) {
    return (symbol >= '0' && symbol <= '9') || (symbol >= 'a' && symbol <= 'f');
  };
  return token.size() == kTokenChars && std::all_of(token.begin(), token.end(), is_digit);
}

}  // namespace

std::string to_string(const Endpoint& endpoint) {
  std::string text = endpoint.address;
  if (!endpoint.server_key.empty()) text.append(" ").append(kCurve).append(endpoint.server_key);
  if (!endpoint.token.empty()) text.append(" ").append(kToken).append(endpoint.token);
  if (!endpoint.rings.empty()) text.append(" ").append(kRings).append(endpoint.rings);
  if (!endpoint.memory.empty()) text.append(" ").append(kMemory).append(endpoint.memory);
  return text;
}

Endpoint parse_endpoint(const std::string& text) {
  // The message quotes the address alone, because tokens are secret.
  const auto refuse = [&](const std::string& why) {
    throw UserError("endpoint '" + shown(text.substr(0, text.find(' '))) + "': " + why);
  };
  if (!std::all_of(text.begin(), text.end(), is_printable)) {
    refuse("it has a symbol that does not belong there");
  }
  const std::vector<std::string_view> words = split_at_blanks(text);
  Endpoint endpoint;
  endpoint.address = words.front();
  if (endpoint.address.find("://") == std::string::npos) {
    refuse("it must begin with an address such as tcp://127.0.0.1:40001");
  }
  for (const std::string_view word : words) {
    if (word.data() == words.front().data()) continue;
    const bool may_say_who = endpoint.server_key.empty() && endpoint.token.empty() &&
                             endpoint.rings.empty() && endpoint.memory.empty();
    if (word.starts_with(kCurve) && may_say_who) {
      endpoint.server_key = word.substr(kCurve.size());
      if (!is_z85_key(endpoint.server_key)) refuse("the key after curve= is not 40 characters of Z85");
    } else if (word.starts_with(kToken) && may_say_who) {
      endpoint.token = word.substr(kToken.size());
      if (!is_token(endpoint.token)) refuse("the token after token= is not 32 hexadecimal digits");
    } else if (word.starts_with(kRings) && endpoint.rings.empty() && endpoint.memory.empty()) {
      endpoint.rings = word.substr(kRings.size());
      if (endpoint.rings.empty()) refuse("nothing follows rings=");
    } else if (word.starts_with(kMemory) && endpoint.memory.empty()) {
      endpoint.memory = word.substr(kMemory.size());
      if (endpoint.memory.empty()) refuse("nothing follows memory=");
    } else {
      refuse(
          "after the address only curve=<key> or token=<token>, then rings=<address>, then memory=<address> "
          "may "
          "follow, once each");
    }
  }
  return endpoint;
}

}  // namespace pipedream
