// Helpers of the transport tests: a handler that records its calls, and transports by name.
#pragma once

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "transport/transport.h"
#include "transport/transport_core.h"

namespace pipedream {

// The patience is long enough for every machine. It only ends a test that is deadlocked.
inline constexpr auto kPatience = std::chrono::seconds(60);

// Records every call. All functions may be called from any thread.
class Recorder final : public LinkHandler {
 public:
  struct Frame {
    FrameHeader header;
    std::vector<std::byte> payload;
  };

  // These functions run on the thread that drives the transport. when_frame and when_open run before the call
  // is recorded. Set them before the link exists.
  std::function<std::optional<Failure>(Link&, const FrameHeader&)> when_frame;
  std::function<void(Link&)> when_open;
  std::function<void()> after_frame;  // runs when the frame is recorded
  bool quick = false;

  bool is_quick() const override { return quick; }
  void on_open(Link& link) override {
    if (when_open) when_open(link);
    change([&] { ++num_opened_; });
  }
  std::optional<Failure> on_frame(Link& link, const FrameHeader& header,
                                  std::span<const std::byte> payload) override {
    std::optional<Failure> failure;
    if (when_frame) failure = when_frame(link, header);
    change([&] { frames_.push_back({header, {payload.begin(), payload.end()}}); });
    if (after_frame) after_frame();
    return failure;
  }
  void on_failed(Link& /*link*/, const Failure& failure) override {
    change([&] { failures_.push_back(failure); });
  }
  void on_closed(Link& /*link*/) override {
    change([&] { ++num_closed_; });
  }

  [[nodiscard]] bool wait_open() {
    return wait([&] { return num_opened_ > 0; });
  }
  // Waits until the link has opened or failed. Returns whether it has opened.
  [[nodiscard]] bool wait_open_or_failure() {
    return wait([&] { return num_opened_ > 0 || !failures_.empty(); }) && num_opened() > 0;
  }
  [[nodiscard]] bool wait_closed() {
    return wait([&] { return num_closed_ > 0; });
  }
  [[nodiscard]] bool wait_frames(std::size_t num_frames) {
    return wait([&] { return frames_.size() >= num_frames; });
  }
  // Waits for the failure and returns it. Without one, returns a failure that says so.
  [[nodiscard]] Failure wait_failure() {
    if (!wait([&] { return !failures_.empty(); })) return {FailureKind::kClosed, "no failure came"};
    const std::lock_guard lock(mutex_);
    return failures_.front();
  }

  [[nodiscard]] std::vector<Frame> frames() const { return locked(frames_); }
  [[nodiscard]] int num_opened() const { return locked(num_opened_); }
  [[nodiscard]] int num_closed() const { return locked(num_closed_); }
  [[nodiscard]] std::size_t num_failures() const { return locked(failures_).size(); }
  [[nodiscard]] std::size_t num_calls() const {
    const std::lock_guard lock(mutex_);
    return frames_.size() + failures_.size() + static_cast<std::size_t>(num_opened_ + num_closed_);
  }

 private:
  template <class Change>
  void change(Change apply) {
    {
      const std::lock_guard lock(mutex_);
      apply();
    }
    changed_.notify_all();
  }
  template <class Predicate>
  bool wait(Predicate predicate) {
    std::unique_lock lock(mutex_);
    return changed_.wait_for(lock, kPatience, predicate);
  }
  template <class Value>
  Value locked(const Value& value) const {
    const std::lock_guard lock(mutex_);
    return value;
  }

  mutable std::mutex mutex_;  // guards the members below
  std::condition_variable changed_;
  std::vector<Frame> frames_;
  std::vector<Failure> failures_;
  int num_opened_ = 0;
  int num_closed_ = 0;
};

// Counts the calls of on_sent. It must outlive the transports.
class SentCount {
 public:
  [[nodiscard]] std::function<void()> callback() {
    return [this] {
      {
        const std::lock_guard lock(mutex_);
        ++count_;
      }
      changed_.notify_all();
    };
  }
  [[nodiscard]] bool wait(int count) {
    std::unique_lock lock(mutex_);
    return changed_.wait_for(lock, kPatience, [&] { return count_ >= count; });
  }
  [[nodiscard]] int count() const {
    const std::lock_guard lock(mutex_);
    return count_;
  }

