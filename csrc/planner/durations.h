// Defines the durations that a replay needs: how long instructions take, and how long the items that they
// send are on their way. All are in milliseconds. Plain values; any thread.
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

// The extra time that an instruction takes after its worker has waited for long.
struct WakingDurations {
  double forward_ms = 0;
  double backward_ms = 0;
  double update_ms = 0;
};

// Durations of a stage: of one microbatch, of an update, and of what one replica exchanges with one other
// (push and pull).
struct StageDurations {
  double forward_ms = 0;
  double later_forward_ms = 0;  // for every microbatch of a minibatch but the first
  double backward_ms = 0;
  double later_backward_ms = 0;
  double recompute_ms = 0;
  double update_ms = 0;
  double push_ms = 0;
  double pull_ms = 0;
  double sync_latency_ms = 0;
  double num_chunks = 1;  // chunks of a shard; one is updated and sent on while the next ones arrive
  // For each owner: when the first chunk of its shard is pushed, and when the last one is. Both are
  // milliseconds before the end of the last backward. If empty, all chunks are pushed after the last
  // backward.
  std::vector<std::pair<double, double>> push_leads_ms = {};
  bool updates_whole = false;  // an update waits for all chunks, for instance to take their norm
  std::vector<WakingDurations> wakings = {};  // one entry per entry of Timing::waking_after_ms
  // The number of the stage's replicas, if the stage has spares. Owners with this index or a higher one are
  // spares. Their shards have another size, and so other durations.
  std::optional<std::int64_t> num_replicas = std::nullopt;
  double spare_push_ms = 0;
  double spare_pull_ms = 0;
  double spare_update_ms = 0;

  [[nodiscard]] bool is_spare(ReplicaIndex owner) const {
    return num_replicas && owner.value() >= *num_replicas;
  }
};

// Durations of one microbatch's items between a stage and the next.
struct BoundaryDurations {
  double activation_ms = 0;
  double gradient_ms = 0;
  double latency_ms = 0;  // comes on top; meanwhile the link may carry the next item
};

// Describes machines whose workers slow each other. The first num_workers ranks are on the first machine, the
// next num_workers ranks on the second, and so on.
struct SharedCores {
  std::size_t num_workers = 1;  // workers of one machine
  // Entry k - 1 is the speed of each worker of a machine while k of its workers compute. The last entry also
  // stands for larger k.
  std::vector<double> speeds = {1.0};
};

// The factors by which single instructions take longer or shorter than the mean. A worker draws its factors
// from a deck, as one draws cards. When the deck is empty it gets a newly shuffled one, so that the mean over
// each deck is exact.
struct Spread {
  std::map<Opcode, std::vector<double>> factors = {};  // an opcode that is not listed takes its mean
  // Returns the worker's next deck: all factors of the opcode, shuffled. The worker draws them from the last
  // to the first.
  std::function<std::vector<double>(std::size_t worker, Opcode opcode)> shuffled = {};
};

struct Timing {
  std::vector<StageDurations> stages = {};           // one per stage
  std::vector<BoundaryDurations> boundaries = {};    // one per boundary between neighbours
  std::optional<SharedCores> shared = std::nullopt;  // none if no worker slows another
  // For each entry of a stage's `wakings`, how many milliseconds of waiting cost the whole extra time. A
  // shorter wait costs a proportional part of it. With 0 there is no extra time.
  std::vector<double> waking_after_ms = {};
  // Whether a worker sends and receives everything over one link, as a host with one network interface does.
  // If not, a worker has one link to each other worker, and one link for all pushes and pulls.
  bool one_link = false;
  Spread spread = {};
};

// Throws UserError for lists whose length does not fit the stages, the boundaries or waking_after_ms, for a
// stage with less than one chunk, and for machines without workers or speeds.
void check_timing(const Timing& timing, std::size_t num_stages);

}  // namespace pipedream
