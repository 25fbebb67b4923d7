#include "planner/factored_weights.h"

#include <algorithm>
#include <cmath>

namespace pipedream {
namespace {

bool are_smaller(const FactoredWeight& weight, std::int64_t num_replicas) {
  return static_cast<double>(num_replicas) * weight.factor_bytes < 2 * weight.weight_bytes;
}

// Returns the largest number of replicas with which the weight is pushed as factors; below 2 if it never is.
std::int64_t replicas_max(const FactoredWeight& weight) {
  if (are_smaller(weight, kNumReplicasMax)) return kNumReplicasMax;
  if (!are_smaller(weight, 2)) return 1;
  auto most = static_cast<std::int64_t>(2 * weight.weight_bytes / weight.factor_bytes);
  while (!are_smaller(weight, most)) --most;  // the bound is strict, and the quotient may be rounded up
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
  const std::size_t place = first_from(most);
  const bool is_behind_all = place == groups_.size();
  if (is_behind_all || groups_[place].num_replicas_max != most) {
    const Sum of_those_after = is_behind_all ? Sum{} : groups_[place].sum;
    groups_.insert(groups_.begin() + static_cast<std::ptrdiff_t>(place), {most, of_those_after});
  }
  const Sum one{weight.weight_bytes, weight.factor_bytes, weight.product_s, weight.weight_bytes,
                weight.factor_bytes};
  for (std::size_t group = 0; group <= place; ++group) groups_[group].sum.add(one);
}

FactoredWeights::Sum FactoredWeights::of(std::int64_t num_replicas) const {
  const std::size_t first = first_from(num_replicas);
  // With one replica nothing is pushed. Without a group nothing goes as factors.
  if (num_replicas < 2 || first == groups_.size()) return {};
  return groups_[first].sum;
}

std::int64_t FactoredWeights::last_alike(std::int64_t num_replicas) const {
  const std::size_t first = first_from(num_replicas);
  return first == groups_.size() ? kNumReplicasMax : groups_[first].num_replicas_max;
}

std::size_t FactoredWeights::first_from(std::int64_t num_replicas) const {
  const auto first = std::partition_point(groups_.begin(), groups_.end(), [&](const Group& group) {
    return group.num_replicas_max < num_replicas;
  });
  return static_cast<std::size_t>(first - groups_.begin());
}

}  // namespace pipedream
