#include "schedule/edge.h"

#include "base/check.h"

namespace pipedream {

std::string to_string(const StageReplica& end) {
  const std::string stage = "stage " + std::to_string(end.stage.value());
  return end.replica.value() == 0 ? stage : stage + " replica " + std::to_string(end.replica.value());
}

const char* edge_kind_name(EdgeKind kind) {
  switch (kind) {
    case EdgeKind::kActivation:
      return "activation";
    case EdgeKind::kGradient:
      return "gradient";
    case EdgeKind::kTiedGradient:
      return "tied_gradient";
    case EdgeKind::kTiedVersion:
      return "tied_version";
    case EdgeKind::kNorm:
      return "norm";
    case EdgeKind::kPush:
      return "push";
    case EdgeKind::kPull:
      return "pull";
    case EdgeKind::kEvaluation:
      return "evaluation";
  }
  PD_CHECK(false, "edge kind " << static_cast<int>(kind));
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
