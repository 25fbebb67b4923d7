// Replicas push gradients of fully connected layers either whole ("dense") or as factors. FactoredWeights
// says which weights' gradients go as factors, and adds up the costs of these weights. Pure arithmetic; any
// thread.
//
// With r replicas a weight's gradient goes as factors if r F < 2 W, where F is factor_bytes and W
// weight_bytes (Zhang et al., Poseidon, ATC 2017, section 4.2). So each weight has a largest r for factors.
// With more replicas its gradient is pushed dense.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace pipedream {

struct FactoredWeight {
  double weight_bytes = 0;
  // The bytes of one replica's factors for the minibatches that it trains in a round. A search, which does
  // not know the round yet, has the bytes for one minibatch here.
  double factor_bytes = 0;
  double product_s = 0;  // time to multiply one replica's factors into a gradient
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
  // Returns the sum over the weights that are pushed as factors with this many replicas.
  [[nodiscard]] Sum of(std::int64_t num_replicas) const;
  // Returns the largest number of replicas for which of() returns the same sum. num_replicas: at least 2.
  [[nodiscard]] std::int64_t last_alike(std::int64_t num_replicas) const;

 private:
  struct Group {
    std::int64_t num_replicas_max = 0;
    Sum sum;  // over this group and the groups after it, which allow even more replicas
  };

  // Returns the index of the first group that goes as factors with this many replicas, or groups_.size() if
  // none does.
  [[nodiscard]] std::size_t first_from(std::int64_t num_replicas) const;

  std::vector<Group> groups_;  // ascending in num_replicas_max, each number once
};

// The most replicas of a plan or of a stage. It is far above any cluster. It keeps sums of workers inside 64
// bits.
inline constexpr std::int64_t kNumReplicasMax = std::int64_t{1} << 30;

}  // namespace pipedream
