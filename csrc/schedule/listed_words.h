// Defines words that the text of a written program and its error messages share. Pure; any thread.
#pragma once

#include <cstdint>
#include <string>

namespace pipedream {

// The largest number in a written program. It is far above the numbers of any real schedule. It keeps the
// replay that checks the program short.
inline constexpr std::int64_t kListedNumberMax = std::int64_t{1} << 16;

inline std::string in_number(std::int64_t number, const std::string& noun) {
  const bool ends_in_sound = noun.ends_with("ch");
  return std::to_string(number) + " " + noun + (number == 1 ? "" : ends_in_sound ? "es" : "s");
}

inline std::string body_title(std::int64_t minibatches) {
  return "body every " + in_number(minibatches, "minibatch");
}

}  // namespace pipedream
