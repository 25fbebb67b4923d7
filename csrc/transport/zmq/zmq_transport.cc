// Links over ZeroMQ and TCP. One context with one I/O thread per transport; per link a PAIR socket and its
// monitor. All sockets belong to who drives once their link is added: libzmq wants a fence between two
// threads that use a socket, and the mutex under which they take turns is one.
//
//   send      caller -> task queue -> who drives: header and payload, two parts -> I/O thread -> TCP
//             the payload is the caller's memory; libzmq's free callback is on_sent
//   receive   TCP -> I/O thread -> message (libzmq's memory) -> who drives -> handler, no copy
//   loss      the monitor tells at once that a connection ended; heartbeats and TCP's user timeout end it
//             when the peer is silent
//
// A socket's descriptor (ZMQ_FD) tells once that something happened, and whatever is done with the socket, a
// send as well, may use that up. So a link that was touched is marked until it was found empty: by reading it
// until libzmq says EAGAIN, or by asking for ZMQ_EVENTS.
//
// What bounds the queues: the credits of the channels above. The high-water marks are off, because they
// count messages and a full socket would block who drives.
#include <algorithm>
#include <atomic>
#include <cerrno>
#include <charconv>
#include <cstring>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "base/check.h"
#include "base/handed_over.h"
#include "transport/endpoint.h"
#include "transport/link_core.h"
#include "transport/transport_core.h"
#include "transport/zmq/bind_address.h"
#include "transport/zmq/curve.h"
#include "transport/zmq/libzmq.h"
#include "transport/zmq/token.h"
#include "transport/zmq/zmq_gate.h"

namespace pipedream {
namespace {

constexpr std::string_view kScheme = "tcp://";
constexpr const char* kEndpointLooks = "an endpoint looks like tcp://127.0.0.1:40001";
constexpr int kNumSocketsMax = 16384;
constexpr int kNumMessagesPerRound = 16;  // of one link, before the others have their turn

bool is_ipv6(const std::string& address) { return address.find('[') != std::string::npos; }

int milliseconds(double seconds) { return static_cast<int>(std::clamp(seconds * 1e3, 1.0, 6'553'500.0)); }

// A message that closes itself.
class Message {
 public:
  explicit Message(const LibZmq& zmq) : zmq_(zmq) {
    PD_CHECK(zmq_.msg_init(&message_) == 0, zmq_.last_error());
  }
  ~Message() { PD_CHECK(zmq_.msg_close(&message_) == 0, zmq_.last_error()); }
  Message(const Message&) = delete;
  Message& operator=(const Message&) = delete;

  // False when nothing has arrived.
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
  // The file descriptor of the connection that it came over; -1 when unknown.
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

// What becomes readable when something happens to the socket; see the top.
int descriptor_of(const LibZmq& zmq, void* socket) {
  int fd = -1;
  std::size_t num_bytes = sizeof(fd);
  PD_CHECK(zmq.getsockopt(socket, zmq::kFd, &fd, &num_bytes) == 0, zmq.last_error());
  return fd;
}

// Payloads that libzmq still reads. Their places are used again, so only a new peak allocates. Any thread.
class Loans {
 public:
  struct Loan {
    Loans* owner;
    std::optional<HeldFrame> frame;
  };

  [[nodiscard]] Loan* lend(HeldFrame frame) {
    const std::lock_guard lock(mutex_);
    if (free_.empty()) {
      free_.push_back(loans_.emplace_back(std::make_unique<Loan>(Loan{this, std::nullopt})).get());
      free_.reserve(loans_.size());  // to give back allocates nothing
    }
    Loan* const loan = free_.back();
    free_.pop_back();
    loan->frame.emplace(std::move(frame));
    return loan;
  }
  void give_back(Loan& loan) {
    loan.frame.reset();  // on_sent, outside the lock
    const std::lock_guard lock(mutex_);
    free_.push_back(&loan);
  }
  [[nodiscard]] std::size_t num_out() const {
    const std::lock_guard lock(mutex_);
    return loans_.size() - free_.size();
  }

 private:
  mutable std::mutex mutex_;  // guards the members below
  std::vector<std::unique_ptr<Loan>> loans_;
  std::vector<Loan*> free_;
};

// libzmq's I/O thread, or who drives when the message never left it.
void give_back(void* /*data*/, void* hint) {
  const PassiveScope on_a_thread_of_libzmq;
  auto* const loan = static_cast<Loans::Loan*>(hint);
  note_taken_over(loan);
  loan->owner->give_back(*loan);
}

class ZmqLink;

// What links need of their transport.
struct ZmqShared {
  const LibZmq& zmq;
  void* context;
  TransportOptions options;
  ZmqDoors doors{};
  Loans loans{};
  std::atomic<std::uint64_t> next_link_number{0};
  std::vector<ZmqLink*> marked_links{};  // who drives
};

class ZmqLink final : public LinkCore {
 public:
  ZmqLink(TransportCore& transport, LinkOptions options, LinkHandler& handler, Role role, ZmqShared& shared);
  ~ZmqLink() override { disconnect(); }

