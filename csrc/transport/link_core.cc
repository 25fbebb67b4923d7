// Implements the protocol of one link, drawn in link_core.h. Everything but the first part of this file runs
// on the thread that drives the transport.
#include "transport/link_core.h"

#include <chrono>
#include <cstdio>
#include <utility>
#include <vector>

#include "base/check.h"

namespace pipedream {
namespace {

std::string hex(std::uint64_t value) {
  std::array<char, 20> text{};
  std::snprintf(text.data(), text.size(), "%016llx", static_cast<unsigned long long>(value));
  return text.data();
}

std::string seconds_text(double seconds) {
  std::array<char, 32> text{};
  std::snprintf(text.data(), text.size(), "%g s", seconds);
  return text.data();
}

FrameHeader header_of(FrameKind kind) {
  FrameHeader header;
  header.kind = kind;
  return header;
}

bool is_said_by_link(FrameKind kind) {
  return kind == FrameKind::kHello || kind == FrameKind::kBye || kind == FrameKind::kBeat;
}

}  // namespace

LinkCore::LinkCore(TransportCore& transport, LinkOptions options, LinkHandler& handler, Role role)
    : options_(std::move(options)),
      transport_(transport),
      peer_life_(transport.peer_named(options_.peer)),
      handler_(handler),
      is_quick_(handler.is_quick()),
      role_(role) {}

// ---- Any thread ----

void LinkCore::send(OutgoingFrame frame) {
  FrameHeader& header = frame.header;
  PD_CHECK(!is_said_by_link(header.kind),
           options_.name << ": the link itself says " << frame_kind_name(header.kind));
  PD_CHECK(header.payload_bytes == frame.payload.size(), options_.name << ": payload_bytes "
                                                                       << header.payload_bytes << ", payload "
                                                                       << frame.payload.size());
  PD_CHECK(
      frame.payload.size() <= options_.payload_bytes_max,
      options_.name << ": payload " << frame.payload.size() << ", at most " << options_.payload_bytes_max);
  if (options_.checksums_payloads && !frame.payload.empty() && !header.has_payload_checksum) {
    header.has_payload_checksum = true;
    header.payload_checksum = crc32c(frame.payload);
  }
  const std::optional<Failure> violation = find_violation(header);
  PD_CHECK(!violation, options_.name << ": " << violation->message);
  // Sends at once on the driving thread. A posted function that sends runs after all tasks queued before it,
  // so the frames among these have been submitted already.
  if (transport_.is_driven_here()) return submit(HeldFrame(std::move(frame)));
  transport_.enqueue([this, held = HeldFrame(std::move(frame))]() mutable { submit(std::move(held)); });
}

void LinkCore::close() {
  const bool was_called = close_called_.exchange(true);
  // Within a handler close() must not wait for another handler: the two could wait for each other.
  if (!TransportCore::is_any_driven_here()) const std::lock_guard no_call_is_under_way(handler_mutex_);
  if (!was_called) transport_.enqueue([this] { begin_close(); });
}

LinkCounters LinkCore::counters() const {
  LinkCounters counters;
  counters.bytes_sent = bytes_sent_.load(std::memory_order_relaxed);
  counters.bytes_received = bytes_received_.load(std::memory_order_relaxed);
  counters.frames_sent = frames_sent_.load(std::memory_order_relaxed);
  counters.frames_received = frames_received_.load(std::memory_order_relaxed);
  counters.num_refused = num_refused_.load(std::memory_order_relaxed);
  return counters;
}

// ---- Life ----

void LinkCore::start() {
  if (ended()) return;
  watch_traffic();
  if (role_ == Role::kListener) return;
  await_hello();
  if (const std::optional<std::string> failure = open_connection()) {
    lost(*failure);
    return;
  }
  say_hello();
}

void LinkCore::begin_close() {
  close_called_.store(true);
  if (state_ == State::kOpen) say_farewell();
  if (state_ != State::kConnecting) return;
  closing_ = true;
  // A connector has said HELLO, so its peer must get a BYE. Frames that wait for the link to open must be
  // sent first.
  if (role_ == Role::kListener && waiting_.empty()) end();
}

void LinkCore::end() { end_quietly(State::kEnded); }

// In the lingering state the connection stays until the peer ends it.
void LinkCore::end_quietly(State state) {
  if (ended()) return;
  state_ = state;
  std::deque<HeldFrame>().swap(waiting_);
  if (state == State::kEnded) disconnect();
  transport_.note_ended();
}

// Calls the handler, unless close() has been called. The mutex lets close() wait for the call.
template <class Call>
void LinkCore::tell_handler(Call call) {
  const std::lock_guard lock(handler_mutex_);
  if (!close_called_.load()) call();
}

// ---- Deadlines ----

std::optional<Deadline> LinkCore::hello_deadline() const {
  return state_ == State::kConnecting ? hello_deadline_ : std::nullopt;
}

void LinkCore::check_hello(Deadline now) {
  const std::optional<Deadline> due = hello_deadline();
  if (!due || now < *due) return;
  // This process may have been held up until now, so arrived bytes are read before the HELLO counts as late.
  if (!std::exchange(looked_for_hello_, true)) {
    look_for_traffic();
  } else {
    hello_is_late();
  }
}

void LinkCore::await_hello() {
  hello_deadline_ = Clock::now() + duration_of(transport_.transport_options().peer_timeout_s);
  transport_.await_hello(*this);
}

void LinkCore::hello_is_late() {
  const std::string at = (role_ == Role::kListener ? " connected to " : " at ") + address();
  fail({FailureKind::kTimeout,
        options_.peer + at + (role_ == Role::kListener ? " but said" : " said") + " no HELLO within " +
            seconds_text(transport_.transport_options().peer_timeout_s) + " (" + options_.name + ")"});
}

void LinkCore::peer_is_silent() {
  lost("nothing has come from it for " + seconds_text(transport_.transport_options().peer_timeout_s / 2) +
       ": its process is stopped, or the way to its machine is cut (" +
       std::to_string(num_work_items_of_peer_) + " work items done)");
}

// Counts beats without a pulse, not seconds. Seconds would mislead: a beat may wait behind payloads on a slow
// link, and no beat arrives while both processes are stopped.
void LinkCore::hear_beat(const FrameHeader& header) {
  num_work_items_of_peer_ = header.num_work_items;
  num_beats_without_pulse_ = header.has_pulse ? 0 : num_beats_without_pulse_ + 1;
  if (num_beats_without_pulse_ >= kBeatsPerTimeout) {
    lost("its process answers, but its program has shown no sign of life for " +
         seconds_text(transport_.transport_options().peer_timeout_s) + " (" +
         std::to_string(num_work_items_of_peer_) + " work items done)");
  }
}

// ---- Sending ----

void LinkCore::submit(HeldFrame frame) {
  if (state_ == State::kOpen) {
    transmit(std::move(frame));
  } else if (state_ == State::kConnecting && !closing_) {
    waiting_.push_back(std::move(frame));
  }
  // In all other cases the link has failed, or it closes or has closed. The frame is destroyed here.
}

void LinkCore::transmit(HeldFrame frame) {
  frame.header().identity = options_.identity;
  frame.header().sequence = next_sent_++;
  FrameHeaderBytes bytes;
  encode(frame.header(), bytes);
  frames_sent_.fetch_add(1, std::memory_order_relaxed);
  bytes_sent_.fetch_add(bytes.size() + frame.payload().size(), std::memory_order_relaxed);
  carry(bytes, std::move(frame));
}

void LinkCore::say(const FrameHeader& header) {
  OutgoingFrame frame;
  frame.header = header;
  transmit(HeldFrame(std::move(frame)));
}

void LinkCore::say_hello() {
  said_hello_ = true;
  FrameHeader hello = header_of(FrameKind::kHello);
  hello.plan_hash = options_.plan_hash;
  say(hello);
}

void LinkCore::say_beat(std::uint64_t num_work_items, bool has_pulse) {
  if (state_ != State::kOpen) return;
  FrameHeader beat = header_of(FrameKind::kBeat);
  beat.num_work_items = num_work_items;
  beat.has_pulse = has_pulse;
  say(beat);
}

void LinkCore::say_farewell() {
  state_ = State::kFarewell;
  say(header_of(FrameKind::kBye));
}

void LinkCore::inject(const FrameHeaderBytes& header, std::vector<std::byte> payload) {
  if (ended()) return;
  auto bytes = std::make_shared<std::vector<std::byte>>(std::move(payload));
  OutgoingFrame frame;
  frame.payload = *bytes;
  frame.on_sent = [bytes] {};  // keeps the bytes until the frame is sent
  carry(header, HeldFrame(std::move(frame)));
}

// ---- Receiving ----

void LinkCore::receive(std::span<const std::byte> header_bytes, std::span<const std::byte> payload) {
  if (state_ == State::kEnded || state_ == State::kLingering) return;
  bytes_received_.fetch_add(header_bytes.size() + payload.size(), std::memory_order_relaxed);
  const Result<FrameHeader> decoded = decode(header_bytes);
  if (!decoded) {
    refuse(corrupt("sent a " + decoded.failure().message));
    return;
  }
  const FrameHeader& header = decoded.value();
  // Answers even a HELLO that is refused, so that both sides report the mismatch.
  if (header.kind == FrameKind::kHello && !said_hello_) say_hello();
  if (const std::optional<Failure> failure = refusal(header, payload)) {
    refuse(*failure);
    return;
  }
  ++next_received_;
  peer_life_.hear_frame();
  frames_received_.fetch_add(1, std::memory_order_relaxed);
  dispatch(header, payload);
}

void LinkCore::receive_malformed(const std::string& what) { refuse(corrupt(what)); }

std::optional<Failure> LinkCore::refusal(const FrameHeader& header,
                                         std::span<const std::byte> payload) const {
  if (auto failure = identity_refusal(header)) return failure;
  if (header.sequence != next_received_) {
    return corrupt("sent frame " + std::to_string(header.sequence) + " where frame " +
                   std::to_string(next_received_) + " is due: frames were lost or repeated");
  }
  if (header.payload_bytes > options_.payload_bytes_max) {
    return corrupt("sent payload_bytes " + std::to_string(header.payload_bytes) + ", planned are at most " +
                   std::to_string(options_.payload_bytes_max));
  }
  if (header.payload_bytes != payload.size()) {
    return corrupt("sent " + std::to_string(payload.size()) + " bytes of payload where payload_bytes is " +
                   std::to_string(header.payload_bytes));
  }
  if (header.has_payload_checksum && crc32c(payload) != header.payload_checksum) {
    return corrupt("sent a payload that does not match its payload_checksum");
  }
  return kind_refusal(header);
}

std::optional<Failure> LinkCore::identity_refusal(const FrameHeader& header) const {
  const LinkIdentity& theirs = header.identity;
  const LinkIdentity& ours = options_.identity;
  if (theirs.run_id != ours.run_id) {
    return corrupt("belongs to run " + hex(theirs.run_id) + ", not to this run " + hex(ours.run_id));
  }
  if (theirs.incarnation != ours.incarnation) {
    return corrupt("sent a frame of incarnation " + std::to_string(theirs.incarnation) +
                   ", this is incarnation " + std::to_string(ours.incarnation) +
                   ": one of the two is a stale worker");
  }
  if (theirs.channel_id != ours.channel_id) {
    return corrupt("sent a frame of channel_id " + std::to_string(theirs.channel_id) + " on channel_id " +
                   std::to_string(ours.channel_id));
  }
  return std::nullopt;
}

std::optional<Failure> LinkCore::kind_refusal(const FrameHeader& header) const {
  const bool is_hello = header.kind == FrameKind::kHello;
  if (state_ == State::kConnecting && !is_hello) {
    return corrupt("sent " + std::string(frame_kind_name(header.kind)) + " before HELLO");
  }
  if (state_ != State::kConnecting && is_hello) return corrupt("sent HELLO twice");
  if (is_hello && header.plan_hash != options_.plan_hash) {
    return corrupt("has another plan, hash " + hex(header.plan_hash) + " where this worker's is " +
                   hex(options_.plan_hash) + ": start all workers with the same plan");
  }
  return std::nullopt;
}

Failure LinkCore::corrupt(const std::string& what) const {
  return {FailureKind::kCorruptFrame, options_.peer + " " + what + " (" + options_.name + ")"};
}

void LinkCore::dispatch(const FrameHeader& header, std::span<const std::byte> payload) {
  switch (header.kind) {
    case FrameKind::kHello:
      open();
      return;
    case FrameKind::kBye:
      hear_farewell();
      return;
    case FrameKind::kBeat:
      hear_beat(header);
      return;
    default:
      break;
  }
  std::optional<Failure> failure;
  tell_handler([&] { failure = handler_.on_frame(*this, header, payload); });
  if (failure) fail(*failure);
}

void LinkCore::open() {
  state_ = State::kOpen;
  peer_life_.hear_at(Clock::now());
  transport_.need_thread();
  opened();
  std::deque<HeldFrame> waiting;
  waiting.swap(waiting_);
  while (!waiting.empty()) {
    transmit(std::move(waiting.front()));
    waiting.pop_front();
  }
  if (closing_) {
    say_farewell();
  } else {
    tell_handler([&] { handler_.on_open(*this); });
  }
}

void LinkCore::hear_farewell() {
  if (state_ == State::kFarewell) {
    end();
    return;
  }
  say(header_of(FrameKind::kBye));
  end_quietly(State::kLingering);
  tell_handler([&] { handler_.on_closed(*this); });
}

// ---- Failing ----

void LinkCore::lost(const std::string& how) {
  if (state_ == State::kConnecting || state_ == State::kOpen) {
    fail({FailureKind::kPeerLost, options_.peer + " is lost: " + how + " (" + options_.name + ")"});
  } else {
    end();
  }
}

void LinkCore::refuse(const Failure& failure) {
  count_refusal();
  fail(failure);
}

void LinkCore::fail(const Failure& failure) {
  if (state_ == State::kEnded || state_ == State::kLingering) return;
  const bool refused_hello = state_ == State::kConnecting && role_ == Role::kListener && said_hello_;
  const bool tell = state_ != State::kFarewell;
  end_quietly(refused_hello ? State::kLingering : State::kEnded);
  if (tell) tell_handler([&] { handler_.on_failed(*this, failure); });
}

}  // namespace pipedream
