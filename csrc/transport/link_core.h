// Implements the protocol of one link, which is the same for every transport: sequence numbers, identity, and
// which frames are allowed in which state. Subclasses carry bytes, and report arrived bytes and a lost peer.
//
//              HELLO heard            close(): BYE said             BYE heard, or the peer is gone
//   connecting ------------> open ----------------------> farewell ------------------------------> ended
//       |                    |  | BYE heard: on_closed, BYE said               the peer is gone     ^ ^
//       |                    |  +----------------------------------> lingering ---------------------+ |
//       |                    | frame refused, peer gone: on_failed                                    |
//       +--------------------+------------------------------------------------------------------------+
//
// A connector says HELLO first and a listener answers it, so a listener never speaks to a silent stranger.
// After BYE a side keeps the connection until the other has answered: closing a TCP socket while the peer
// still sends would reset it and destroy frames on the way. A listener that refuses a HELLO also lingers, so
// that its own HELLO arrives and the other side reports the same mismatch. Handlers never see HELLO, BYE or
// BEAT.
//
// Threads: send(), close(), counters() and options() run on any thread; all other functions run on the thread
// that drives the transport.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <deque>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "transport/transport.h"
#include "transport/transport_core.h"

namespace pipedream {

// A frame on its way. Its destructor runs on_sent, so on_sent runs exactly once whatever happens to the
// frame.
class HeldFrame {
 public:
  explicit HeldFrame(OutgoingFrame frame) : frame_(std::move(frame)) {}
  HeldFrame(HeldFrame&& other) noexcept : frame_(std::move(other.frame_)) { other.frame_.on_sent = nullptr; }
  HeldFrame& operator=(HeldFrame&&) = delete;
  HeldFrame(const HeldFrame&) = delete;
  HeldFrame& operator=(const HeldFrame&) = delete;
  ~HeldFrame() {
    if (frame_.on_sent) frame_.on_sent();
  }

  [[nodiscard]] FrameHeader& header() { return frame_.header; }
  [[nodiscard]] std::span<const std::byte> payload() const { return frame_.payload; }

 private:
  OutgoingFrame frame_;
};

class LinkCore : public Link {
 public:
  enum class Role { kListener, kConnector };

  LinkCore(TransportCore& transport, LinkOptions options, LinkHandler& handler, Role role);

  void send(OutgoingFrame frame) final;
  void close() final;
  [[nodiscard]] LinkCounters counters() const final;
  [[nodiscard]] const LinkOptions& options() const final { return options_; }

  // For TransportCore.
  void start();
  void begin_close();
  void end();  // ends the link without BYE; idempotent
  // Ends the link as end() does, and tells the handler.
  void fail(const Failure& failure);
  [[nodiscard]] bool ended() const { return state_ == State::kEnded; }
  // The deadline for the peer's HELLO; empty when no HELLO is awaited.
  [[nodiscard]] std::optional<Deadline> hello_deadline() const;
  void check_hello(Deadline now);
  // The PeerLife of the process at the other end. Other links may share it.
  [[nodiscard]] PeerLife& peer_life() const { return peer_life_; }
  // Whether a peer that is alive would soon send something on this link.
  [[nodiscard]] bool awaits_frames() const { return state_ == State::kOpen || state_ == State::kFarewell; }
  // When bytes last came from the peer, even bytes of an incomplete frame; empty when unknown.
  [[nodiscard]] virtual std::optional<Deadline> last_arrival() const { return std::nullopt; }
  // Marks this link, so that the next thread that drives reads it even if no traffic is reported.
  virtual void look_for_traffic() {}
  void peer_is_silent();
  void say_beat(std::uint64_t num_work_items, bool has_pulse);  // only if the link is open

  // Sends the bytes as they are, without any check. For tests.
  void inject(const FrameHeaderBytes& header, std::vector<std::byte> payload);