  void bind();                                // throws UserError
  void connect(const std::string& endpoint);  // throws UserError

  [[nodiscard]] std::string endpoint() const override {
    return to_string(Endpoint{.address = address_, .server_key = server_key_, .token = token_});
  }

  // Who drives. A link's names (watch.h) are its address, even, and the next number for its monitor.
  static void note_ready(std::uint64_t name);
  // Unmarks the link and returns false once there is nothing more to read.
  [[nodiscard]] bool deliver(Driver driver);

 private:
  // Connections of this link's socket, by file descriptor. A listener may see strangers' connections end.
  static constexpr int kAnyFd = -1;

  void watch_traffic() override;
  void look_for_traffic() override;
  void carry(const FrameHeaderBytes& header, HeldFrame frame) override;
  void disconnect() override;
  [[nodiscard]] const std::string& address() const override { return address_; }
  void open_monitor();
  [[nodiscard]] std::uint64_t name() const { return reinterpret_cast<std::uintptr_t>(this); }
  void mark();
  [[nodiscard]] bool has_traffic();
  void read_events();
  // True when it stopped before the socket was empty.
  [[nodiscard]] bool receive_some();
  void set_option(int option, int value);
  void set_part_bytes_max();
  void handle_connector_event(int event, int value);
  void handle_listener_event(int event, int value);
  [[nodiscard]] std::string how_handshake_failed(int event, int value) const;
  void receive_one(Message& header);
  void carry_payload(HeldFrame frame);
  // True when it was handed over; false when the connection has ended.
  [[nodiscard]] bool handed_over(int send_result);

  ZmqShared& shared_;
  const LibZmq& zmq_;
  const Role role_;
  const std::string domain_;  // of the gate; unique in the transport
  void* socket_ = nullptr;
  void* monitor_ = nullptr;
  std::string address_;
  std::string server_key_;  // of the listener; empty without keys
  std::string token_;       // of the listener; empty with keys

