// Reads an address or interface in the same way as libzmq. Any thread; pure.
#include "transport/zmq/bind_address.h"

#include <arpa/inet.h>
#include <netinet/in.h>

#include <optional>
#include <string_view>

#include "base/failure.h"

namespace pipedream {
namespace {

constexpr std::uint32_t kLoopbackNetwork = 127;
constexpr std::string_view kTcp = "tcp://";

std::string without_brackets(const std::string& host) {
  const bool has_brackets = host.size() >= 2 && host.front() == '[' && host.back() == ']';
  return has_brackets ? host.substr(1, host.size() - 2) : host;
}

// Also accepts short forms such as "0" and "127.1", because libzmq's resolver does.
std::optional<std::uint32_t> as_ipv4(const std::string& host) {
  in_addr address{};
  if (::inet_aton(host.c_str(), &address) == 0) return std::nullopt;
  return ntohl(address.s_addr);
}

std::optional<in6_addr> as_ipv6(const std::string& host) {
  in6_addr address{};
  if (::inet_pton(AF_INET6, host.c_str(), &address) != 1) return std::nullopt;
  return address;
}

bool is_wildcard(const std::string& host) {
  if (host == "*" || as_ipv4(host) == INADDR_ANY) return true;
  const std::optional<in6_addr> ipv6 = as_ipv6(host);
  return ipv6 && IN6_IS_ADDR_UNSPECIFIED(&*ipv6);
}

// Accepts "tcp://127.0.0.1:40001", "tcp://[::1]:40001" and other exact addresses only. inet_aton would also
// accept text after a space.
bool is_loopback_endpoint(const std::string& address) {
  const std::size_t colon = address.rfind(':');
  if (!address.starts_with(kTcp) || colon < kTcp.size() || colon + 1 == address.size()) return false;
  const std::string port = address.substr(colon + 1);
  if (port.find_first_not_of("0123456789") != std::string::npos) return false;
  const std::string host = address.substr(kTcp.size(), colon - kTcp.size());
  in_addr ipv4{};
  if (::inet_pton(AF_INET, host.c_str(), &ipv4) == 1) return ntohl(ipv4.s_addr) >> 24 == kLoopbackNetwork;
  const std::optional<in6_addr> ipv6 = host.starts_with('[') ? as_ipv6(without_brackets(host)) : std::nullopt;
  return ipv6 && IN6_IS_ADDR_LOOPBACK(&*ipv6);
}

}  // namespace

bool is_loopback(const std::string& host) {
  const std::string bare = without_brackets(host);
  if (bare == "localhost" || bare == "lo") return true;
  if (const std::optional<std::uint32_t> ipv4 = as_ipv4(bare)) return *ipv4 >> 24 == kLoopbackNetwork;
  const std::optional<in6_addr> ipv6 = as_ipv6(bare);
  return ipv6 && IN6_IS_ADDR_LOOPBACK(&*ipv6);
}

std::string bind_address(const TransportOptions& options) {
  const std::string host = without_brackets(options.bind_host);
  if (is_wildcard(host)) {
    throw UserError("cannot listen at '" + options.bind_host +
                    "': nobody can connect to it; give the one address or interface of this machine by which "
                    "the other workers reach it");
  }
  if (!is_loopback(host) && !options.keys && !options.insecure) {
    throw UserError(
        "refuses to listen at '" + options.bind_host +
        "', which others reach, without encryption: give all workers keys (`pipedream keys` makes "
        "them), or insecure=True where everybody on that network is trusted");
  }
  // zmq_bind resolves no names.
  if (host == "localhost") return "tcp://127.0.0.1";
  const bool is_ipv6 = host.find(':') != std::string::npos;
  return "tcp://" + (is_ipv6 ? "[" + host + "]" : host);
}

void check_connect_address(const TransportOptions& options, const std::string& address) {
  if (options.keys || options.insecure || is_loopback_endpoint(address)) return;
  throw UserError(
      "refuses to connect to '" + address +
      "', which is not loopback, without encryption: give all workers keys (`pipedream keys` makes "
      "them), or insecure=True where everybody on that network is trusted");
}

}  // namespace pipedream
