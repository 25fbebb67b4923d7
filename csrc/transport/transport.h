// A transport moves frames between two workers, in order and exactly once, or reports that the peer is lost.
// A transport knows bytes and identities; the code in channel/ knows tensors. zmq/ and inproc/ implement this
// same interface, and the tests in tests/cpp/transport run on both.
//
// Threads: one thread at a time drives a transport. The driving thread runs posted functions, moves bytes and
// calls the handlers. When no thread drives, any thread may begin to drive. So a thread that sends or waits
// for a message needs no help from another thread:
//
//   a thread that sends    post_and_drive(): runs posted functions, and delivers frames to quick handlers
//   a thread that waits    drive_until(): sleeps until there is traffic, and delivers it
//   the transport thread   traffic and posts while other threads compute, deadlines, beats (signs of life)
//
// send() and post() may be called from any thread and never block. Handlers must not block either. Handlers
// run on any of these threads, one after the other, and each handler sees the writes of the handler before
// it. Threads of streams and of ZeroMQ never drive (PassiveScope). An exception of a handler or a posted
// function reaches the thread that drives the transport. On the transport thread no caller would catch it, so
// there it fails every link.
//
// The life of a link:
//
//   listen/connect -> HELLO both ways -> on_open -> on_frame ... -> close (BYE) | on_failed
//
// A listening link accepts one connection, from a peer that knows its endpoint, and refuses all others. An
// accepted peer must send its HELLO within peer_timeout_s. There is no reconnect: after a loss the run
// restarts from a checkpoint.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "base/failure.h"
#include "wire/frame.h"

namespace pipedream {

struct OutgoingFrame {
  FrameHeader header;  // the link fills in identity and sequence
  // The payload is sent from the caller's memory, without a copy. That memory must stay valid until on_sent.
  std::span<const std::byte> payload;
  // Called exactly once, on any thread, when the payload is no longer read: it was sent, or the link failed
  // or closed. Must be short. May be empty.
  std::function<void()> on_sent;
};

class Link;

class LinkHandler {
 public:
  LinkHandler() = default;
  LinkHandler(const LinkHandler&) = delete;
  LinkHandler& operator=(const LinkHandler&) = delete;
  virtual ~LinkHandler() = default;

  // All functions but is_quick() are called on the thread that drives the transport.
  virtual void on_open(Link& link) = 0;  // both HELLOs are exchanged and accepted
  // The payload is valid until this returns. A returned failure is fatal for the link: it is closed and
  // on_failed follows with that failure.
  [[nodiscard]] virtual std::optional<Failure> on_frame(Link& link, const FrameHeader& header,
                                                        std::span<const std::byte> payload) = 0;
  // Called at most once, and then no other function of the handler is called. If the peer said BYE, on_closed
  // is called instead.
  virtual void on_failed(Link& link, const Failure& failure) = 0;
  virtual void on_closed(Link& link) = 0;  // the peer said BYE; frames that it sent before were delivered

  // Whether all frames of this handler are small and on_frame is quick. Frames of a quick handler are
  // delivered even by a thread that drives only because it sends. Frames of other handlers wait for a thread
  // that has time. Any thread may ask, and always gets the same answer.
  [[nodiscard]] virtual bool is_quick() const { return false; }
};

struct LinkOptions {
  LinkIdentity identity;
  std::uint64_t plan_hash = 0;  // sent and expected in HELLO
  std::string name;             // for errors: "activations of stage 0 to stage 1"
  // "stage 1 (rank 1)", for errors. Links with the same peer name lead to one process: while anything arrives
  // on one of them, all count as alive.
  std::string peer;
  std::size_t payload_bytes_max = 1 << 20;  // larger frames are refused before anything is allocated
  // send() computes a CRC-32C for every payload that has none, on the caller's thread.
  bool checksums_payloads = false;
};

struct LinkCounters {
  std::uint64_t bytes_sent = 0;  // payload and headers
  std::uint64_t bytes_received = 0;
  std::uint64_t frames_sent = 0;
  std::uint64_t frames_received = 0;
  // Connections of a listener that ended before their HELLO, plus frames that broke the protocol and so
  // failed the link.
  std::uint64_t num_refused = 0;
};

// How long the tensors and credits of a link may lie unnoticed.
enum class Patience {
  kNone,
  kUntilOneWaits,   // until a thread is in drive_until() or drives for another reason
  kUntilOneDrives,  // until some thread drives, because no thread waits for them
};

class Link {
 public:
  Link() = default;
  Link(const Link&) = delete;
  Link& operator=(const Link&) = delete;
  virtual ~Link() = default;

