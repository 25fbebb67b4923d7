#include "schedule/placement.h"

#include <algorithm>
#include <string>
#include <tuple>
#include <utility>

#include "base/failure.h"

namespace pipedream {
namespace {

// The largest number of ranks. It is far above any cluster, and keeps counts of places inside 64 bits.
constexpr std::int64_t kNumRanksMax = std::int64_t{1} << 30;

auto order_of(const Place& place) { return std::tie(place.stage, place.replica); }

// "stage 1 replica 0"
std::string name_of(StageIndex stage, std::int64_t replica) {
  return "stage " + std::to_string(stage.value()) + " replica " + std::to_string(replica);
}

std::string name_of(const Place& place) { return name_of(place.stage, place.replica.value()); }

std::string at_rank(const Place& place) { return " at rank " + std::to_string(place.rank.value()); }

void check_numbers(const Place& place) {
  const auto [least, most] = std::minmax({place.stage.value(), place.replica.value(), place.rank.value()});
  if (least >= 0 && most < kNumRanksMax) return;
  throw UserError(name_of(place) + at_rank(place) + ": all three are counted from 0, to " +
                  std::to_string(kNumRanksMax - 1));
}

}  // namespace

Placement::Placement(std::vector<Place> places) : places_(std::move(places)) {
  for (const Place& place : places_) {
    check_numbers(place);
    num_ranks_ = std::max(num_ranks_, place.rank.value() + 1);
    if (place.is_spare) ++num_spares_;
  }
  std::sort(places_.begin(), places_.end(),
            [](const Place& one, const Place& other) { return order_of(one) < order_of(other); });
  count_stages();
  check_spares();
  check_gaps();
  check_ranks();
}

Placement Placement::at_ranks(const std::vector<std::int64_t>& rank_of_stage) {
  std::vector<Place> places;
  places.reserve(rank_of_stage.size());
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

// Counts the replicas of each stage from the index of its last one. check_gaps() makes sure that none is
// missing.
void Placement::count_stages() {
  for (std::size_t index = 0; index < places_.size(); ++index) {
    const bool is_first = index == 0 || places_[index].stage != places_[index - 1].stage;
    if (is_first) stages_.push_back({.first_place = index});
    Stage& stage = stages_.back();
    stage.num_owners = places_[index].replica.value() + 1;
    if (!places_[index].is_spare) stage.num_replicas = stage.num_owners;
  }
}

void Placement::check_spares() const {
  for (std::size_t index = 0; index < places_.size(); ++index) {
    const bool is_first = index == 0 || places_[index].stage != places_[index - 1].stage;
    const bool is_behind_spare = !is_first && places_[index - 1].is_spare;
    if (!(places_[index].is_spare ? is_first : is_behind_spare)) continue;
    const Place& spare = places_[places_[index].is_spare ? index : index - 1];
    throw UserError(name_of(spare) + at_rank(spare) +
                    " is a spare; spares count on from the replicas of their stage");
  }
}

void Placement::check_gaps() const {
  for (std::size_t index = 1; index < places_.size(); ++index) {
    if (order_of(places_[index]) != order_of(places_[index - 1])) continue;
    throw UserError(name_of(places_[index]) + " is placed twice," + at_rank(places_[index - 1]) + " and" +
                    at_rank(places_[index]));
  }
  std::size_t next = 0;
  for (std::size_t stage_index = 0; stage_index < stages_.size(); ++stage_index) {
    const Stage& stage = stages_[stage_index];
    const StageIndex due_stage(static_cast<std::int64_t>(stage_index));
    for (std::int64_t replica = 0; replica < stage.num_owners; ++replica, ++next) {
      const Place due{due_stage, ReplicaIndex(replica), {}};
      if (next < places_.size() && order_of(places_[next]) == order_of(due)) continue;
      throw UserError(name_of(due) + " is placed nowhere; stages and replicas have no gaps");
    }
  }
}

void Placement::check_ranks() const {
  std::vector<Place> by_rank = places_;
  std::stable_sort(by_rank.begin(), by_rank.end(),
                   [](const Place& one, const Place& other) { return one.rank < other.rank; });
  std::int64_t next = 0;
  for (std::size_t index = 0; index < by_rank.size(); ++index) {
    const Place& place = by_rank[index];
    if (place.rank.value() > next) {
      throw UserError("nothing is placed at rank " + std::to_string(next) + ", and " + name_of(place) +
                      " is" + at_rank(place) + "; ranks have no gaps");
    }
    next = place.rank.value() + 1;
    if (index == 0 || by_rank[index - 1].rank != place.rank || by_rank[index - 1].stage != place.stage) {
      continue;
    }
    throw UserError(name_of(by_rank[index - 1]) + " and " + name_of(place) + " are both" + at_rank(place) +
                    "; replicas of a stage lie at different ranks");
  }
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
