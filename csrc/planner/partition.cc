// Finds the exact partition. See partition.h for the cost model and the method.
//
// The comparisons with the bound t use the same floating-point stage times as the reported bottleneck. So the
// answer is the least double t for which a plan exists, and the returned plan has exactly this bottleneck.
#include "planner/partition.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstddef>
#include <limits>
#include <string>

#include "base/check.h"
#include "base/failure.h"
#include "planner/stage_cost.h"
#include "schedule/program.h"

namespace pipedream {
namespace {

struct Problem {
  const std::vector<LayerCost>& layers;
  std::int64_t num_replicas_max;  // num_workers, or 1 for a straight plan
  std::int64_t num_workers;
  double bandwidth_bytes_per_s;
  std::int64_t num_microbatches = 1;

  [[nodiscard]] double boundary_s(std::size_t layer_index) const {
    return 2 * (layers[layer_index].activation_bytes / bandwidth_bytes_per_s);
  }
};

constexpr std::int64_t kImpossible = -1;

// Estimates the fewest replicas m >= 2 with T(m) <= t. Apart from rounding, the estimate is not too high. It
// follows from two conditions: compute_s / m <= t, and 4 (m - 1) w / (m^2 B) <= t. The second condition is
// the same as q m^2 - m + 1 >= 0 with q = t B / (4 w).
double estimate_replicas(const StageCost& cost, double bottleneck_s, double bandwidth_bytes_per_s) {
  const double for_compute = cost.compute_s / bottleneck_s;
  const double quotient = bottleneck_s * bandwidth_bytes_per_s / (4 * cost.parameter_bytes);
  const double discriminant = 1 - 4 * quotient;
  // If it is negative, or NaN because there are no parameters, the sync is fast enough at every m.
  if (!(discriminant >= 0)) return for_compute;
  return std::max(for_compute, (1 + std::sqrt(discriminant)) / (2 * quotient));
}

// Returns the first number from `from` to `to` that is enough, or to + 1 if none is. If a number is enough,
// all larger numbers must be enough.
template <class IsEnough>
std::int64_t first_enough(std::int64_t from, std::int64_t to, const IsEnough& is_enough) {
  if (from > to || !is_enough(to)) return to + 1;
  std::int64_t enough = to;
  while (from < enough) {
    const std::int64_t middle = from + (enough - from) / 2;
    if (is_enough(middle)) {
      enough = middle;
    } else {
      from = middle + 1;
    }
  }
  return enough;
}

// Finds the fewest replicas m >= 2 with T(m) <= t for a stage whose weights may go as factors, or returns
// kImpossible. Consider a range of m in which the same weights go as factors. There the computing time
// (C - P) / m + P falls with m. The sync, (m - 1) (4 w / m^2 + 2 F / m), first rises and then falls.
std::int64_t fewest_with_factors(const Problem& problem, const StageCost& cost, double bottleneck_s) {
  const auto computes = [&](std::int64_t num_replicas) {
    const double own_s = cost.compute_s + cost.products_s(num_replicas);
    return own_s / static_cast<double>(num_replicas) <= bottleneck_s;
  };
  const auto is_enough = [&](std::int64_t num_replicas) {
    return cost.time_s(num_replicas, problem.bandwidth_bytes_per_s) <= bottleneck_s;
  };
  // The stage cannot compute in time with fewer replicas than at_least. 1 is subtracted because of rounding.
  const double at_least = std::floor(cost.compute_s / bottleneck_s) - 1;
  if (at_least > static_cast<double>(problem.num_replicas_max)) return kImpossible;
  for (auto from = static_cast<std::int64_t>(std::max(2.0, at_least)); from <= problem.num_replicas_max;) {
    const std::int64_t to = std::min(problem.num_replicas_max, cost.factored.last_alike(from));
    const std::int64_t begin = first_enough(from, to, computes);
    if (begin <= to) {
      if (is_enough(begin)) return begin;  // if it is not, the sync takes too long
      const std::int64_t found = first_enough(begin + 1, to, is_enough);
      if (found <= to) return found;
    }
    from = to + 1;
  }
  return kImpossible;
}

// Finds the fewest replicas m >= 2 with T(m) <= t if minibatches are cut into microbatches, or returns
// kImpossible. It tries one number after the other, because the sync depends on the common divisors of m and
// the number of microbatches.
std::int64_t fewest_with_microbatches(const Problem& problem, const StageCost& cost, double bottleneck_s) {
  // The stage cannot compute in time with fewer replicas than at_least. 1 is subtracted because of rounding.
  const double at_least = std::floor(cost.compute_s / bottleneck_s) - 1;
  if (at_least > static_cast<double>(problem.num_replicas_max)) return kImpossible;
  for (auto num_replicas = static_cast<std::int64_t>(std::max(2.0, at_least));
       num_replicas <= problem.num_replicas_max; ++num_replicas) {
    if (cost.time_s(num_replicas, problem.bandwidth_bytes_per_s) <= bottleneck_s) return num_replicas;
  }
  return kImpossible;
}

// Finds the fewest replicas m with T(m) <= t, or returns kImpossible. Without microbatches and factors, T
// falls as m grows, except from 1 to 2, where the sync begins: 4 (m - 1) w / (m^2 B) is 0 at m = 1 and
// largest at m = 2.
std::int64_t fewest_replicas(const Problem& problem, const StageCost& cost, double bottleneck_s) {
  const auto is_enough = [&](std::int64_t num_replicas) {
    return cost.time_s(num_replicas, problem.bandwidth_bytes_per_s) <= bottleneck_s;
  };
  if (is_enough(1)) return 1;
  if (problem.num_microbatches > 1) return fewest_with_microbatches(problem, cost, bottleneck_s);
  if (!cost.factored.empty()) return fewest_with_factors(problem, cost, bottleneck_s);
  std::int64_t enough = problem.num_replicas_max;
  if (enough < 2 || !is_enough(enough)) return kImpossible;

  const double estimate = std::ceil(estimate_replicas(cost, bottleneck_s, problem.bandwidth_bytes_per_s));
  if (estimate < static_cast<double>(enough)) {
    const auto guess = std::max<std::int64_t>(2, static_cast<std::int64_t>(estimate));
    if (is_enough(guess)) enough = guess;
  }
  if (enough == 2 || !is_enough(enough - 1)) return enough;
  // The estimate may be too high because of rounding. Bisection finds the exact number.
  std::int64_t too_few = 1;
  while (enough - too_few > 1) {
    const std::int64_t middle = too_few + (enough - too_few) / 2;
    (is_enough(middle) ? enough : too_few) = middle;
  }
  return enough;
}

// Calls visit(first_layer, last_layer, num_replicas) for every stage that runs within bottleneck_s, with the
// fewest replicas that do so. Skips stages whose first layer is not reachable, or whose boundary upstream
// takes longer. First layers ascend.
template <class IsReachable, class Visit>
void for_each_stage_within(const Problem& problem, double bottleneck_s, IsReachable is_reachable,
                           Visit visit) {
  for (std::size_t first = 0; first < problem.layers.size(); ++first) {
    if (first > 0 && problem.boundary_s(first - 1) > bottleneck_s) continue;
    if (!is_reachable(first)) continue;
    StageCost cost;
    cost.num_microbatches = problem.num_microbatches;
    for (std::size_t last = first; last < problem.layers.size(); ++last) {
      cost.add(problem.layers[last]);
      const std::int64_t num_replicas = fewest_replicas(problem, cost, bottleneck_s);
      if (num_replicas == kImpossible) break;  // more layers would only take longer
      visit(first, last, num_replicas);
    }
  }
}

// Returns whether at most num_workers workers can cover all layers within bottleneck_s.
bool is_feasible(const Problem& problem, double bottleneck_s) {
  constexpr std::int64_t kUnreached = std::numeric_limits<std::int64_t>::max();
  // fewest_workers[j]: the fewest workers that cover the layers before j.
  std::vector<std::int64_t> fewest_workers(problem.layers.size() + 1, kUnreached);
  fewest_workers[0] = 0;
  for_each_stage_within(
      problem, bottleneck_s, [&](std::size_t first) { return fewest_workers[first] < problem.num_workers; },
      [&](std::size_t first, std::size_t last, std::int64_t num_replicas) {
        fewest_workers[last + 1] = std::min(fewest_workers[last + 1], fewest_workers[first] + num_replicas);
      });
  return fewest_workers.back() <= problem.num_workers;
}

// Finds the least feasible bottleneck. One stage with all layers and one replica is always feasible.
double least_bottleneck_s(const Problem& problem) {
  StageCost everything;
  for (const LayerCost& layer : problem.layers) everything.add(layer);
  // Non-negative doubles are ordered like their bit patterns.
  std::uint64_t feasible = std::bit_cast<std::uint64_t>(everything.compute_s);
  std::uint64_t lowest = 0;
  while (lowest < feasible) {
    const std::uint64_t middle = lowest + (feasible - lowest) / 2;
    if (is_feasible(problem, std::bit_cast<double>(middle))) {
      feasible = middle;
    } else {
      lowest = middle + 1;
    }
  }
  return std::bit_cast<double>(feasible);
}

// The best way to divide the layers before some layer into stages. It has the fewest workers; among equals,
// the fewest stages; among these, the last stage that begins earliest.
struct Cover {
  std::int64_t num_workers = 0;
  std::int64_t num_stages = 0;
  PlannedStage last_stage;

