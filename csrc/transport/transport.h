// Moves frames between two workers, in order, exactly once, or says that the peer is lost. Knows bytes
// and identities, not tensors (channel/ does). zmq/ and inproc/ implement one contract; the suite in
// tests/cpp/transport runs on both.
//
// Threads: one thread at a time drives a transport: it runs what was posted, moves bytes and calls the
// handlers. Whoever finds nobody driving may, so that a message needs no other thread to leave or to arrive:
//
//   a thread that sends    post_and_drive(): what it has posted, and what others have, and no more
//   a thread that waits    drive_until(): sleeps until there is traffic, and delivers it
//   the transport thread   whatever is left: traffic and posts while the others compute, deadlines, beats
//
// send() and post() may be called from any thread and never block. Handlers must not block either. They run
// on any of these threads, one after the other, each sees what the one before it has written. Streams'
// threads and ZeroMQ's never drive, see PassiveScope. What a handler or what was posted throws reaches the
// thread that drives; on the transport thread, where nobody would hear of it, it is every link's failure.
//
// Life of a link:  listen/connect -> HELLO both ways -> on_open -> on_frame ... -> close (BYE) | on_failed
// A listening link lets one connection in, which must know its endpoint: others are refused. Once it is in,
// it has peer_timeout_s for its HELLO. There is no reconnect: what is lost is lost, and the run restarts from
// a checkpoint.
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
  // Sent from the caller's memory, without a copy. Must stay valid until on_sent.
  std::span<const std::byte> payload;
  // The payload is no longer read: it was sent, or the link failed or closed. Exactly once, on any
  // thread, must be short. May be empty.
  std::function<void()> on_sent;
};

class Link;

class LinkHandler {
 public:
  LinkHandler() = default;
  LinkHandler(const LinkHandler&) = delete;
  LinkHandler& operator=(const LinkHandler&) = delete;
  virtual ~LinkHandler() = default;

  // All on the thread that drives.
  virtual void on_open(Link& link) = 0;  // HELLOs exchanged and accepted
  // The payload is valid until this returns. A returned failure is fatal for the link: it is closed and
  // on_failed follows with that failure.
  [[nodiscard]] virtual std::optional<Failure> on_frame(Link& link, const FrameHeader& header,
                                                        std::span<const std::byte> payload) = 0;
  // Once at most; nothing follows. Not called after the peer's BYE: then on_closed.
  virtual void on_failed(Link& link, const Failure& failure) = 0;
  virtual void on_closed(Link& link) = 0;  // the peer said BYE; frames that it sent before were delivered

  // All its frames are small and on_frame is quick: a thread that drives only because it sends delivers them,
  // too. Others wait for a thread that has time. Any thread; always the same.
  [[nodiscard]] virtual bool is_quick() const { return false; }
};

struct LinkOptions {
  LinkIdentity identity;
  std::uint64_t plan_hash = 0;  // sent and expected in HELLO
  std::string name;             // for errors: "activations of stage 0 to stage 1"
  // "stage 1 (rank 1)": in errors, and as links of one name lead to one process: while anything comes by one
  // of them, all of them live.
  std::string peer;
  std::size_t payload_bytes_max = 1 << 20;  // larger frames are refused before anything is allocated
  // send() adds a CRC-32C to every payload that has none, on the caller's thread.
  bool checksums_payloads = false;
};

struct LinkCounters {
  std::uint64_t bytes_sent = 0;  // payload and headers
  std::uint64_t bytes_received = 0;
  std::uint64_t frames_sent = 0;
  std::uint64_t frames_received = 0;
  // Refusals of a listener: connections that ended before it had heard HELLO from them; and frames that broke
  // the protocol, after which a link has failed.
  std::uint64_t num_refused = 0;
};

// How long tensors and credits that a link brings may lie unnoticed.
enum class Patience {
  kNone,
  kUntilOneWaits,   // in drive_until(), or drives for some other reason
  kUntilOneDrives,  // nobody waits for them
};

class Link {
 public:
  Link() = default;
  Link(const Link&) = delete;
  Link& operator=(const Link&) = delete;
  virtual ~Link() = default;

  // Frames sent before the link is open wait for it, in order. After close, failure or the peer's BYE they
  // are dropped. on_sent may run inside this call: of a handler or what was posted, or after shutdown().
  virtual void send(OutgoingFrame frame) = 0;
  // Says BYE after what was sent before, then closes. Once it has returned no handler call of this link
  // begins. Waits for one that another thread is in, so the caller holds no mutex that it takes; inside a
  // handler, of whatever transport, it does not wait. Idempotent.
  virtual void close() = 0;
  [[nodiscard]] virtual LinkCounters counters() const = 0;
  [[nodiscard]] virtual const LinkOptions& options() const = 0;
  [[nodiscard]] virtual std::string endpoint() const = 0;  // what the peer connects to, see endpoint.h

  // Who drives. The link may notice what comes at once all the same; until this is called it does.
  virtual void let_wait(Patience /*patience*/) {}
};

