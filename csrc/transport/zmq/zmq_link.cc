// Implements one link over ZeroMQ. Threads as in zmq_link.h.
#include "transport/zmq/zmq_link.h"

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <chrono>
#include <cstring>
#include <string_view>
#include <thread>
#include <utility>

#include "base/check.h"
#include "base/handed_over.h"
#include "base/random_text.h"
#include "transport/zmq/bind_address.h"
#include "transport/zmq/curve.h"
#include "transport/zmq/token.h"

namespace pipedream {
// A message that closes itself.
class ZmqReceived {
 public:
  explicit ZmqReceived(const LibZmq& zmq) : zmq_(zmq) {
    PD_CHECK(zmq_.msg_init(&message_) == 0, zmq_.last_error());
  }
  ~ZmqReceived() { PD_CHECK(zmq_.msg_close(&message_) == 0, zmq_.last_error()); }
  ZmqReceived(const ZmqReceived&) = delete;
  ZmqReceived& operator=(const ZmqReceived&) = delete;

  // Receives a part of a message. False when nothing has arrived.
  [[nodiscard]] bool receive(void* socket) {
    const auto receive = [&] { return zmq_.msg_recv(&message_, socket, zmq::kDontWait); };
    if (zmq_.uninterrupted(receive) >= 0) return true;
    PD_CHECK(zmq_.errno_of_thread() == EAGAIN, zmq_.last_error());
    return false;
  }
  [[nodiscard]] std::span<const std::byte> bytes() {
    return {static_cast<const std::byte*>(zmq_.msg_data(&message_)), zmq_.msg_size(&message_)};
  }
  [[nodiscard]] bool more() const { return zmq_.msg_more(&message_) != 0; }
  // The file descriptor of the connection that the message came over; -1 when unknown.
  [[nodiscard]] int connection_fd() const {
    const char* const text = zmq_.msg_gets(&message_, "__fd");
    int fd = -1;
    if (text != nullptr) std::from_chars(text, text + std::strlen(text), fd);
    return fd;
  }

