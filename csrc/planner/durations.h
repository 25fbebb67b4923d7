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

// Durations of a stage's microbatch and update, and of a replica's push to one other replica and pull from
// it.
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
  double num_chunks = 1;  // of a shard: one chunk is updated and sent on while the next ones arrive
  // By owner: how long before the end of the last backward the first and the last chunk of its shard are
  // pushed. Empty: all are pushed after it.
  std::vector<std::pair<double, double>> push_leads_ms = {};
  bool updates_whole = false;  // an update waits for all chunks, for instance to take their norm
  std::vector<WakingDurations> wakings = {};
  // For a stage with spares: the number of its replicas. Owners from this index on are spares. Their shards
  // have another size, and so other durations.
  std::optional<std::int64_t> num_replicas = std::nullopt;
  double spare_push_ms = 0;
  double spare_pull_ms = 0;
  double spare_update_ms = 0;

  [[nodiscard]] bool is_spare(ReplicaIndex owner) const {
    return num_replicas && owner.value() >= *num_replicas;
  }
};

// Durations of a microbatch's items between a stage and the next one.
struct BoundaryDurations {
  double activation_ms = 0;
  double gradient_ms = 0;
  double latency_ms = 0;  // comes on top; the link may carry the next item meanwhile
};

// Machines whose workers slow each other. The first num_workers ranks are on the first machine, the next ones
// on the second, and so on. Each worker has a core.
struct SharedCores {
  std::size_t num_workers = 1;  // of a machine
  // The speed of each of 1, 2, ... workers of a machine that are at work at once. More have the last speed.
  std::vector<double> speeds = {1.0};
};

// The factors by which single items are longer or shorter than their mean. A worker draws them from a deck,
// which is shuffled again when it is empty, so that the means hold after every deck.
struct Spread {
  std::map<Opcode, std::vector<double>> factors = {};  // other opcodes take their mean
  // Returns the next deck of a worker: all factors of the opcode, of which the last is drawn first.
  std::function<std::vector<double>(std::size_t worker, Opcode opcode)> shuffled = {};
};

struct Timing {
  std::vector<StageDurations> stages = {};           // one per stage
  std::vector<BoundaryDurations> boundaries = {};    // one per boundary between neighbours
  std::optional<SharedCores> shared = std::nullopt;  // none where no worker slows another
  // One entry for each of a stage's `wakings`: the milliseconds of waiting after which an item takes all of
  // that extra time. After a shorter wait it takes a part in proportion. 0: no item takes any.
  std::vector<double> waking_after_ms = {};
  // True: a worker sends and receives everything over one link, as a host with one network interface does.
  // False: it has a link to each other worker, and one more for all exchanges with replicas.
  bool one_link = false;
  Spread spread = {};
};

// Throws UserError for lists whose length does not fit the stages, the boundaries or waking_after_ms, for a
// stage with less than one chunk, and for machines without workers or speeds.
void check_timing(const Timing& timing, std::size_t num_stages);

}  // namespace pipedream
