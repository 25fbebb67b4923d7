// Binds for pipedream._core the weight layout and the native optimizer kernels. Python passes pointers as
// integers. The caller owns the tensors and has checked dtype, contiguity and size.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <array>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "base/failure.h"
#include "bindings/bindings.h"
#include "weights/adam.h"
#include "weights/sgd.h"
#include "weights/thread_team.h"
#include "weights/weight_layout.h"

namespace py = pybind11;

namespace pipedream {

namespace {

using Parameter = std::tuple<std::string, std::string, std::int64_t>;  // name, dtype name, elements

// Returns (slot_bytes, offset of each parameter).
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
  return reinterpret_cast<void*>(address);  // NOLINT(performance-no-int-to-ptr)
}

bool on_cuda(const std::string& device) {
  if (device == "cuda") return true;
  if (device == "host") return false;
  throw UserError("device is '" + device + "'; it must be 'host' or 'cuda'");
}

void sgd_step(const py::sequence& tensors, const std::string& dtype, bool first_step, double lr,
              double momentum, double dampening, double weight_decay, bool nesterov, bool maximize,
              double gradient_scale, const std::string& device, std::uintptr_t stream, int num_threads) {
  const SgdOptions options{lr, momentum, dampening, weight_decay, nesterov, maximize};
  check_sgd_options(options);
  std::vector<SgdTensor> rows;
  rows.reserve(tensors.size());
  for (const py::handle row : tensors) {
    const auto [num_elements, weight_in, weight_out, gradient, momentum_buffer, master] =
        py::cast<std::array<std::uintptr_t, 6>>(row);
    rows.push_back({static_cast<std::int64_t>(num_elements), pointer(weight_in), pointer(weight_out),
                    pointer(gradient), pointer(momentum_buffer), pointer(master)});
  }
  const bool is_cuda = on_cuda(device);
  const py::gil_scoped_release released;
  if (is_cuda) {
    sgd_step_cuda(options, dtype_from_name(dtype), rows, first_step, gradient_scale, stream);
  } else {
    sgd_step_host(options, dtype_from_name(dtype), rows, first_step, gradient_scale, num_threads);
  }
}

void adam_step(const py::sequence& tensors, const std::string& dtype, std::int64_t step, double lr,
               double beta1, double beta2, double eps, double weight_decay, bool decoupled_weight_decay,
               bool amsgrad, bool maximize, bool nesterov, double momentum_decay, double momentum_product,
               double gradient_scale, const std::string& device, std::uintptr_t stream, int num_threads) {
  const AdamOptions options{
      lr,       beta1,          beta2,           eps, weight_decay, decoupled_weight_decay, amsgrad, maximize,
      nesterov, momentum_decay, momentum_product};
  check_adam_options(options);
  std::vector<AdamTensor> rows;
  rows.reserve(tensors.size());
  for (const py::handle row : tensors) {
    const auto [num_elements, weight_in, weight_out, gradient, exp_avg, exp_avg_sq, max_exp_avg_sq, master] =
        py::cast<std::array<std::uintptr_t, 8>>(row);
    rows.push_back({static_cast<std::int64_t>(num_elements), pointer(weight_in), pointer(weight_out),
                    pointer(gradient), pointer(exp_avg), pointer(exp_avg_sq), pointer(max_exp_avg_sq),
                    pointer(master)});
  }
  const bool is_cuda = on_cuda(device);
  const py::gil_scoped_release released;
  if (is_cuda) {
    adam_step_cuda(options, dtype_from_name(dtype), rows, step, gradient_scale, stream);
  } else {
    adam_step_host(options, dtype_from_name(dtype), rows, step, gradient_scale, num_threads);
  }
}

}  // namespace

void bind_weights(py::module_& module) {
  module.def("weight_layout", &weight_layout, py::arg("parameters"));
  module.def("sgd_step", &sgd_step, py::arg("tensors"), py::kw_only(), py::arg("dtype"),
             py::arg("first_step"), py::arg("lr"), py::arg("momentum"), py::arg("dampening"),
             py::arg("weight_decay"), py::arg("nesterov"), py::arg("maximize"), py::arg("gradient_scale") = 1,
             py::arg("device") = "host", py::arg("stream") = 0, py::arg("num_threads") = 1);
  module.def("adam_step", &adam_step, py::arg("tensors"), py::kw_only(), py::arg("dtype"), py::arg("step"),
             py::arg("lr"), py::arg("beta1"), py::arg("beta2"), py::arg("eps"), py::arg("weight_decay"),
             py::arg("decoupled_weight_decay"), py::arg("amsgrad"), py::arg("maximize"),
             py::arg("nesterov") = false, py::arg("momentum_decay") = 0, py::arg("momentum_product") = 0,
             py::arg("gradient_scale") = 1, py::arg("device") = "host", py::arg("stream") = 0,
             py::arg("num_threads") = 1);
  module.def(
      "share_openmp",
      [](const std::string& library_path) { return ThreadTeam::of_process().share_openmp(library_path); },
      py::arg("library_path"));
}

}  // namespace pipedream
