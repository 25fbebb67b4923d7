// The last frame that a worker sends before it stops early. It tells the peer why. Any thread that may send
// on the link.
#pragma once

#include <cstddef>
#include <string>

#include "transport/transport.h"

namespace pipedream {

inline constexpr std::size_t kAbortTextBytesMax = 1024;

// Cuts the text to kAbortTextBytesMax bytes, but never inside a UTF-8 character.
void send_abort(Link& link, const std::string& why);

}  // namespace pipedream
