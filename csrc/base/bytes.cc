// Formats sizes for people.
#include "base/bytes.h"

#include <array>
#include <cstdio>

namespace pipedream {

std::string format_bytes(std::size_t num_bytes) {
  constexpr std::array<const char*, 6> kUnits = {"KiB", "MiB", "GiB", "TiB", "PiB", "EiB"};
  if (num_bytes < 1024) return std::to_string(num_bytes) + " bytes";
  double scaled = static_cast<double>(num_bytes) / 1024;
  std::size_t unit_index = 0;
  // From 1023.995 on, two decimals would print 1024.00 of this unit, so the next unit is taken.
  while (scaled >= 1023.995 && unit_index + 1 < kUnits.size()) {
    scaled /= 1024;
    ++unit_index;
  }
  std::array<char, 32> text{};
  std::snprintf(text.data(), text.size(), "%.2f %s", scaled, kUnits.at(unit_index));
  return text.data();
}

}  // namespace pipedream
