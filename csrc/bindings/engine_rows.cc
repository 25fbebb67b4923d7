#include "bindings/engine_rows.h"

#include "bindings/id_caster.h"

namespace py = pybind11;

namespace pipedream {

py::list version_rows(const std::vector<VersionsRead>& versions) {
  py::list pairs;
  for (const VersionsRead& read : versions) {
    pairs.append(py::make_tuple(read.forward, read.backward));
  }
  return pairs;
}

py::list span_rows(const std::vector<Span>& spans) {
  py::list rows;
  for (const Span& span : spans) {
    rows.append(py::make_tuple(opcode_name(span.opcode), span.stage, span.minibatch, span.microbatch,
                               span.asked_ns, span.ready_ns, span.completed_ns, span.wait_ns,
                               span.compute_ns));
  }
  return rows;
}

py::dict totals_entry(const EngineTotals& totals) {
  py::dict entries;
  entries["num_work_items"] = totals.num_work_items;
  entries["wait_ns"] = totals.wait_ns;
  entries["compute_ns"] = totals.compute_ns;
  entries["elapsed_ns"] = totals.elapsed_ns;
  return entries;
}

}  // namespace pipedream
