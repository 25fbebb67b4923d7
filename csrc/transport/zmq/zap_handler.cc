// Answers libzmq's requests to let a connection in. On the thread that drives the transport.
#include "transport/zmq/zap_handler.h"

#include <algorithm>
#include <cerrno>
#include <utility>

#include "base/check.h"
#include "base/failure.h"
#include "transport/zmq/token.h"

namespace pipedream {
namespace {

constexpr const char* kZapEndpoint = "inproc://zeromq.zap.01";
// Parts of a request: version, request id, domain, address, routing id, mechanism, credentials.
constexpr std::size_t kRequestIdPart = 1;
constexpr std::size_t kDomainPart = 2;
constexpr std::size_t kMechanismPart = 5;
constexpr std::size_t kKeyPart = 6;       // CURVE only
constexpr std::size_t kPasswordPart = 7;  // PLAIN only, after the user's name
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

void ZapDomains::add(const std::string& domain, std::string token, std::function<void()> on_enter) {
  const std::lock_guard lock(mutex_);
  domains_.insert_or_assign(domain, Domain{std::move(token), std::move(on_enter)});
}

void ZapDomains::remove(const std::string& domain) {
  const std::lock_guard lock(mutex_);
  domains_.erase(domain);
}

bool ZapDomains::knows(const std::string& domain, std::string_view token) const {
  const std::lock_guard lock(mutex_);
  const auto found = domains_.find(domain);
  return found != domains_.end() && is_same_token(token, found->second.token);
}

bool ZapDomains::enter(const std::string& domain) {
  std::function<void()> on_enter;  // called after the lock, because it may take other locks
  {
    const std::lock_guard lock(mutex_);
    const auto found = domains_.find(domain);
    if (found == domains_.end() || !std::exchange(found->second.is_open, false)) return false;
    on_enter = found->second.on_enter;
  }
  on_enter();
  return true;
}

ZapHandler::ZapHandler(const LibZmq& zmq, void* context, std::optional<std::vector<CurveKey>> allowed,
                       ZapDomains& zap_domains)
    : zmq_(zmq), socket_(make_socket(zmq, context)), allowed_(std::move(allowed)), domains_(zap_domains) {}

ZapHandler::~ZapHandler() { PD_CHECK(zmq_.close(socket_) == 0, zmq_.last_error()); }

void ZapHandler::answer() {
  for (;;) {
    std::vector<std::string> request;
    bool more = true;
    while (more) {
      if (!receive_part(request.emplace_back(), more)) return;
    }
    // The request comes from libzmq itself, so it is well formed.
    PD_CHECK(request.size() > kMechanismPart, "ZAP request of " << request.size() << " parts");
    reply(request[0], request[kRequestIdPart], verdict(request));
  }
}

// Checks the key or token first, so that a stranger does not take the peer's place.
int ZapHandler::verdict(const std::vector<std::string>& request) {
  if (!may_talk(request)) return kIsStranger;
  return domains_.enter(request[kDomainPart]) ? kWelcome : kHasItsPeer;
}

bool ZapHandler::may_talk(const std::vector<std::string>& request) const {
  const std::string& mechanism = request[kMechanismPart];
  if (allowed_) return mechanism == "CURVE" && request.size() > kKeyPart && is_allowed(request[kKeyPart]);
  return mechanism == "PLAIN" && request.size() > kPasswordPart &&
         domains_.knows(request[kDomainPart], request[kPasswordPart]);
}

bool ZapHandler::is_allowed(const std::string& key) const {
  return std::any_of(allowed_->begin(), allowed_->end(), [&](const CurveKey& allowed) {
    return std::equal(
        key.begin(), key.end(), allowed.begin(), allowed.end(),
        [](char theirs, unsigned char ours) { return static_cast<unsigned char>(theirs) == ours; });
  });
}

bool ZapHandler::receive_part(std::string& part, bool& more) {
  ZmqMessage message;
  PD_CHECK(zmq_.msg_init(&message) == 0, zmq_.last_error());
  const int num_bytes = zmq_.uninterrupted([&] { return zmq_.msg_recv(&message, socket_, zmq::kDontWait); });
  if (num_bytes >= 0) {
    part.assign(static_cast<const char*>(zmq_.msg_data(&message)), zmq_.msg_size(&message));
    more = zmq_.msg_more(&message) != 0;
  } else {
    PD_CHECK(zmq_.errno_of_thread() == EAGAIN, zmq_.last_error());
  }
  PD_CHECK(zmq_.msg_close(&message) == 0, zmq_.last_error());
  return num_bytes >= 0;
}

void ZapHandler::reply(const std::string& version, const std::string& request_id, int status) {
  // Version, request id, status code, status text, user id, metadata.
  const std::vector<std::string> parts = {
      version, request_id, std::to_string(status), status == kWelcome ? "OK" : "refused", "", ""};
  for (std::size_t part = 0; part < parts.size(); ++part) {
    const int flags = zmq::kDontWait | (part + 1 < parts.size() ? zmq::kSndMore : 0);
    const auto send = [&] { return zmq_.send(socket_, parts[part].data(), parts[part].size(), flags); };
    PD_CHECK(zmq_.uninterrupted(send) >= 0, zmq_.last_error());
  }
}

}  // namespace pipedream
