// Who may connect: the context's ZAP handler (ZeroMQ RFC 27). Where there are keys only the allowed ones
// enter. Each listening link is a ZAP domain and lets one connection at a time through its handshake, so a
// second connector is refused at once. Without keys whoever speaks ZeroMQ may be that one connection.
//
// Why not unbind after the first: zmq_unbind also ends the connections that the endpoint has accepted. Why
// not leave it to PAIR: it keeps a second connection open, silently, for ever.
//
// Transport thread, but for the constructor.
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "transport/zmq/curve.h"
#include "transport/zmq/libzmq.h"

namespace pipedream {

class ZmqGate {
 public:
  // What a connector that is refused is told: the value of its monitor's kEventHandshakeFailedAuth. ZAP has
  // a fixed set of codes.
  static constexpr int kKeyIsNotAllowed = 400;
  static constexpr int kHasItsPeer = 500;

  // allowed: keys, empty where links are not encrypted. may_enter: whether a connection to this domain is let
  // in; called on the transport thread.
  ZmqGate(const LibZmq& zmq, void* context, std::optional<std::vector<CurveKey>> allowed,
          std::function<bool(const std::string& domain)> may_enter);
  ~ZmqGate();
  ZmqGate(const ZmqGate&) = delete;
  ZmqGate& operator=(const ZmqGate&) = delete;

  [[nodiscard]] void* socket() const { return socket_; }
  // Answers all requests that are waiting.
  void answer();

 private:
  [[nodiscard]] bool receive_part(std::string& part, bool& more);
  [[nodiscard]] int verdict(const std::vector<std::string>& request) const;
  [[nodiscard]] bool may_talk(const std::vector<std::string>& request) const;
  void reply(const std::string& version, const std::string& request_id, int status);

  const LibZmq& zmq_;
  void* const socket_;
  const std::optional<std::vector<CurveKey>> allowed_;
  const std::function<bool(const std::string&)> may_enter_;
};

}  // namespace pipedream
