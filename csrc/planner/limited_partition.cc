// See limited_partition.h for the cost model and the method.
#include "planner/limited_partition.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstddef>
#include <functional>
#include <limits>
#include <string>
#include <utility>

#include "base/failure.h"
#include "planner/stage_cost.h"

namespace pipedream {
namespace {

constexpr double kStepsMax = 2e9;

// A Suffix is a plan for the layers from some layer to the end, with some number of workers. It stores the
// plan's first stage and the figures that matter for a stage upstream.
struct Suffix {
  StageCopies copies{};
  double spare_bytes = 0;  // memory that each of the first stage's workers has left for items from upstream
  std::size_t end_layer = 0;  // the layer after the first stage's last layer
  bool recompute = false;
  std::size_t next = 0;  // index of the suffix that continues from end_layer
  double bottleneck_s = 0;
  bool has_room = false;  // spare_bytes are enough whatever stage comes upstream

  [[nodiscard]] std::int64_t in_flight_all() const { return copies.in_flight * copies.num_replicas; }
};

// A bound on the time of a stage or a boundary. next_s is the least time above the bound that the search has
// met, so no plan's bottleneck lies between the two.
struct Bound {
  double limit_s = 0;
  double next_s = std::numeric_limits<double>::infinity();

  [[nodiscard]] bool is_exceeded_by(double time_s) {
    if (time_s <= limit_s) return false;
    next_s = std::min(next_s, time_s);
    return true;
  }
};

// The fewest workers of a plan within a bound, and the bottleneck of that plan.
struct Fewest {
  std::int64_t num_workers = 0;
  double bottleneck_s = 0;
};

class LimitedSearch {
 public:
  LimitedSearch(const std::vector<LayerCost>& layers, const std::vector<LayerMemory>& memory,
                std::int64_t num_workers, double bandwidth_bytes_per_s, const PlanLimits& limits)
      : layers_(layers),
        memory_(memory),
        num_workers_(num_workers),
        bandwidth_(bandwidth_bytes_per_s),
        limits_(limits) {
    if (!limits.speeds.empty()) fastest_ = *std::max_element(limits.speeds.begin(), limits.speeds.end());
    for (std::size_t last_layer = 0; last_layer < layers.size(); ++last_layer) {
      may_end_.push_back(limits.last_layers.empty() ||
                         std::find(limits.last_layers.begin(), limits.last_layers.end(),
                                   static_cast<std::int64_t>(last_layer)) != limits.last_layers.end());
    }
  }

  // Suffixes within a bound, by first layer and number of workers. A suffix is better for a stage upstream if
  // it has fewer microbatches in flight and more spare memory. With memory limits the search keeps, for each
  // number of replicas of a suffix's first stage, the suffixes that no other beats in both figures. Suffixes
  // with fewer microbatches come first.
  using Suffixes = std::vector<Suffix>;
  using Table = std::vector<std::vector<Suffixes>>;

  // Finds the smallest number of workers between `from` and `to` that has a plan within the bound; nothing if
  // none has. The last replica of the last stage has rank to - 1. If all workers are alike, the ranks do not
  // matter.
  [[nodiscard]] std::optional<Fewest> fewest_workers(std::int64_t from, std::int64_t to, Bound& bound) const {
    std::vector<Table> tables;
    if (counts_stages()) {
      tables = tables_by_stages(from, to, bound);
    } else {
      tables.push_back(any_table(to, bound));
    }
    if (tables.empty()) return std::nullopt;
    return covering(tables.back(), from, to);
  }

  // Returns the partition with the fewest stages. num_workers workers must have a plan with this bottleneck.
  [[nodiscard]] LimitedPartition smallest(std::int64_t num_workers, double bottleneck_s) const {
    Bound bound{bottleneck_s};
    const std::vector<Table> tables = tables_by_stages(num_workers, num_workers, bound);
    LimitedPartition found;
    found.bottleneck_s = bottleneck_s;
    std::size_t layer = 0;
    std::size_t chosen = 0;
    std::int64_t workers = num_workers;
    std::vector<StageCopies> copies;
    for (std::size_t left = tables.size(); left-- > 0;) {
      const Suffix& suffix = tables[left][layer][index(workers)][chosen];
      const std::int64_t replicas = suffix.copies.num_replicas;
      found.stages.push_back(
          {static_cast<std::int64_t>(layer), static_cast<std::int64_t>(suffix.end_layer) - 1, replicas});
      found.recompute.push_back(suffix.recompute);
      copies.push_back(suffix.copies);
      layer = suffix.end_layer;
      chosen = suffix.next;
      workers -= replicas;
    }
    found.memory_bytes =
        memory_of_plan(layers_, memory_, found.stages, copies, found.recompute, limits_.costs);
    return found;
  }

