// The time of each instruction of the workers' lists, and figures that follow from the times. Pure; any
// thread.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "schedule/instruction.h"

namespace pipedream {

struct TimedStep {
  Opcode opcode = Opcode::kForward;
  std::int64_t minibatch = 0;  // of an update the first of its round
  double begin_ms = 0;
  double end_ms = 0;
};

// Shares are idle time over all time of the workers; repeated compute counts as work.
struct Steady {
  double bubble_share = 0;
  double ms_per_minibatch = 0;  // from when a minibatch was updated everywhere to when the last one was
};

struct TimelineSummary {
  std::int64_t num_minibatches = 0;
  double makespan_ms = 0;
  double bubble_share = 0;  // 1 - (sum of all workers' work) / (number of workers * makespan)
  // None of too few minibatches. Let `skipped` be the most minibatches that any worker starts before its
  // first update, less one, and N the number of minibatches. Worker w is looked at from the end of its update
  // of minibatch `skipped` to the end of its update of minibatch N - 1 - `skipped`: a whole number of
  // minibatches, after its warm-up and before its cool-down. For schedules that drain every minibatch that is
  // everything after the first one, warm-ups and cool-downs included, as they are what such a schedule costs.
  // With replicas minibatches are counted through all of them, those that other replicas start before it
  // included, and both ends of the window are moved inwards to where all stages begin a round.
  std::optional<Steady> steady = std::nullopt;

  // In the steady state; of too few minibatches to have one the mean over all of them.
  [[nodiscard]] double ms_per_minibatch() const {
    return steady ? steady->ms_per_minibatch : makespan_ms / static_cast<double>(num_minibatches);
  }
};

using Timeline = std::vector<std::vector<TimedStep>>;  // by worker, in order

// minibatches_per_body: after so many the lists repeat; the window of the steady state is a multiple.
[[nodiscard]] TimelineSummary summarize(const Timeline& timeline, std::int64_t minibatches_per_body = 1);

}  // namespace pipedream
