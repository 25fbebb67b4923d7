#include "planner/factored_weights.h"

#include <algorithm>
#include <cmath>

namespace pipedream {
namespace {

bool are_smaller(const FactoredWeight& weight, std::int64_t num_replicas) {
  return static_cast<double>(num_replicas) * weight.factor_bytes < 2 * weight.weight_bytes;
}

// The most replicas that push it as factors; below 2 where none do.
std::int64_t replicas_max(const FactoredWeight& weight) {
  if (are_smaller(weight, kNumReplicasMax)) return kNumReplicasMax;
  if (!are_smaller(weight, 2)) return 1;
  auto most = static_cast<std::int64_t>(2 * weight.weight_bytes / weight.factor_bytes);
  while (!are_smaller(weight, most)) --most;  // by rounding, or where it divides
  return most;
}

}  // namespace

void FactoredWeights::Sum::add(const Sum& other) {
  weight_bytes += other.weight_bytes;
  factor_bytes += other.factor_bytes;
  product_s += other.product_s;
  largest_weight_bytes = std::max(largest_weight_bytes, other.largest_weight_bytes);
  largest_factor_bytes = std::max(largest_factor_bytes, other.largest_factor_bytes);
}

void FactoredWeights::add(const FactoredWeight& weight) {
  const std::int64_t most = replicas_max(weight);
  if (most < 2) return;
  auto place = std::lower_bound(
      groups_.begin(), groups_.end(), most,
      [](const Group& group, std::int64_t num_replicas) { return group.num_replicas_max < num_replicas; });
  if (place == groups_.end() || place->num_replicas_max != most) place = groups_.insert(place, {most, {}});
  place->sum.add(
      {weight.weight_bytes, weight.factor_bytes, weight.product_s, weight.weight_bytes, weight.factor_bytes});
}

FactoredWeights::Sum FactoredWeights::of(std::int64_t num_replicas) const {
  Sum sum;
  if (num_replicas < 2) return sum;  // nothing to push
  for (const Group& group : groups_) {
    if (num_replicas <= group.num_replicas_max) sum.add(group.sum);
  }
  return sum;
}

std::int64_t FactoredWeights::last_alike(std::int64_t num_replicas) const {
  for (const Group& group : groups_) {
    if (num_replicas <= group.num_replicas_max) return group.num_replicas_max;
  }
  return kNumReplicasMax;
}

}  // namespace pipedream
