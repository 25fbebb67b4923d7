// Connects transports of one process. A frame itself is moved to the receiver's task queue, without a copy or
// an allocation. Endpoints are numbers in a registry of the process.
//
// The receiver reads the sender's memory, and on_sent runs on the thread that drives the receiver. So a
// transport that ends waits until the other transports have released its payloads. Before it waits, it
// releases the payloads of other transports, so that two transports that end at once do not wait for each
// other.
//
// Keys are ignored, because a process need not hide from itself. Beats work as in every transport.
//
// The registry's mutex guards the set of listening links and the pairing of all inproc links. A link's peer
// is always alive, because a link leaves under that mutex before it is destroyed.
#include <charconv>
#include <condition_variable>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>

#include "base/check.h"
#include "transport/endpoint.h"
#include "transport/link_core.h"
#include "transport/transport_core.h"

namespace pipedream {
namespace {

constexpr std::string_view kScheme = "inproc://";

class InprocLink;

// The number of a transport's payloads that its peers still read. Any thread.
class DeliveryCount {
 public:
  void begin() {
    const std::lock_guard lock(mutex_);
    ++num_under_way_;
  }
  void end() {
    const std::lock_guard lock(mutex_);
    // Notifies under the lock, because the waiter may destroy this object.
    if (--num_under_way_ == 0) none_left_.notify_all();
  }
  void wait_until_none() {
    std::unique_lock lock(mutex_);
    none_left_.wait(lock, [&] { return num_under_way_ == 0; });
  }

 private:
  std::mutex mutex_;  // guards num_under_way_
  std::condition_variable none_left_;
  std::int64_t num_under_way_ = 0;
};

struct EndDelivery {
  void operator()(DeliveryCount* count) const { count->end(); }
};
using CountedDelivery = std::unique_ptr<DeliveryCount, EndDelivery>;

// A frame in the receiver's task queue. `frame` is the last member, so it is destroyed before `counted`
// counts the delivery as over.
struct Delivery {
  void operator()();

  InprocLink* to;
  FrameHeaderBytes header;
  CountedDelivery counted;
  HeldFrame frame;
};

class InprocRegistry {
 public:
  static InprocRegistry& instance();

  std::uint64_t listen(InprocLink& link);
  // False when no link listens under this number, or when it has stopped listening.
  [[nodiscard]] bool connect(InprocLink& link, std::uint64_t number);
  // Drops the frame when `from` has no peer or has lost it.
  void deliver(const InprocLink& from, const FrameHeaderBytes& header, HeldFrame frame);
  void leave(InprocLink& link);

 private:
  std::mutex mutex_;  // guards the members and every link's peer_
  std::uint64_t next_number_ = 1;
  std::map<std::uint64_t, InprocLink*> listeners_;
};

class InprocLink final : public LinkCore {
 public:
  InprocLink(TransportCore& transport, LinkOptions options, LinkHandler& handler, DeliveryCount& deliveries)
      : LinkCore(transport, std::move(options), handler, Role::kListener),
        deliveries_(deliveries),
        number_(InprocRegistry::instance().listen(*this)) {}
  InprocLink(TransportCore& transport, LinkOptions options, LinkHandler& handler, DeliveryCount& deliveries,
             std::uint64_t number)
      : LinkCore(transport, std::move(options), handler, Role::kConnector),
        deliveries_(deliveries),
        number_(number) {}
  ~InprocLink() override { InprocRegistry::instance().leave(*this); }

  [[nodiscard]] std::string endpoint() const override { return to_string(Endpoint{.address = address_}); }

 private:
  friend class InprocRegistry;
  friend struct Delivery;

  std::optional<std::string> open_connection() override {
    if (InprocRegistry::instance().connect(*this, number_)) return std::nullopt;
    return "nothing listens at " + address_ + ", or it has its peer";
  }
  void carry(const FrameHeaderBytes& header, HeldFrame frame) override {
    InprocRegistry::instance().deliver(*this, header, std::move(frame));
  }
  void disconnect() override { InprocRegistry::instance().leave(*this); }
  [[nodiscard]] const std::string& address() const override { return address_; }

