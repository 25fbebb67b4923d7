// Defines the extension module pipedream._core. Each subsystem is bound in a file of its own. This file calls
// the functions that bind them, and translates errors.
#include <pybind11/pybind11.h>

#include "base/failure.h"
#include "bindings/bindings.h"

namespace py = pybind11;

PYBIND11_MODULE(_core, module) {
  module.doc() = "The C++ core of pipedream: schedules, planner, pool, weights, transport, stage engine.";
  py::register_exception_translator([](std::exception_ptr exception) {
    try {
      if (exception) std::rethrow_exception(exception);
    } catch (const pipedream::UserError& error) {
      PyErr_SetString(PyExc_ValueError, error.what());
    }
  });
  pipedream::bind_schedule(module);
  pipedream::bind_program(module);
  pipedream::bind_planner(module);
  pipedream::bind_simulation(module);
  pipedream::bind_weights(module);
  pipedream::bind_param_server(module);
  pipedream::bind_worker(module);
  pipedream::bind_segments(module);
}
