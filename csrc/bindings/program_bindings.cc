// Binds for pipedream._core the opcodes, programs as data and as text, and the replay that checks programs.
// For Python an opcode or a phase is its name. Called with the GIL held.
#include <pybind11/operators.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/failure.h"
#include "bindings/bindings.h"
#include "bindings/id_caster.h"
#include "schedule/listed_program.h"
#include "schedule/transfers.h"
#include "schedule/validator.h"

namespace py = pybind11;

namespace pipedream {

namespace {

using Programs = std::vector<std::vector<Instruction>>;

// Rows of (boundary, number of validation minibatches that are evaluated there).
using EvaluatedFields = std::vector<std::pair<MinibatchId, std::int64_t>>;

std::vector<Instruction> make_worker_program(const ScheduleOptions& options, Rank rank,
                                             std::int64_t num_minibatches, const EvaluatedFields& evaluated) {
  const py::gil_scoped_release release;
  if (evaluated.empty()) return make_program(options, rank, num_minibatches);
  std::vector<Evaluated> all;
  for (const auto& [boundary, number] : evaluated) all.push_back({boundary, number});
  return make_program(options, rank, num_minibatches, all);
}

ReplayReport replay_programs(const ScheduleOptions& options, std::int64_t num_minibatches,
                             std::optional<Programs> programs) {
  const py::gil_scoped_release release;
  if (!programs) {
    programs.emplace();
    for (std::int64_t rank = 0; rank < num_workers(options); ++rank) {
      programs->push_back(make_program(options, Rank(rank), num_minibatches));
    }
  }
  return replay(options, *programs, num_minibatches);
}

py::dict to_dict(const ReplayReport& report) {
  py::dict result;
  result["ok"] = report.ok;
  result["error"] = report.error;
  result["versions_live_max"] = report.versions_live_max;
  result["activations_live_max"] = report.activations_live_max;
  py::list edges;
  for (const auto& [edge, queued_max] : report.edges) edges.append(py::make_tuple(edge, queued_max));
  result["edges"] = edges;
  return result;
}

// The names of the values of Scope, Stash and Duration (schedule/opcode.h), in the order of the values.
constexpr auto kScopes = std::to_array<const char*>({"microbatch", "round", "boundary"});
constexpr auto kStashes = std::to_array<const char*>({"none", "kept", "restored", "released"});
constexpr auto kDurations =
    std::to_array<const char*>({"none", "forward", "recompute", "backward", "update"});

void bind_opcodes(py::module_& module) {
  py::class_<OpcodeTraits>(module, "OpcodeTraits")
      .def_readonly("name", &OpcodeTraits::name)
      .def_readonly("meaning", &OpcodeTraits::meaning)
      .def_readonly("letter", &OpcodeTraits::letter)
      .def_readonly("travels", &OpcodeTraits::travels)
      .def_readonly("writes_version", &OpcodeTraits::writes_version)
      .def_property_readonly(
          "scope",
          [](const OpcodeTraits& traits) { return kScopes.at(static_cast<std::size_t>(traits.scope)); })
      .def_property_readonly(
          "stash",
          [](const OpcodeTraits& traits) { return kStashes.at(static_cast<std::size_t>(traits.stash)); })
      .def_property_readonly("duration", [](const OpcodeTraits& traits) {
        return kDurations.at(static_cast<std::size_t>(traits.duration));
      });
  py::dict opcodes;
  for (const OpcodeTraits& traits : kOpcodeTraits) {
    opcodes[traits.name] = py::cast(traits, py::return_value_policy::reference);
  }
  module.attr("OPCODES") = opcodes;
}

void bind_edge(py::module_& module) {
  py::class_<Edge>(module, "Edge")
      .def(py::init([](const std::string& kind, StageIndex from_stage, StageIndex to_stage,
                       ReplicaIndex from_replica, ReplicaIndex to_replica) {
             const auto found = find_edge_kind(kind);
             if (!found) throw UserError("edge kind \"" + kind + "\" is unknown");
             return Edge{*found, {from_stage, from_replica}, {to_stage, to_replica}};
           }),
           py::arg("kind"), py::arg("from_stage"), py::arg("to_stage"), py::arg("from_replica") = 0,
           py::arg("to_replica") = 0)
      .def_property_readonly("kind", [](const Edge& edge) { return edge_kind_name(edge.kind); })
      .def_property_readonly("from_stage", [](const Edge& edge) { return edge.from.stage; })
      .def_property_readonly("to_stage", [](const Edge& edge) { return edge.to.stage; })
      .def_property_readonly("from_replica", [](const Edge& edge) { return edge.from.replica; })
      .def_property_readonly("to_replica", [](const Edge& edge) { return edge.to.replica; })
      .def(py::self == py::self)
      .def("__hash__", [](const Edge& edge) { return static_cast<py::ssize_t>(EdgeHash()(edge)); })
      .def("__str__", [](const Edge& edge) { return to_string(edge); })
      .def("__repr__", [](const Edge& edge) { return "<" + to_string(edge) + ">"; });
  module.def("edges_of", &edges_of, py::arg("options"));
  module.def(
      "items_of",
      [](const ScheduleOptions& options, const Edge& edge) {
        const EdgeItems items = items_of(options, edge);
        return std::pair(items.first, items.stride);
      },
      py::arg("options"), py::arg("edge"));
}

void bind_instruction(py::module_& module) {
  py::class_<Instruction>(module, "Instruction")
      .def_property_readonly("opcode",
                             [](const Instruction& instruction) { return opcode_name(instruction.opcode); })
      .def_property_readonly(
          "traits",
          [](const Instruction& instruction) -> const OpcodeTraits& { return traits_of(instruction.opcode); },
          py::return_value_policy::reference)
      .def_readonly("stage", &Instruction::stage)
      .def_readonly("replica", &Instruction::replica)
      .def_readonly("minibatch", &Instruction::minibatch)
      .def_readonly("microbatch", &Instruction::microbatch)
      .def_readonly("version", &Instruction::version)
      .def_property_readonly("edge",
                             [](const Instruction& instruction) -> std::optional<Edge> {
                               if (!travels(instruction.opcode)) return std::nullopt;
                               return instruction.edge;
                             })
      .def(py::self == py::self)
      .def("__str__", [](const Instruction& instruction) { return to_string(instruction); })
      .def("__repr__", [](const Instruction& instruction) { return "<" + to_string(instruction) + ">"; });
}

void bind_listed_program(py::module_& module) {
  py::class_<ListedProgram, std::shared_ptr<ListedProgram>>(module, "ListedProgram")
      .def(py::init([](const std::string& text) {
             const py::gil_scoped_release release;
             return std::make_shared<ListedProgram>(ListedProgram::parse(text));
           }),
           py::arg("text"))
      .def_static(
          "of",
          [](const ScheduleOptions& options) {
            const py::gil_scoped_release release;
            return std::make_shared<ListedProgram>(ListedProgram::of(options));
          },
          py::arg("options"))
      .def_property_readonly("text", &ListedProgram::to_text)
      .def_property_readonly("note_on_unstashed", &ListedProgram::note_on_unstashed)
      .def_property_readonly("placement", &ListedProgram::placement)
      .def_property_readonly("num_stages", &ListedProgram::num_stages)
      .def_property_readonly("num_microbatches", &ListedProgram::num_microbatches)
      .def_property_readonly("minibatches_per_body", &ListedProgram::minibatches_per_body)
      .def_property_readonly("num_minibatches_listed", &ListedProgram::num_minibatches_listed)
      .def_property_readonly("versions_kept", &ListedProgram::versions_kept)
      .def_property_readonly("in_flight", &ListedProgram::in_flight)
      .def(py::self == py::self);
}

void bind_programs(py::module_& module) {
  module.def("make_program", &make_worker_program, py::arg("options"), py::arg("rank"),
             py::arg("num_minibatches"), py::arg("evaluated") = EvaluatedFields());
  module.def(
      "add_transfers",
      [](const ScheduleOptions& options, const Programs& computed, std::int64_t num_minibatches) {
        const py::gil_scoped_release release;
        Programs programs;
        for (std::size_t rank = 0; rank < computed.size(); ++rank) {
          programs.push_back(
              add_transfers(options, Rank(static_cast<std::int64_t>(rank)), computed[rank], num_minibatches));
        }
        return programs;
      },
      py::arg("options"), py::arg("programs"), py::arg("num_minibatches"));
  module.attr("NUM_EVALUATION_SLOTS") = kNumEvaluationSlots;
  module.attr("EVALUATED_MINIBATCHES_MAX") = kEvaluatedMinibatchesMax;
  module.def("print_programs", &print_programs, py::arg("programs"));
  module.def(
      "parse_programs", [](const std::string& text) { return parse_programs(text); }, py::arg("text"));
  module.def(
      "phase_of",
      [](const ScheduleOptions& options, const Instruction& instruction,
         std::optional<std::int64_t> num_minibatches) {
        return phase_name(phase_of(options, instruction, num_minibatches));
      },
      py::arg("options"), py::arg("instruction"), py::arg("num_minibatches"));
  module.def(
      "replay",
      [](const ScheduleOptions& options, std::int64_t num_minibatches, std::optional<Programs> programs) {
        return to_dict(replay_programs(options, num_minibatches, std::move(programs)));
      },
      py::arg("options"), py::arg("num_minibatches"), py::arg("programs") = py::none());
}

}  // namespace

void bind_program(py::module_& module) {
  bind_opcodes(module);
  bind_edge(module);
  bind_instruction(module);
  bind_listed_program(module);
  bind_programs(module);
}

}  // namespace pipedream