 private:
  static std::size_t index(std::int64_t value) { return static_cast<std::size_t>(value); }
  [[nodiscard]] bool counts_stages() const {
    return !limits_.num_replicas.empty() || !limits_.last_layers.empty();
  }
  [[nodiscard]] std::int64_t num_stages_max() const {
    if (!limits_.num_replicas.empty()) return static_cast<std::int64_t>(limits_.num_replicas.size());
    if (!limits_.last_layers.empty()) return static_cast<std::int64_t>(limits_.last_layers.size());
    return static_cast<std::int64_t>(layers_.size());
  }

  [[nodiscard]] Table empty_table(std::int64_t num_workers) const {
    return Table(layers_.size() + 1, std::vector<Suffixes>(index(num_workers) + 1));
  }

  // Makes the table of suffixes with any number of stages.
  [[nodiscard]] Table any_table(std::int64_t num_workers, Bound& bound) const {
    Table table = empty_table(num_workers);
    table.back()[0].emplace_back();
    for (std::size_t first = layers_.size(); first-- > 0;) {
      extend(table, table, first, num_workers, bound, 0);
    }
    return table;
  }

  static std::optional<Fewest> covering(const Table& table, std::int64_t from, std::int64_t to) {
    for (std::int64_t workers = from; workers <= to; ++workers) {
      const Suffixes& found = table.front()[index(workers)];
      if (!found.empty()) return Fewest{workers, found.front().bottleneck_s};
    }
    return std::nullopt;
  }

  // Makes the tables for exactly 1, 2, ... stages, up to the first number of stages that covers all layers.
  // Empty if none does.
  [[nodiscard]] std::vector<Table> tables_by_stages(std::int64_t from, std::int64_t to, Bound& bound) const {
    const std::int64_t stages_max = num_stages_max();
    std::vector<Table> tables;
    Table below = empty_table(to);
    below.back()[0].emplace_back();
    for (std::int64_t num_stages = 1; num_stages <= stages_max; ++num_stages) {
      std::int64_t replicas = 0;
      if (!limits_.num_replicas.empty()) {
        replicas = limits_.num_replicas[index(stages_max - num_stages)];
      }
      Table table = empty_table(to);
      for (std::size_t first = layers_.size(); first-- > 0;) {
        extend(table, below, first, to, bound, replicas);
      }
      tables.push_back(table);
      const bool is_enough = !counts_stages() || num_stages == stages_max;
      if (is_enough && covering(table, from, to)) return tables;
      below = std::move(table);
    }
    return {};
  }

  // Fills table[first] with suffixes. Each has a stage that begins at `first`, and then a suffix of `below`.
  // replicas: the stage's number of replicas; 0 allows any.
  void extend(Table& table, const Table& below, std::size_t first, std::int64_t num_workers, Bound& bound,
              std::int64_t replicas) const {
    if (first > 0 && !may_end_[first - 1]) return;
    StageCost cost;
    cost.num_microbatches = limits_.costs.num_microbatches;
    double forward_s = 0;
    StageBytes bytes = StageBytes::from(layers_, first);
    for (std::size_t last = first; last < layers_.size(); ++last) {
      cost.add(layers_[last]);
      const double compute_s = cost.compute_s;
      forward_s += memory_[last].forward_s;
      bytes.add(layers_, memory_, last);
      // The stage cannot compute in time with fewer replicas than `fewest`. 1 is subtracted because of
      // rounding.
      const double fewest = compute_s > 0 ? std::floor(compute_s / (fastest_ * bound.limit_s)) - 1 : 0.0;
      const auto at_least_s = [&](double count) { return compute_s / (fastest_ * count); };
      if (fewest > static_cast<double>(num_workers)) {  // more layers would only take longer
        static_cast<void>(bound.is_exceeded_by(at_least_s(static_cast<double>(num_workers))));
        break;
      }
      if (fewest > 1) static_cast<void>(bound.is_exceeded_by(at_least_s(fewest - 1)));
      if (!may_end_[last]) continue;
      const double behind_s = bytes.is_last ? 0.0 : boundary_s(last);
      if (bound.is_exceeded_by(behind_s)) continue;
      for (std::int64_t after = 0; after < num_workers; ++after) {
        if (below[last + 1][index(after)].empty()) continue;
        const std::int64_t most = std::min(num_workers - after, limits_.num_replicas_max);
        const std::int64_t from =
            replicas == 0 ? std::max<std::int64_t>(1, static_cast<std::int64_t>(fewest)) : replicas;
        const std::int64_t to = replicas == 0 ? most : std::min(most, replicas);
        for (std::int64_t count = from; count <= to; ++count) {
          const Workers workers = workers_of(count, num_workers - after, cost);
          const double once_s = std::max(workers.time_s(compute_s), behind_s);
          if (bound.is_exceeded_by(once_s)) continue;
          std::optional<double> twice_s;  // the stage's time if it does the forward twice
          if (limits_.may_recompute && !limits_.memory_bytes.empty()) {
            twice_s = std::max(workers.time_s(compute_s + forward_s), behind_s);
            if (bound.is_exceeded_by(*twice_s)) twice_s.reset();
          }
          add(table[first][index(after + count)], below[last + 1][index(after)], bytes, last + 1, workers,
              once_s, twice_s);
        }
      }
    }
  }