  // Frames sent before the link is open wait for it, in order. Frames sent after close, failure or the peer's
  // BYE are dropped. on_sent may run before this call returns. It may even run on this thread, if a handler
  // or a posted function makes the call, or if the transport is shut down.
  virtual void send(OutgoingFrame frame) = 0;
  // Sends BYE after all earlier frames, then closes the link. Once close() has returned, no handler call of
  // this link begins. close() waits for a handler call on another thread, so the caller must hold no mutex
  // that the handler takes. Called inside a handler of any transport, it does not wait. Idempotent.
  virtual void close() = 0;
  [[nodiscard]] virtual LinkCounters counters() const = 0;
  [[nodiscard]] virtual const LinkOptions& options() const = 0;
  [[nodiscard]] virtual std::string endpoint() const = 0;  // the peer connects to it, see endpoint.h

  // Allows arriving frames to lie unnoticed for as long as the Patience says. Before the first call all
  // frames are noticed at once. On the thread that drives the transport.
  virtual void let_wait(Patience /*patience*/) {}
};

// A CURVE identity (CurveZMQ, RFC 26) and the peers that may talk to it. Keys are Z85 text of 40 characters.
struct CurveKeys {
  std::string public_key;
  std::string secret_key;
  std::vector<std::string> allowed;  // public keys of the peers; also the own key if all share one pair
};

// The ports of a machine that listeners may use. The range includes `first` and `last`.
struct PortRange {
  std::uint16_t first = 0;
  std::uint16_t last = 0;
};

struct TransportOptions {
  std::string bind_host = "127.0.0.1";  // address or interface on which links listen
  // Every listening link takes a free port of this range, and waits for one for at most peer_timeout_s.
  // Without a range the system chooses a port.
  std::optional<PortRange> ports;
  double peer_timeout_s = 15.0;  // bounds the waits for HELLO and for a silent peer; see beats
  // Encrypts and authenticates every link. A listener accepts allowed keys only. A connector talks only to
  // the key in the endpoint, and only if that key is allowed. Without keys a connector must say the
  // endpoint's token, unencrypted.
  std::optional<CurveKeys> keys;
  // Allows links without keys beyond loopback: a listener may then bind, and a connector connect, to an
  // address that other hosts can reach.
  bool insecure = false;
  // Whether frames without a payload travel through shared memory. They do if both transports are on one host
  // and both have this option.
  bool shares_memory = false;
  // Both ends of an open link send a BEAT every peer_timeout_s / 8. A peer is lost if nothing has arrived
  // from it for half of peer_timeout_s: it is stopped, or the network to it is cut. A peer is also lost after
  // 8 beats in a row without a pulse. A beat has a pulse if pulse() was called within the last peer_timeout_s
  // / 4. Both ends must have the same setting. Without beats a peer is lost only when its connection ends.
  bool beats = false;
};

// While a PassiveScope lives, its thread drives no transport: post_and_drive() is post(). It is for callbacks
// on threads of streams and of ZeroMQ, which must not be held up. Such a thread must not run handlers either.
// On a stream's thread a handler might wait for that same stream, or call the device, which a function given
// to Stream::call must not do.
class PassiveScope {
 public:
  PassiveScope() : was_passive_(std::exchange(is_passive_, true)) {}
  ~PassiveScope() { is_passive_ = was_passive_; }
  PassiveScope(const PassiveScope&) = delete;
  PassiveScope& operator=(const PassiveScope&) = delete;

