// Converts records of a stage engine to rows and dicts for Python. Called with the GIL held.
#pragma once

#include <pybind11/pybind11.h>

#include <vector>

#include "stage/engine.h"

namespace pipedream {

// Rows of (version that the forward read, version that the backward read), one for each microbatch.
[[nodiscard]] pybind11::list version_rows(const std::vector<VersionsRead>& versions);
// Rows of (kind, stage, minibatch, microbatch, asked, ready, completed, wait, compute), the last five in ns.
[[nodiscard]] pybind11::list span_rows(const std::vector<Span>& spans);
[[nodiscard]] pybind11::dict totals_entry(const EngineTotals& totals);

}  // namespace pipedream
