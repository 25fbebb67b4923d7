// Implements one link over ZeroMQ and TCP by a PAIR socket and its monitor. Once the link is added, only the
// thread that drives the transport uses the sockets. libzmq needs a fence between two threads that use a
// socket; the mutex under which threads begin and stop driving is such a fence.
//
//   send      caller -> task queue -> driving thread: header and payload, two parts -> I/O thread -> TCP
//             the payload is the caller's memory; libzmq's free callback is on_sent
//   receive   TCP -> I/O thread -> message (libzmq's memory) -> driving thread -> handler, no copy
//   loss      the monitor reports at once when a connection ends; LinkCore notices a silent peer
//
// If both ends are on one host and share memory, frames without a payload take rings in that memory instead
// (frame_rings.h). The connection then serves to find the peer, to carry the other frames, and to report a
// loss.
//
// A socket's descriptor (ZMQ_FD) reports activity once, and any use of the socket, even a send, may consume
// the report. So a link that was used stays marked until it is found empty: reading returned EAGAIN, or
// ZMQ_EVENTS showed no message.
//
// The credits of the channels bound the queues. High-water marks are off: they count messages, and a full
// socket would refuse a message as a socket without a connection does.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "transport/endpoint.h"
#include "transport/frame_rings.h"
#include "transport/link_core.h"
#include "transport/ring_board.h"
#include "transport/transport_core.h"
#include "transport/zmq/libzmq.h"
#include "transport/zmq/zap_handler.h"

namespace pipedream {

class ZmqReceived;

// The descriptor that becomes readable on activity of the socket; the head of this file says how to read it.
[[nodiscard]] int descriptor_of(const LibZmq& zmq, void* socket);

// Payloads that libzmq still reads. Payload objects are reused, so memory is allocated only when libzmq holds
// more payloads than ever before. Any thread.
class SentPayloads {
 public:
  struct Payload {
    SentPayloads* owner;
    std::optional<HeldFrame> frame;
  };

  [[nodiscard]] Payload* add(HeldFrame frame) {
    const std::lock_guard lock(mutex_);
    if (free_.empty()) {
      free_.push_back(payloads_.emplace_back(std::make_unique<Payload>(Payload{this, std::nullopt})).get());
      free_.reserve(payloads_.size());  // so that release() allocates nothing
    }
    Payload* const payload = free_.back();
    free_.pop_back();
    payload->frame.emplace(std::move(frame));
    return payload;
  }
  void release(Payload& payload) {
    payload.frame.reset();  // calls on_sent, outside the lock
    const std::lock_guard lock(mutex_);
    free_.push_back(&payload);
  }
  [[nodiscard]] std::size_t num_held() const {
    const std::lock_guard lock(mutex_);
    return payloads_.size() - free_.size();
  }

 private:
  mutable std::mutex mutex_;  // guards the members below
  std::vector<std::unique_ptr<Payload>> payloads_;
  std::vector<Payload*> free_;
};

class ZmqLink;

// The parts of the transport that its links use.
struct ZmqShared {
  const LibZmq& zmq;
  void* context;
  TransportOptions options;
  ZapDomains zap_domains{};
  SentPayloads sent_payloads{};
  std::atomic<std::uint64_t> next_link_number{0};
  std::unique_ptr<RingBoard> board{};  // serves the rings of all links; null: no memory is shared
  // Used by the thread that drives the transport. ring_links: by number on the board; null where a link has
  // no rings.
  std::vector<ZmqLink*> marked_links{};
  std::vector<ZmqLink*> ring_links{};
};

class ZmqLink final : public LinkCore {
 public:
  ZmqLink(TransportCore& transport, LinkOptions options, LinkHandler& handler, Role role, ZmqShared& shared);
  ~ZmqLink() override { disconnect(); }

  // bind() and connect() throw UserError. If all ports of a range are taken, bind() waits until one is free.
  void bind();
  void connect(const std::string& endpoint);

  [[nodiscard]] std::string endpoint() const override {
    return to_string(Endpoint{.address = address_,
                              .server_key = server_key_,
                              .token = token_,
                              .rings = role_ == Role::kListener && rings_ ? rings_->address() : ""});
  }
  void look_for_traffic() override;
  [[nodiscard]] std::optional<Deadline> last_arrival() const override;
  void let_wait(Patience patience) override {
    if (uses_rings_) shared_.board->let_wait(rings_->number(), patience);
  }

  // On the thread that drives the transport. A link has two names (watch.h): its address, which is even, and
  // the next number for its monitor.
  static void note_ready(std::uint64_t name);
  // Delivers arrived frames. Returns false and unmarks the link once there is nothing more to read.
  [[nodiscard]] bool deliver(Driver driver);
  // Delivers frames from the rings. True if some are left.
  [[nodiscard]] bool deliver_rings();

 private:
  // The value of peer_fd_ until the peer's HELLO has come. Connections are named by their file descriptors,
  // because a listener may also see strangers' connections end.
  static constexpr int kAnyFd = -1;

  void watch_traffic() override;
  void opened() override;
  void carry(const FrameHeaderBytes& header, HeldFrame frame) override;
  void disconnect() override;
  [[nodiscard]] const std::string& address() const override { return address_; }
  void open_monitor();
  void bind_to(const std::string& host);
  [[nodiscard]] bool try_bind(const std::string& address);
  [[nodiscard]] std::uint64_t name() const { return reinterpret_cast<std::uintptr_t>(this); }
  void mark();
  [[nodiscard]] bool has_traffic();
  void read_events();
  // True when it stopped before the socket was empty.
  [[nodiscard]] bool receive_some();
  [[nodiscard]] bool receive_from_rings();
  void drain_rings();
  void set_option(int option, int value);
  void set_part_bytes_max();
  void handle_connector_event(int event, int value);
  void handle_listener_event(int event, int value);
  [[nodiscard]] std::string how_handshake_failed(int event, int value) const;
  void receive_one(ZmqReceived& header);
  void carry_payload(HeldFrame frame);
  // True when libzmq took the message; false when the connection has ended.
  [[nodiscard]] bool handed_over(int send_result);

  ZmqShared& shared_;
  const LibZmq& zmq_;
  const Role role_;
  const std::string domain_;  // the link's ZAP domain
  void* socket_ = nullptr;
  void* monitor_ = nullptr;
  std::string address_;
  std::string server_key_;  // the listener's public key; empty without keys
  std::string token_;       // the listener's token; empty with keys

  // Used by the thread that drives the transport.
  int socket_fd_ = -1;  // the watched descriptors of socket and monitor; -1: none
  int monitor_fd_ = -1;
  bool is_marked_ = false;   // whether it is in marked_links, because there may be traffic
  bool has_events_ = false;  // the monitor may have events
  int peer_fd_ = kAnyFd;     // the connection on which HELLO came
  std::set<int> ended_fds_;  // connections of a listener that ended before HELLO
  bool connection_ended_ = false;
  // Null if no memory is shared. Used by the thread that drives the transport, once the link is added.
  std::unique_ptr<FrameRings> rings_;
  bool uses_rings_ = false;
  std::string how_it_ended_ = "the connection ended without a farewell";
};

}  // namespace pipedream
