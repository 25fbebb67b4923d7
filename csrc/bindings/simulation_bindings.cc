// Binds for pipedream._core the replay of programs in time (planner/replay.h). For Python, durations are
// objects of the types in durations.h, and an opcode is its name. Called with the GIL held. A replay runs
// without the GIL, and takes it to call Python's function `shuffled`.
#include <pybind11/functional.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <array>
#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <variant>
#include <vector>

#include "base/failure.h"
#include "bindings/bindings.h"
#include "bindings/id_caster.h"
#include "planner/replay.h"

namespace py = pybind11;

namespace pipedream {

namespace {

using Figures = std::vector<double>;
using Programs = std::vector<std::vector<Instruction>>;
// A machine that several workers share: the number of its workers, and the speed of each worker when 1, 2,
// ... of them are at work at once.
using Host = std::optional<std::pair<std::size_t, Figures>>;
using Factors = std::map<std::string, Figures>;
using Shuffled = std::function<Figures(std::size_t, const std::string&)>;

template <class Value>
using OneOrEach = std::variant<Value, std::vector<Value>>;

template <class Value>
std::vector<Value> each_of(OneOrEach<Value> given, std::size_t count) {
  if (auto* const all = std::get_if<std::vector<Value>>(&given)) return std::move(*all);
  return std::vector<Value>(count, std::get<Value>(given));
}

Timing make_timing(std::vector<StageDurations> stages, std::vector<BoundaryDurations> boundaries,
                   const Host& host, Figures waking_after_ms, bool one_link, const Factors& factors,
                   Shuffled shuffled) {
  Timing timing{
      std::move(stages), std::move(boundaries), std::nullopt, std::move(waking_after_ms), one_link, {}};
  if (host) timing.shared = {host->first, host->second};
  for (const auto& [name, of_kind] : factors) {
    if (const auto opcode = find_opcode(name)) timing.spread.factors[*opcode] = of_kind;
  }
  timing.spread.shuffled = [shuffled = std::move(shuffled)](std::size_t worker, Opcode opcode) {
    return shuffled(worker, opcode_name(opcode));
  };
  return timing;
}

double steady_ms_of(const ScheduleOptions& options, std::int64_t num_minibatches,
                    std::vector<StageDurations> stages, std::vector<BoundaryDurations> boundaries,
                    const Host& host, Figures waking_after_ms, bool one_link, const Factors& factors,
                    Shuffled shuffled) {
  const Timing timing = make_timing(std::move(stages), std::move(boundaries), host,
                                    std::move(waking_after_ms), one_link, factors, std::move(shuffled));
  const py::gil_scoped_release released;
  return steady_ms(options, num_minibatches, timing);
}

// Returns (makespan_ms, bubble_share, steady_bubble_share, ms_per_minibatch). The last two are None if there
// are too few minibatches for a steady state.
py::tuple summary_fields(const TimelineSummary& summary) {
  if (!summary.steady)
    return py::make_tuple(summary.makespan_ms, summary.bubble_share, py::none(), py::none());
  return py::make_tuple(summary.makespan_ms, summary.bubble_share, summary.steady->bubble_share,
                        summary.steady->ms_per_minibatch);
}

py::tuple simulate_programs(const Programs& programs, OneOrEach<StageDurations> stages,
                            OneOrEach<BoundaryDurations> boundaries, const Host& host,
                            Figures waking_after_ms, bool one_link, const Factors& factors, Shuffled shuffled,
                            std::int64_t minibatches_per_body) {
  const std::size_t num_stages = num_stages_of(programs);
  const Timing timing = make_timing(each_of(std::move(stages), num_stages),
                                    each_of(std::move(boundaries), num_stages > 0 ? num_stages - 1 : 0), host,
                                    std::move(waking_after_ms), one_link, factors, std::move(shuffled));
  SimulatedRun simulated;
  TimelineSummary summary;
  {
    const py::gil_scoped_release released;
    simulated = simulate(programs, timing);
    summary = summarize(simulated.timeline, minibatches_per_body);
  }
  py::list timeline;
  for (const std::vector<TimedStep>& row : simulated.timeline) {
    Figures begins_ms;
    Figures ends_ms;
    for (const TimedStep& step : row) {
      begins_ms.push_back(step.begin_ms);
      ends_ms.push_back(step.end_ms);
    }
    timeline.append(py::make_tuple(begins_ms, ends_ms));
  }
  py::list transfers;
  for (const Transfer& one : simulated.transfers) {
    transfers.append(py::make_tuple(edge_kind_name(one.what), one.from_worker, one.to_worker, one.minibatch,
                                    one.microbatch, one.begin_ms, one.end_ms));
  }
  return py::make_tuple(timeline, transfers, summary_fields(summary));
}

py::tuple summarize_programs(const Programs& programs,
                             const std::vector<std::vector<std::pair<double, double>>>& spans_ms) {
  Timeline timeline;
  for (std::size_t worker = 0; worker < programs.size(); ++worker) {
    if (spans_ms.size() != programs.size() || spans_ms[worker].size() != programs[worker].size()) {
      throw UserError("spans_ms needs a begin and an end for each instruction of each worker");
    }
    std::vector<TimedStep>& row = timeline.emplace_back();
    for (std::size_t position = 0; position < programs[worker].size(); ++position) {
      const Instruction& step = programs[worker][position];
      const auto [begin_ms, end_ms] = spans_ms[worker][position];
      row.push_back({step.opcode, step.minibatch.value(), begin_ms, end_ms});
    }
  }
  return summary_fields(summarize(timeline));
}

void bind_durations(py::module_& module) {
  using Given = std::optional<double>;
  py::class_<StageDurations>(module, "StageDurations")
      .def(py::init([](double forward_ms, double backward_ms, double update_ms, Given recompute_ms,
                       double pull_ms, Given later_forward_ms, Given later_backward_ms, Given push_ms,
                       double sync_latency_ms, std::optional<std::int64_t> num_replicas, double spare_push_ms,
                       double spare_pull_ms, double spare_update_ms, double num_chunks,
                       std::vector<std::pair<double, double>> push_leads_ms, bool updates_whole,
                       const std::vector<std::array<double, 3>>& wakings_ms) {
             std::vector<WakingDurations> wakings;
             for (const auto& [forward, backward, update] : wakings_ms) {
               wakings.push_back({forward, backward, update});
             }
             return StageDurations{forward_ms,
                                   later_forward_ms.value_or(forward_ms),
                                   backward_ms,
                                   later_backward_ms.value_or(backward_ms),
                                   recompute_ms.value_or(forward_ms),
                                   update_ms,
                                   push_ms.value_or(pull_ms),
                                   pull_ms,
                                   sync_latency_ms,
                                   num_chunks,
                                   std::move(push_leads_ms),
                                   updates_whole,
                                   std::move(wakings),
                                   num_replicas,
                                   spare_push_ms,
                                   spare_pull_ms,
                                   spare_update_ms};
           }),
           py::arg("forward_ms"), py::arg("backward_ms"), py::arg("update_ms") = 0.0,
           py::arg("recompute_ms") = py::none(), py::arg("pull_ms") = 0.0,
           py::arg("later_forward_ms") = py::none(), py::arg("later_backward_ms") = py::none(),
           py::arg("push_ms") = py::none(), py::arg("sync_latency_ms") = 0.0,
           py::arg("num_replicas") = py::none(), py::arg("spare_push_ms") = 0.0,
           py::arg("spare_pull_ms") = 0.0, py::arg("spare_update_ms") = 0.0, py::arg("num_chunks") = 1.0,
           py::arg("push_leads_ms") = std::vector<std::pair<double, double>>(),
           py::arg("updates_whole") = false, py::arg("wakings_ms") = std::vector<std::array<double, 3>>())
      .def_readonly("forward_ms", &StageDurations::forward_ms)
      .def_readonly("backward_ms", &StageDurations::backward_ms)
      .def_readonly("update_ms", &StageDurations::update_ms)
      .def_readonly("pull_ms", &StageDurations::pull_ms);
  py::class_<BoundaryDurations>(module, "BoundaryDurations")
      .def(py::init([](double activation_ms, double gradient_ms, double latency_ms) {
             return BoundaryDurations{activation_ms, gradient_ms, latency_ms};
           }),
           py::arg("activation_ms"), py::arg("gradient_ms"), py::arg("latency_ms") = 0.0)
      .def_readonly("activation_ms", &BoundaryDurations::activation_ms)
      .def_readonly("gradient_ms", &BoundaryDurations::gradient_ms)
      .def_readonly("latency_ms", &BoundaryDurations::latency_ms);
}

}  // namespace

void bind_simulation(py::module_& module) {
  bind_durations(module);
  module.def("steady_ms", &steady_ms_of, py::arg("options"), py::arg("num_minibatches"), py::arg("stages"),
             py::arg("boundaries"), py::kw_only(), py::arg("host"), py::arg("waking_after_ms"),
             py::arg("one_link"), py::arg("factors"), py::arg("shuffled"));
  module.def("simulate", &simulate_programs, py::arg("programs"), py::arg("stages"), py::arg("boundaries"),
             py::kw_only(), py::arg("host"), py::arg("waking_after_ms"), py::arg("one_link"),
             py::arg("factors"), py::arg("shuffled"), py::arg("minibatches_per_body"));
  module.def("summarize", &summarize_programs, py::arg("programs"), py::arg("spans_ms"));
}

}  // namespace pipedream
