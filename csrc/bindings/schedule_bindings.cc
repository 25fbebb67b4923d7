// pipedream._core: programs, weight versions and their replay. Ids cross as plain ints, opcodes as their
// names. Called with the GIL held.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstdint>
#include <string>
#include <vector>

#include "base/failure.h"
#include "bindings/bindings.h"
#include "schedule/program.h"
#include "schedule/validator.h"

namespace py = pybind11;

namespace pipedream {

namespace {

ProgramOptions make_options(const std::string& schedule, std::int64_t stage, std::int64_t num_stages,
                            std::int64_t in_flight) {
  return {schedule, StageIndex(stage), num_stages, in_flight};
}

py::dict replay_schedule(const std::string& schedule, const std::vector<std::int64_t>& in_flight,
                         std::int64_t num_minibatches) {
  if (in_flight.empty())
    throw UserError("in_flight is empty; it has one number per stage, and at least one stage");
  const ReplayReport report = [&] {
    const py::gil_scoped_release release;
    std::vector<StageProgram> programs;
    const auto num_stages = static_cast<std::int64_t>(in_flight.size());
    for (std::int64_t stage = 0; stage < num_stages; ++stage) {
      const ProgramOptions options =
          make_options(schedule, stage, num_stages, in_flight[static_cast<std::size_t>(stage)]);
      programs.push_back({options, make_program(options, num_minibatches)});
    }
    return replay(programs, num_minibatches);
  }();
  py::dict result;
  result["ok"] = report.ok;
  result["error"] = report.error;
  result["versions_live_max"] = report.versions_live_max;
  result["activations_live_max"] = report.activations_live_max;
  result["activations_queued_max"] = report.activations_queued_max;
  result["gradients_queued_max"] = report.gradients_queued_max;
  return result;
}

void bind_instruction(py::module_& module) {
  py::class_<Instruction>(module, "Instruction", "One step of a stage's program.")
      .def_property_readonly("opcode",
                             [](const Instruction& instruction) { return opcode_name(instruction.opcode); })
      .def_property_readonly("minibatch",
                             [](const Instruction& instruction) { return instruction.minibatch.value(); })
      .def_property_readonly("microbatch",
                             [](const Instruction& instruction) { return instruction.microbatch.value(); })
      .def_property_readonly("version",
                             [](const Instruction& instruction) { return instruction.version.value(); })
      .def(
          "__eq__",
          [](const Instruction& instruction, const Instruction& other) { return instruction == other; },
          py::is_operator())
      .def("__repr__", [](const Instruction& instruction) { return "<" + to_string(instruction) + ">"; });
}

}  // namespace

void bind_schedule(py::module_& module) {
  bind_instruction(module);
  module.def("derive_in_flight", &derive_in_flight, py::arg("num_replicas"),
             "Minibatches in flight at each replica of every stage: n_s = 1 + ceil(n_{s+1} r_{s+1} / r_s).");
  module.def(
      "make_program",
      [](const std::string& schedule, std::int64_t stage, std::int64_t num_stages, std::int64_t in_flight,
         std::int64_t num_minibatches) {
        return make_program(make_options(schedule, stage, num_stages, in_flight), num_minibatches);
      },
      py::arg("schedule"), py::arg("stage"), py::arg("num_stages"), py::arg("in_flight"),
      py::arg("num_minibatches"), "The whole list of one stage's instructions.");
  const auto def_version = [&](const char* name, auto version, const char* doc) {
    module.def(
        name,
        [version](const std::string& schedule, std::int64_t stage, std::int64_t num_stages,
                  std::int64_t in_flight, std::int64_t minibatch) {
          return version(make_options(schedule, stage, num_stages, in_flight), MinibatchId(minibatch))
              .value();
        },
        py::arg("schedule"), py::arg("stage"), py::arg("num_stages"), py::arg("in_flight"),
        py::arg("minibatch"), doc);
  };
  def_version("forward_version", &forward_version, "The weight version that the minibatch's forward reads.");
  def_version("backward_version", &backward_version,
              "The weight version that the minibatch's backward reads.");
  module.def(
      "num_versions_kept",
      [](const std::string& schedule, std::int64_t stage, std::int64_t num_stages, std::int64_t in_flight) {
        return num_versions_kept(make_options(schedule, stage, num_stages, in_flight));
      },
      py::arg("schedule"), py::arg("stage"), py::arg("num_stages"), py::arg("in_flight"),
      "Weight versions kept at the stage: how many slots it needs.");
  module.def(
      "replay", &replay_schedule, py::arg("schedule"), py::arg("in_flight"), py::arg("num_minibatches"),
      "Replays the programs of all stages, one number in flight per stage. A dict: ok, error, the most "
      "that was alive per stage (versions_live_max, activations_live_max) and waiting per boundary "
      "(activations_queued_max, gradients_queued_max).");
}

}  // namespace pipedream
