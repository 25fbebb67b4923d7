#include "planner/stage_memory.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "schedule/edge.h"
#include "schedule/shard_sizes.h"

namespace pipedream {
namespace {

// Returns the number of edges from one replica of the stage to replicas of its neighbour.
std::int64_t num_edges(const StageCopies& stage, const StageCopies& neighbour) {
  if (neighbour.num_replicas == 0) return 0;
  return neighbour.num_replicas / std::gcd(stage.num_replicas, neighbour.num_replicas);
}

std::int64_t divide_up(std::int64_t number, std::int64_t by) { return (number + by - 1) / by; }

// How many bytes a chunk's slot is larger than the chunk: for the list of the chunk's pieces and for
// alignment.
constexpr double kBesidesChunkBytes = 512;

double beside_chunks_bytes(double bytes) {
  return std::floor(bytes / static_cast<double>(kShardChunkBytesMin)) * kBesidesChunkBytes;
}

double largest_tensor(const ReplicaWeights& weights) {
  return std::min(weights.largest, weights.all - weights.factored);
}

// Returns the most bytes of dense weights that one replica may own.
double shard_bytes(const ReplicaWeights& weights, std::int64_t num_replicas, const ShardShare& share,
                   const MemoryCosts& costs) {
  const double even = share.most * (weights.all - weights.factored);
  if (!costs.whole_tensors) return even;
  return even + (1 - 1 / static_cast<double>(num_replicas)) * largest_tensor(weights);
}

// Returns the bytes of gradients and of their copies, at a stage with shards.
double gradient_bytes(const ReplicaWeights& weights, std::int64_t num_versions, double others,
                      const MemoryCosts& costs) {
  std::int64_t rounds = 1 + (costs.staleness + 1) / 2;
  if (weights.factored > 0) ++rounds;
  if (costs.has_spares && num_versions + costs.staleness > 1) ++rounds;
  const double copies = others + beside_chunks_bytes(others);
  return static_cast<double>(rounds) * (weights.all - weights.factored + copies + weights.factors);
}

// Returns the bytes of the slots for other replicas' pushes and for pulls, at a stage with shards.
double slots_bytes(const ReplicaWeights& weights, std::int64_t num_replicas, double shard, double others,
                   const MemoryCosts& costs) {
  const auto num_others = static_cast<double>(num_replicas - 1);
  double pushed = shard + weights.factors + beside_chunks_bytes(shard);
  if (costs.whole_tensors) pushed += largest_tensor(weights);
  return num_others * pushed + (costs.posts_versions && !costs.asynchronous ? 0 : others);
}

ReplicaWeights weights_of(const StageBytes& stage, const FactoredWeights::Sum& factored) {
  return {stage.parameters, stage.largest, factored.weight_bytes, factored.factor_bytes};
}

// The encoded items that a replica exchanges with one neighbouring stage, over num_channels channels in each
// direction.
struct EncodedItems {
  double item_bytes = 0;  // bytes of a microbatch's item
  std::int64_t num_channels = 0;
  CodecShares received;
  std::int64_t num_slots = 0;
  CodecShares sent;
  std::int64_t num_unsent = 0;
};
double encoded_bytes(const EncodedItems& items, bool stages_apart) {
  const double num_received = stages_apart ? 1 : static_cast<double>(items.num_slots);
  const double num_sent = stages_apart ? 1 : static_cast<double>(items.num_unsent);
  const double of_channel =
      num_received * items.received.wire + num_sent * items.sent.wire + items.sent.residual;
  return static_cast<double>(items.num_channels) * of_channel * items.item_bytes;
}

// Returns the number of minibatches to which a replica's microbatches in flight belong.
std::int64_t num_minibatches_of(const StageCopies& copies, const MemoryCosts& costs) {
  const std::int64_t later = divide_up((copies.in_flight - 1) * copies.num_replicas, costs.num_microbatches);
  return std::min(copies.in_flight, 1 + later);
}

// Returns the share of the dense weights that a replica owns. A search does not know the number of spares
// yet. If there may be spares, or if shards have whole tensors, a replica may own less or nothing.
ShardShare share_of(std::int64_t num_replicas, const MemoryCosts& costs) {
  const double even = 1 / static_cast<double>(num_replicas);
  return {even, costs.has_spares || costs.whole_tensors ? 0 : even};
}

// Bytes of the temporaries of an optimizer's step.
double step_bytes(const StageBytes& stage, std::int64_t num_replicas, const MemoryCosts& costs) {
  double step = costs.step_copies * stage.largest;
  FactoredWeights::Sum factored;
  if (!stage.factored.empty()) {
    factored = stage.factored.of(num_replicas);
    step += costs.whole_tensors ? factored.weight_bytes : factored.largest_weight_bytes;
    step += static_cast<double>(num_replicas) * factored.largest_factor_bytes;
  }
  if (num_replicas == 1 || costs.reduces_together) return step;
  const double shard =
      shard_bytes(weights_of(stage, factored), num_replicas, share_of(num_replicas, costs), costs);
  if (costs.whole_tensors) return step + shard;
  const auto chunk = static_cast<double>(shard_chunk_bytes_max(static_cast<std::size_t>(shard)));
  return step + (costs.drains ? std::min(shard, chunk) : 0);
}

}  // namespace

double replica_weight_bytes(const ReplicaWeights& weights, std::int64_t num_replicas,
                            std::int64_t num_versions, const ShardShare& share, const MemoryCosts& costs) {
  const auto versions = static_cast<double>(num_versions + costs.staleness);
  const double kept = (versions + costs.model_copies) * weights.all;
  if (num_replicas == 1) return kept + (1 + costs.state_copies) * weights.all;
  if (costs.reduces_together) return kept + (2 + costs.state_copies) * weights.all;
  const double shard = shard_bytes(weights, num_replicas, share, costs);
  const double others = (1 - share.least) * (weights.all - weights.factored);
  double needed = kept + costs.state_copies * (shard + weights.factored) +
                  gradient_bytes(weights, num_versions, others, costs) +
                  slots_bytes(weights, num_replicas, shard, others, costs);
  if (costs.asynchronous) needed += static_cast<double>(num_replicas) * shard;
  return needed;
}

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
  frozen += memory[layer].frozen_bytes;
  saved += memory[layer].saved_bytes;
  widest = std::max(widest, layers[layer].activation_bytes);
  largest = std::max(largest, layers[layer].parameter_bytes);
  for (const FactoredWeight& weight : layers[layer].factors) factored.add(weight);
  is_last = layer + 1 == layers.size();
  output = is_last ? 0.0 : layers[layer].activation_bytes;
}

