// One link over ZeroMQ and TCP: a PAIR socket and its monitor. All sockets belong to who drives once the link
// is added: libzmq wants a fence between two threads that use a socket, and the mutex under which they take
// turns is one.
//
//   send      caller -> task queue -> who drives: header and payload, two parts -> I/O thread -> TCP
//             the payload is the caller's memory; libzmq's free callback is on_sent
//   receive   TCP -> I/O thread -> message (libzmq's memory) -> who drives -> handler, no copy
//   loss      the monitor tells at once that a connection ended; that a peer is silent, LinkCore finds
//
// Where both ends are on one host and share memory, frames without a payload take rings in it instead
// (frame_rings.h), and the connection is there to find each other, for the rest, and to tell of a loss.
//
// A socket's descriptor (ZMQ_FD) tells once that something happened, and whatever is done with the socket, a
// send as well, may use that up. So a link that was touched is marked until it was found empty: by reading it
// until libzmq says EAGAIN, or by asking for ZMQ_EVENTS.
//
// What bounds the queues: the credits of the channels above. The high-water marks are off, because they
// count messages and a full socket would block who drives.
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

// The descriptor that becomes readable when something happens to the socket; see the top.
[[nodiscard]] int descriptor_of(const LibZmq& zmq, void* socket);

// Payloads that libzmq still reads. Their places are used again, so only a new peak allocates. Any thread.
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
      free_.reserve(payloads_.size());  // to release allocates nothing
    }
    Payload* const payload = free_.back();
    free_.pop_back();
    payload->frame.emplace(std::move(frame));
    return payload;
  }
  void release(Payload& payload) {
    payload.frame.reset();  // on_sent, outside the lock
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

// Things of the transport that its links need.
struct ZmqShared {
  const LibZmq& zmq;
  void* context;
  TransportOptions options;
  ZapDomains zap_domains{};
  SentPayloads sent_payloads{};
  std::atomic<std::uint64_t> next_link_number{0};
  std::unique_ptr<RingBoard> board{};    // for the rings of all links; null: no memory is shared
  std::vector<ZmqLink*> marked_links{};  // who drives
  std::vector<ZmqLink*> ring_links{};    // likewise: by number on the board; null where no rings are in use
};

class ZmqLink final : public LinkCore {
 public:
  ZmqLink(TransportCore& transport, LinkOptions options, LinkHandler& handler, Role role, ZmqShared& shared);
  ~ZmqLink() override { disconnect(); }

  // Throw UserError. Where all ports of a range are taken bind() waits until one is free.
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

  // Who drives. A link's names (watch.h) are its address, even, and the next number for its monitor.
  static void note_ready(std::uint64_t name);
  // Unmarks the link and returns false once there is nothing more to read.
  [[nodiscard]] bool deliver(Driver driver);
  // Delivers frames that have come by the rings. True if some of them are left.
  [[nodiscard]] bool deliver_rings();

 private:
  // Connections of this link's socket, by file descriptor. A listener may see strangers' connections end.
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
  // True when it was handed over; false when the connection has ended.
  [[nodiscard]] bool handed_over(int send_result);

  ZmqShared& shared_;
  const LibZmq& zmq_;
  const Role role_;
  const std::string domain_;  // of the ZAP handler; unique in the transport
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
  int peer_fd_ = kAnyFd;     // the connection that HELLO came by
  std::set<int> ended_fds_;  // a listener's connections that ended before that and were not opened anew
  bool connection_ended_ = false;
  std::unique_ptr<FrameRings> rings_;  // null: not shared; who drives, once the link is added
  bool uses_rings_ = false;
  std::string how_it_ended_ = "the connection ended without a farewell";
};

}  // namespace pipedream
