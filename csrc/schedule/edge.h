// An edge carries items of one kind from one replica of a stage to another replica, of the same or another
// stage. An item is the tensors of one transfer, for instance one microbatch's activations. Sender and
// receiver use the same name for the edge. Their programs say which items it carries, and in which order.
// Plain values; any thread.
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
  kTiedVersion,   // from owner to user, an item per round of the owner: the version that its update wrote
  kNorm,  // norms of gradients, an item per update: partial sums to the first worker, then the total back
  kPush,  // from a replica to another owner of a shard, an item per round: the gradient of the owner's shard
  kPull,  // from the owner of a shard to another replica, an item per round: the shard's new version
  kEvaluation,  // downstream, an item per validation minibatch, then an item that says that there are no more
};

inline constexpr std::array<EdgeKind, 8> kEdgeKinds = {
    EdgeKind::kActivation, EdgeKind::kGradient, EdgeKind::kTiedGradient, EdgeKind::kTiedVersion,
    EdgeKind::kNorm,       EdgeKind::kPush,     EdgeKind::kPull,         EdgeKind::kEvaluation};

[[nodiscard]] const char* edge_kind_name(EdgeKind kind);  // "activation", "tied_gradient", ...
[[nodiscard]] std::optional<EdgeKind> find_edge_kind(std::string_view name);

// Returns whether items of a kind that an instruction needs or makes (opcode.h) go upstream.
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

// The number of slots in which a stage receives gradients over one edge: one for the gradient in use and one
// for the next. A receiver of activations has more slots, because it keeps each activation until its
// backward.
inline constexpr std::int64_t kNumGradientSlots = 2;
// The most items that may wait on an edge of kind kEvaluation. While that many wait, the sender waits, too.
inline constexpr std::int64_t kNumEvaluationSlots = 2;
// Returns the most unsent items that a sender may hold. in_flight_upstream: the most microbatches in flight
// at the upstream one of the two stages. Each unsent item belongs to one of these microbatches. The factor 2
// and the 4 are a reserve for slots that the neighbour frees late.
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
