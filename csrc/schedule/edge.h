// An edge carries items of one kind from one replica of a stage to another replica, of the same or another
// stage. Both ends use the same name for the edge. The programs say which items it carries, and in which
// order. Plain values; any thread.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <optional>
#include <string>
#include <string_view>

#include "base/ids.h"

namespace pipedream {

enum class EdgeKind {
  kActivation,    // downstream, an item per microbatch
  kGradient,      // upstream, an item per microbatch
  kTiedGradient,  // from a user of tied parameters to their owner, an item per minibatch
  kTiedVersion,   // from the owner to the user, an item per minibatch: what its update wrote
  kNorm,          // the gradients' norm, an item per update: partial sums upstream, then the total down
  kPush,          // between replicas, an item per round: the gradient of the receiver's shard
  kPull,          // between replicas, an item per round: what the sender's update wrote to its shard
  kEvaluation,    // downstream, an item per validation minibatch and one that says that there are no more
};

inline constexpr std::array<EdgeKind, 8> kEdgeKinds = {
    EdgeKind::kActivation, EdgeKind::kGradient, EdgeKind::kTiedGradient, EdgeKind::kTiedVersion,
    EdgeKind::kNorm,       EdgeKind::kPush,     EdgeKind::kPull,         EdgeKind::kEvaluation};

[[nodiscard]] const char* edge_kind_name(EdgeKind kind);  // "activation", "tied_gradient", ...
[[nodiscard]] std::optional<EdgeKind> find_edge_kind(std::string_view name);

// Whether items of the kind go from a stage to its neighbour upstream.
[[nodiscard]] constexpr bool goes_upstream(EdgeKind kind) { return kind == EdgeKind::kGradient; }

struct StageReplica {
  StageIndex stage;
  ReplicaIndex replica;

  // NOLINTNEXTLINE(modernize-use-nullptr): as in ids.h
  friend auto operator<=>(const StageReplica&, const StageReplica&) = default;
};
[[nodiscard]] std::string to_string(const StageReplica& end);  // "stage 1", "stage 0 replica 2"

struct Edge {
  EdgeKind kind = EdgeKind::kActivation;
  StageReplica from;
  StageReplica to;

  // NOLINTNEXTLINE(modernize-use-nullptr): as in ids.h
  friend auto operator<=>(const Edge&, const Edge&) = default;
};

// The number of slots of a receiver of gradients: one for the gradient in use and one for the next gradient.
// A receiver of activations has more slots, because it keeps each activation until its backward.
inline constexpr std::int64_t kNumGradientSlots = 2;
// The most items that an edge of kind kEvaluation holds. If it is full, its sender waits.
inline constexpr std::int64_t kNumEvaluationSlots = 2;
// The largest number of items that a sender may hold unsent. in_flight_upstream: the most microbatches in
// flight at the upstream stage. Each unsent item belongs to one of these microbatches. The constant is a
// reserve for slots that a neighbour frees a little late.
[[nodiscard]] constexpr std::int64_t num_unsent_max(std::int64_t in_flight_upstream) {
  return 2 * in_flight_upstream + 4;
}

struct EdgeHash {
  [[nodiscard]] std::size_t operator()(const Edge& edge) const {
    auto hash = static_cast<std::uint64_t>(edge.kind);
    for (const std::int64_t part : {edge.from.stage.value(), edge.from.replica.value(), edge.to.stage.value(),
                                    edge.to.replica.value()}) {
      hash = (hash << 16 | hash >> 48) ^ static_cast<std::uint64_t>(part);
    }
    return hash * 0x9E3779B97F4A7C15ULL;
  }
};

// Returns a name such as "activation stage 0 to stage 1". Replicas other than the first are named:
// "activation stage 0 replica 2 to stage 1".
[[nodiscard]] std::string to_string(const Edge& edge);

}  // namespace pipedream
