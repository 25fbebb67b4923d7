#include "schedule/checked_options.h"

#include <algorithm>
#include <numeric>

#include "base/check.h"
#include "schedule/listed_program.h"
#include "schedule/schedule_rules.h"

namespace pipedream {
namespace {

std::int64_t minibatches_per_round(const ScheduleOptions& options, StageIndex stage) {
  if (options.program != nullptr) return options.program->minibatches_per_round(stage);
  const std::int64_t m = options.num_microbatches;
  return rules_of(options).drains() ? minibatches_between_drains(options)
                                    : std::lcm(m, num_replicas_of(options, stage)) / m;
}

}  // namespace

std::int64_t num_stages(const ScheduleOptions& options) {
  return static_cast<std::int64_t>(options.in_flight.size());
}

std::int64_t num_workers(const ScheduleOptions& options) {
  return options.placement.empty() ? num_stages(options) : options.placement.num_ranks();
}

Rank rank_of(const ScheduleOptions& options, StageIndex stage, ReplicaIndex replica) {
  return options.placement.empty() ? Rank(stage.value()) : options.placement.rank_of(stage, replica);
}

bool has_replicas(const ScheduleOptions& options) { return num_workers(options) > num_stages(options); }

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
  return options.in_flight.at(static_cast<std::size_t>(stage.value()));
}

std::int64_t minibatches_between_drains(const ScheduleOptions& options) {
  const std::int64_t m = options.num_microbatches;
  std::int64_t common = m;  // microbatches
  for (StageIndex stage; stage.value() < num_stages(options); stage = stage.next()) {
    common = std::lcm(common, num_replicas_of(options, stage));
    if (common > kMinibatchesPerRoundMax * m) break;
  }
  return common / m;
}

Rounds rounds_of(const ScheduleOptions& options, StageIndex stage) {
  return {options.first_minibatch.value(), num_replicas_of(options, stage),
          minibatches_per_round(options, stage), options.asynchronous, options.num_microbatches};
}

bool drains_every_minibatch(const ScheduleOptions& options) {
  return options.program != nullptr ? options.program->drains() : rules_of(options).drains();
}

std::int64_t num_rounds_delayed(const ScheduleOptions& options, StageIndex stage) {
  return num_replicas_of(options, stage) > 1 ? (options.staleness + 1) / 2 : 0;
}

MicrobatchOrder order_of(const ScheduleOptions& options) {
  if (options.program != nullptr) return {options.num_microbatches, 1, 1};  // the lists give the order
  const std::int64_t workers = num_workers(options);
  const std::int64_t num_chunks = std::max<std::int64_t>(1, num_stages(options) / workers);
  return {options.num_microbatches, num_chunks, num_chunks == 1 ? 1 : workers};
}

Rounds positions_of(const ScheduleOptions& options, StageIndex stage) {
  Rounds positions = rounds_of(options, stage);
  positions.num_microbatches = order_of(options).num_positions();
  return positions;
}

std::int64_t window_of(const ScheduleOptions& options, Rank rank) {
  const StageIndex first_stage = stages_at(options, rank).front();
  const std::int64_t num_in_round = rounds_of(options, first_stage).own_per_round();
  const std::int64_t in_flight = in_flight_at(options, first_stage);
  const std::int64_t num_downstream = num_workers(options) - rank.value() - 1;
  switch (rules_of(options).in_flight) {
    case InFlight::kAsPlanned:
      return in_flight;
    case InFlight::kAsPlannedOfRound:
      return std::min(num_in_round, in_flight);
    case InFlight::kRound:
      return num_in_round;
    case InFlight::kOne:
      return 1;
    case InFlight::kListed:
      return options.program->num_in_flight(first_stage);
    case InFlight::kOverChunks: {
      const MicrobatchOrder order = order_of(options);
      if (order.num_chunks == 1) return std::min(num_in_round, num_downstream + 1);
      return 2 * num_downstream + (order.num_chunks - 1) * order.group_size + 1;
    }
  }
  PD_CHECK(false, options.schedule);
}

}  // namespace pipedream