 protected:
  // Called before the functions below. From now on the subclass must notice traffic.
  virtual void watch_traffic() {}
  // Called after HELLOs were exchanged and accepted.
  virtual void opened() {}
  // Opens a connector's connection, before HELLO. A returned message ends the link.
  [[nodiscard]] virtual std::optional<std::string> open_connection() { return std::nullopt; }
  // Sends the header and takes the frame over. The frame is destroyed when its payload is no longer read.
  virtual void carry(const FrameHeaderBytes& header, HeldFrame frame) = 0;
  // Ends the connection. Bytes on the way may be lost. Idempotent.
  virtual void disconnect() = 0;

  // Subclasses call these functions to report what arrived. receive() may end the link.
  void receive(std::span<const std::byte> header_bytes, std::span<const std::byte> payload);
  // The peer's HELLO is due within peer_timeout_s from now. Subclasses call it when a listener's peer has
  // connected.
  void await_hello();
  void lost(const std::string& how);  // called after receive() got everything that had arrived
  // Reports that the peer sent bytes that are not a header and a payload.
  void receive_malformed(const std::string& what);
  void count_refusal() { num_refused_.fetch_add(1, std::memory_order_relaxed); }

  // The address where the link listens or connects to, for errors.
  [[nodiscard]] virtual const std::string& address() const = 0;

  [[nodiscard]] bool connecting() const { return state_ == State::kConnecting; }
  [[nodiscard]] bool is_quick() const { return is_quick_; }
  [[nodiscard]] TransportCore& transport() const { return transport_; }

 private:
  enum class State { kConnecting, kOpen, kFarewell, kLingering, kEnded };

  void submit(HeldFrame frame);
  void transmit(HeldFrame frame);
  void say(const FrameHeader& header);
  void say_hello();
  void say_farewell();

  [[nodiscard]] std::optional<Failure> refusal(const FrameHeader& header,
                                               std::span<const std::byte> payload) const;
  [[nodiscard]] std::optional<Failure> identity_refusal(const FrameHeader& header) const;
  [[nodiscard]] std::optional<Failure> kind_refusal(const FrameHeader& header) const;
  [[nodiscard]] Failure corrupt(const std::string& what) const;

  void dispatch(const FrameHeader& header, std::span<const std::byte> payload);
  void open();
  void hear_beat(const FrameHeader& header);
  void hear_farewell();
  void hello_is_late();
  void refuse(const Failure& failure);
  void end_quietly(State state);
  template <class Call>
  void tell_handler(Call call);

  const LinkOptions options_;
  TransportCore& transport_;
  PeerLife& peer_life_;
  LinkHandler& handler_;
  const bool is_quick_;  // the handler's answer, kept because after close() the handler may be gone
  const Role role_;

  std::mutex handler_mutex_;               // held during every handler call; close() waits for it
  std::atomic<bool> close_called_{false};  // the handler gets no more calls
  std::atomic<std::uint64_t> bytes_sent_{0};
  std::atomic<std::uint64_t> bytes_received_{0};
  std::atomic<std::uint64_t> frames_sent_{0};
  std::atomic<std::uint64_t> frames_received_{0};
  std::atomic<std::uint64_t> num_refused_{0};

  // Used by the thread that drives the transport.
  State state_ = State::kConnecting;
  bool closing_ = false;  // whether to say BYE as soon as the link is open
  bool said_hello_ = false;
  std::deque<HeldFrame> waiting_;             // frames that were sent before the link was open
  std::uint64_t next_sent_ = 0;               // the sequence number of the next frame that is sent
  std::uint64_t next_received_ = 0;           // the sequence number of the next frame that is due
  std::optional<Deadline> hello_deadline_;    // set by await_hello()
  int num_beats_without_pulse_ = 0;           // beats that came since the last beat with a pulse
  std::uint64_t num_work_items_of_peer_ = 0;  // as its last BEAT said
  bool looked_for_hello_ = false;             // whether arrived bytes were read once more after the deadline
};

}  // namespace pipedream
