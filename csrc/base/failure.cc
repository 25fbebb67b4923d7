// Names the kinds of failure like the Python exceptions for them.
#include "base/failure.h"

namespace pipedream {

std::string_view failure_kind_name(FailureKind kind) {
  switch (kind) {
    case FailureKind::kPeerLost:
      return "PeerLost";
    case FailureKind::kTimeout:
      return "Timeout";
    case FailureKind::kCorruptFrame:
      return "CorruptFrame";
    case FailureKind::kAborted:
      return "Aborted";
    case FailureKind::kClosed:
      return "Closed";
    case FailureKind::kDeviceError:
      return "DeviceError";
    case FailureKind::kUncaught:
      return "UncaughtError";
  }
  PD_CHECK(false, "failure kind " << static_cast<int>(kind));
}

}  // namespace pipedream
