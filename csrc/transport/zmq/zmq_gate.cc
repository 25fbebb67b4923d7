// Answers libzmq's questions whether a connection may enter. Transport thread.
#include "transport/zmq/zmq_gate.h"

#include <cerrno>
#include <utility>
#include <vector>

#include "base/check.h"
#include "base/failure.h"

namespace pipedream {
namespace {

constexpr const char* kZapEndpoint = "inproc://zeromq.zap.01";
// Parts of a request: version, request id, domain, address, routing id, mechanism, credentials.
constexpr std::size_t kRequestIdPart = 1;
constexpr std::size_t kDomainPart = 2;

void* make_socket(const LibZmq& zmq, void* context) {
  void* const socket = zmq.socket(context, zmq::kRep);
  if (socket == nullptr) throw UserError("cannot make a ZeroMQ socket: " + zmq.last_error());
  const int linger = 0;
  PD_CHECK(zmq.setsockopt(socket, zmq::kLinger, &linger, sizeof(linger)) == 0, zmq.last_error());
  PD_CHECK(zmq.bind(socket, kZapEndpoint) == 0, zmq.last_error());
  return socket;
}

}  // namespace

ZmqGate::ZmqGate(const LibZmq& zmq, void* context, std::function<bool(const std::string&)> may_enter)
    : zmq_(zmq), socket_(make_socket(zmq, context)), may_enter_(std::move(may_enter)) {}

ZmqGate::~ZmqGate() { PD_CHECK(zmq_.close(socket_) == 0, zmq_.last_error()); }

void ZmqGate::answer() {
  for (;;) {
    std::vector<std::string> request;
    bool more = true;
    while (more) {
      if (!receive_part(request.emplace_back(), more)) return;
    }
    // libzmq itself asks, so the request is well formed.
    PD_CHECK(request.size() > kDomainPart, "ZAP request of " << request.size() << " parts");
    reply(request[0], request[kRequestIdPart], may_enter_(request[kDomainPart]));
  }
}

bool ZmqGate::receive_part(std::string& part, bool& more) {
  ZmqMessage message;
  PD_CHECK(zmq_.msg_init(&message) == 0, zmq_.last_error());
  const int num_bytes = zmq_.msg_recv(&message, socket_, zmq::kDontWait);
  if (num_bytes >= 0) {
    part.assign(static_cast<const char*>(zmq_.msg_data(&message)), zmq_.msg_size(&message));
    more = zmq_.msg_more(&message) != 0;
  } else {
    const int error = zmq_.errno_of_thread();
    PD_CHECK(error == EAGAIN || error == EINTR, zmq_.last_error());
  }
  PD_CHECK(zmq_.msg_close(&message) == 0, zmq_.last_error());
  return num_bytes >= 0;
}

void ZmqGate::reply(const std::string& version, const std::string& request_id, bool enter) {
  // Version, request id, status code, status text, user id, metadata.
  const std::vector<std::string> parts = {
      version, request_id, enter ? "200" : "400", enter ? "OK" : "has its peer", "", ""};
  for (std::size_t part = 0; part < parts.size(); ++part) {
    const int flags = zmq::kDontWait | (part + 1 < parts.size() ? zmq::kSndMore : 0);
    PD_CHECK(zmq_.send(socket_, parts[part].data(), parts[part].size(), flags) >= 0, zmq_.last_error());
  }
}

}  // namespace pipedream
