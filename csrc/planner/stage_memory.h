// Estimates the memory of one replica of a planned stage from a profile's figures. The estimate is the sum
// that budget/memory.py computes for a run, or a little more. Pure arithmetic; any thread.
//
// Stage s has r replicas, each with n microbatches in flight. A minibatch has m microbatches. `input`,
// `output`, `widest` and `saved` below are bytes of one microbatch, which is a profile's bytes of a minibatch
// divided by m.
//
// A replica receives activations over u edges, one from each upstream replica that has a microbatch in common
// with it. It receives gradients over d edges, one from each such downstream replica: u = r_{s-1} /
// gcd(r_{s-1}, r), d = r_{s+1} / gcd(r, r_{s+1}).

// The terms at every stage:
//
//   weights                         replica_weight_bytes(), below
//   + frozen weights                model_copies of them, and nothing else
//   + 2 d output                    slots for received gradients
//   + max(2 widest + largest, step) temporaries of a backward or of an optimizer's step, see below
//   + another step                  with asynchronous shards, for the gradients of other replicas
//   + kept activations              n (saved + output) at the first stage, see below for other stages
//   + encoded items                 if a codec encodes items that cross a cut. A receiver has one per slot, a
//                                   sender one per item that may be unsent, and the residual of topk. With
//                                   stages_apart a channel has only one received and one sent item in the
//                                   device's memory
//   + data                          at the first and the last stage: the minibatches of n consecutive
//                                   microbatches of one replica, which are min(n, 1 + ceil((n - 1) r / m))

// Temporaries. A backward has the gradients of two layers' outputs. If a round has several microbatches, it
// also has the gradient of one layer's parameters, before this is added to the round's sum.
//
// A step has step_copies of a layer's parameters. For weights that go as factors it also has the largest
// gradient, and all replicas' factors of this gradient. With shards it may also have a mean gradient: of the
// whole shard if the shard is updated at once, or of one chunk if the schedule drains, because the mean of a
// short last round may need memory of its own.

// Every stage except the first also has
//
//   u (ceil(n / u) + 1) input         slots: per edge one more than the edge may have in flight
//   + input                           a gradient that is sent, but released late
//   + U input + n max(saved + output - input, 0)    instead of n (saved + output)
//
// U = u ceil(n_{s-1} gcd(r_{s-1}, r) / r) is the number of this replica's microbatches that are in flight
// upstream. For n of them the replica keeps the input. For the other U - n it has a gradient that waits to be
// sent.

// With recompute a replica keeps the inputs of its forwards, and the outputs until they are sent. Only one
// microbatch at a time has all its activations. So n (saved + output) becomes saved + input + (n + 2) output.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "planner/partition.h"