 private:
  const LibZmq& zmq_;
  ZmqMessage message_;
};

namespace {

constexpr std::string_view kScheme = "tcp://";
constexpr const char* kEndpointLooks = "an endpoint looks like tcp://127.0.0.1:40001";
constexpr std::chrono::milliseconds kTakenPortsPeriod{20};
constexpr int kNumMessagesPerRound = 16;  // messages of one link that are read before the next link's turn

bool is_ipv6(const std::string& address) { return address.find('[') != std::string::npos; }

int milliseconds(double seconds) { return static_cast<int>(std::clamp(seconds * 1e3, 1.0, 6'553'500.0)); }

// Whether the frame wakes a receiver that lets frames wait. False only for tensors and credits, the steady
// traffic of a training.
bool is_urgent(FrameKind kind) { return kind != FrameKind::kTensor && kind != FrameKind::kCredit; }

// Called on a thread of libzmq, or on the thread that drives the transport if the message was never sent.
void release_payload(void* /*data*/, void* hint) {
  const PassiveScope on_a_thread_of_libzmq;
  auto* const sent = static_cast<SentPayloads::Payload*>(hint);
  note_taken_over(sent);
  sent->owner->release(*sent);
}

}  // namespace

int descriptor_of(const LibZmq& zmq, void* socket) {
  int fd = -1;
  std::size_t num_bytes = sizeof(fd);
  PD_CHECK(zmq.getsockopt(socket, zmq::kFd, &fd, &num_bytes) == 0, zmq.last_error());
  return fd;
}

ZmqLink::ZmqLink(TransportCore& transport, LinkOptions options, LinkHandler& handler, Role role,
                 ZmqShared& shared)
    : LinkCore(transport, std::move(options), handler, role),
      shared_(shared),
      zmq_(shared.zmq),
      role_(role),
      domain_("link " + std::to_string(shared.next_link_number++)),
      socket_(zmq_.socket(shared.context, zmq::kPair)) {
  if (socket_ == nullptr) throw UserError("cannot make a ZeroMQ socket: " + zmq_.last_error());
  const double peer_timeout_s = shared_.options.peer_timeout_s;
  set_option(zmq::kLinger, 0);
  set_option(zmq::kSndHwm, 0);
  set_option(zmq::kRcvHwm, 0);
  set_option(zmq::kReconnectIvl, -1);
  set_option(zmq::kConnectTimeout, milliseconds(peer_timeout_s));
  // At a connector the deadline for HELLO must pass before this timeout, because its error message says more.
  set_option(zmq::kHandshakeIvl,
             milliseconds(role == Role::kConnector ? 2 * peer_timeout_s : peer_timeout_s));
  set_part_bytes_max();
  open_monitor();
}

// Sets the largest size of a message part. libzmq ends the connection when a part is longer, before it
// allocates memory for the part.
void ZmqLink::set_part_bytes_max() {
  std::size_t num_bytes = std::max<std::size_t>(options().payload_bytes_max, kFrameHeaderBytes);
  if (shared_.options.keys) num_bytes = std::max(num_bytes + kCurveBytesPerPart, kCurveHandshakeBytesMax);
  const auto part_bytes_max = static_cast<std::int64_t>(num_bytes);
  PD_CHECK(zmq_.setsockopt(socket_, zmq::kMaxMsgSize, &part_bytes_max, sizeof(part_bytes_max)) == 0,
           zmq_.last_error());
}

void ZmqLink::set_option(int option, int value) {
  PD_CHECK(zmq_.setsockopt(socket_, option, &value, sizeof(value)) == 0,
           "socket option " << option << " = " << value << ": " << zmq_.last_error());
}

void ZmqLink::open_monitor() {
  const std::string address = "inproc://monitor of " + domain_;
  const int events = zmq::kEventAccepted | zmq::kEventClosed | zmq::kEventDisconnected |
                     zmq::kEventHandshakeFailedNoDetail | zmq::kEventHandshakeFailedProtocol |
                     zmq::kEventHandshakeFailedAuth;
  monitor_ = zmq_.socket(shared_.context, zmq::kPair);
  const int linger = 0;
  // No limit: a full monitor would block libzmq's I/O thread, and with it all links, until a thread drives.
  const int unbounded = 0;
  if (monitor_ == nullptr || zmq_.socket_monitor(socket_, address.c_str(), events) != 0 ||
      zmq_.setsockopt(monitor_, zmq::kLinger, &linger, sizeof(linger)) != 0 ||
      zmq_.setsockopt(monitor_, zmq::kRcvHwm, &unbounded, sizeof(unbounded)) != 0 ||
      zmq_.connect(monitor_, address.c_str()) != 0) {
    const std::string reason = zmq_.last_error();
    disconnect();
    throw UserError("cannot make a ZeroMQ socket: " + reason);
  }
}

void ZmqLink::bind() {
  const std::string host = bind_address(shared_.options);
  if (is_ipv6(host)) set_option(zmq::kIpv6, 1);
  if (const std::optional<CurveKeys>& keys = shared_.options.keys) {
    set_curve_server(zmq_, socket_, *keys);
    server_key_ = keys->public_key;
  } else {
    set_token_server(zmq_, socket_);
    token_ = random_hex(kTokenChars);
  }
  if (shared_.board) rings_ = FrameRings::make(options().identity, *shared_.board, is_quick());
  PD_CHECK(zmq_.setsockopt(socket_, zmq::kZapDomain, domain_.data(), domain_.size()) == 0, zmq_.last_error());
  bind_to(host);
  char bound[256] = {};
  std::size_t num_bytes = sizeof(bound);
  PD_CHECK(zmq_.getsockopt(socket_, zmq::kLastEndpoint, bound, &num_bytes) == 0, zmq_.last_error());
  address_ = bound;
  // The domain need not be added before the socket is bound, because no one else knows the endpoint yet.
  shared_.zap_domains.add(domain_, token_, [this] { await_hello(); });
}

// Tries the ports again and again until one is free. All workers of a machine share the range, so a port may
// become free when a link of another worker closes.
void ZmqLink::bind_to(const std::string& host) {
  if (!shared_.options.ports) {
    if (try_bind(host + ":*")) return;
    throw UserError("cannot listen at '" + host + "': the system has no free port");
  }
  const PortRange ports = *shared_.options.ports;
  const Deadline deadline = Clock::now() + duration_of(shared_.options.peer_timeout_s);
  for (;; std::this_thread::sleep_for(kTakenPortsPeriod)) {
    for (unsigned port = ports.first; port <= ports.last; ++port) {
      if (try_bind(host + ":" + std::to_string(port))) return;
    }
    if (Clock::now() >= deadline) break;
  }
  throw UserError("all ports of " + std::to_string(ports.first) + "-" + std::to_string(ports.last) +
                  " are taken at '" + host +
                  "', by other programs or other runs: give another range, or a larger one");
}

// False when the port is taken.
bool ZmqLink::try_bind(const std::string& address) {
  if (zmq_.bind(socket_, address.c_str()) == 0) return true;
  if (zmq_.errno_of_thread() == EADDRINUSE) return false;
  throw UserError("cannot listen at '" + address + "': " + zmq_.last_error() +
                  "; bind_host must be an address or interface of this machine");
}

void ZmqLink::connect(const std::string& endpoint) {
  const Endpoint parsed = parse_endpoint(endpoint);
  address_ = parsed.address;
  server_key_ = parsed.server_key;
  token_ = parsed.token;
  const std::string refusal = "cannot connect to '" + address_ + "': ";
  if (!address_.starts_with(kScheme)) throw UserError(refusal + kEndpointLooks);
  check_connect_address(shared_.options, address_);
  const std::optional<CurveKeys>& keys = shared_.options.keys;
  check_server_key(keys, server_key_, address_);
  if (keys) {
    set_curve_client(zmq_, socket_, *keys, server_key_);
  } else {
    check_token(token_, address_);
    set_token_client(zmq_, socket_, token_);
  }
  if (shared_.board && !parsed.rings.empty()) {
    rings_ = FrameRings::open(parsed.rings, options().identity, *shared_.board, is_quick());
  }
  if (is_ipv6(address_)) set_option(zmq::kIpv6, 1);
  if (zmq_.connect(socket_, address_.c_str()) != 0) {
    throw UserError(refusal + zmq_.last_error() + "; " + kEndpointLooks);
  }
}

// Stops watching the descriptors before libzmq closes them.
void ZmqLink::disconnect() {
  if (socket_ == nullptr) return;  // already disconnected, and the transport may be partly destroyed
  if (std::exchange(uses_rings_, false)) shared_.ring_links.at(rings_->number()) = nullptr;
  shared_.zap_domains.remove(domain_);
  for (int* fd : {&socket_fd_, &monitor_fd_}) {
    if (*fd >= 0) transport().unwatch(std::exchange(*fd, -1));
  }
  if (monitor_ != nullptr) {
    // The call fails only when there is no monitor, for instance because the constructor threw before it made
    // the monitor.
    [[maybe_unused]] const int stopped = zmq_.socket_monitor(socket_, nullptr, 0);
    PD_CHECK(zmq_.close(monitor_) == 0, zmq_.last_error());
    monitor_ = nullptr;
  }
  PD_CHECK(zmq_.close(socket_) == 0, zmq_.last_error());
  socket_ = nullptr;
}

// ---- Marks ----

void ZmqLink::watch_traffic() {
  socket_fd_ = descriptor_of(zmq_, socket_);
  monitor_fd_ = descriptor_of(zmq_, monitor_);
  transport().watch(socket_fd_, name());
  transport().watch(monitor_fd_, name() + 1);
  look_for_traffic();  // traffic before this may have been reported already
}

void ZmqLink::look_for_traffic() {
  has_events_ = true;
  mark();
}

// Asks the kernel, because libzmq reports only whole messages. The descriptor belongs to libzmq. If libzmq
// has just closed it, the answer is empty or another connection's; then the monitor reports the end.
std::optional<Deadline> ZmqLink::last_arrival() const {
  tcp_info info{};
  socklen_t num_bytes = sizeof(info);
  if (peer_fd_ == kAnyFd || ::getsockopt(peer_fd_, IPPROTO_TCP, TCP_INFO, &info, &num_bytes) != 0) {
    return std::nullopt;
  }
  return Clock::now() - std::chrono::milliseconds(info.tcpi_last_data_recv);
}

void ZmqLink::mark() {
  if (!std::exchange(is_marked_, true)) shared_.marked_links.push_back(this);
}

void ZmqLink::note_ready(std::uint64_t name) {
  const bool is_monitor = name % 2 != 0;
  // NOLINTNEXTLINE(performance-no-int-to-ptr): name() has made the number from a pointer
  auto* const link = reinterpret_cast<ZmqLink*>(static_cast<std::uintptr_t>(name - (is_monitor ? 1 : 0)));
  link->has_events_ |= is_monitor;
  link->mark();
}

// Reads the monitor's events first. If they report that a connection has ended, all messages that came over
// it are already in the socket.
bool ZmqLink::deliver(Driver driver) {
  if (socket_ != nullptr) {
    const bool is_quick_turn = is_quick() && !has_events_ && !connection_ended_;
    if (driver == Driver::kPoster && !is_quick_turn) {
      if (has_traffic()) return true;
    } else {
      if (std::exchange(has_events_, false)) read_events();
      if (receive_some()) return true;
    }
  }
  is_marked_ = false;
  return false;
}

bool ZmqLink::has_traffic() {
  if (has_events_ || connection_ended_) return true;
  int events = 0;
  std::size_t num_bytes = sizeof(events);
  const auto look = [&] { return zmq_.getsockopt(socket_, zmq::kEvents, &events, &num_bytes); };
  PD_CHECK(zmq_.uninterrupted(look) == 0, zmq_.last_error());
  return (events & zmq::kPollIn) != 0;
}

// ---- Sending ----

// After both HELLOs frames may take the rings or the connection.
void ZmqLink::opened() {
  if (!rings_ || !rings_->begin(*shared_.board)) return;
  uses_rings_ = true;
  std::vector<ZmqLink*>& links = shared_.ring_links;
  links.resize(std::max<std::size_t>(links.size(), rings_->number() + 1));
  links[rings_->number()] = this;
}

void ZmqLink::carry(const FrameHeaderBytes& header, HeldFrame frame) {
  const bool goes_by_rings = uses_rings_ && frame.payload().empty();
  if (goes_by_rings && rings_->push(header, is_urgent(frame.header().kind))) return;
  if (uses_rings_) rings_->note_carried();
  mark();
  const bool has_payload = !frame.payload().empty();
  const int flags = zmq::kDontWait | (has_payload ? zmq::kSndMore : 0);
  const auto send = [&] { return zmq_.send(socket_, header.data(), header.size(), flags); };
  if (!handed_over(zmq_.uninterrupted(send))) return;
  if (has_payload) carry_payload(std::move(frame));
}

void ZmqLink::carry_payload(HeldFrame frame) {
  const std::span<const std::byte> payload = frame.payload();
  SentPayloads::Payload* const sent = shared_.sent_payloads.add(std::move(frame));
  note_given_away(sent);
  ZmqMessage message;
  // libzmq does not write through the pointer.
  const int made = zmq_.msg_init_data(&message, const_cast<std::byte*>(payload.data()), payload.size(),
                                      release_payload, sent);
  PD_CHECK(made == 0, zmq_.last_error());
  const auto send = [&] { return zmq_.msg_send(&message, socket_, zmq::kDontWait); };
  if (!handed_over(zmq_.uninterrupted(send))) {
    PD_CHECK(zmq_.msg_close(&message) == 0, zmq_.last_error());  // releases the payload
  }
}

bool ZmqLink::handed_over(int send_result) {
  if (send_result >= 0) return true;
  // The socket has no high-water mark, so it refuses a message only when it has no connection.
  PD_CHECK(zmq_.errno_of_thread() == EAGAIN, zmq_.last_error());
  connection_ended_ = true;
  return false;
}

// ---- Receiving ----

void ZmqLink::read_events() {
  while (monitor_ != nullptr) {
    ZmqReceived event(zmq_);
    if (!event.receive(monitor_)) return;
    ZmqReceived address(zmq_);
    PD_CHECK(event.more() && address.receive(monitor_), "monitor event without an address");
    // A message of the monitor begins with 16 bits of event and 32 bits of value.
    std::uint16_t code = 0;
    std::int32_t value = 0;
    PD_CHECK(event.bytes().size() == sizeof(code) + sizeof(value), event.bytes().size());
    std::memcpy(&code, event.bytes().data(), sizeof(code));
    std::memcpy(&value, event.bytes().data() + sizeof(code), sizeof(value));
    if (role_ == Role::kConnector) {
      handle_connector_event(code, value);
    } else {
      handle_listener_event(code, value);
    }
  }
}

void ZmqLink::handle_connector_event(int event, int value) {
  connection_ended_ = true;
  if (!connecting()) return;
  if (event == zmq::kEventClosed) {
    how_it_ended_ = "nothing accepts connections at " + address_;
  } else if (event != zmq::kEventDisconnected) {
    how_it_ended_ = how_handshake_failed(event, value);
  }
}

// The reason for which the handshake failed, as far as this side can know it. A listener with another key
// ends the connection without giving a reason.
std::string ZmqLink::how_handshake_failed(int event, int value) const {
  if (event == zmq::kEventHandshakeFailedAuth) {
    const std::string refused = "it refused the connection to " + address_ + ": ";
    if (value == ZapHandler::kHasItsPeer) return refused + "it has its peer already";
    if (shared_.options.keys) return refused + "this worker's key is not in its keys.allowed";
    return refused + "the token of the endpoint is not its own, so the endpoint is of another run";
  }
  const std::string failed = "the handshake with " + address_ + " failed: ";
  if (event == zmq::kEventHandshakeFailedProtocol && value == zmq::kMechanismMismatch) {
    return failed + (shared_.options.keys ? "it has no keys and this worker has"
                                          : "it has keys and this worker has none");
  }
  return failed + (shared_.options.keys ? "it ended, or does not have the key that its endpoint names"
                                        : "it ended, is no worker, or has keys and this worker has none");
}

void ZmqLink::handle_listener_event(int event, int value) {
  if (event == zmq::kEventAccepted) {
    ended_fds_.erase(value);
    return;
  }
  if (event != zmq::kEventDisconnected) return;
  if (value == peer_fd_) {
    connection_ended_ = true;  // noted at once, because a stranger's connection may get this descriptor next
  } else {
    ended_fds_.insert(value);
    count_refusal();
  }
}

bool ZmqLink::receive_some() {
  for (int count = 0; count < kNumMessagesPerRound; ++count) {
    if (socket_ == nullptr) return false;
    ZmqReceived header(zmq_);
    if (header.receive(socket_)) {
      receive_one(header);
      continue;
    }
    // Delivers the last frames, which the peer put into the ring before the connection ended.
    drain_rings();
    if (peer_fd_ != kAnyFd && ended_fds_.contains(peer_fd_)) connection_ended_ = true;
    if (connection_ended_) lost(how_it_ended_);
    return false;
  }
  return true;
}

bool ZmqLink::deliver_rings() {
  for (int count = 0; count < kNumMessagesPerRound; ++count) {
    if (!receive_from_rings()) return false;
  }
  return uses_rings_ && rings_->has_frames();
}

bool ZmqLink::receive_from_rings() {
  FrameHeaderBytes header;
  if (!uses_rings_ || !rings_->take(header)) return false;
  receive(header, {});
  return true;
}

// Delivers the frames that are in the ring now, at most one per cell. Called when the connection has brought
// a message or has ended.
void ZmqLink::drain_rings() {
  for (std::size_t count = 0; count < FrameRings::kNumCells && receive_from_rings(); ++count) {
  }
}

// Delivers the ring's frames first: the sender put them there before it used the connection.
void ZmqLink::receive_one(ZmqReceived& header) {
  drain_rings();
  if (socket_ == nullptr) return;  // a frame of the ring has ended the link
  if (uses_rings_) rings_->note_brought();
  if (connecting()) peer_fd_ = header.connection_fd();
  if (!header.more()) {
    receive(header.bytes(), {});
    return;
  }
  ZmqReceived payload(zmq_);
  PD_CHECK(payload.receive(socket_), "parts of a message arrive together");
  if (!payload.more()) {
    receive(header.bytes(), payload.bytes());
    return;
  }
  receive_malformed("sent a message of more than two parts");
}

}  // namespace pipedream
