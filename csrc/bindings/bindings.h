// Declares the functions that bind the subsystems; module.cc calls them.
#pragma once

#include <pybind11/pybind11.h>

namespace pipedream {

void bind_schedule(pybind11::module_& module);
void bind_program(pybind11::module_& module);
void bind_planner(pybind11::module_& module);
void bind_simulation(pybind11::module_& module);
void bind_weights(pybind11::module_& module);
void bind_param_server(pybind11::module_& module);
void bind_worker(pybind11::module_& module);
void bind_segments(pybind11::module_& module);

}  // namespace pipedream