  // The workers of one stage.
  struct Workers {
    std::int64_t count = 0;
    double speed = 1;
    double sync_s = 0;
    double products_s = 0;
    double memory_bytes = 0;  // memory of the worker that has the least
    double per_round = 1;     // minibatches per round

    [[nodiscard]] double time_s(double compute_s) const {
      return std::max((compute_s + products_s) / speed / static_cast<double>(count), sync_s / per_round);
    }
  };

  // ranks_end: the rank after that of the stage's last replica.
  [[nodiscard]] Workers workers_of(std::int64_t replicas, std::int64_t ranks_end,
                                   const StageCost& cost) const {
    const std::size_t begin = index(ranks_end - replicas);
    const std::size_t end = index(ranks_end);
    Workers workers{replicas, 1, 0, 0, std::numeric_limits<double>::infinity()};
    workers.per_round = cost.minibatches_per_round(replicas);
    if (!limits_.speeds.empty()) workers.speed = least(limits_.speeds, begin, end);
    if (replicas > 1) {
      workers.sync_s = cost.sync_s(replicas, bandwidth_);
      workers.products_s = cost.products_s(replicas);
    }
    if (!limits_.memory_bytes.empty()) workers.memory_bytes = least(limits_.memory_bytes, begin, end);
    return workers;
  }

  // Adds the suffixes that begin with this stage and continue with one of `rest`. Each is added without a
  // recompute if it fits, and with one if that may leave more room for a stage upstream. once_s, twice_s: the
  // stage's time without and with a recompute.
  void add(Suffixes& found, const Suffixes& rest, const StageBytes& bytes, std::size_t end_layer,
           const Workers& workers, double once_s, std::optional<double> twice_s) const {
    for (std::size_t next = 0; next < rest.size(); ++next) {
      const Suffix& behind = rest[next];
      Suffix suffix;
      suffix.copies = StageCopies::stashing(workers.count,
                                            1 + (behind.in_flight_all() + workers.count - 1) / workers.count,
                                            limits_.costs.num_microbatches);
      suffix.end_layer = end_layer;
      suffix.next = next;
      if (!behind.has_room &&
          crossing_bytes(bytes.output, behind.copies, suffix.copies, limits_.costs) > behind.spare_bytes) {
        continue;
      }
      for (const bool recompute : {false, true}) {
        if (recompute && !twice_s) continue;
        suffix.recompute = recompute;
        suffix.bottleneck_s = std::max(recompute ? *twice_s : once_s, behind.bottleneck_s);
        suffix.spare_bytes =
            workers.memory_bytes - own_bytes(bytes, suffix.copies, behind.copies, recompute, limits_.costs);
        if (suffix.spare_bytes < 0) continue;
        suffix.has_room =
            suffix.spare_bytes >= crossing_bytes_max(bytes.input, suffix.copies, num_workers_, limits_.costs);
        insert(found, suffix);
        if (bytes.is_first || suffix.has_room) break;
      }
      // Later suffixes of `rest` have neither fewer microbatches in flight nor fewer edges to this stage.
      if (bytes.is_last || workers.count % behind.copies.num_replicas == 0) break;
    }
  }

