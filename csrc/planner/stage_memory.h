// Estimates the memory of one replica of a planned stage from a profile's figures: the sum that
// budget/memory.py finds for a run, or a little more. Pure arithmetic; any thread.
//
// Stage s has r replicas, each with n microbatches in flight; a minibatch has m microbatches. `input`,
// `output`, `widest` and `saved` below are bytes of a microbatch: a profile's bytes of a minibatch over m.
// Each replica receives activations over u edges, one from each upstream replica that has a microbatch in
// common with it, and gradients over d edges likewise: u = r_{s-1} / gcd(r_{s-1}, r), d = r_{s+1} / gcd(r,
// r_{s+1}).
//
//   what there is of the weights    replica_weight_bytes(), below
//   + frozen weights                as given: model_copies of them, and nothing else
//   + 2 d output                    slots for its gradients
//   + max(2 widest + largest, step) what a backward or a step makes and drops: gradients of what crosses
//                                   between layers, and of a layer's parameters where they are added to those
//                                   of microbatches before; temporaries of a layer's parameters; of weights
//                                   that go as factors with those of a step the largest gradient, and all
//                                   replicas' factors that it is made of; the means of a shard that is
//                                   updated at once, or of a chunk where a replica may have none of a round's
//                                   last minibatches
//   + the served step               with asynchronous shards: of another replica's gradient
//   + what is kept                  n (saved + output) at the first stage
//   + encoded items                 where a codec encodes what crosses: a receiver has as many as slots, a
//                                   sender as many as may not have left, and what topk has left out; where
//                                   these wait apart each channel has one in the device's memory
//   + data                          at the first and the last stage, the minibatches that n microbatches in a
//                                   row of one replica are of: min(n, 1 + ceil((n - 1) r / m))
//
// A stage but the first also has
//
//   u (ceil(n / u) + 1) input         slots: of each edge one more than it may have in flight
//   + input                           a gradient that has left and is released late
//   + U input + n max(saved + output - input, 0)    in the place of n (saved + output)
//
// as upstream has U = u ceil(n_{s-1} gcd(r_{s-1}, r) / r) microbatches of the replica in flight: n that are
// kept here, and the gradients of the others, which wait. With recompute nothing but a forward's input is
// kept, outputs until they have left, and one microbatch at a time has more: of n (saved + output) there
// remain saved + input + (n + 2) output.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "planner/partition.h"