StageCopies StageCopies::stashing(std::int64_t num_replicas, std::int64_t in_flight,
                                  std::int64_t num_microbatches) {
  const std::int64_t own_per_round = std::lcm(num_microbatches, num_replicas) / num_replicas;
  return {num_replicas, in_flight, 1 + divide_up(in_flight - 1, own_per_round), own_per_round};
}

double own_bytes(const StageBytes& stage, const StageCopies& copies, const StageCopies& below, bool recompute,
                 const MemoryCosts& costs) {
  const auto in_flight = static_cast<double>(copies.in_flight);
  const auto m = static_cast<double>(costs.num_microbatches);
  const FactoredWeights::Sum factored =
      stage.factored.empty() ? FactoredWeights::Sum{} : stage.factored.of(copies.num_replicas);
  const double weights =
      replica_weight_bytes(weights_of(stage, factored), copies.num_replicas, copies.num_versions,
                           share_of(copies.num_replicas, costs), costs);
  const double step = step_bytes(stage, copies.num_replicas, costs);
  const double num_ends = (stage.is_first ? 1.0 : 0.0) + (stage.is_last ? 1.0 : 0.0);
  const double data = num_ends * static_cast<double>(num_minibatches_of(copies, costs)) * costs.data_bytes;
  const double added = copies.own_per_round > 1 ? stage.largest : 0;
  const double transient = std::max(2 * stage.widest / m + added, step);
  const double served = costs.asynchronous && copies.num_replicas > 1 ? step : 0;
  const double output = stage.output / m;
  const double slots = static_cast<double>(kNumGradientSlots * num_edges(copies, below)) * output;
  const double encoded = encoded_bytes({.item_bytes = output,
                                        .num_channels = num_edges(copies, below),
                                        .received = costs.gradients,
                                        .num_slots = kNumGradientSlots,
                                        .sent = costs.activations,
                                        .num_unsent = num_unsent_max(copies.in_flight)},
                                       costs.stages_apart);
  const double frozen = costs.model_copies * stage.frozen;
  const double common = weights + frozen + data + transient + served + slots + encoded;
  if (recompute) {
    const double input = stage.is_first ? costs.data_bytes / m : stage.input / m;
    return common + stage.saved / m + input + (stage.is_last ? 0.0 : in_flight + 2) * output;
  }
  return common + in_flight * std::max((stage.saved + stage.output - stage.input) / m, 0.0);
}