// A CURVE identity (CurveZMQ, RFC 26) and who may talk to it. Keys are Z85 text of 40 characters.
struct CurveKeys {
  std::string public_key;
  std::string secret_key;
  std::vector<std::string> allowed;  // public keys of the peers, one's own where all share a pair
};

// Ports of a machine, the last one included.
struct PortRange {
  std::uint16_t first = 0;
  std::uint16_t last = 0;
};

struct TransportOptions {
  std::string bind_host = "127.0.0.1";  // address or interface
  // Every listening link takes one of these that is free, and waits for one for peer_timeout_s at most.
  // Without a range the system chooses.
  std::optional<PortRange> ports;
  double peer_timeout_s = 15.0;  // a silent peer is lost after this
  // Encrypts and authenticates every link: a listener lets in the allowed keys only, a connector talks to the
  // endpoint's key only, and only if it is allowed. Without keys a connector must say the endpoint's token,
  // in the clear.
  std::optional<CurveKeys> keys;
  // Lets a listener without keys bind elsewhere than to loopback, and a connector talk to such a one.
  bool insecure = false;
  // Whether frames without a payload travel through shared memory. It takes two transports of one host that
  // both have this set.
  bool shares_memory = false;
  // Whether the ends of an open link tell each other that they live, by a BEAT every peer_timeout_s / 8. A
  // peer from which nothing has come for half of peer_timeout_s is lost: it is stopped, or the way to it is
  // cut. One of which 8 beats in a row have no pulse is lost, too: a beat has one while pulse()
  // is called at least every peer_timeout_s / 8. Both ends must have the same setting. Without beats a peer
  // is lost only when its connection ends.
  bool beats = false;
};

// While one lives this thread drives no transport: post_and_drive() is post(). For callbacks on threads that
// must not be held up or must not run handlers: a stream's (a handler may call the device, which a function
// of Stream::call must not, or wait for the very stream) and those of ZeroMQ.
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
  virtual ~Transport() = default;  // shutdown(0)

  [[nodiscard]] virtual std::string_view name() const = 0;  // "zmq/tcp", "inproc"

  // This program is alive; num_work_items: how far it has come, for the peers' error messages. Any thread.
  virtual void pulse(std::uint64_t num_work_items) = 0;

  // Any thread. The handler outlives the transport or its shutdown(). Links are owned by the transport
  // and live until it is destroyed. Throws UserError for an endpoint that cannot be bound or parsed.
  virtual Link& listen(LinkOptions options, LinkHandler& handler) = 0;
  virtual Link& connect(LinkOptions options, const std::string& endpoint, LinkHandler& handler) = 0;

  // Runs on the thread that drives, after what was posted before. Dropped after shutdown.
  virtual void post(std::function<void()> function) = 0;
  // post(), and where nobody drives and this thread may, it does until nothing that was posted is left: what
  // `function` sends leaves here and now. Never waits: where another thread drives, that one runs it. The
  // caller holds no mutex that a handler takes.
  virtual void post_and_drive(std::function<void()> function) = 0;
  // post() that wakes nobody: this thread calls drive_posted(), drives otherwise or waits before long.
  virtual void post_for_later(std::function<void()> function) = 0;
  // Drives what was posted, as post_and_drive() does.
  virtual void drive_posted() = 0;

  // Drives until done() or the deadline, for threads that wait for what a handler does; sleeps while there is
  // nothing to do. done() is asked at first, after every turn, at the deadline and after interrupt(), and
  // not again once it was true; it runs without any lock of the transport's that a poster takes. False, at
  // once, when it cannot be: another thread waits here, or this one drives already or is passive.
  [[nodiscard]] virtual bool drive_until(Deadline deadline, const std::function<bool()>& done) = 0;
  // The thread that waits in drive_until() asks done() again. Any thread.
  virtual void interrupt() = 0;

  // Until it is taken back, once each: whatever arrives is noticed at once, also what handlers let wait. For
  // threads that wait for a handler elsewhere than in drive_until(). Any thread.
  virtual void want_all(bool wants) = 0;

  // Closes all links (BYE), waits until the peers have received what was sent and answered, linger_s at
  // most, then stops the thread. No handler is called afterwards; every pending on_sent has been. Idempotent.
  virtual void shutdown(double linger_s) = 0;
};

// libzmq is loaded at run time: libzmq_path, else $PIPEDREAM_LIBZMQ, else the system's libzmq.so.5.
// Throws UserError naming what was tried when it cannot be loaded or is older than 4.3.
[[nodiscard]] std::unique_ptr<Transport> make_zmq_transport(const TransportOptions& options,
                                                            const std::string& libzmq_path = "");
// A new pair of Z85 keys, public and secret; libzmq as above.
[[nodiscard]] std::pair<std::string, std::string> make_curve_keys(const std::string& libzmq_path = "");
// Between transports of one process; endpoints look like "inproc://7".
[[nodiscard]] std::unique_ptr<Transport> make_inproc_transport(const TransportOptions& options);

}  // namespace pipedream
