#include "planner/stage_memory.h"

#include <algorithm>
#include <numeric>

namespace pipedream {
namespace {

// Between a replica of one stage and those of its neighbour.
std::int64_t num_edges(const StageCopies& stage, const StageCopies& neighbour) {
  if (neighbour.num_replicas == 0) return 0;
  return neighbour.num_replicas / std::gcd(stage.num_replicas, neighbour.num_replicas);
}

std::int64_t divide_up(std::int64_t number, std::int64_t by) { return (number + by - 1) / by; }

}  // namespace

StageBytes StageBytes::from(const std::vector<LayerCost>& layers, std::size_t first_layer) {
  StageBytes bytes;
  bytes.is_first = first_layer == 0;
  bytes.input = bytes.is_first ? 0.0 : layers[first_layer - 1].activation_bytes;
  bytes.widest = bytes.input;
  return bytes;
}

void StageBytes::add(const std::vector<LayerCost>& layers, const std::vector<LayerMemory>& memory,
                     std::size_t layer) {
  parameters += layers[layer].parameter_bytes;
  saved += memory[layer].saved_bytes;
  widest = std::max(widest, layers[layer].activation_bytes);
  largest = std::max(largest, layers[layer].parameter_bytes);
  for (const FactoredWeight& weight : layers[layer].factors) factored.add(weight);
  is_last = layer + 1 == layers.size();
  output = is_last ? 0.0 : layers[layer].activation_bytes;
}

double own_bytes(const StageBytes& stage, const StageCopies& copies, const StageCopies& below, bool recompute,
                 const MemoryCosts& costs) {
  const auto in_flight = static_cast<double>(copies.in_flight);
  const auto replicas = static_cast<double>(copies.num_replicas);
  const double exchanged = copies.num_replicas == 1 ? 0.0 : 1 + 2 * (replicas - 1) / replicas;
  double weights = (in_flight + costs.fixed_copies + exchanged) * stage.parameters;
  double step = costs.step_copies * stage.largest;
  if (!stage.factored.empty()) {
    const FactoredWeights::Sum factored = stage.factored.of(copies.num_replicas);
    weights += (replicas + 1) * factored.factor_bytes - (1 + exchanged) * factored.weight_bytes;
    step += factored.largest_weight_bytes + replicas * factored.largest_factor_bytes;
  }
  const double data = ((stage.is_first ? in_flight : 0.0) + (stage.is_last ? 1.0 : 0.0)) * costs.data_bytes;
  const double transient = std::max(2 * stage.widest, step);
  const double served = costs.asynchronous && copies.num_replicas > 1
                            ? stage.parameters + costs.step_copies * stage.largest
                            : 0;
  const double slots = 2 * static_cast<double>(num_edges(copies, below)) * stage.output;
  const double common = weights + data + transient + served + slots;
  if (recompute) {
    const double input = stage.is_first ? costs.data_bytes : stage.input;
    return common + stage.saved + input + (stage.is_last ? 0.0 : in_flight + 2) * stage.output;
  }
  return common + in_flight * std::max(stage.saved + stage.output - stage.input, 0.0);
}

double crossing_bytes(double input_bytes, const StageCopies& copies, const StageCopies& above) {
  if (above.num_replicas == 0 || copies.num_replicas == 0) return 0;
  const std::int64_t edges = num_edges(copies, above);
  const std::int64_t slots = edges * (divide_up(copies.in_flight, edges) + 1);
  const std::int64_t upstream = edges * divide_up(above.in_flight, num_edges(above, copies));
  return static_cast<double>(slots + upstream + 1) * input_bytes;
}

double crossing_bytes_max(double input_bytes, const StageCopies& copies, std::int64_t num_workers) {
  // u <= num_workers, and U <= u (n_{s-1} gcd / r + 1) with n_{s-1} r_{s-1} <= n r + 2 r_{s-1}.
  const std::int64_t slots = copies.in_flight + 2 * num_workers;
  const std::int64_t upstream =
      copies.in_flight + divide_up(2 * num_workers, copies.num_replicas) + num_workers;
  return static_cast<double>(slots + upstream + 1) * input_bytes;
}

std::vector<double> memory_of_plan(const std::vector<LayerCost>& layers,
                                   const std::vector<LayerMemory>& memory,
                                   const std::vector<PlannedStage>& stages,
                                   const std::vector<std::int64_t>& in_flight,
                                   const std::vector<bool>& recompute, const MemoryCosts& costs) {
  std::vector<double> needed;
  const auto copies_of = [&](std::size_t stage) {
    return stage < stages.size() ? StageCopies{stages[stage].num_replicas, in_flight[stage]} : StageCopies{};
  };
  StageCopies above{};
  for (std::size_t stage = 0; stage < stages.size(); ++stage) {
    const auto first_layer = static_cast<std::size_t>(stages[stage].first_layer);
    StageBytes bytes = StageBytes::from(layers, first_layer);
    for (std::size_t layer = first_layer; layer <= static_cast<std::size_t>(stages[stage].last_layer);
         ++layer) {
      bytes.add(layers, memory, layer);
    }
    const StageCopies copies = copies_of(stage);
    needed.push_back(own_bytes(bytes, copies, copies_of(stage + 1), recompute[stage], costs) +
                     crossing_bytes(bytes.input, copies, above));
    above = copies;
  }
  return needed;
}

}  // namespace pipedream
