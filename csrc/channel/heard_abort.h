// Makes the failure for an ABORT frame from the peer. Pure; any thread.
#pragma once

#include <cstddef>
#include <span>
#include <string>

#include "base/failure.h"
#include "base/utf8.h"
#include "transport/transport.h"

namespace pipedream {

[[nodiscard]] inline Failure heard_abort(const Link& link, std::span<const std::byte> payload) {
  if (payload.empty()) return {FailureKind::kAborted, link.options().peer + " stops and does not say why"};
  return {FailureKind::kAborted, as_utf8({reinterpret_cast<const char*>(payload.data()), payload.size()})};
}

}  // namespace pipedream
