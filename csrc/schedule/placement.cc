#include "schedule/placement.h"

#include <algorithm>
#include <set>
#include <string>
#include <utility>

#include "base/failure.h"

namespace pipedream {
namespace {

// The largest number of ranks. It is far above any cluster, and keeps counts of places inside 64 bits.
constexpr std::int64_t kNumRanksMax = std::int64_t{1} << 30;

// "stage 1 replica 0"
std::string name_of(StageIndex stage, std::int64_t replica) {
  return "stage " + std::to_string(stage.value()) + " replica " + std::to_string(replica);
}

void check_ranks(const std::vector<std::int64_t>& rank_of_stage) {
  const std::set<std::int64_t> ranks(rank_of_stage.begin(), rank_of_stage.end());
  std::int64_t next = 0;
  for (const std::int64_t rank : ranks) {
    const auto stage = std::ranges::find(rank_of_stage, rank) - rank_of_stage.begin();
    const std::string name = name_of(StageIndex(stage), 0);
    if (rank < 0 || rank >= kNumRanksMax) {
      throw UserError(name + " is at rank " + std::to_string(rank) + "; ranks are counted from 0, to " +
                      std::to_string(kNumRanksMax - 1));
    }
    if (rank > next) {
      throw UserError("nothing is placed at rank " + std::to_string(next) + ", and " + name + " is at rank " +
                      std::to_string(rank) + "; ranks have no gaps");
    }
    ++next;
  }
}

}  // namespace

Placement::Placement(std::vector<Place> places) : places_(std::move(places)) {
  std::ranges::sort(places_, {}, [](const Place& place) { return std::pair(place.stage, place.replica); });
  for (std::size_t index = 0; index < places_.size(); ++index) {
    const Place& place = places_[index];
    if (place.replica == ReplicaIndex(0)) stages_.push_back({.first_place = index});
    Stage& stage = stages_.back();
    stage.num_owners = place.replica.value() + 1;
    if (place.is_spare) {
      ++num_spares_;
    } else {
      stage.num_replicas = stage.num_owners;
    }
    num_ranks_ = std::max(num_ranks_, place.rank.value() + 1);
  }
}

Placement Placement::at_ranks(const std::vector<std::int64_t>& rank_of_stage) {
  check_ranks(rank_of_stage);
  std::vector<Place> places;
  for (const std::int64_t rank : rank_of_stage) {
    places.push_back({StageIndex(static_cast<std::int64_t>(places.size())), {}, Rank(rank)});
  }
  return Placement(std::move(places));
}

Placement Placement::in_order(const std::vector<std::int64_t>& num_replicas,
                              const std::vector<std::int64_t>& num_spares) {
  if (!num_spares.empty() && num_spares.size() != num_replicas.size()) {
    throw UserError("num_spares has " + std::to_string(num_spares.size()) + " entries for " +
                    std::to_string(num_replicas.size()) + " stages; give one per stage, or none");
  }
  std::vector<Place> places;
  const auto add = [&places](std::size_t stage, std::int64_t first, std::int64_t count, bool is_spare) {
    for (std::int64_t replica = first; replica < first + count; ++replica) {
      const Rank next(static_cast<std::int64_t>(places.size()));
      places.push_back({StageIndex(static_cast<std::int64_t>(stage)), ReplicaIndex(replica), next, is_spare});
    }
  };
  const auto check_count = [&places](std::size_t stage, std::int64_t count, std::int64_t least,
                                     const char* what) {
    const std::int64_t num_places = static_cast<std::int64_t>(places.size());
    if (count >= least && count <= kNumRanksMax - num_places) return;
    throw UserError("stage " + std::to_string(stage) + " has " + std::to_string(count) + ' ' + what +
                    "; it must have at least " + std::to_string(least) + ", and all stages at most " +
                    std::to_string(kNumRanksMax));
  };
  for (std::size_t stage = 0; stage < num_replicas.size(); ++stage) {
    check_count(stage, num_replicas[stage], 1, "replicas");
    add(stage, 0, num_replicas[stage], false);
  }
  for (std::size_t stage = 0; stage < num_spares.size(); ++stage) {
    check_count(stage, num_spares[stage], 0, "spares");
    add(stage, num_replicas[stage], num_spares[stage], true);
  }
  return Placement(std::move(places));
}

const Placement::Stage& Placement::stage_at(StageIndex stage) const {
  if (stage.value() >= 0 && stage.value() < num_stages()) {
    return stages_[static_cast<std::size_t>(stage.value())];
  }
  throw UserError("stage " + std::to_string(stage.value()) + " is outside the plan of " +
                  std::to_string(num_stages()) + " stages, which are counted from 0");
}

std::int64_t Placement::num_replicas(StageIndex stage) const { return stage_at(stage).num_replicas; }

std::int64_t Placement::num_owners(StageIndex stage) const { return stage_at(stage).num_owners; }

Rank Placement::rank_of(StageIndex stage, ReplicaIndex replica) const {
  const Stage& found = stage_at(stage);
  if (replica.value() < 0 || replica.value() >= found.num_owners) {
    throw UserError(name_of(stage, replica.value()) + " does not exist; the stage has " +
                    std::to_string(found.num_owners) + " replicas");
  }
  return places_[found.first_place + static_cast<std::size_t>(replica.value())].rank;
}

std::vector<Place> Placement::places_at(Rank rank) const {
  std::vector<Place> found;
  for (const Place& place : places_) {
    if (place.rank == rank) found.push_back(place);
  }
  return found;
}

std::vector<StageIndex> Placement::stages_at(Rank rank) const {
  std::vector<StageIndex> found;
  for (const Place& place : places_) {
    if (place.rank == rank && (found.empty() || found.back() != place.stage)) found.push_back(place.stage);
  }
  return found;
}

}  // namespace pipedream