  [[nodiscard]] bool is_reached() const { return num_stages > 0; }
  [[nodiscard]] bool is_better_than(const Cover& other) const {
    if (!other.is_reached()) return true;
    if (num_workers != other.num_workers) return num_workers < other.num_workers;
    return num_stages < other.num_stages;
  }
};

std::vector<PlannedStage> smallest_plan(const Problem& problem, double bottleneck_s) {
  std::vector<Cover> covers(problem.layers.size() + 1);
  for_each_stage_within(
      problem, bottleneck_s, [&](std::size_t first) { return first == 0 || covers[first].is_reached(); },
      [&](std::size_t first, std::size_t last, std::int64_t num_replicas) {
        const PlannedStage stage{static_cast<std::int64_t>(first), static_cast<std::int64_t>(last),
                                 num_replicas};
        const Cover cover{covers[first].num_workers + num_replicas, covers[first].num_stages + 1, stage};
        if (cover.is_better_than(covers[last + 1])) covers[last + 1] = cover;
      });
  std::vector<PlannedStage> stages;
  for (std::size_t num_layers = problem.layers.size(); num_layers > 0;) {
    PD_CHECK(covers[num_layers].is_reached(),
             "no plan within " << bottleneck_s << " s covers " << num_layers);
    stages.push_back(covers[num_layers].last_stage);
    num_layers = static_cast<std::size_t>(covers[num_layers].last_stage.first_layer);
  }
  std::reverse(stages.begin(), stages.end());
  return stages;
}

StageCost sum_cost(const std::vector<LayerCost>& layers, const PlannedStage& stage,
                   std::int64_t num_microbatches) {
  StageCost cost;
  cost.num_microbatches = num_microbatches;
  for (std::int64_t layer = stage.first_layer; layer <= stage.last_layer; ++layer) {
    cost.add(layers[static_cast<std::size_t>(layer)]);
  }
  return cost;
}

}  // namespace

double bottleneck_s(const std::vector<LayerCost>& layers, const std::vector<PlannedStage>& stages,
                    double bandwidth_bytes_per_s, std::int64_t num_microbatches) {
  const Problem problem{layers, 0, 0, bandwidth_bytes_per_s};
  double slowest_s = 0;
  for (const PlannedStage& stage : stages) {
    const StageCost cost = sum_cost(layers, stage, num_microbatches);
    slowest_s = std::max(slowest_s, cost.time_s(stage.num_replicas, bandwidth_bytes_per_s));
    if (stage.first_layer == 0) continue;
    slowest_s = std::max(slowest_s, problem.boundary_s(static_cast<std::size_t>(stage.first_layer - 1)));
  }
  return slowest_s;
}

Partition partition(const std::vector<LayerCost>& layers, std::int64_t num_workers,
                    double bandwidth_bytes_per_s, bool straight, std::int64_t num_microbatches) {
  if (num_workers < 1 || num_workers > kNumReplicasMax) {
    throw UserError("num_workers is " + std::to_string(num_workers) + "; it must be between 1 and " +
                    std::to_string(kNumReplicasMax));
  }
  const Problem problem{layers, straight ? 1 : num_workers, num_workers, bandwidth_bytes_per_s,
                        num_microbatches};
  Partition best;
  best.bottleneck_s = least_bottleneck_s(problem);
  best.stages = smallest_plan(problem, best.bottleneck_s);
  PD_CHECK(bottleneck_s(layers, best.stages, bandwidth_bytes_per_s, num_microbatches) == best.bottleneck_s,
           "the plan's bottleneck is not the least feasible one, " << best.bottleneck_s << " s");
  return best;
}

}  // namespace pipedream
