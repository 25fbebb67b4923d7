// One link's protocol, the same for every transport: sequence numbers, identity, who may say what when.
// Subclasses carry bytes and report what arrived or that the peer is gone.
//
//              HELLO heard            close(): BYE said             BYE heard, or the peer is gone
//   connecting ------------> open ----------------------> farewell ------------------------------> ended
//       |                    |  | BYE heard: on_closed, BYE said               the peer is gone     ^ ^
//       |                    |  +----------------------------------> lingering ---------------------+ |
//       |                    | frame refused, peer gone: on_failed                                    |
//       +--------------------+------------------------------------------------------------------------+
//
// A connector says HELLO first; a listener answers it, so it never speaks to a silent stranger. After BYE
// the connection is kept until the other side has answered: closing a TCP socket while the peer still
// sends would reset it and destroy what is on the way. A listener that refuses a HELLO lingers too, so
// that its own HELLO arrives and the other side names the same mismatch. Handlers see neither HELLO nor BYE
// nor BEAT.
//
// Threads: send(), close(), counters() and options() on any; the rest on the thread that drives.
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

// A frame on its way. on_sent runs when it dies, wherever that is: so it runs exactly once in every outcome.
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
  void end();  // without a farewell; idempotent
  // Ends the link as end() does, and tells the handler.
  void fail(const Failure& failure);
  [[nodiscard]] bool ended() const { return state_ == State::kEnded; }
  // When the peer's HELLO is due at the latest; empty when it is not awaited.
  [[nodiscard]] std::optional<Deadline> hello_deadline() const;
  void check_hello(Deadline now);
  // The process at the other end, which other links may share.
  [[nodiscard]] PeerLife& peer_life() const { return peer_life_; }
  // A peer that lives says something before long.
  [[nodiscard]] bool awaits_frames() const { return state_ == State::kOpen || state_ == State::kFarewell; }
  // When bytes last came from the peer, be they of a frame that has not come whole; empty when unknown.
  [[nodiscard]] virtual std::optional<Deadline> last_arrival() const { return std::nullopt; }
  // There may be traffic of which nobody was told.
  virtual void look_for_traffic() {}
  void peer_is_silent();
  void say_beat(std::uint64_t num_work_items, bool has_pulse);  // if the link is open

  // Carries bytes as they are, past every rule. For tests.
  void inject(const FrameHeaderBytes& header, std::vector<std::byte> payload);

 protected:
  // First of all: from now on traffic is to be noticed.
  virtual void watch_traffic() {}
  // HELLOs were exchanged and accepted.
  virtual void opened() {}
  // Connectors, before HELLO. A failure ends the link.
  [[nodiscard]] virtual std::optional<std::string> open_connection() { return std::nullopt; }
  // Takes the frame: it dies when its payload is no longer read.
  virtual void carry(const FrameHeaderBytes& header, HeldFrame frame) = 0;
  // No more bytes either way. Idempotent. What is still on its way may be dropped.
  virtual void disconnect() = 0;

  // Reports of the subclass. receive() may end the link.
  void receive(std::span<const std::byte> header_bytes, std::span<const std::byte> payload);
  void await_hello();                 // a listener's peer is there: its HELLO is due within peer_timeout
  void lost(const std::string& how);  // after everything that had arrived was given to receive()
  // Bytes that are not even a header and a payload.
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
  [[nodiscard]] Clock::duration peer_timeout() const;
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
  const bool is_quick_;  // as the handler said: after close() it may be gone
  const Role role_;

  std::mutex handler_mutex_;               // held in every call of the handler, for close()
  std::atomic<bool> close_called_{false};  // the handler hears nothing more
  std::atomic<std::uint64_t> bytes_sent_{0};
  std::atomic<std::uint64_t> bytes_received_{0};
  std::atomic<std::uint64_t> frames_sent_{0};
  std::atomic<std::uint64_t> frames_received_{0};
  std::atomic<std::uint64_t> num_refused_{0};

  // Who drives.
  State state_ = State::kConnecting;
  bool closing_ = false;  // BYE as soon as the link is open
  bool said_hello_ = false;
  std::deque<HeldFrame> waiting_;  // sent before the link was open
  std::uint64_t next_sent_ = 0;    // sequence numbers
  std::uint64_t next_received_ = 0;
  std::optional<Deadline> hello_deadline_;    // from when the peer is known to be there
  int num_beats_without_pulse_ = 0;           // in a row, up to the last
  std::uint64_t num_work_items_of_peer_ = 0;  // as its last BEAT said
  bool looked_for_hello_ = false;             // what may have come was read at the deadline
};

}  // namespace pipedream
