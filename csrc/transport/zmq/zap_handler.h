// The context's ZAP handler (ZeroMQ RFC 27) decides who may connect. With keys it lets in the allowed keys;
// without keys it lets in connectors that say the link's token. Each listening link is a ZAP domain and lets
// one connection through its handshake, so a second connector is refused at once.
//
// Two simpler ways to limit a link to one connection fail. zmq_unbind() after the first connection also ends
// that connection. A PAIR socket alone would silently keep a second connection open for ever.
//
// Runs on the thread that drives the transport, except the constructor and the domains.
#pragma once

#include <functional>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "transport/zmq/curve.h"
#include "transport/zmq/libzmq.h"

namespace pipedream {

// The table of listening links by domain. A connection may ask to enter before its link has started. Any
// thread.
class ZapDomains {
 public:
  // Adds a listening link as a domain. token: empty if links have keys. on_enter: called by the handler when
  // a connection is let in.
  void add(const std::string& domain, std::string token, std::function<void()> on_enter);
  // Call it on the thread that runs ZapHandler::answer(), or when answer() cannot run, because answer() calls
  // on_enter. Idempotent.
  void remove(const std::string& domain);

  [[nodiscard]] bool knows(const std::string& domain, std::string_view token) const;
  // Lets a connection in and closes the domain for good, because there is no reconnect. False when the link
  // has its peer already.
  [[nodiscard]] bool enter(const std::string& domain);

 private:
  struct Domain {
    std::string token;
    std::function<void()> on_enter;
    bool is_open = true;
  };

  mutable std::mutex mutex_;  // guards domains_
  std::map<std::string, Domain, std::less<>> domains_;
};

class ZapHandler {
 public:
  // The status sent to a refused connector. The connector's monitor gets it as the value of
  // kEventHandshakeFailedAuth. ZAP has a fixed set of codes.
  static constexpr int kIsStranger = 400;  // its key is not allowed, or it does not know the token
  static constexpr int kHasItsPeer = 500;

  // allowed: keys, empty where links are not encrypted.
  ZapHandler(const LibZmq& zmq, void* context, std::optional<std::vector<CurveKey>> allowed,
             ZapDomains& zap_domains);
  ~ZapHandler();
  ZapHandler(const ZapHandler&) = delete;
  ZapHandler& operator=(const ZapHandler&) = delete;

  [[nodiscard]] void* socket() const { return socket_; }
  // Answers all requests that are waiting.
  void answer();

 private:
  [[nodiscard]] bool receive_part(std::string& part, bool& more);
  [[nodiscard]] int verdict(const std::vector<std::string>& request);
  [[nodiscard]] bool may_talk(const std::vector<std::string>& request) const;
  [[nodiscard]] bool is_allowed(const std::string& key) const;
  void reply(const std::string& version, const std::string& request_id, int status);

  const LibZmq& zmq_;
  void* const socket_;
  const std::optional<std::vector<CurveKey>> allowed_;
  ZapDomains& domains_;
};

}  // namespace pipedream
