// Implements a transport whose links use ZeroMQ (zmq_link.h). Each transport has one context with one I/O
// thread, and one board for the rings of all its links.
#include <cerrno>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/check.h"
#include "transport/transport_core.h"
#include "transport/zmq/curve.h"
#include "transport/zmq/libzmq.h"
#include "transport/zmq/zap_handler.h"
#include "transport/zmq/zmq_link.h"

namespace pipedream {
namespace {

constexpr int kNumSocketsMax = 16384;

class ZmqTransport final : public TransportCore {
 public:
  ZmqTransport(const TransportOptions& options, const LibZmq& zmq)
      : TransportCore(options),
        context_(make_context(zmq)),
        shared_{zmq, context_, options},
        zap_handler_(std::make_unique<ZapHandler>(zmq, context_, allowed_keys(options), shared_.zap_domains)),
        zap_fd_(descriptor_of(zmq, zap_handler_->socket())) {
    watch(zap_fd_, kZapName);
    if (options.shares_memory) {
      shared_.board = std::make_unique<RingBoard>();
      watch(shared_.board->bell().fd(), kBellName);
      listen_to(*shared_.board);
    }
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
  static constexpr std::uint64_t kZapName = 1;   // no link has this name: see ZmqLink::note_ready
  static constexpr std::uint64_t kBellName = 3;  // no link has this name

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
    if (name == kBellName) return shared_.board->bell().clear();  // deliver_rings() looks at all marks
    if (name != kZapName) return ZmqLink::note_ready(name);
    zap_is_ready_ = true;
  }

  void deliver(Driver driver) override {
    if (driver != Driver::kPoster && std::exchange(zap_is_ready_, false)) zap_handler_->answer();
    delivering_.swap(shared_.marked_links);
    for (ZmqLink* link : delivering_) {
      if (link->deliver(driver)) shared_.marked_links.push_back(link);
    }
    delivering_.clear();
    deliver_rings(driver);
  }

  // Delivers frames from the rings. ring_links is read anew for each mark, because a handler may end or open
  // a link.
  void deliver_rings(Driver driver) {
    rings_have_more_ = false;
    if (!shared_.board) return;
    shared_.board->take_marks(/*only_quick=*/driver == Driver::kPoster, [&](std::uint32_t number) {
      ZmqLink* const link = number < shared_.ring_links.size() ? shared_.ring_links[number] : nullptr;
      if (link == nullptr || !link->deliver_rings()) return;
      shared_.board->mark(number);
      rings_have_more_ = true;
    });
  }

  [[nodiscard]] bool has_traffic() const override {
    return zap_is_ready_ || rings_have_more_ || !shared_.marked_links.empty();
  }

  void teardown() override {
    unwatch(zap_fd_);
    if (shared_.board) unwatch(shared_.board->bell().fd());
    zap_handler_.reset();
    while (shared_.zmq.ctx_term(context_) != 0) {
      PD_CHECK(shared_.zmq.errno_of_thread() == EINTR, shared_.zmq.last_error());
    }
    PD_CHECK(shared_.sent_payloads.num_held() == 0, shared_.sent_payloads.num_held()
                                                        << " payloads were not released");
  }

  void* const context_;
  ZmqShared shared_;
  std::unique_ptr<ZapHandler> zap_handler_;
  const int zap_fd_;

  // Used by the thread that drives the transport.
  bool zap_is_ready_ = true;  // true, because requests before the first turn may have been reported already
  bool rings_have_more_ = false;
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
