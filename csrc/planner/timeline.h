// Holds the begin and end of each instruction in the workers' lists, and sums them up: makespan, bubble, and
// time per minibatch. Pure; any thread.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "schedule/instruction.h"

namespace pipedream {

struct TimedStep {
  Opcode opcode = Opcode::kForward;
  std::int64_t minibatch = 0;  // for an update, the first of its round
  double begin_ms = 0;
  double end_ms = 0;
};

// Figures of the steady phase. bubble_share is the workers' idle time divided by all their time. Recomputing
// counts as work.
struct Steady {
  double bubble_share = 0;
  double ms_per_minibatch = 0;  // between the times at which two minibatches were updated at all workers
};

struct TimelineSummary {
  std::int64_t num_minibatches = 0;
  double makespan_ms = 0;
  double bubble_share = 0;  // 1 - (sum of all workers' work) / (number of workers * makespan)
  // Figures of a window between the warm-up and the cool-down; none if there are too few minibatches. Let N
  // be the number of minibatches, and `skipped` one less than the most minibatches that any worker starts
  // before its first update. A worker's window goes from the end of its update of minibatch `skipped` to the
  // end of its update of minibatch N - 1 - `skipped`. For a schedule that drains every minibatch the window
  // has everything after the first minibatch. With replicas both ends of the window move inwards to
  // minibatches at which all stages begin a round.
  std::optional<Steady> steady = std::nullopt;

  // Milliseconds per minibatch in the steady state. If `steady` is empty: the mean over all minibatches.
  [[nodiscard]] double ms_per_minibatch() const {
    return steady ? steady->ms_per_minibatch : makespan_ms / static_cast<double>(num_minibatches);
  }
};

using Timeline = std::vector<std::vector<TimedStep>>;  // by worker, in order

// minibatches_per_body: the number of minibatches after which the lists repeat. The steady window is a
// multiple of it.
[[nodiscard]] TimelineSummary summarize(const Timeline& timeline, std::int64_t minibatches_per_body = 1);

}  // namespace pipedream
