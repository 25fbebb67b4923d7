// Implements the check that all numeric options share. See step_factors.h.
#include "weights/step_factors.h"

#include <string>

#include "base/failure.h"

namespace pipedream {

void check_number(const char* name, double value, bool may_be_negative) {
  if (std::isfinite(value) && (may_be_negative || value >= 0)) return;
  throw UserError(std::string(name) + " is " + std::to_string(value) + "; it must be finite" +
                  (may_be_negative ? "" : " and not negative"));
}

}  // namespace pipedream
