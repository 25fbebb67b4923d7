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

namespace pipedream {
namespace {

constexpr double kStepsMax = 2e9;
constexpr std::int64_t kUnreached = std::numeric_limits<std::int64_t>::max();

// A stage at its place, as the bound t sees it.
struct Candidate {
  std::int64_t in_flight_all = kUnreached;  // n_s r_s
  double memory_bytes = 0;
  bool recompute = false;
};

// What the suffix from a layer on looks like with so many workers.
struct Suffix {
  std::int64_t in_flight_all = kUnreached;  // of its first stage; fewer are better
  std::int64_t last_layer = 0;              // of its first stage
  std::int64_t num_replicas = 0;
  double memory_bytes = 0;
  bool recompute = false;

  [[nodiscard]] bool is_reached() const { return in_flight_all != kUnreached; }
};

class LimitedSearch {
 public:
  LimitedSearch(const std::vector<LayerCost>& layers, const std::vector<LayerMemory>& memory,
                double bandwidth_bytes_per_s, const PlanLimits& limits)
      : layers_(layers), memory_(memory), bandwidth_(bandwidth_bytes_per_s), limits_(limits) {
    if (!limits.speeds.empty()) fastest_ = *std::max_element(limits.speeds.begin(), limits.speeds.end());
    for (std::size_t last_layer = 0; last_layer < layers.size(); ++last_layer) {
      may_end_.push_back(limits.last_layers.empty() ||
                         std::find(limits.last_layers.begin(), limits.last_layers.end(),
                                   static_cast<std::int64_t>(last_layer)) != limits.last_layers.end());
    }
  }

  // Suffixes within a bound, [first layer][workers].
  using Table = std::vector<std::vector<Suffix>>;

  // The fewest workers, from `from` to `to`, of a plan within bottleneck_s; the last stage has rank to - 1,
  // unless workers are alike.
  [[nodiscard]] std::optional<std::int64_t> fewest_workers(std::int64_t from, std::int64_t to,
                                                           double bottleneck_s) const {
    std::vector<Table> tables;
    if (counts_stages()) {
      tables = tables_by_stages(from, to, bottleneck_s);
    } else {
      tables.push_back(any_table(to, bottleneck_s));
    }
    if (tables.empty()) return std::nullopt;
    return covering(tables.back(), from, to);
  }

  // Of the fewest stages; the bound is feasible.
  [[nodiscard]] LimitedPartition smallest(std::int64_t num_workers, double bottleneck_s) const {
    const std::vector<Table> tables = tables_by_stages(num_workers, num_workers, bottleneck_s);
    LimitedPartition found;
    found.bottleneck_s = bottleneck_s;
    std::size_t layer = 0;
    std::int64_t workers = num_workers;
    for (std::size_t left = tables.size(); left-- > 0;) {
      const Suffix& suffix = tables[left][layer][index(workers)];
      found.stages.push_back({static_cast<std::int64_t>(layer), suffix.last_layer, suffix.num_replicas});
      found.recompute.push_back(suffix.recompute);
      found.memory_bytes.push_back(suffix.memory_bytes);
      layer = index(suffix.last_layer) + 1;
      workers -= suffix.num_replicas;
    }
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
    return Table(layers_.size() + 1, std::vector<Suffix>(index(num_workers) + 1));
  }

  // Suffixes of any number of stages.
  [[nodiscard]] Table any_table(std::int64_t num_workers, double bottleneck_s) const {
    Table table = empty_table(num_workers);
    table.back()[0].in_flight_all = 0;
    for (std::size_t first = layers_.size(); first-- > 0;) {
      extend(table, table, first, num_workers, bottleneck_s, 0);
    }
    return table;
  }

  static std::optional<std::int64_t> covering(const Table& table, std::int64_t from, std::int64_t to) {
    for (std::int64_t workers = from; workers <= to; ++workers) {
      if (table.front()[index(workers)].is_reached()) return workers;
    }
    return std::nullopt;
  }

  // Of 1, 2, ... stages, up to the first number that covers all layers; empty: none does.
  [[nodiscard]] std::vector<Table> tables_by_stages(std::int64_t from, std::int64_t to,
                                                    double bottleneck_s) const {
    const std::int64_t stages_max = num_stages_max();
    std::vector<Table> tables;
    Table below = empty_table(to);
    below.back()[0].in_flight_all = 0;
    for (std::int64_t num_stages = 1; num_stages <= stages_max; ++num_stages) {
      std::int64_t replicas = 0;
      if (!limits_.num_replicas.empty()) {
        replicas = limits_.num_replicas[index(stages_max - num_stages)];
      }
      Table table = empty_table(to);
      for (std::size_t first = layers_.size(); first-- > 0;) {
        extend(table, below, first, to, bottleneck_s, replicas);
      }
      tables.push_back(table);
      const bool is_enough = !counts_stages() || num_stages == stages_max;
      if (is_enough && covering(table, from, to)) return tables;
      below = std::move(table);
    }
    return {};
  }

