// Lists the pairs of options that exclude each other, each pair once, as data. check_schedule_options() uses
// the table to refuse pairs of the core's own options, and planning/job.py uses it for pairs of Python's
// arguments. `pipedream explain --options` prints it. Pure; any thread.
#pragma once

#include <functional>
#include <map>
#include <span>
#include <string>
#include <string_view>

namespace pipedream {

// A trait is an option, or a property of a plan, a model or data. Exclusion (below) names two traits that
// exclude each other.
struct Trait {
  std::string_view key;   // its name in Python and in the rows of the table
  std::string_view name;  // its name when the table is printed
  std::string_view said;  // its text in an error, unless the caller gives a text
};

struct Exclusion {
  std::string_view first;  // the keys of two traits
  std::string_view second;
  std::string_view because;
  std::string_view remedy;
};

[[nodiscard]] std::span<const Exclusion> exclusions();
// Throws UserError for an unknown key.
[[nodiscard]] const Trait& trait_of(std::string_view key);
// Throws UserError for the first row of the table that has both of its traits in `said`. A key of `said` is a
// trait's key. The value is its text in the error, for example "staleness is 1"; if it is empty, Trait::said
// is used. The error is such as "staleness is 1, and sync is 'asp': <reason>; <remedy>".
void check_exclusions(const std::map<std::string, std::string, std::less<>>& said);

}  // namespace pipedream
