// The durations that a replay takes as input: how long a schedule's instructions take, and how long the items
// that they send are on their way. Milliseconds. Plain values; any thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <utility>
#include <vector>

#include "schedule/instruction.h"

namespace pipedream {

// The extra time of an item after a long wait.
struct WakingDurations {
  double forward_ms = 0;
  double backward_ms = 0;
  double update_ms = 0;
};

// Durations of a stage's microbatch and update, and of what a replica pushes to one other and pulls from it.
struct StageDurations {
  double forward_ms = 0;
  double later_forward_ms = 0;  // of all microbatches of a minibatch but the first
  double backward_ms = 0;
  double later_backward_ms = 0;
  double recompute_ms = 0;
  double update_ms = 0;
  double push_ms = 0;
  double pull_ms = 0;
  double sync_latency_ms = 0;
  double num_chunks = 1;  // of a shard: one is updated, and leaves for the others, while the next come
  // By owner: how long before the end of the last backward the first and the last chunk of its shard are
  // pushed. Empty: all are pushed after it.
  std::vector<std::pair<double, double>> push_leads_ms = {};
  bool updates_whole = false;  // an update waits for all chunks, as where norms are measured
  std::vector<WakingDurations> wakings = {};
  // The replicas of a stage with spares, which count on from them and have shards of their own size.
  std::optional<std::int64_t> num_replicas = std::nullopt;
  double spare_push_ms = 0;
  double spare_pull_ms = 0;
  double spare_update_ms = 0;

  [[nodiscard]] bool is_spare(ReplicaIndex owner) const {
    return num_replicas && owner.value() >= *num_replicas;
  }
};

// Between a stage and the next one, of a microbatch.
struct BoundaryDurations {
  double activation_ms = 0;
  double gradient_ms = 0;
  double latency_ms = 0;  // besides, in which the link may carry the next item
};

// Machines whose workers slow each other, in the order of their ranks. Each worker has a core.
struct SharedCores {
  std::size_t num_workers = 1;  // of a machine
  // The speed of each of 1, 2, ... workers of a machine that are at work at once. More have the last speed.
  std::vector<double> speeds = {1.0};
};

// The factors by which single items are longer or shorter than their mean. A worker draws them from a deck,
// which is shuffled again when it is empty, so that the means hold after every deck.
struct Spread {
  std::map<Opcode, std::vector<double>> factors = {};  // other opcodes take their mean
  // The next deck of a worker, whose last factor is drawn first: as many as there are factors.
  std::function<std::vector<double>(std::size_t worker, Opcode opcode)> shuffled = {};
};

struct Timing {
  std::vector<StageDurations> stages = {};           // one per stage
  std::vector<BoundaryDurations> boundaries = {};    // one per boundary between neighbours
  std::optional<SharedCores> shared = std::nullopt;  // none where no worker slows another
  // By waking of the stages, the wait from which on an item pays all of it; 0: no item does.
  std::vector<double> waking_after_ms = {};
  // A worker has one link to all others, as a host has one network interface, by which also what they send it
  // comes. Else it has one to each other worker, and one for all that it exchanges with replicas.
  bool one_link = false;
  Spread spread = {};
};

// Throws UserError naming what is of another number than stages, boundaries and wakings, and machines without
// workers or cores.
void check_timing(const Timing& timing, std::size_t num_stages);

}  // namespace pipedream
