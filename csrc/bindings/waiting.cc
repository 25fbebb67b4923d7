#include "bindings/waiting.h"

#include <string>

namespace py = pybind11;

namespace pipedream {

namespace {

PyObject* g_run_failure = nullptr;  // set once, when the module is imported

}  // namespace

void bind_run_failure(py::module_& module) {
  g_run_failure = PyErr_NewException("pipedream._core.RunFailure", PyExc_RuntimeError, nullptr);
  if (g_run_failure == nullptr) throw py::error_already_set();
  module.attr("RunFailure") = py::handle(g_run_failure);
}

void raise(const Failure& failure) {
  PyErr_SetObject(g_run_failure,
                  py::make_tuple(std::string(failure_kind_name(failure.kind)), failure.message).ptr());
  throw py::error_already_set();
}

}  // namespace pipedream