namespace pipedream {

struct LayerMemory {
  double saved_bytes = 0;   // of a minibatch, for its backward
  double forward_s = 0;     // what a recompute adds
  double frozen_bytes = 0;  // of parameters that nobody trains
};

// Bytes that a codec adds for each byte that crosses a cut in one direction. 0: nothing is encoded.
struct CodecShares {
  double wire = 0;      // of an encoded item
  double residual = 0;  // at its sender, of what topk has left out
};

// Figures that do not depend on the plan.
struct MemoryCosts {
  double model_copies = 1;            // of the weights, besides versions and gradients: the model as given
  double state_copies = 0;            // of the weights that a replica updates: the optimizer's state
  double step_copies = 0;             // of a layer's parameters, that a step makes and drops
  double data_bytes = 0;              // of a minibatch
  std::int64_t num_microbatches = 1;  // m
  CodecShares activations = {};
  CodecShares gradients = {};
  bool stages_apart = false;  // encoded items wait in host memory, beside the device's that is counted
  // Figures of stages with replicas.
  bool asynchronous = false;      // shards: an owner's, besides versions, and a copy for each other replica
  bool reduces_together = false;  // no shards
  bool whole_tensors = false;     // shards of them, updated at once
  bool posts_versions = false;    // what is pulled lands in the slot of the next version
  bool has_spares = false;        // or may have
  bool drains = false;            // a round may have several minibatches of a replica
  std::int64_t staleness = 0;     // k, in rounds; of all stages
};

// Bytes of a stage's weights.
struct ReplicaWeights {
  double all = 0;
  double largest = 0;   // of a layer
  double factored = 0;  // whose gradients go as factors, and every replica updates
  double factors = 0;   // of one replica in a round
};

// The part of the dense weights that one replica owns.
struct ShardShare {
  double most = 0;
  double least = 0;
};

// Bytes of weights at one of r replicas with n versions: d bytes go dense and f as factors, F of those in a
// round:
//
//   (n + k + model_copies) |w|
//   straight            + (1 + state_copies) |w|    gradients, state
//   reduced together    + (2 + state_copies) |w|    gradients of two rounds
//   with shards         + g (d + c + F)             gradients of g rounds: one, one for every second of
//                                                   staleness, one more where factors or spares may wait; and
//                                                   the copies c from which those leave that share a chunk:
//                                                   of all that others own
//                       + state_copies (s + f)      s: of its shard, d / r; of whole tensors at most
//                                                   d / r + (1 - 1 / r) largest, as the largest are dealt
//                                                   first, each to who has least
//                       + (r - 1) (s + F)           slots for what the others push; of whole tensors each as
//                                                   large as the largest, which makes one more
//                       + d - s                     slots for what it pulls, if it has any
//                       + r s                       asynchronous: its own apart, a copy for each other
[[nodiscard]] double replica_weight_bytes(const ReplicaWeights& weights, std::int64_t num_replicas,
                                          std::int64_t num_versions, const ShardShare& share,
                                          const MemoryCosts& costs);

// Bytes of a stage for one minibatch, but for the parameters.
struct StageBytes {
  double parameters = 0;
  double frozen = 0;  // parameters that nobody trains
  double saved = 0;
  double input = 0;  // what crosses before it, and behind it; 0 at the ends of the model
  double output = 0;
  double widest = 0;   // that crosses between two of its layers, or before the first
  double largest = 0;  // parameters of a layer
  FactoredWeights factored;
  bool is_first = false;
  bool is_last = false;

  // A stage that begins with this layer, as yet without any.
  [[nodiscard]] static StageBytes from(const std::vector<LayerCost>& layers, std::size_t first_layer);
  // The next layer.
  void add(const std::vector<LayerCost>& layers, const std::vector<LayerMemory>& memory, std::size_t layer);
};

struct StageCopies {
  std::int64_t num_replicas = 0;   // 0: there is no such stage
  std::int64_t in_flight = 0;      // microbatches, at each
  std::int64_t num_versions = 0;   // that each keeps, but for those of staleness
  std::int64_t own_per_round = 1;  // c: a replica's microbatches of which an update is made

  // With the rounds and versions of schedule "pipedream": c = lcm(m, r) / r, and 1 + ceil((n - 1) / c).
  [[nodiscard]] static StageCopies stashing(std::int64_t num_replicas, std::int64_t in_flight,
                                            std::int64_t num_microbatches);
};

// All but what depends on the stage upstream.
[[nodiscard]] double own_bytes(const StageBytes& stage, const StageCopies& copies, const StageCopies& below,
                               bool recompute, const MemoryCosts& costs);
// The part that depends on the stage upstream: nothing at the first stage. input_bytes: of a minibatch.
[[nodiscard]] double crossing_bytes(double input_bytes, const StageCopies& copies, const StageCopies& above,
                                    const MemoryCosts& costs);

// No less than that, whatever the stage upstream, with so many workers in all. 0 where nothing crosses.
[[nodiscard]] double crossing_bytes_max(double input_bytes, const StageCopies& copies,
                                        std::int64_t num_workers, const MemoryCosts& costs);

// Bytes of a replica of each stage of a plan. memory: one per layer; copies, recompute: one per stage.
[[nodiscard]] std::vector<double> memory_of_plan(const std::vector<LayerCost>& layers,
                                                 const std::vector<LayerMemory>& memory,
                                                 const std::vector<PlannedStage>& stages,
                                                 const std::vector<StageCopies>& copies,
                                                 const std::vector<bool>& recompute,
                                                 const MemoryCosts& costs);

}  // namespace pipedream