  // Fills table[first] with a stage that begins there and a suffix of `below` after it. replicas: of the
  // stage, 0 is any number.
  void extend(Table& table, const Table& below, std::size_t first, std::int64_t num_workers,
              double bottleneck_s, std::int64_t replicas) const {
    if (first > 0 && !may_end_[first - 1]) return;
    double compute_s = 0;
    double parameter_bytes = 0;
    double saved_bytes = 0;
    double forward_s = 0;
    double widest_bytes = first == 0 ? 0.0 : layers_[first - 1].activation_bytes;
    double largest_bytes = 0;
    for (std::size_t last = first; last < layers_.size(); ++last) {
      compute_s += layers_[last].compute_s;
      parameter_bytes += layers_[last].parameter_bytes;
      saved_bytes += memory_[last].saved_bytes;
      forward_s += memory_[last].forward_s;
      widest_bytes = std::max(widest_bytes, layers_[last].activation_bytes);
      largest_bytes = std::max(largest_bytes, layers_[last].parameter_bytes);
      // A lower bound on the replicas, one less for rounding: fewer cannot compute the stage in time.
      const double fewest = compute_s > 0 ? std::floor(compute_s / (fastest_ * bottleneck_s)) - 1 : 0.0;
      if (fewest > static_cast<double>(num_workers)) break;  // more layers only add to it
      if (!may_end_[last]) continue;
      if (last + 1 < layers_.size() && boundary_s(last) > bottleneck_s) continue;
      const Sums sums{compute_s, parameter_bytes, saved_bytes,  forward_s, first,
                      last,      widest_bytes,    largest_bytes};
      for (std::int64_t after = 0; after < num_workers; ++after) {
        const Suffix& rest = below[last + 1][index(after)];
        if (!rest.is_reached()) continue;
        const std::int64_t most = std::min(num_workers - after, limits_.num_replicas_max);
        const std::int64_t from =
            replicas == 0 ? std::max<std::int64_t>(1, static_cast<std::int64_t>(fewest)) : replicas;
        const std::int64_t to = replicas == 0 ? most : std::min(most, replicas);
        for (std::int64_t count = from; count <= to; ++count) {
          const Candidate stage = place(sums, count, num_workers - after, rest.in_flight_all, bottleneck_s);
          Suffix& best = table[first][index(after + count)];
          if (stage.in_flight_all >= best.in_flight_all) continue;
          best = {stage.in_flight_all, static_cast<std::int64_t>(last), count, stage.memory_bytes,
                  stage.recompute};
        }
      }
    }
  }

  struct Sums {
    double compute_s;
    double parameter_bytes;
    double saved_bytes;
    double forward_s;
    std::size_t first;
    std::size_t last;
    double widest_bytes;   // that crosses between two layers, or before the first
    double largest_bytes;  // parameters of a layer
  };

