// Lists the pairs of options that exclude each other, each pair once, as data. check_schedule_options() uses
// the table to refuse pairs of the core's own options. run(), reference.run() and partition() use it for
// pairs of their arguments (planning/job.py). `pipedream explain --options` prints it. Pure; any thread.
#pragma once

#include <functional>
#include <map>
#include <span>
#include <string>
#include <string_view>

namespace pipedream {

// An option, or a property of a plan, a model or data. Exclusion, below, says which two of them exclude each
// other.
struct Trait {
  std::string_view key;   // its name in Python and in the rows
  std::string_view name;  // in the printed table
  std::string_view said;  // in an error, if the caller does not name the value
};

struct Exclusion {
  std::string_view first;  // keys of two traits
  std::string_view second;
  std::string_view because;
  std::string_view remedy;
};

[[nodiscard]] std::span<const Exclusion> exclusions();
// Throws UserError for an unknown key.
[[nodiscard]] const Trait& trait_of(std::string_view key);
// Throws UserError for the first row whose two traits are both given, such as "sync is 'asp', and staleness
// is 1: ", then the reason and the remedy. said: by key, the text for the trait; empty for the usual text.
void check_exclusions(const std::map<std::string, std::string, std::less<>>& said);

}  // namespace pipedream
