// Gives each kind of failure the name by which Python knows it (raise_failure() in common/errors.py).
#include "base/failure.h"

#include <array>
#include <cstddef>

namespace pipedream {

std::string_view failure_kind_name(FailureKind kind) {
  constexpr std::array<std::string_view, 7> kNames = {"PeerLost", "Timeout",     "CorruptFrame", "Aborted",
                                                      "Closed",   "DeviceError", "UncaughtError"};
  return kNames.at(static_cast<std::size_t>(kind));
}

}  // namespace pipedream