  // ranks_end: one after the rank of the stage's last replica.
  [[nodiscard]] Candidate place(const Sums& sums, std::int64_t replicas, std::int64_t ranks_end,
                                std::int64_t in_flight_below, double bottleneck_s) const {
    const std::size_t begin = index(ranks_end - replicas);
    const std::size_t end = index(ranks_end);
    const auto count = static_cast<double>(replicas);
    const double speed = limits_.speeds.empty() ? 1.0 : least(limits_.speeds, begin, end);
    const double sync_s = replicas == 1 ? 0.0 : 4 * (count - 1) * sums.parameter_bytes / (count * bandwidth_);
    const auto time_s = [&](double compute_s) { return std::max(compute_s / speed, sync_s) / count; };
    if (time_s(sums.compute_s) > bottleneck_s) return {};
    const std::int64_t in_flight = 1 + (in_flight_below + replicas - 1) / replicas;
    Candidate stage;
    stage.in_flight_all = in_flight * replicas;
    const auto held = static_cast<double>(in_flight);
    const bool is_first = sums.first == 0;
    const bool is_last = sums.last + 1 == layers_.size();
    const double input = is_first ? 0.0 : layers_[sums.first - 1].activation_bytes;
    const double output = is_last ? 0.0 : layers_[sums.last].activation_bytes;
    const double exchanged = replicas == 1 ? 0.0 : 1 + 2 * (count - 1) / count;
    const double data = ((is_first ? held : 0.0) + (is_last ? 1.0 : 0.0)) * limits_.data_bytes;
    const double transient = std::max(2 * sums.widest_bytes, limits_.step_copies * sums.largest_bytes);
    const double common = (held + limits_.fixed_copies + exchanged) * sums.parameter_bytes +
                          (held + 3) * input + data + transient;
    stage.memory_bytes = common + held * sums.saved_bytes + (held + 2) * output;
    if (limits_.memory_bytes.empty()) return stage;
    const double limit = least(limits_.memory_bytes, begin, end);
    if (stage.memory_bytes <= limit) return stage;
    stage.memory_bytes = common + sums.saved_bytes + input + 4 * output;
    stage.recompute = true;
    const bool fits = limits_.may_recompute && stage.memory_bytes <= limit &&
                      time_s(sums.compute_s + sums.forward_s) <= bottleneck_s;
    return fits ? stage : Candidate{};
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
  double bandwidth_;
  const PlanLimits& limits_;
  std::vector<bool> may_end_;
  double fastest_ = 1;
};

bool are_alike(const std::vector<double>& figures) {
  return std::adjacent_find(figures.begin(), figures.end(), std::not_equal_to<>()) == figures.end();
}

void check_length(const char* name, std::size_t length, std::int64_t wanted, const char* of_what) {
  if (length == 0 || static_cast<std::int64_t>(length) == wanted) return;
  throw UserError(std::string(name) + " has " + std::to_string(length) + " entries for " +
                  std::to_string(wanted) + " " + of_what);
}

void check_positive(const char* name, const std::vector<double>& figures) {
  for (std::size_t position = 0; position < figures.size(); ++position) {
    if (std::isfinite(figures[position]) && figures[position] > 0) continue;
    throw UserError(std::string(name) + " " + std::to_string(position) + " is " +
                    std::to_string(figures[position]) + "; it must be finite and above 0");
  }
}

void check_limits(const std::vector<LayerCost>& layers, const std::vector<LayerMemory>& memory,
                  std::int64_t num_workers, const PlanLimits& limits) {
  const auto num_layers = static_cast<std::int64_t>(layers.size());
  if (static_cast<std::int64_t>(memory.size()) != num_layers) {
    throw UserError("memory has " + std::to_string(memory.size()) + " entries for " +
                    std::to_string(num_layers) + " layers");
  }
  for (std::size_t layer = 0; layer < memory.size(); ++layer) {
    const LayerMemory& figures = memory[layer];
    if (std::isfinite(figures.saved_bytes) && figures.saved_bytes >= 0 && std::isfinite(figures.forward_s) &&
        figures.forward_s >= 0) {
      continue;
    }
    throw UserError("saved_bytes or forward_s of layer " + std::to_string(layer) +
                    " must be finite and not negative");
  }
  check_length("speeds", limits.speeds.size(), num_workers, "workers");
  check_length("memory_bytes", limits.memory_bytes.size(), num_workers, "workers");
  check_positive("the speed of worker", limits.speeds);
  check_positive("the memory of worker", limits.memory_bytes);
  for (std::size_t stage = 0; stage < limits.last_layers.size(); ++stage) {
    const std::int64_t before = stage == 0 ? -1 : limits.last_layers[stage - 1];
    const bool is_last = stage + 1 == limits.last_layers.size();
    if (limits.last_layers[stage] > before && limits.last_layers[stage] < num_layers &&
        (!is_last || limits.last_layers[stage] == num_layers - 1)) {
      continue;
    }
    throw UserError("stages that end after layer " + std::to_string(limits.last_layers[stage]) +
                    " are not in order, or do not end with the model's last layer, " +
                    std::to_string(num_layers - 1));
  }
  if (!limits.last_layers.empty()) {
    check_length("num_replicas", limits.num_replicas.size(),
                 static_cast<std::int64_t>(limits.last_layers.size()), "stages");
  }
  for (const std::int64_t replicas : limits.num_replicas) {
    if (replicas < 1) throw UserError("num_replicas has " + std::to_string(replicas) + "; give at least 1");
  }
  const double steps =
      std::pow(static_cast<double>(num_layers) * static_cast<double>(num_workers), 2) *
      (are_alike(limits.speeds) && are_alike(limits.memory_bytes) ? 1.0 : static_cast<double>(num_workers));
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
  // Refuses what it refuses; with workers as fast as the profile says no limit makes a plan faster.
  const double unlimited_s = partition(layers, num_workers, bandwidth_bytes_per_s).bottleneck_s;
  check_limits(layers, memory, num_workers, limits);
  const LimitedSearch search(layers, memory, bandwidth_bytes_per_s, limits);
  // With workers that differ it matters how many are used, as the last stage has the last of those.
  std::optional<std::int64_t> best_workers;
  std::uint64_t best = std::bit_cast<std::uint64_t>(std::numeric_limits<double>::max());
  const bool alike = are_alike(limits.speeds) && are_alike(limits.memory_bytes);
  for (std::int64_t used = alike ? num_workers : 1; used <= num_workers; ++used) {
    const std::int64_t from = alike ? 1 : used;
    const auto fewest = [&](std::uint64_t bits) {
      return search.fewest_workers(from, used, std::bit_cast<double>(bits));
    };
    std::uint64_t feasible = best;
    if (!fewest(feasible)) continue;
    // Doubles from 0 on are ordered like their bit patterns.
    std::uint64_t lowest = limits.speeds.empty() ? std::bit_cast<std::uint64_t>(unlimited_s) : 0;
    if (lowest < feasible && fewest(lowest)) feasible = lowest;
    while (lowest < feasible) {
      const std::uint64_t middle = lowest + (feasible - lowest) / 2;
      if (fewest(middle)) {
        feasible = middle;
      } else {
        lowest = middle + 1;
      }
    }
    if (best_workers && feasible >= best) continue;
    best = feasible;
    best_workers = fewest(feasible);
  }
  if (!best_workers) return std::nullopt;
  return search.smallest(*best_workers, std::bit_cast<double>(best));
}

}  // namespace pipedream
