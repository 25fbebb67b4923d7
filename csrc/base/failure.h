// Defines the three kinds of error as types.
//   our bug             PD_CHECK (check.h): aborts
//   the user's mistake  UserError: thrown early, becomes ValueError in Python
//   the world's failure Failure: a value that crosses threads and wire; afterwards the transport is
//                       rebuilt, not reused
#pragma once

#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <variant>

#include "base/check.h"

namespace pipedream {

class UserError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

enum class FailureKind {
  // The connection ended without a BYE frame or before all items had come, or the peer's BEAT frames stopped.
  kPeerLost,
  kTimeout,       // the peer's HELLO frame did not come within the time limit
  kCorruptFrame,  // the bytes are no frame of this protocol, or the plan does not allow this frame now
  kAborted,       // the peer said that it stops, and why
  kClosed,        // used after close
  kDeviceError,   // this worker's own device refused a call, or earlier work on it failed
  kUncaught,      // an error on a thread of the core, which has no caller that could catch it
};

[[nodiscard]] std::string_view failure_kind_name(FailureKind kind);  // "PeerLost", "Timeout", ...

struct Failure {
  FailureKind kind = FailureKind::kClosed;
  std::string message;
};

// Holds a value or a Failure. C++20 has no std::expected yet.
template <class T>
class [[nodiscard]] Result {
 public:
  Result(T value) : state_(std::move(value)) {}            // NOLINT(google-explicit-constructor)
  Result(Failure failure) : state_(std::move(failure)) {}  // NOLINT(google-explicit-constructor)

  [[nodiscard]] bool ok() const { return std::holds_alternative<T>(state_); }
  explicit operator bool() const { return ok(); }

  [[nodiscard]] T& value() {
    PD_CHECK(ok(), failure().message);
    return std::get<T>(state_);
  }
  [[nodiscard]] const T& value() const {
    PD_CHECK(ok(), failure().message);
    return std::get<T>(state_);
  }
  [[nodiscard]] const Failure& failure() const { return std::get<Failure>(state_); }

 private:
  std::variant<T, Failure> state_;
};

}  // namespace pipedream
