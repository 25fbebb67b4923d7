// Who may connect: the context's ZAP handler (ZeroMQ RFC 27). Each listening link is a ZAP domain and lets
// one connection at a time through its handshake, so a second connector is refused at once.
//
// Why not unbind after the first: zmq_unbind also ends the connections that the endpoint has accepted. Why
// not leave it to PAIR: it keeps a second connection open, silently, for ever.
//
// Transport thread, but for the constructor.
#pragma once

#include <functional>
#include <string>

#include "transport/zmq/libzmq.h"

namespace pipedream {

class ZmqGate {
 public:
  // may_enter: whether a connection to this domain is let in; called on the transport thread.
  ZmqGate(const LibZmq& zmq, void* context, std::function<bool(const std::string& domain)> may_enter);
  ~ZmqGate();
  ZmqGate(const ZmqGate&) = delete;
  ZmqGate& operator=(const ZmqGate&) = delete;

  [[nodiscard]] void* socket() const { return socket_; }
  // Answers all requests that are waiting.
  void answer();

 private:
  [[nodiscard]] bool receive_part(std::string& part, bool& more);
  void reply(const std::string& version, const std::string& request_id, bool enter);

  const LibZmq& zmq_;
  void* const socket_;
  const std::function<bool(const std::string&)> may_enter_;
};

}  // namespace pipedream
