// Says for which weights of fully connected layers the replicas push their gradients as factors, and adds up
// the costs of these weights. Pure arithmetic; any thread.
//
// With r replicas a weight goes as factors if r F < 2 W, where F is the bytes of one replica's factors in a
// round and W the bytes of the weight (Zhang et al., Poseidon, ATC 2017, section 4.2). So each weight has a
// largest r for factors, and is pushed dense beyond it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace pipedream {

struct FactoredWeight {
  double weight_bytes = 0;
  double factor_bytes = 0;  // of one replica in a round
  double product_s = 0;     // to make the gradient of one replica's factors
};

class FactoredWeights {
 public:
  struct Sum {
    double weight_bytes = 0;
    double factor_bytes = 0;
    double product_s = 0;
    double largest_weight_bytes = 0;
    double largest_factor_bytes = 0;

    void add(const Sum& other);
  };

  void add(const FactoredWeight& weight);
  [[nodiscard]] bool empty() const { return groups_.empty(); }
  // The sum over the weights that this many replicas push as factors.
  [[nodiscard]] Sum of(std::int64_t num_replicas) const;
  // The largest number of replicas with which the same weights are pushed as factors.
  [[nodiscard]] std::int64_t last_alike(std::int64_t num_replicas) const;

 private:
  struct Group {
    std::int64_t num_replicas_max = 0;
    Sum sum;  // over this group and the later groups, which go as factors with even more replicas
  };

  // The index of the first group that goes as factors with this number of replicas; groups_.size() if no
  // group does.
  [[nodiscard]] std::size_t first_from(std::int64_t num_replicas) const;

  std::vector<Group> groups_;  // fewest replicas first, each number once
};

// The most replicas of a plan or a stage. It is far above any cluster, and keeps every sum of workers inside
// 64 bits.
inline constexpr std::int64_t kNumReplicasMax = std::int64_t{1} << 30;

}  // namespace pipedream