 private:
  mutable std::mutex mutex_;  // guards count_
  std::condition_variable changed_;
  int count_ = 0;
};

inline LinkOptions link_options(const std::string& peer = "stage 1 (rank 1)") {
  LinkOptions options;
  options.identity = {0xABCDEF, 4, 17};
  options.plan_hash = 0x5EED;
  options.name = "activations of stage 0 to stage 1";
  options.peer = peer;
  options.payload_bytes_max = std::size_t{8} << 20;
  return options;
}

// Returns a frame with a chunk of a one-dimensional tensor of bytes.
inline OutgoingFrame tensor_frame(std::int64_t minibatch, std::span<const std::byte> payload,
                                  std::function<void()> on_sent = {}) {
  OutgoingFrame frame;
  frame.header.kind = FrameKind::kTensor;
  frame.header.minibatch = MinibatchId(minibatch);
  frame.header.num_tensors = 1;
  frame.header.num_dims = 1;
  frame.header.shape[0] = static_cast<std::int64_t>(payload.size());
  frame.header.tensor_bytes = payload.size();
  frame.header.payload_bytes = payload.size();
  frame.payload = payload;
  frame.on_sent = std::move(on_sent);
  return frame;
}

// Returns a frame without a tensor. The number distinguishes it from other frames.
inline OutgoingFrame credit_frame(std::uint64_t number, std::function<void()> on_sent = {}) {
  OutgoingFrame frame;
  frame.header.kind = FrameKind::kCredit;
  frame.header.minibatch = MinibatchId(static_cast<std::int64_t>(number));
  frame.on_sent = std::move(on_sent);
  return frame;
}
[[nodiscard]] inline std::uint64_t number_of(const FrameHeader& header) {
  return static_cast<std::uint64_t>(header.minibatch.value());
}

inline std::vector<std::byte> patterned_bytes(std::size_t num_bytes, std::uint32_t seed) {
  std::vector<std::byte> bytes(num_bytes);
  std::uint32_t state = seed * 2654435761U + 1;
  for (std::byte& byte : bytes) {
    state = state * 1664525U + 1013904223U;
    byte = static_cast<std::byte>(state >> 24);
  }
  return bytes;
}

// Makes a pair of keys that may talk to itself and to `others`. Throws UserError without libzmq.
inline CurveKeys make_keys(const std::vector<std::string>& others = {}) {
  const auto [public_key, secret_key] = make_curve_keys();
  CurveKeys keys{public_key, secret_key, {public_key}};
  keys.allowed.insert(keys.allowed.end(), others.begin(), others.end());
  return keys;
}

// Returns the pair of keys of all "zmq_curve" transports. Throws UserError without libzmq.
inline const CurveKeys& keys_of_tests() {
  static const CurveKeys keys = make_keys();
  return keys;
}

// Makes a transport "inproc", "zmq", "zmq_rings" or "zmq_curve". All "zmq_curve" transports have the same
// keys. Returns null if libzmq is missing, or if $PIPEDREAM_TEST_TRANSPORTS (comma separated) leaves the
// transport out.
inline std::unique_ptr<Transport> make_transport(const std::string& name, TransportOptions options = {}) {
  const char* const chosen = std::getenv("PIPEDREAM_TEST_TRANSPORTS");
  const std::string family = name.substr(0, name.find('_'));
  if (chosen != nullptr && std::string(chosen).find(family) == std::string::npos) return nullptr;
  if (name == "inproc") return make_inproc_transport(options);
  try {
    // keys_of_tests() is tried apart, so that a missing libzmq does not hide a wrong option.
    const CurveKeys& keys = keys_of_tests();
    if (name == "zmq_curve") options.keys = keys;
    options.shares_memory = name == "zmq_rings";
  } catch (const UserError&) {
    return nullptr;
  }
  return make_zmq_transport(options);
}

// Polls until the predicate is true or kPatience has passed, and returns whether it became true. It is for
// states that no call of a handler reports.
template <class Predicate>
[[nodiscard]] bool wait_until(Predicate predicate) {
  for (const auto deadline = Clock::now() + kPatience; Clock::now() < deadline;) {
    if (predicate()) return true;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return false;
}

inline TransportCore& core_of(Transport& transport) { return dynamic_cast<TransportCore&>(transport); }

}  // namespace pipedream
