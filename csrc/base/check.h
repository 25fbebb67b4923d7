// PD_CHECK checks for our own bugs, in every build. A failed check prints file, line, condition and values,
// and aborts. Mistakes of the user are a UserError, and failures of the outside world are a Failure
// (failure.h).
#pragma once

#include <sstream>
#include <string>

namespace pipedream {

[[noreturn]] void check_failed(const char* file, int line, const char* condition, const std::string& values);

}  // namespace pipedream

// Example: PD_CHECK(slot < num_slots, "slot " << slot << " of " << num_slots)
#define PD_CHECK(condition, values)                                                     \
  do {                                                                                  \
    if (!(condition)) [[unlikely]] {                                                    \
      std::ostringstream pd_check_values;                                               \
      pd_check_values << values; /* NOLINT(bugprone-macro-parentheses) */               \
      ::pipedream::check_failed(__FILE__, __LINE__, #condition, pd_check_values.str()); \
    }                                                                                   \
  } while (false)
