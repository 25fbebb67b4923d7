// Binds for pipedream._core the exact partition and the memory of plans. Called with the GIL held.
// Python passes
//   layers    as one list per figure, with one entry per layer
//   stages    as tuples (first_layer, last_layer, num_replicas)
//   factors   as a list per layer of (weight_bytes, factor_bytes, product_s), one for each weight whose
//             gradient may be pushed as factors; an empty list if no layer has such a weight
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstdint>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings/bindings.h"
#include "planner/limited_partition.h"
#include "planner/partition.h"
#include "schedule/edge.h"

namespace py = pybind11;

namespace pipedream {

namespace {

using Figures = std::vector<double>;
using FactorTuple = std::tuple<double, double, double>;
using Factors = std::vector<std::vector<FactorTuple>>;
using StageTuple = std::tuple<std::int64_t, std::int64_t, std::int64_t>;

std::vector<LayerCost> make_layers(const Figures& compute_s, const Figures& activation_bytes,
                                   const Figures& parameter_bytes, const Factors& factors = {}) {
  std::vector<LayerCost> layers;
  layers.reserve(compute_s.size());
  for (std::size_t layer = 0; layer < compute_s.size(); ++layer) {
    layers.push_back({compute_s[layer], activation_bytes.at(layer), parameter_bytes.at(layer), {}});
    if (factors.empty()) continue;
    for (const auto& [weight_bytes, factor_bytes, product_s] : factors.at(layer)) {
      layers.back().factors.push_back({weight_bytes, factor_bytes, product_s});
    }
  }
  return layers;
}

std::pair<std::vector<StageTuple>, double> partition_layers(
    const Figures& compute_s, const Figures& activation_bytes, const Figures& parameter_bytes,
    std::int64_t num_workers, double bandwidth_bytes_per_s, bool straight, const Factors& factors,
    std::int64_t num_microbatches) {
  const Partition best = partition(make_layers(compute_s, activation_bytes, parameter_bytes, factors),
                                   num_workers, bandwidth_bytes_per_s, straight, num_microbatches);
  std::vector<StageTuple> stages;
  for (const PlannedStage& stage : best.stages) {
    stages.emplace_back(stage.first_layer, stage.last_layer, stage.num_replicas);
  }
  return {std::move(stages), best.bottleneck_s};
}

std::vector<PlannedStage> make_stages(const std::vector<StageTuple>& stages) {
  std::vector<PlannedStage> planned;
  planned.reserve(stages.size());
  for (const auto& [first_layer, last_layer, num_replicas] : stages) {
    planned.push_back({first_layer, last_layer, num_replicas});
  }
  return planned;
}

// frozen_bytes: empty if no parameter is frozen.
std::vector<LayerMemory> make_memory(const Figures& saved_bytes, const Figures& forward_s,
                                     const Figures& frozen_bytes, std::size_t num_layers) {
  std::vector<LayerMemory> memory;
  memory.reserve(num_layers);
  for (std::size_t layer = 0; layer < num_layers; ++layer) {
    memory.push_back(
        {saved_bytes.at(layer), forward_s.at(layer), frozen_bytes.empty() ? 0.0 : frozen_bytes.at(layer)});
  }
  return memory;
}

py::object partition_layers_within(const Figures& compute_s, const Figures& activation_bytes,
                                   const Figures& parameter_bytes, std::int64_t num_workers,
                                   double bandwidth_bytes_per_s, const Figures& saved_bytes,
                                   const Figures& forward_s, const Figures& frozen_bytes,
                                   const PlanLimits& limits, const Factors& factors) {
  const std::vector<LayerMemory> memory = make_memory(saved_bytes, forward_s, frozen_bytes, compute_s.size());
  std::optional<LimitedPartition> best;
  {
    const py::gil_scoped_release released;
    best = partition_within(make_layers(compute_s, activation_bytes, parameter_bytes, factors), memory,
                            num_workers, bandwidth_bytes_per_s, limits);
  }
  if (!best) return py::none();
  std::vector<StageTuple> stages;
  for (const PlannedStage& stage : best->stages) {
    stages.emplace_back(stage.first_layer, stage.last_layer, stage.num_replicas);
  }
  return py::make_tuple(stages, best->bottleneck_s, best->recompute, best->memory_bytes);
}

}  // namespace

void bind_planner(py::module_& module) {
  using Shares = std::pair<double, double>;
  py::class_<MemoryCosts>(module, "MemoryCosts")
      .def(py::init([](double model_copies, double state_copies, double step_copies, double data_bytes,
                       std::int64_t num_microbatches, Shares activations, Shares gradients, bool stages_apart,
                       bool asynchronous, bool reduces_together, bool whole_tensors, bool posts_versions,
                       bool has_spares, bool drains, std::int64_t staleness) {
             return MemoryCosts{model_copies,
                                state_copies,
                                step_copies,
                                data_bytes,
                                num_microbatches,
                                {activations.first, activations.second},
                                {gradients.first, gradients.second},
                                stages_apart,
                                asynchronous,
                                reduces_together,
                                whole_tensors,
                                posts_versions,
                                has_spares,
                                drains,
                                staleness};
           }),
           py::kw_only(), py::arg("model_copies") = 1.0, py::arg("state_copies") = 0.0,
           py::arg("step_copies") = 0.0, py::arg("data_bytes") = 0.0, py::arg("num_microbatches") = 1,
           py::arg("activations") = Shares(), py::arg("gradients") = Shares(),
           py::arg("stages_apart") = false, py::arg("asynchronous") = false,
           py::arg("reduces_together") = false, py::arg("whole_tensors") = false,
           py::arg("posts_versions") = false, py::arg("has_spares") = false, py::arg("drains") = false,
           py::arg("staleness") = 0);
  module.attr("NUM_GRADIENT_SLOTS") = kNumGradientSlots;
  module.def("num_unsent_max", &num_unsent_max, py::arg("in_flight_upstream"));
  module.def("partition", &partition_layers, py::arg("compute_s"), py::arg("activation_bytes"),
             py::arg("parameter_bytes"), py::arg("num_workers"), py::arg("bandwidth_bytes_per_s"),
             py::arg("straight") = false, py::arg("factors") = Factors(), py::arg("num_microbatches") = 1,
             py::call_guard<py::gil_scoped_release>());
  module.def(
      "partition_within",
      [](const Figures& compute_s, const Figures& activation_bytes, const Figures& parameter_bytes,
         std::int64_t num_workers, double bandwidth_bytes_per_s, const Figures& saved_bytes,
         const Figures& forward_s, Figures speeds, Figures memory_bytes, const MemoryCosts& costs,
         bool may_recompute, std::vector<std::int64_t> last_layers, std::vector<std::int64_t> num_replicas,
         std::int64_t num_replicas_max, const Factors& factors, const Figures& frozen_bytes) {
        const PlanLimits limits{std::move(speeds), std::move(memory_bytes), costs,
                                may_recompute,     std::move(last_layers),  std::move(num_replicas),
                                num_replicas_max};
        return partition_layers_within(compute_s, activation_bytes, parameter_bytes, num_workers,
                                       bandwidth_bytes_per_s, saved_bytes, forward_s, frozen_bytes, limits,
                                       factors);
      },
      py::arg("compute_s"), py::arg("activation_bytes"), py::arg("parameter_bytes"), py::arg("num_workers"),
      py::arg("bandwidth_bytes_per_s"), py::kw_only(), py::arg("saved_bytes"), py::arg("forward_s"),
      py::arg("speeds"), py::arg("memory_bytes"), py::arg("costs"), py::arg("may_recompute"),
      py::arg("last_layers"), py::arg("num_replicas"), py::arg("num_replicas_max"),
      py::arg("factors") = Factors(), py::arg("frozen_bytes") = Figures());
  module.def(
      "memory_of_plan",
      [](const Figures& activation_bytes, const Figures& parameter_bytes, const Figures& saved_bytes,
         const std::vector<StageTuple>& stages, const std::vector<std::int64_t>& in_flight,
         const std::vector<std::int64_t>& num_versions, const std::vector<std::int64_t>& own_per_round,
         const std::vector<bool>& recompute, const MemoryCosts& costs, const Factors& factors,
         const Figures& frozen_bytes) {
        const std::size_t num_layers = activation_bytes.size();
        const Figures no_time(num_layers, 0.0);
        const std::vector<PlannedStage> planned = make_stages(stages);
        std::vector<StageCopies> copies;
        for (std::size_t stage = 0; stage < stages.size(); ++stage) {
          copies.push_back({planned[stage].num_replicas, in_flight.at(stage), num_versions.at(stage),
                            own_per_round.at(stage)});
        }
        return memory_of_plan(make_layers(no_time, activation_bytes, parameter_bytes, factors),
                              make_memory(saved_bytes, no_time, frozen_bytes, num_layers), planned, copies,
                              recompute, costs);
      },
      py::arg("activation_bytes"), py::arg("parameter_bytes"), py::kw_only(), py::arg("saved_bytes"),
      py::arg("stages"), py::arg("in_flight"), py::arg("num_versions"), py::arg("own_per_round"),
      py::arg("recompute"), py::arg("costs"), py::arg("factors") = Factors(),
      py::arg("frozen_bytes") = Figures());
  module.def(
      "replica_weight_bytes",
      [](double all_bytes, double largest_bytes, std::int64_t num_replicas, std::int64_t num_versions,
         const MemoryCosts& costs, std::optional<double> share, double factored_bytes, double factor_bytes) {
        const double owned = share.value_or(1 / static_cast<double>(num_replicas));
        return replica_weight_bytes({all_bytes, largest_bytes, factored_bytes, factor_bytes}, num_replicas,
                                    num_versions, {owned, costs.whole_tensors ? 0 : owned}, costs);
      },
      py::arg("all_bytes"), py::arg("largest_bytes"), py::kw_only(), py::arg("num_replicas"),
      py::arg("num_versions"), py::arg("costs"), py::arg("share") = py::none(),
      py::arg("factored_bytes") = 0.0, py::arg("factor_bytes") = 0.0);
}

}  // namespace pipedream
