// The last frame of a worker that ends: it tells its neighbours why. Any thread that may send on the link.
#pragma once

#include <cstddef>
#include <string>

#include "transport/transport.h"

namespace pipedream {

inline constexpr std::size_t kAbortTextBytesMax = 1024;

// The text is cut to kAbortTextBytesMax bytes, not inside a character of UTF-8.
void send_abort(Link& link, const std::string& why);

}  // namespace pipedream