  // Who drives.
  int socket_fd_ = -1;  // what is watched; -1: nothing
  int monitor_fd_ = -1;
  bool is_marked_ = false;   // it is in marked_links: there may be traffic
  bool has_events_ = false;  // the monitor may have
  int peer_fd_ = kAnyFd;     // a listener's connection that said HELLO
  std::set<int> ended_fds_;  // a listener's connections that ended before that and were not opened anew
  bool connection_ended_ = false;
  std::string how_it_ended_ = "the connection ended without a farewell";
};

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
  // A silent peer is lost after at most an eighth and a half of the timeout. TCP's user timeout stands in
  // where a full send buffer holds the heartbeat itself back.
  set_option(zmq::kHeartbeatIvl, milliseconds(peer_timeout_s / 8));
  set_option(zmq::kHeartbeatTimeout, milliseconds(peer_timeout_s / 2));
  set_option(zmq::kHeartbeatTtl, std::max(100, milliseconds(peer_timeout_s / 2)));
  set_option(zmq::kTcpMaxRt, milliseconds(peer_timeout_s / 2));
  set_option(zmq::kConnectTimeout, milliseconds(peer_timeout_s));
  // A connector's own deadline for HELLO comes first: it says what happened.
  set_option(zmq::kHandshakeIvl,
             milliseconds(role == Role::kConnector ? 2 * peer_timeout_s : peer_timeout_s));
  set_part_bytes_max();
  open_monitor();
}

// A longer part ends the connection before memory is allocated for it.
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
  if (monitor_ == nullptr || zmq_.socket_monitor(socket_, address.c_str(), events) != 0 ||
      zmq_.setsockopt(monitor_, zmq::kLinger, &linger, sizeof(linger)) != 0 ||
      zmq_.connect(monitor_, address.c_str()) != 0) {
    const std::string reason = zmq_.last_error();
    disconnect();
    throw UserError("cannot make a ZeroMQ socket: " + reason);
  }
}

void ZmqLink::bind() {
  const std::string wanted = bind_address(shared_.options);
  if (is_ipv6(wanted)) set_option(zmq::kIpv6, 1);
  if (const std::optional<CurveKeys>& keys = shared_.options.keys) {
    set_curve_server(zmq_, socket_, *keys);
    server_key_ = keys->public_key;
  } else {
    set_token_server(zmq_, socket_);
    token_ = make_token();
  }
  PD_CHECK(zmq_.setsockopt(socket_, zmq::kZapDomain, domain_.data(), domain_.size()) == 0, zmq_.last_error());
  if (zmq_.bind(socket_, wanted.c_str()) != 0) {
    throw UserError("cannot listen at '" + wanted + "': " + zmq_.last_error() +
                    "; bind_host must be an address or interface of this machine");
  }
  char bound[256] = {};
  std::size_t num_bytes = sizeof(bound);
  PD_CHECK(zmq_.getsockopt(socket_, zmq::kLastEndpoint, bound, &num_bytes) == 0, zmq_.last_error());
  address_ = bound;
  // Not before: nobody else knows the endpoint yet.
  shared_.doors.open(domain_, token_, [this] { await_hello(); });
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
  if (is_ipv6(address_)) set_option(zmq::kIpv6, 1);
  if (zmq_.connect(socket_, address_.c_str()) != 0) {
    throw UserError(refusal + zmq_.last_error() + "; " + kEndpointLooks);
  }
}

// Before libzmq closes the descriptors.
void ZmqLink::disconnect() {
  if (socket_ == nullptr) return;  // a second time: the transport may be half gone
  shared_.doors.shut(domain_);
  for (int* fd : {&socket_fd_, &monitor_fd_}) {
    if (*fd >= 0) transport().unwatch(std::exchange(*fd, -1));
  }
  if (monitor_ != nullptr) {
    // Fails only when there is no monitor, as half way through the constructor.
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
  look_for_traffic();  // what came before may have been told already
}

void ZmqLink::look_for_traffic() {
  has_events_ = true;
  mark();
}

void ZmqLink::mark() {
  if (!std::exchange(is_marked_, true)) shared_.marked_links.push_back(this);
}

void ZmqLink::note_ready(std::uint64_t name) {
  const bool is_monitor = name % 2 != 0;
  auto* const link = reinterpret_cast<ZmqLink*>(static_cast<std::uintptr_t>(name - (is_monitor ? 1 : 0)));
  link->has_events_ |= is_monitor;
  link->mark();
}

// Events first: what was received before a connection ended is then in the socket.
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

void ZmqLink::carry(const FrameHeaderBytes& header, HeldFrame frame) {
  mark();
  const bool has_payload = !frame.payload().empty();
  const int flags = zmq::kDontWait | (has_payload ? zmq::kSndMore : 0);
  const auto send = [&] { return zmq_.send(socket_, header.data(), header.size(), flags); };
  if (!handed_over(zmq_.uninterrupted(send))) return;
  if (has_payload) carry_payload(std::move(frame));
}

void ZmqLink::carry_payload(HeldFrame frame) {
  const std::span<const std::byte> payload = frame.payload();
  Loans::Loan* const loan = shared_.loans.lend(std::move(frame));
  note_given_away(loan);
  ZmqMessage message;
  // libzmq does not write through the pointer.
  const int made =
      zmq_.msg_init_data(&message, const_cast<std::byte*>(payload.data()), payload.size(), give_back, loan);
  PD_CHECK(made == 0, zmq_.last_error());
  const auto send = [&] { return zmq_.msg_send(&message, socket_, zmq::kDontWait); };
  if (!handed_over(zmq_.uninterrupted(send))) {
    PD_CHECK(zmq_.msg_close(&message) == 0, zmq_.last_error());  // gives the loan back
  }
}

bool ZmqLink::handed_over(int send_result) {
  if (send_result >= 0) return true;
  // Without a high-water mark a socket refuses only when it has no connection.
  PD_CHECK(zmq_.errno_of_thread() == EAGAIN, zmq_.last_error());
  connection_ended_ = true;
  return false;
}

// ---- Receiving ----

void ZmqLink::read_events() {
  while (monitor_ != nullptr) {
    Message event(zmq_);
    if (!event.receive(monitor_)) return;
    Message address(zmq_);
    PD_CHECK(event.more() && address.receive(monitor_), "monitor event without an address");
    // 16 bits of event, 32 bits of value.
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

// As far as this side can know: a listener whose key is another one just ends the connection.
std::string ZmqLink::how_handshake_failed(int event, int value) const {
  if (event == zmq::kEventHandshakeFailedAuth) {
    const std::string refused = "it refused the connection to " + address_ + ": ";
    if (value == ZmqGate::kHasItsPeer) return refused + "it has its peer already";
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
    connection_ended_ = true;  // now: a stranger's connection may have the same descriptor next
  } else {
    ended_fds_.insert(value);
    count_refusal();
  }
}

bool ZmqLink::receive_some() {
  for (int count = 0; count < kNumMessagesPerRound; ++count) {
    if (socket_ == nullptr) return false;
    Message header(zmq_);
    if (header.receive(socket_)) {
      receive_one(header);
      continue;
    }
    // Only now is everything delivered that came before the end.
    if (peer_fd_ != kAnyFd && ended_fds_.contains(peer_fd_)) connection_ended_ = true;
    if (connection_ended_) lost(how_it_ended_);
    return false;
  }
  return true;
}

void ZmqLink::receive_one(Message& header) {
  if (connecting() && role_ == Role::kListener) peer_fd_ = header.connection_fd();
  if (!header.more()) {
    receive(header.bytes(), {});
    return;
  }
  Message payload(zmq_);
  PD_CHECK(payload.receive(socket_), "parts of a message arrive together");
  if (!payload.more()) {
    receive(header.bytes(), payload.bytes());
    return;
  }
  receive_malformed("sent a message of more than two parts");
}

class ZmqTransport final : public TransportCore {
 public:
  ZmqTransport(const TransportOptions& options, const LibZmq& zmq)
      : TransportCore(options),
        context_(make_context(zmq)),
        shared_{zmq, context_, options},
        gate_(std::make_unique<ZmqGate>(zmq, context_, allowed_keys(options), shared_.doors)),
        gate_fd_(descriptor_of(zmq, gate_->socket())) {
    watch(gate_fd_, kGateName);
    start();
  }
  ~ZmqTransport() override { shutdown(0); }

  [[nodiscard]] std::string_view name() const override { return "zmq/tcp"; }

  Link& listen(LinkOptions options, LinkHandler& handler) override {
    auto link =
        std::make_unique<ZmqLink>(*this, std::move(options), handler, LinkCore::Role::kListener, shared_);
    link->bind();
    return add(std::move(link));
  }
  Link& connect(LinkOptions options, const std::string& endpoint, LinkHandler& handler) override {
    auto link =
        std::make_unique<ZmqLink>(*this, std::move(options), handler, LinkCore::Role::kConnector, shared_);
    link->connect(endpoint);
    return add(std::move(link));
  }

 private:
  static constexpr std::uint64_t kGateName = 1;  // no link's

  static std::optional<std::vector<CurveKey>> allowed_keys(const TransportOptions& options) {
    if (!options.keys) return std::nullopt;
    return allowed_curve_keys(*options.keys);
  }
  static void* make_context(const LibZmq& zmq) {
    void* const context = zmq.ctx_new();
    if (context == nullptr) throw UserError("cannot make a ZeroMQ context: " + zmq.last_error());
    PD_CHECK(zmq.ctx_set(context, zmq::kIoThreads, 1) == 0, zmq.last_error());
    PD_CHECK(zmq.ctx_set(context, zmq::kMaxSockets, kNumSocketsMax) == 0, zmq.last_error());
    return context;
  }

  void note_ready(std::uint64_t name) override {
    if (name != kGateName) return ZmqLink::note_ready(name);
    gate_is_ready_ = true;
  }

  void deliver(Driver driver) override {
    if (driver != Driver::kPoster && std::exchange(gate_is_ready_, false)) gate_->answer();
    delivering_.swap(shared_.marked_links);
    for (ZmqLink* link : delivering_) {
      if (link->deliver(driver)) shared_.marked_links.push_back(link);
    }
    delivering_.clear();
  }

  [[nodiscard]] bool has_traffic() const override { return gate_is_ready_ || !shared_.marked_links.empty(); }

  void teardown() override {
    unwatch(gate_fd_);
    gate_.reset();
    while (shared_.zmq.ctx_term(context_) != 0) {
      PD_CHECK(shared_.zmq.errno_of_thread() == EINTR, shared_.zmq.last_error());
    }
    PD_CHECK(shared_.loans.num_out() == 0, shared_.loans.num_out() << " payloads were not given back");
  }

  void* const context_;
  ZmqShared shared_;
  std::unique_ptr<ZmqGate> gate_;
  const int gate_fd_;

  // Who drives.
  bool gate_is_ready_ = true;  // what came before it was watched may have been told already
  std::vector<ZmqLink*> delivering_;
};

}  // namespace

std::unique_ptr<Transport> make_zmq_transport(const TransportOptions& options,
                                              const std::string& libzmq_path) {
  const LibZmq& zmq = load_libzmq(libzmq_path);
  if (options.keys) check_curve_keys(*options.keys, zmq);
  return std::make_unique<ZmqTransport>(options, zmq);
}

}  // namespace pipedream