double crossing_bytes(double input_bytes, const StageCopies& copies, const StageCopies& above,
                      const MemoryCosts& costs) {
  if (above.num_replicas == 0 || copies.num_replicas == 0) return 0;
  const std::int64_t edges = num_edges(copies, above);
  const std::int64_t slots = divide_up(copies.in_flight, edges) + 1;
  const std::int64_t upstream = edges * divide_up(above.in_flight, num_edges(above, copies));
  const double input = input_bytes / static_cast<double>(costs.num_microbatches);
  const double encoded = encoded_bytes({.item_bytes = input,
                                        .num_channels = edges,
                                        .received = costs.activations,
                                        .num_slots = slots,
                                        .sent = costs.gradients,
                                        .num_unsent = num_unsent_max(above.in_flight)},
                                       costs.stages_apart);
  return static_cast<double>(edges * slots + upstream + 1) * input + encoded;
}

double crossing_bytes_max(double input_bytes, const StageCopies& copies, std::int64_t num_workers,
                          const MemoryCosts& costs) {
  // These bounds follow from stage_memory.h: u <= num_workers, and U <= u (n_{s-1} gcd(r_{s-1}, r) / r + 1),
  // where n_{s-1} r_{s-1} <= n r + 2 r_{s-1}.
  const std::int64_t slots = copies.in_flight + 2 * num_workers;
  const std::int64_t upstream =
      copies.in_flight + divide_up(2 * num_workers, copies.num_replicas) + num_workers;
  const double input = input_bytes / static_cast<double>(costs.num_microbatches);
  const double encoded =
      encoded_bytes({.item_bytes = input,
                     .num_channels = num_workers,
                     .received = costs.activations,
                     .num_slots = copies.in_flight + 1,
                     .sent = costs.gradients,
                     .num_unsent = num_unsent_max(copies.in_flight * copies.num_replicas + 2)},
                    costs.stages_apart);
  return static_cast<double>(slots + upstream + 1) * input + encoded;
}

std::vector<double> memory_of_plan(const std::vector<LayerCost>& layers,
                                   const std::vector<LayerMemory>& memory,
                                   const std::vector<PlannedStage>& stages,
                                   const std::vector<StageCopies>& copies, const std::vector<bool>& recompute,
                                   const MemoryCosts& costs) {
  std::vector<double> needed;
  for (std::size_t stage = 0; stage < stages.size(); ++stage) {
    const auto first_layer = static_cast<std::size_t>(stages[stage].first_layer);
    StageBytes bytes = StageBytes::from(layers, first_layer);
    for (std::size_t layer = first_layer; layer <= static_cast<std::size_t>(stages[stage].last_layer);
         ++layer) {
      bytes.add(layers, memory, layer);
    }
    const StageCopies above = stage == 0 ? StageCopies{} : copies[stage - 1];
    const StageCopies below = stage + 1 < stages.size() ? copies[stage + 1] : StageCopies{};
    needed.push_back(own_bytes(bytes, copies[stage], below, recompute[stage], costs) +
                     crossing_bytes(bytes.input, copies[stage], above, costs));
  }
  return needed;
}

}  // namespace pipedream
