// A Placement knows the rank of every replica of every stage, and which stages a rank has. Plain value; any
// thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "base/ids.h"

namespace pipedream {

// The rank of one replica of a stage, or of one spare (program.h).
struct Place {
  StageIndex stage;
  ReplicaIndex replica;
  Rank rank;
  bool is_spare = false;

  friend bool operator==(const Place&, const Place&) = default;
};

class Placement {
 public:
  Placement() = default;  // has no stages
  // Places one replica of each stage, at these ranks. Throws UserError for a rank that is below 0 or too
  // large, and for ranks with a gap.
  [[nodiscard]] static Placement at_ranks(const std::vector<std::int64_t>& rank_of_stage);
  // Places all replicas stage by stage, each at the next rank, and then all spares stage by stage.
  // num_spares: the number of spares (program.h) of each stage; empty if there are none. Throws UserError for
  // a stage without replicas, for negative or too large numbers, and for another number of entries in
  // num_spares than of stages.
  [[nodiscard]] static Placement in_order(const std::vector<std::int64_t>& num_replicas,
                                          const std::vector<std::int64_t>& num_spares = {});

  [[nodiscard]] bool empty() const { return places_.empty(); }
  [[nodiscard]] std::int64_t num_stages() const { return static_cast<std::int64_t>(stages_.size()); }
  [[nodiscard]] std::int64_t num_ranks() const { return num_ranks_; }
  // These functions throw UserError for a stage or a replica that the placement does not have.
  [[nodiscard]] std::int64_t num_replicas(StageIndex stage) const;
  [[nodiscard]] std::int64_t num_owners(StageIndex stage) const;         // number of replicas and spares
  [[nodiscard]] std::int64_t num_spares() const { return num_spares_; }  // spares of all stages together
  [[nodiscard]] Rank rank_of(StageIndex stage, ReplicaIndex replica = {}) const;

  // Returns the places at the rank, in the order of stages. Empty for a rank that the placement does not use.
  [[nodiscard]] std::vector<Place> places_at(Rank rank) const;
  [[nodiscard]] std::vector<StageIndex> stages_at(Rank rank) const;
  [[nodiscard]] const std::vector<Place>& places() const { return places_; }

  friend bool operator==(const Placement& one, const Placement& other) {
    return one.places_ == other.places_;
  }

 private:
  struct Stage {
    std::size_t first_place = 0;
    std::int64_t num_replicas = 0;
    std::int64_t num_owners = 0;
  };

  explicit Placement(std::vector<Place> places);  // all places of the stages, in any order
  [[nodiscard]] const Stage& stage_at(StageIndex stage) const;

  std::vector<Place> places_;  // sorted by stage and replica, without gaps
  std::vector<Stage> stages_;
  std::int64_t num_ranks_ = 0;
  std::int64_t num_spares_ = 0;
};

}  // namespace pipedream
