// Always-on checks for our own bugs: print file, line, condition and values, then abort.
// The user's mistakes are UserError and the world's failures are Failure (failure.h); never mix them.
#pragma once

#include <sstream>
#include <string>

namespace pipedream {

[[noreturn]] void check_failed(const char* file, int line, const char* condition, const std::string& values);

}  // namespace pipedream

// PD_CHECK(slot < num_slots, "slot " << slot << " of " << num_slots << ", minibatch " << minibatch)
#define PD_CHECK(condition, values)                                                     \
  do {                                                                                  \
    if (!(condition)) [[unlikely]] {                                                    \
      std::ostringstream pd_check_values;                                               \
      pd_check_values << values; /* NOLINT(bugprone-macro-parentheses) */               \
      ::pipedream::check_failed(__FILE__, __LINE__, #condition, pd_check_values.str()); \
    }                                                                                   \
  } while (false)
