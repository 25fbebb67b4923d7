#include "schedule/checked_options.h"

#include <array>
#include <numeric>
#include <string>
#include <utility>

#include "base/check.h"

namespace pipedream {
namespace {

constexpr std::array<std::pair<ScheduleKind, std::string_view>, 9> kKindNames = {{
    {ScheduleKind::kPipedream, "pipedream"},
    {ScheduleKind::kVerticalSync, "vertical_sync"},
    {ScheduleKind::kUnstashed, "unstashed"},
    {ScheduleKind::k2bw, "2bw"},
    {ScheduleKind::kFlush, "flush"},
    {ScheduleKind::kGpipe, "gpipe"},
    {ScheduleKind::kModelParallel, "model_parallel"},
    {ScheduleKind::kDataParallel, "data_parallel"},
    {ScheduleKind::kInterleaved, "interleaved"},
}};

}  // namespace

std::optional<ScheduleKind> find_schedule_kind(std::string_view schedule) {
  for (const auto& [kind, name] : kKindNames) {
    if (name == schedule) return kind;
  }
  if (schedule == "naive") return ScheduleKind::kUnstashed;  // its name before
  return std::nullopt;
}

ScheduleKind kind_of(const ScheduleOptions& options) {
  if (options.program != nullptr) return ScheduleKind::kListed;
  const std::optional<ScheduleKind> kind = find_schedule_kind(options.schedule);
  PD_CHECK(kind.has_value(), options.schedule);
  return *kind;
}

const std::vector<std::string>& schedule_names() {
  static const std::vector<std::string> names = [] {
    std::vector<std::string> made;
    made.reserve(kKindNames.size());
    for (const auto& [kind, name] : kKindNames) made.emplace_back(name);
    return made;
  }();
  return names;
}

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

bool drains(ScheduleKind kind) {
  switch (kind) {
    case ScheduleKind::kPipedream:
    case ScheduleKind::kVerticalSync:
    case ScheduleKind::kUnstashed:
    case ScheduleKind::k2bw:
    case ScheduleKind::kListed:
      return false;
    case ScheduleKind::kFlush:
    case ScheduleKind::kGpipe:
    case ScheduleKind::kModelParallel:
    case ScheduleKind::kDataParallel:
    case ScheduleKind::kInterleaved:
      return true;
  }
  PD_CHECK(false, "kind " << static_cast<int>(kind));
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
