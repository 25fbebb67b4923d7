// What a replica of a planned stage has in memory, by a profile's figures: what budget/memory.py will find of
// a run, or a little more. Pure arithmetic; any thread.
//
// Stage s with r replicas and n minibatches in flight at each. To each replica activations come by u edges,
// from each other replica upstream that has a minibatch in common with it, and d gradients' edges likewise:
// u = r_{s-1} / gcd(r_{s-1}, r), d = r_{s+1} / gcd(r, r_{s+1}).
//
//   (n + fixed_copies) |w|            versions, and what there is of the weights besides
//   + (1 + 2 (r - 1) / r) |w|         with r > 1 replicas: gradients that have not left, and slots for what
//                                     the others push and pull
//                                     of weights that go as factors: (r + 1) F in the place of this and of
//                                     the gradients of fixed_copies, F of them in a round: those that are
//                                     made, those that have not left, those of the others
//   + |w| + step_copies largest       with asynchronous shards: the owner's own apart, a copy for each other
//                                     replica, and the step of another's gradient
//   + 2 d output                      slots for its gradients
//   + max(2 widest, step_copies largest)    what a backward or a step makes and drops: gradients of what
//                                     crosses between layers, temporaries of a layer's parameters; of
//                                     weights that go as factors with those of a step the largest gradient,
//                                     and all replicas' factors that it is made of
//   + what is kept                    n (saved + output) at the first stage, and n minibatches of the data;
//                                     at the last one a minibatch of the data
//
// A stage but the first also has
//
//   u (ceil(n / u) + 1) input         slots: of each edge one more than it may have in flight
//   + input                           a gradient that has left and is released late
//   + U input + n max(saved + output - input, 0)    in the place of n (saved + output)
//
// as upstream has U = u ceil(n_{s-1} gcd(r_{s-1}, r) / r) minibatches of the replica in flight: n that are
// kept here, and the gradients of the others, which wait. With recompute nothing but a forward's input is
// kept, outputs until they have left, and one minibatch at a time has more: of n (saved + output) there
// remain saved + input + (n + 2) output.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "planner/partition.h"

namespace pipedream {

struct LayerMemory {
  double saved_bytes = 0;  // of a minibatch, for its backward
  double forward_s = 0;    // what a recompute adds
};

// What does not depend on the plan.
struct MemoryCosts {
  double fixed_copies = 2;    // of the weights: the model as given, gradients, the optimizer's state
  double step_copies = 0;     // of a layer's parameters, that a step makes and drops
  double data_bytes = 0;      // of a minibatch
  bool asynchronous = false;  // shards: an owner's, besides versions, and a copy for each other replica
};

struct StageBytes {
  double parameters = 0;
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
  std::int64_t num_replicas = 0;  // 0: there is no such stage
  std::int64_t in_flight = 0;     // at each
};

// All but what depends on the stage upstream.
[[nodiscard]] double own_bytes(const StageBytes& stage, const StageCopies& copies, const StageCopies& below,
                               bool recompute, const MemoryCosts& costs);
// What does: nothing at the first stage.
[[nodiscard]] double crossing_bytes(double input_bytes, const StageCopies& copies, const StageCopies& above);

// No less than that, whatever the stage upstream, with so many workers in all. 0 where nothing crosses.
[[nodiscard]] double crossing_bytes_max(double input_bytes, const StageCopies& copies,
                                        std::int64_t num_workers);

// Of each stage of a plan. memory: one per layer; in_flight, recompute: one per stage.
[[nodiscard]] std::vector<double> memory_of_plan(const std::vector<LayerCost>& layers,
                                                 const std::vector<LayerMemory>& memory,
                                                 const std::vector<PlannedStage>& stages,
                                                 const std::vector<std::int64_t>& in_flight,
                                                 const std::vector<bool>& recompute,
                                                 const MemoryCosts& costs);

}  // namespace pipedream