namespace pipedream {

struct LayerMemory {
  double saved_bytes = 0;   // bytes that a minibatch's forward saves for its backward
  double forward_s = 0;     // time that a recompute adds per minibatch
  double frozen_bytes = 0;  // bytes of parameters that are not trained
};

// The bytes of memory that a codec needs for each byte that crosses a cut in one direction. They are 0 if
// nothing is encoded.
struct CodecShares {
  double wire = 0;      // bytes of the encoded item
  double residual = 0;  // at the sender: bytes of the values that topk has not sent yet
};

// Figures that do not depend on the plan. The copies are multiples of the bytes of weights.
struct MemoryCosts {
  double model_copies = 1;  // copies of all weights: the model itself, in addition to versions and gradients
  double state_copies = 0;  // copies of the weights that a replica updates: the optimizer's state
  double step_copies = 0;   // copies of one layer's parameters: temporaries of an optimizer's step
  double data_bytes = 0;    // bytes of one minibatch
  std::int64_t num_microbatches = 1;  // m
  CodecShares activations = {};
  CodecShares gradients = {};
  bool stages_apart = false;  // encoded items wait in host memory, which is not counted here
  // The figures below matter only for stages with replicas, except for the staleness.
  bool asynchronous = false;  // an owner keeps its shard apart from versions, and a copy per other replica
  bool reduces_together = false;  // replicas update by a collective, and there are no shards
  bool whole_tensors = false;     // shards have only whole tensors, and are updated at once
  bool posts_versions = false;    // pulled chunks arrive in the slot of the next version
  bool has_spares = false;        // stages have spares, or the search may add some
  bool drains = false;            // the schedule drains (program.h)
  std::int64_t staleness = 0;     // k, in rounds; the same for all stages
};

// Bytes of a stage's weights.
struct ReplicaWeights {
  double all = 0;
  double largest = 0;  // bytes of the layer with the most
  // Bytes of the weights whose gradients go as factors; every replica updates these weights.
  double factored = 0;
  double factors = 0;  // bytes of one replica's factors in a round
};

// The share of the dense weights that one replica owns: at most and at least.
struct ShardShare {
  double most = 0;
  double least = 0;
};

// Returns the bytes of weights, gradients and optimizer state at one of r replicas that keeps n versions. |w|
// is the bytes of the weights, and k the staleness. The gradients of d of these bytes are pushed as they are
// ("dense"), those of f bytes as factors. F is the bytes of one replica's factors of a round.
//
//   (n + k + model_copies) |w|
//   one replica         + (1 + state_copies) |w|    gradients, state
//   reduces_together    + (2 + state_copies) |w|    gradients of two rounds, state
//   with shards         + g (d + c + F)             gradients of g rounds, and their copies for sending
//                       + state_copies (s + f)      state of its shard and of the weights that go as factors
//                       + (r - 1) (s + F)           slots for the others' pushes. With whole tensors one slot
//                                                   more, as large as the largest tensor
//                       + d - s                     slots for pulled versions; none with posts_versions,
//                                                   unless asynchronous
//                       + r s                       if asynchronous: its shard apart from versions, and a
//                                                   copy for each other replica
//
// Here g is 1 + ceil(k / 2), and one more each for factors and for spares, which may wait. c is the bytes of
// the parameters that other replicas own. s is the bytes of its shard: d / r, or with whole tensors
// at most d / r + (1 - 1 / r) largest. The reason is that the largest tensors are dealt first, each to the
// shard that has least.
[[nodiscard]] double replica_weight_bytes(const ReplicaWeights& weights, std::int64_t num_replicas,
                                          std::int64_t num_versions, const ShardShare& share,
                                          const MemoryCosts& costs);

// Bytes of a stage. `parameters`, `frozen` and `largest` are bytes of parameters; all others are bytes of one
// minibatch.
struct StageBytes {
  double parameters = 0;
  double frozen = 0;  // bytes of parameters that are not trained
  double saved = 0;
  double input = 0;   // bytes of activations from upstream; 0 at the first stage
  double output = 0;  // bytes of activations to downstream; 0 at the last stage
  // Bytes of the largest activation at a boundary between layers of the stage, or at its cuts.
  double widest = 0;
  double largest = 0;  // bytes of the parameters of the layer with the most
  FactoredWeights factored;
  bool is_first = false;
  bool is_last = false;

  // Makes the sums for a stage that will begin with this layer. It has no layers yet.
  [[nodiscard]] static StageBytes from(const std::vector<LayerCost>& layers, std::size_t first_layer);
  // Adds the next layer.
  void add(const std::vector<LayerCost>& layers, const std::vector<LayerMemory>& memory, std::size_t layer);
};

struct StageCopies {
  std::int64_t num_replicas = 0;   // 0 if the stage does not exist, as upstream of the first stage
  std::int64_t in_flight = 0;      // microbatches in flight at each replica
  std::int64_t num_versions = 0;   // versions that each replica keeps, without the versions for a staleness
  std::int64_t own_per_round = 1;  // c: how many microbatches of a round a replica has

  // Returns the copies under schedule "pipedream": c = lcm(m, r) / r, and 1 + ceil((n - 1) / c) versions.
  [[nodiscard]] static StageCopies stashing(std::int64_t num_replicas, std::int64_t in_flight,
                                            std::int64_t num_microbatches);
};

// Returns the bytes of a replica without the part that depends on the stage upstream. below: the copies of
// the stage downstream.
[[nodiscard]] double own_bytes(const StageBytes& stage, const StageCopies& copies, const StageCopies& below,
                               bool recompute, const MemoryCosts& costs);
// Returns the bytes that depend on the stage upstream, `above`; 0 at the first stage. input_bytes: the bytes
// of the input for one minibatch.
[[nodiscard]] double crossing_bytes(double input_bytes, const StageCopies& copies, const StageCopies& above,
                                    const MemoryCosts& costs);

// Returns an upper bound of crossing_bytes() for every possible stage upstream in a plan of num_workers
// workers.
[[nodiscard]] double crossing_bytes_max(double input_bytes, const StageCopies& copies,
                                        std::int64_t num_workers, const MemoryCosts& costs);

// Returns the bytes of a replica of each stage of a plan. memory: one entry per layer. copies, recompute: one
// per stage.
[[nodiscard]] std::vector<double> memory_of_plan(const std::vector<LayerCost>& layers,
                                                 const std::vector<LayerMemory>& memory,
                                                 const std::vector<PlannedStage>& stages,
                                                 const std::vector<StageCopies>& copies,
                                                 const std::vector<bool>& recompute,
                                                 const MemoryCosts& costs);

}  // namespace pipedream
