// pipedream._core: weight layout and native optimizer kernels. Pointers cross as integers: the caller
// owns the tensors and has checked dtype, contiguity and size.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <tuple>
#include <vector>

#include "bindings/bindings.h"
#include "weights/sgd.h"
#include "weights/weight_layout.h"

namespace py = pybind11;

namespace pipedream {

namespace {

using Parameter = std::tuple<std::string, std::string, std::int64_t>;  // name, dtype name, elements

// (slot_bytes, offset of each parameter)
std::pair<std::size_t, std::vector<std::size_t>> weight_layout(const std::vector<Parameter>& parameters) {
  std::vector<ParameterSpec> specs;
  for (const auto& [name, dtype, num_elements] : parameters)
    specs.push_back({name, dtype_from_name(dtype), num_elements});
  const WeightLayout layout(std::move(specs));
  std::vector<std::size_t> offsets;
  for (std::size_t parameter = 0; parameter < parameters.size(); ++parameter) {
    offsets.push_back(layout.offset_bytes(parameter));
  }
  return {layout.slot_bytes(), offsets};
}

void* pointer(std::uintptr_t address) {
  return reinterpret_cast<void*>(address);
}  // NOLINT(performance-no-int-to-ptr)

void sgd_step(const std::string& dtype, std::int64_t num_elements, std::uintptr_t weight_in,
              std::uintptr_t weight_out, std::uintptr_t gradient, std::uintptr_t momentum_buffer,
              bool first_step, double lr, double momentum, double dampening, double weight_decay,
              bool nesterov, bool maximize) {
  const SgdOptions options{lr, momentum, dampening, weight_decay, nesterov, maximize};
  sgd_step_host(options, dtype_from_name(dtype), num_elements, pointer(weight_in), pointer(weight_out),
                pointer(gradient), pointer(momentum_buffer), first_step);
}

}  // namespace

void bind_weights(py::module_& module) {
  module.def("weight_layout", &weight_layout, py::arg("parameters"),
             "(slot_bytes, offsets) of (name, dtype, num_elements) parameters in a version's flat slot.");
  module.def("sgd_step", &sgd_step, py::arg("dtype"), py::arg("num_elements"), py::arg("weight_in"),
             py::arg("weight_out"), py::arg("gradient"), py::arg("momentum_buffer"), py::arg("first_step"),
             py::arg("lr"), py::arg("momentum"), py::arg("dampening"), py::arg("weight_decay"),
             py::arg("nesterov"), py::arg("maximize"), py::call_guard<py::gil_scoped_release>(),
             "One out-of-place SGD step over host memory; addresses as integers.");
}

}  // namespace pipedream
