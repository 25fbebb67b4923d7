#include "schedule/edge.h"

#include <array>
#include <cstddef>

namespace pipedream {

std::string to_string(const StageReplica& end) {
  const std::string stage = "stage " + std::to_string(end.stage.value());
  return end.replica.value() == 0 ? stage : stage + " replica " + std::to_string(end.replica.value());
}

const char* edge_kind_name(EdgeKind kind) {
  constexpr std::array<const char*, kEdgeKinds.size()> kNames = {
      "activation", "gradient", "tied_gradient", "tied_version", "norm", "push", "pull", "evaluation"};
  return kNames.at(static_cast<std::size_t>(kind));
}

std::optional<EdgeKind> find_edge_kind(std::string_view name) {
  for (const EdgeKind kind : kEdgeKinds) {
    if (name == edge_kind_name(kind)) return kind;
  }
  return std::nullopt;
}

std::string to_string(const Edge& edge) {
  return std::string(edge_kind_name(edge.kind)) + ' ' + to_string(edge.from) + " to " + to_string(edge.to);
}

}  // namespace pipedream
