// Holds when each instruction of the workers' lists begins and ends, and sums these times up: makespan,
// bubble, and time per minibatch. Pure; any thread.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "schedule/instruction.h"

namespace pipedream {

struct TimedStep {
  Opcode opcode = Opcode::kForward;
  std::int64_t minibatch = 0;  // for an update, the first minibatch of its round
  double begin_ms = 0;
  double end_ms = 0;
};

// Figures of the steady phase. bubble_share is the workers' idle time divided by their whole time.
// Recomputing counts as work.
struct Steady {
  double bubble_share = 0;
  // Time from the end of one update at all workers to the end of a later one, divided by the number of
  // minibatches between them.
  double ms_per_minibatch = 0;
};

struct TimelineSummary {
  std::int64_t num_minibatches = 0;
  double makespan_ms = 0;
  double bubble_share = 0;  // 1 - (sum of all workers' work) / (number of workers * makespan)
  // Figures of a window between the warm-up and the cool-down; none if there are too few minibatches. Let N
  // be the number of minibatches. Let s + 1 be the most minibatches that any worker starts before its first
  // update. A worker's window goes from the end of its update of minibatch s to the end of its update of
  // minibatch N - 1 - s. If the schedule drains after every minibatch, s is 0, and the window leaves out only
  // the first minibatch. With replicas both ends of the window move inwards, to minibatches at which all
  // stages begin a round.
  std::optional<Steady> steady = std::nullopt;

  // Milliseconds per minibatch in the steady state. If `steady` is empty, the mean over all minibatches.
  [[nodiscard]] double ms_per_minibatch() const {
    return steady ? steady->ms_per_minibatch : makespan_ms / static_cast<double>(num_minibatches);
  }
};

using Timeline = std::vector<std::vector<TimedStep>>;  // one list per worker, in the order of its steps

// Sums up a timeline. minibatches_per_body: the number of minibatches after which the lists repeat. The
// length of the steady window is a multiple of this number.
[[nodiscard]] TimelineSummary summarize(const Timeline& timeline, std::int64_t minibatches_per_body = 1);

}  // namespace pipedream