  InprocLink* peer_ = nullptr;  // guarded by the registry's mutex
  DeliveryCount& deliveries_;   // counts the deliveries of this link's transport
  const std::uint64_t number_;
  const std::string address_ = std::string(kScheme) + std::to_string(number_);
};

void Delivery::operator()() { to->receive(header, frame.payload()); }

InprocRegistry& InprocRegistry::instance() {
  static InprocRegistry registry;
  return registry;
}

std::uint64_t InprocRegistry::listen(InprocLink& link) {
  const std::lock_guard lock(mutex_);
  listeners_.emplace(next_number_, &link);
  return next_number_++;
}

bool InprocRegistry::connect(InprocLink& link, std::uint64_t number) {
  const std::lock_guard lock(mutex_);
  const auto listener = listeners_.find(number);
  if (listener == listeners_.end()) return false;
  link.peer_ = listener->second;
  listener->second->peer_ = &link;
  listeners_.erase(listener);
  return true;
}

void InprocRegistry::deliver(const InprocLink& from, const FrameHeaderBytes& header, HeldFrame frame) {
  Task refused;  // destroyed after the lock is released, because it runs the user's on_sent
  const std::lock_guard lock(mutex_);
  InprocLink* const to = from.peer_;
  if (to == nullptr) return;
  from.deliveries_.begin();
  Task task(Delivery{to, header, CountedDelivery(&from.deliveries_), std::move(frame)});
  if (!to->transport().try_enqueue(task)) refused = std::move(task);
}

void InprocRegistry::leave(InprocLink& link) {
  const std::lock_guard lock(mutex_);
  if (const auto listener = listeners_.find(link.number_);
      listener != listeners_.end() && listener->second == &link) {
    listeners_.erase(listener);
  }
  InprocLink* const peer = std::exchange(link.peer_, nullptr);
  if (peer == nullptr) return;
  peer->peer_ = nullptr;
  peer->transport().enqueue([peer] { peer->lost("it ended without a farewell"); });
}

std::uint64_t parse_number(const std::string& address) {
  std::uint64_t number = 0;
  if (address.starts_with(kScheme)) {
    const char* const first = address.data() + kScheme.size();
    const char* const last = address.data() + address.size();
    const auto [end, error] = std::from_chars(first, last, number);
    if (error == std::errc() && end == last) return number;
  }
  throw UserError("cannot connect to '" + address + "': an inproc endpoint looks like inproc://7");
}

class InprocTransport final : public TransportCore {
 public:
  explicit InprocTransport(const TransportOptions& options) : TransportCore(options) { start(); }
  ~InprocTransport() override { shutdown(0); }

  [[nodiscard]] std::string_view name() const override { return "inproc"; }

  Link& listen(LinkOptions options, LinkHandler& handler) override {
    return add(std::make_unique<InprocLink>(*this, std::move(options), handler, deliveries_));
  }
  Link& connect(LinkOptions options, const std::string& endpoint, LinkHandler& handler) override {
    return add(std::make_unique<InprocLink>(*this, std::move(options), handler, deliveries_,
                                            parse_number(parse_endpoint(endpoint).address)));
  }

 private:
  // No descriptor is watched, because frames arrive as tasks.
  void note_ready(std::uint64_t name) override { PD_CHECK(false, "nothing is watched, but " << name); }
  void deliver(Driver /*driver*/) override {}
  [[nodiscard]] bool has_traffic() const override { return false; }
  void teardown() override { deliveries_.wait_until_none(); }

  DeliveryCount deliveries_;
};

}  // namespace

std::unique_ptr<Transport> make_inproc_transport(const TransportOptions& options) {
  return std::make_unique<InprocTransport>(options);
}

}  // namespace pipedream
