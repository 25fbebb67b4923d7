#include "schedule/checked_options.h"

#include <numeric>

namespace pipedream {
std::int64_t count_stages(const ScheduleOptions& options) {
  return static_cast<std::int64_t>(options.in_flight.size());
}

std::int64_t count_workers(const ScheduleOptions& options) {
  return options.placement.empty() ? count_stages(options) : options.placement.num_ranks();
}

Rank rank_of(const ScheduleOptions& options, StageIndex stage, ReplicaIndex replica) {
  return options.placement.empty() ? Rank(stage.value()) : options.placement.rank_of(stage, replica);
}

bool is_replicated(const ScheduleOptions& options) { return count_workers(options) > count_stages(options); }

std::int64_t num_replicas_of(const ScheduleOptions& options, StageIndex stage) {
  return options.placement.empty() ? 1 : options.placement.num_replicas(stage);
}

bool is_at_spare(const ScheduleOptions& options, StageIndex stage, ReplicaIndex replica) {
  const Placement& placement = options.placement;
  if (placement.empty()) return false;
  return replica.value() >= placement.num_replicas(stage) && replica.value() < placement.num_owners(stage);
}

ReplicaIndex replica_at(const ScheduleOptions& options, Rank rank) {
  return options.placement.empty() ? ReplicaIndex() : options.placement.places_at(rank).front().replica;
}

std::vector<StageIndex> stages_at(const ScheduleOptions& options, Rank rank) {
  if (options.placement.empty()) return {StageIndex(rank.value())};
  return options.placement.stages_at(rank);
}

std::int64_t in_flight_at(const ScheduleOptions& options, StageIndex stage) {
  return options.in_flight[static_cast<std::size_t>(stage.value())];
}

std::int64_t common_round(const ScheduleOptions& options) {
  const std::int64_t m = options.num_microbatches;
  std::int64_t common = m;  // microbatches
  for (StageIndex stage; stage.value() < count_stages(options); stage = stage.next()) {
    common = std::lcm(common, num_replicas_of(options, stage));
    if (common > kMinibatchesPerRoundMax * m) break;
  }
  return common / m;
}

}  // namespace pipedream
