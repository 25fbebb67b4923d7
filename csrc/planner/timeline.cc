#include "planner/timeline.h"

#include <algorithm>
#include <numeric>

namespace pipedream {
namespace {

struct UpdateEnd {
  std::int64_t minibatch = 0;  // the first minibatch of the round
  double end_ms = 0;
};

// When a worker finished the updates of its rounds: one entry per round, ascending. A worker with several
// stages has finished when the last stage is updated.
using UpdateEnds = std::vector<UpdateEnd>;

UpdateEnds::const_iterator find_end(const UpdateEnds& ends, std::int64_t minibatch) {
  return std::ranges::lower_bound(ends, minibatch, {}, &UpdateEnd::minibatch);
}

bool contains(const UpdateEnds& ends, std::int64_t minibatch) {
  const auto found = find_end(ends, minibatch);
  return found != ends.end() && found->minibatch == minibatch;
}

UpdateEnds update_ends(const std::vector<TimedStep>& row) {
  UpdateEnds ends;
  for (const TimedStep& step : row) {
    if (!writes_version(step.opcode)) continue;
    const auto at = std::ranges::lower_bound(ends, step.minibatch, {}, &UpdateEnd::minibatch);
    if (at != ends.end() && at->minibatch == step.minibatch) {
      at->end_ms = step.end_ms;
    } else {
      ends.insert(at, {step.minibatch, step.end_ms});
    }
  }
  return ends;
}

// Returns the number of minibatches between two updates, or 1 if there is only one update.
std::int64_t minibatches_per_update(const UpdateEnds& ends) {
  return ends.size() > 1 ? ends[1].minibatch - ends[0].minibatch : 1;
}

std::int64_t num_started_before_update(const std::vector<TimedStep>& row) {
  std::int64_t num_started = 0;
  for (const TimedStep& step : row) {
    if (writes_version(step.opcode)) break;
    if (!travels(step.opcode)) num_started = std::max(num_started, step.minibatch + 1);
  }
  return num_started;
}

// Returns the milliseconds of work between two times at which no step is under way.
double busy_ms(const std::vector<TimedStep>& row, double begin_ms, double end_ms) {
  double busy_ms = 0;
  for (const TimedStep& step : row) {
    if (step.begin_ms >= begin_ms && step.end_ms <= end_ms) busy_ms += step.end_ms - step.begin_ms;
  }
  return busy_ms;
}

double idle_share(double busy_ms, double all_ms) {
  return all_ms > 0 ? std::max(0.0, 1.0 - busy_ms / all_ms) : 0.0;
}

struct Window {
  std::int64_t first = 0;  // minibatches
  std::int64_t last = 0;
};

std::optional<Window> steady_window(const Timeline& timeline, const std::vector<UpdateEnds>& ends,
                                    std::int64_t num_minibatches, std::int64_t minibatches_per_body) {
  std::int64_t skipped = -1;
  // The number of minibatches after which all stages begin a round.
  std::int64_t together = minibatches_per_body;
  for (std::size_t worker = 0; worker < timeline.size(); ++worker) {
    if (ends[worker].empty()) return std::nullopt;
    skipped = std::max(skipped, num_started_before_update(timeline[worker]) - 1);
    together = std::lcm(together, minibatches_per_update(ends[worker]));
  }
  if (skipped < 0) return std::nullopt;
  const std::int64_t first = (skipped + together - 1) / together * together;
  const std::int64_t beyond = num_minibatches - 1 - skipped;
  if (beyond <= first) return std::nullopt;
  const std::int64_t last = beyond / together * together;
  if (last <= first) return std::nullopt;
  const bool have_both = std::ranges::all_of(ends, [&](const UpdateEnds& of_worker) {
    return contains(of_worker, first) && contains(of_worker, last);
  });
  return have_both ? std::optional(Window{first, last}) : std::nullopt;
}

std::optional<Steady> measure_steady(const Timeline& timeline, std::int64_t num_minibatches,
                                     std::int64_t minibatches_per_body) {
  std::vector<UpdateEnds> ends;
  for (const std::vector<TimedStep>& row : timeline) ends.push_back(update_ends(row));
  const std::optional<Window> window = steady_window(timeline, ends, num_minibatches, minibatches_per_body);
  if (!window) return std::nullopt;
  const auto [first, last] = *window;
  double first_ms = 0;
  double last_ms = 0;
  double in_window_ms = 0;
  double all_ms = 0;
  for (std::size_t worker = 0; worker < timeline.size(); ++worker) {
    const double begin_ms = find_end(ends[worker], first)->end_ms;
    const double end_ms = find_end(ends[worker], last)->end_ms;
    in_window_ms += busy_ms(timeline[worker], begin_ms, end_ms);
    all_ms += end_ms - begin_ms;
    first_ms = std::max(first_ms, begin_ms);
    last_ms = std::max(last_ms, end_ms);
  }
  return Steady{idle_share(in_window_ms, all_ms), (last_ms - first_ms) / static_cast<double>(last - first)};
}

}  // namespace

TimelineSummary summarize(const Timeline& timeline, std::int64_t minibatches_per_body) {
  TimelineSummary summary;
  for (const std::vector<TimedStep>& row : timeline) {
    if (!row.empty()) summary.makespan_ms = std::max(summary.makespan_ms, row.back().end_ms);
    for (const TimedStep& step : row) {
      summary.num_minibatches = std::max(summary.num_minibatches, step.minibatch + 1);
    }
  }
  double all_busy_ms = 0;
  for (const std::vector<TimedStep>& row : timeline) all_busy_ms += busy_ms(row, 0, summary.makespan_ms);
  summary.bubble_share = idle_share(all_busy_ms, static_cast<double>(timeline.size()) * summary.makespan_ms);
  summary.steady = measure_steady(timeline, summary.num_minibatches, minibatches_per_body);
  return summary;
}

}  // namespace pipedream
