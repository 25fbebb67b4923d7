// Prints the message of a failed PD_CHECK, on whichever thread found it, before the process aborts.
#include "base/check.h"

#include <cstdio>
#include <cstdlib>

namespace pipedream {

void check_failed(const char* file, int line, const char* condition, const std::string& values) {
  // The line is written by one call, because several workers may share a terminal.
  const std::string message = std::string(file) + ":" + std::to_string(line) +
                              ": check failed: " + condition + " (" + values +
                              "). This is a bug in pipedream.\n";
  std::fputs(message.c_str(), stderr);
  std::fflush(stderr);
  std::abort();
}

}  // namespace pipedream
