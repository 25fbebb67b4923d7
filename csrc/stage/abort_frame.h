// Sends the last frame of a worker that stops early, which tells the peer why it stops. Any thread that may
// send on the link.
#pragma once

#include <cstddef>
#include <string>

#include "transport/transport.h"

namespace pipedream {

inline constexpr std::size_t kAbortTextBytesMax = 1024;

// Sends the reason, cut to at most kAbortTextBytesMax bytes, but never inside a UTF-8 character.
void send_abort(Link& link, const std::string& why);

}  // namespace pipedream
