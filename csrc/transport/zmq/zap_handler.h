// Who may connect: the context's ZAP handler (ZeroMQ RFC 27). With keys only the allowed ones enter; without,
// who says the link's token. Each listening link is a ZAP domain and lets one connection through its
// handshake, so a second connector is refused at once.
//
// Why not unbind after the first: zmq_unbind also ends the connections that the endpoint has accepted. Why
// not leave it to PAIR: it keeps a second connection open, silently, for ever.
//
// On the thread that drives, but for the constructor and the domains.
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

// The listening links by domain: a connection may ask before its link has started. Any thread.
class ZapDomains {
 public:
  // token: empty where there are keys. on_enter: called by the handler when a connection is let in.
  void add(const std::string& domain, std::string token, std::function<void()> on_enter);
  // On the handler's thread, so that on_enter does not run any more, or when there is none. Idempotent.
  void remove(const std::string& domain);

  [[nodiscard]] bool knows(const std::string& domain, std::string_view token) const;
  // False when the link has its peer. The domain lets nobody else in, for good: who enters is the peer,
  // and there is no reconnect.
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
  // The answer to a connector that is refused: the value of its monitor's kEventHandshakeFailedAuth. ZAP has
  // a fixed set of codes.
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