  [[nodiscard]] static bool is_passive() { return is_passive_; }

 private:
  static inline thread_local bool is_passive_ = false;
  const bool was_passive_;
};

class Transport {
 public:
  Transport() = default;
  Transport(const Transport&) = delete;
  Transport& operator=(const Transport&) = delete;
  virtual ~Transport() = default;  // does shutdown(0)

  [[nodiscard]] virtual std::string_view name() const = 0;  // "zmq/tcp", "inproc"

  // Says that this program is alive. num_work_items: its progress, for error messages of the peers. Any
  // thread.
  virtual void pulse(std::uint64_t num_work_items) = 0;

  // Any thread. The handler must live until the transport's shutdown() or destruction. The transport owns its
  // links, which live as long as it does. Throws UserError for an endpoint that cannot be bound or parsed.
  virtual Link& listen(LinkOptions options, LinkHandler& handler) = 0;
  virtual Link& connect(LinkOptions options, const std::string& endpoint, LinkHandler& handler) = 0;

  // Runs the function on the thread that drives the transport, after all earlier posts. After shutdown() the
  // function is dropped.
  virtual void post(std::function<void()> function) = 0;
  // Does post(). Then, if no thread drives and this thread may, it runs the posted functions. So frames that
  // `function` sends are on their way when this call returns. Never waits: if another thread drives, or the
  // transport thread must drive next, that thread runs the function. The caller holds no mutex that a handler
  // takes.
  virtual void post_and_drive(std::function<void()> function) = 0;
  // Does post() without waking a thread. The calling thread must soon call drive_posted(), drive in another
  // way, or wait.
  virtual void post_for_later(std::function<void()> function) = 0;
  // Runs the posted functions as post_and_drive() does.
  virtual void drive_posted() = 0;

  // Drives this transport on the calling thread until done() returns true or the deadline passes, then
  // returns true. Sleeps while there is nothing to do. For threads that wait for the result of a handler.
  // Calls done() first, each time it has driven or slept, at the deadline and after interrupt(), but never
  // again once it has returned true. Holds no lock that post() takes during these calls.
  // Returns false at once if this thread cannot drive: another thread is in drive_until(), this thread
  // already drives a transport or has a PassiveScope, or this process is a child of fork().
  [[nodiscard]] virtual bool drive_until(Deadline deadline, const std::function<bool()>& done) = 0;
  // Makes the thread in drive_until() call done() again. Any thread.
  virtual void interrupt() = 0;

  // Between want_all(true) and want_all(false) every arriving frame wakes a thread at once, also on links
  // with let_wait(). For threads that wait for a handler outside drive_until(). Calls nest. Any thread.
  virtual void want_all(bool wants) = 0;

  // Closes all links with BYE, waits for at most linger_s until the peers have received everything and
  // answered, and stops the thread. Afterwards no handler is called, and every pending on_sent has been
  // called. Idempotent.
  virtual void shutdown(double linger_s) = 0;
};

// libzmq is loaded at run time: libzmq_path, else $PIPEDREAM_LIBZMQ, else the system's libzmq.so.5.
// Throws UserError naming what was tried when it cannot be loaded or is not version 4.3 or a later 4.x, and
// for keys that are wrong.
[[nodiscard]] std::unique_ptr<Transport> make_zmq_transport(const TransportOptions& options,
                                                            const std::string& libzmq_path = "");
// A new pair of Z85 keys: public, then secret. libzmq_path: as for make_zmq_transport(). Throws UserError
// also if libzmq was built without CURVE.
[[nodiscard]] std::pair<std::string, std::string> make_curve_keys(const std::string& libzmq_path = "");
// A transport that connects to other transports of the same process. Its endpoints look like "inproc://7".
[[nodiscard]] std::unique_ptr<Transport> make_inproc_transport(const TransportOptions& options);

}  // namespace pipedream