  // Inserts the suffix, unless one in `found` is as good in every figure. Removes the suffixes that the new
  // one beats.
  void insert(Suffixes& found, const Suffix& suffix) const {
    const auto excels = [this](const Suffix& one, const Suffix& other) {
      if (one.in_flight_all() > other.in_flight_all()) return false;
      if (limits_.memory_bytes.empty()) return true;
      // If the replica count of `one` divides that of `other`, `one` has at most as many edges to any stage
      // upstream as `other`.
      if (one.has_room) return other.copies.num_replicas % one.copies.num_replicas == 0;
      return one.copies.num_replicas == other.copies.num_replicas && one.spare_bytes >= other.spare_bytes;
    };
    if (std::any_of(found.begin(), found.end(), [&](const Suffix& one) { return excels(one, suffix); })) {
      return;
    }
    std::erase_if(found, [&](const Suffix& other) { return excels(suffix, other); });
    const auto behind = std::upper_bound(
        found.begin(), found.end(), suffix,
        [](const Suffix& one, const Suffix& other) { return one.in_flight_all() < other.in_flight_all(); });
    found.insert(behind, suffix);
  }

  static double least(const std::vector<double>& figures, std::size_t begin, std::size_t end) {
    return *std::min_element(figures.begin() + static_cast<std::ptrdiff_t>(begin),
                             figures.begin() + static_cast<std::ptrdiff_t>(end));
  }

  [[nodiscard]] double boundary_s(std::size_t layer) const {
    return 2 * (layers_[layer].activation_bytes / bandwidth_);
  }

  const std::vector<LayerCost>& layers_;
  const std::vector<LayerMemory>& memory_;
  std::int64_t num_workers_;
  double bandwidth_;
  const PlanLimits& limits_;
  std::vector<bool> may_end_;
  double fastest_ = 1;
};

// Non-negative doubles are ordered like their bit patterns.
std::uint64_t bits_of(double time_s) { return std::bit_cast<std::uint64_t>(time_s); }

bool are_alike(const std::vector<double>& figures) {
  return std::adjacent_find(figures.begin(), figures.end(), std::not_equal_to<>()) == figures.end();
}

void check_size(std::size_t num_layers, std::int64_t num_workers, bool workers_differ) {
  const double steps = std::pow(static_cast<double>(num_layers) * static_cast<double>(num_workers), 2) *
                       (workers_differ ? static_cast<double>(num_workers) : 1.0);
  if (steps > kStepsMax) {
    throw UserError(std::to_string(num_layers) + " layers and " + std::to_string(num_workers) +
                    " workers are more than a search within limits can do; give fewer workers, or no limits");
  }
}

}  // namespace

std::optional<LimitedPartition> partition_within(const std::vector<LayerCost>& layers,
                                                 const std::vector<LayerMemory>& memory,
                                                 std::int64_t num_workers, double bandwidth_bytes_per_s,
                                                 const PlanLimits& limits) {
  const bool alike = are_alike(limits.speeds) && are_alike(limits.memory_bytes);
  check_size(layers.size(), num_workers, !alike);
  // The bottleneck without limits is a lower bound if all workers have speed 1, because limits make no plan
  // faster.
  const double unlimited_s = partition(layers, num_workers, bandwidth_bytes_per_s).bottleneck_s;
  const LimitedSearch search(layers, memory, num_workers, bandwidth_bytes_per_s, limits);
  // If workers differ, each number of used workers needs a search of its own, because the last stage always
  // gets the last of the used workers.
  std::optional<std::int64_t> best_workers;
  std::uint64_t best = bits_of(std::numeric_limits<double>::max());
  for (std::int64_t used = alike ? num_workers : 1; used <= num_workers; ++used) {
    const std::int64_t from = alike ? 1 : used;
    std::uint64_t feasible = best;
    std::uint64_t lowest = limits.speeds.empty() ? bits_of(unlimited_s) : 0;
    std::optional<std::int64_t> workers;
    // If a bound is feasible, its plan may have an even lower bottleneck. If not, the search has met a least
    // time above the bound, and no plan has a bottleneck below that time.
    const auto narrow = [&](std::uint64_t bits) {
      Bound bound{std::bit_cast<double>(bits)};
      if (const std::optional<Fewest> found = search.fewest_workers(from, used, bound)) {
        feasible = std::min(bits, bits_of(found->bottleneck_s));
        workers = found->num_workers;
      } else {
        lowest = std::max(bits + 1, bits_of(bound.next_s));
      }
    };
    narrow(feasible);
    if (!workers) continue;
    if (lowest < feasible) narrow(lowest);
    while (lowest < feasible) narrow(lowest + (feasible - lowest) / 2);
    if (best_workers && feasible >= best) continue;
    best = feasible;
    Bound bound{std::bit_cast<double>(best)};
    best_workers = search.fewest_workers(from, used, bound)->num_workers;
  }
  if (!best_workers) return std::nullopt;
  return search.smallest(*best_workers, std::bit_cast<double>(best));
}

}  // namespace pipedream
