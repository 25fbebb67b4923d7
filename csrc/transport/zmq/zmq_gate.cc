// Answers libzmq's questions whether a connection may enter. Transport thread.
#include "transport/zmq/zmq_gate.h"

#include <algorithm>
#include <cerrno>
#include <utility>

#include "base/check.h"
#include "base/failure.h"

namespace pipedream {
namespace {

constexpr const char* kZapEndpoint = "inproc://zeromq.zap.01";
// Parts of a request: version, request id, domain, address, routing id, mechanism, credentials.
constexpr std::size_t kRequestIdPart = 1;
constexpr std::size_t kDomainPart = 2;
constexpr std::size_t kMechanismPart = 5;
constexpr std::size_t kKeyPart = 6;
constexpr int kWelcome = 200;

void* make_socket(const LibZmq& zmq, void* context) {
  void* const socket = zmq.socket(context, zmq::kRep);
  if (socket == nullptr) throw UserError("cannot make a ZeroMQ socket: " + zmq.last_error());
  const int linger = 0;
  PD_CHECK(zmq.setsockopt(socket, zmq::kLinger, &linger, sizeof(linger)) == 0, zmq.last_error());
  PD_CHECK(zmq.bind(socket, kZapEndpoint) == 0, zmq.last_error());
  return socket;
}

}  // namespace

ZmqGate::ZmqGate(const LibZmq& zmq, void* context, std::optional<std::vector<CurveKey>> allowed,
                 std::function<bool(const std::string&)> may_enter)
    : zmq_(zmq),
      socket_(make_socket(zmq, context)),
      allowed_(std::move(allowed)),
      may_enter_(std::move(may_enter)) {}

ZmqGate::~ZmqGate() { PD_CHECK(zmq_.close(socket_) == 0, zmq_.last_error()); }

void ZmqGate::answer() {
  for (;;) {
    std::vector<std::string> request;
    bool more = true;
    while (more) {
      if (!receive_part(request.emplace_back(), more)) return;
    }
    // libzmq itself asks, so the request is well formed.
    PD_CHECK(request.size() > kMechanismPart, "ZAP request of " << request.size() << " parts");
    reply(request[0], request[kRequestIdPart], verdict(request));
  }
}

// The key comes first: a stranger does not take the peer's place.
int ZmqGate::verdict(const std::vector<std::string>& request) const {
  if (!may_talk(request)) return kKeyIsNotAllowed;
  return may_enter_(request[kDomainPart]) ? kWelcome : kHasItsPeer;
}

bool ZmqGate::may_talk(const std::vector<std::string>& request) const {
  if (!allowed_) return true;
  if (request[kMechanismPart] != "CURVE" || request.size() <= kKeyPart) return false;
  const std::string& key = request[kKeyPart];
  return std::any_of(allowed_->begin(), allowed_->end(), [&](const CurveKey& allowed) {
    return std::equal(
        key.begin(), key.end(), allowed.begin(), allowed.end(),
        [](char theirs, unsigned char ours) { return static_cast<unsigned char>(theirs) == ours; });
  });
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

void ZmqGate::reply(const std::string& version, const std::string& request_id, int status) {
  // Version, request id, status code, status text, user id, metadata.
  const std::vector<std::string> parts = {
      version, request_id, std::to_string(status), status == kWelcome ? "OK" : "refused", "", ""};
  for (std::size_t part = 0; part < parts.size(); ++part) {
    const int flags = zmq::kDontWait | (part + 1 < parts.size() ? zmq::kSndMore : 0);
    PD_CHECK(zmq_.send(socket_, parts[part].data(), parts[part].size(), flags) >= 0, zmq_.last_error());
  }
}

}  // namespace pipedream
