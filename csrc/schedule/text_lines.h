// Reads text line by line, for texts with comments that people write. Pure; any thread.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <string_view>

#include "base/failure.h"

namespace pipedream {

// Calls read(line, number) for each line of the text. The line comes without its comment, which '#' starts,
// and without blanks at both ends. Lines that are empty then are skipped. If read() throws a UserError, the
// line's number is put in front of its text.
template <typename Read>
void for_each_line(std::string_view text, Read read) {
  constexpr std::string_view kBlanks = " \t\r\v\f";
  for (std::int64_t number = 1; !text.empty(); ++number) {
    const std::size_t line_bytes = std::min(text.find('\n'), text.size());
    std::string_view line = text.substr(0, line_bytes);
    text.remove_prefix(std::min(line_bytes + 1, text.size()));
    line = line.substr(0, line.find('#'));
    line.remove_prefix(std::min(line.find_first_not_of(kBlanks), line.size()));
    line = line.substr(0, line.find_last_not_of(kBlanks) + 1);
    if (line.empty()) continue;
    try {
      read(line, number);
    } catch (const UserError& error) {
      throw UserError("line " + std::to_string(number) + ": " + error.what());
    }
  }
}

}  // namespace pipedream
