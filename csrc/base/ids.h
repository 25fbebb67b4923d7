// Defines one type for each kind of identifier, so that for instance a StageIndex cannot be used as a
// MinibatchId. Plain values, owned by nobody; any thread.
#pragma once

#include <compare>
#include <cstdint>
#include <functional>

namespace pipedream {

template <class Tag>
class StrongId {
 public:
  constexpr StrongId() = default;
  constexpr explicit StrongId(std::int64_t value) : value_(value) {}

  [[nodiscard]] constexpr std::int64_t value() const { return value_; }
  [[nodiscard]] constexpr StrongId next() const { return StrongId(value_ + 1); }

  // NOLINTNEXTLINE(modernize-use-nullptr): clang-tidy 14 takes the defaulted operator for a literal 0
  friend constexpr auto operator<=>(StrongId, StrongId) = default;

 private:
  std::int64_t value_ = 0;
};

using StageIndex = StrongId<struct StageIndexTag>;
using ReplicaIndex = StrongId<struct ReplicaIndexTag>;  // local to its stage
using Rank = StrongId<struct RankTag>;                  // global
using MinibatchId = StrongId<struct MinibatchIdTag>;    // counted through all epochs, from 0
using MicrobatchIndex = StrongId<struct MicrobatchIndexTag>;
using WeightVersion = StrongId<struct WeightVersionTag>;  // the weights after that many updates
using SlotIndex = StrongId<struct SlotIndexTag>;

}  // namespace pipedream

template <class Tag>
struct std::hash<pipedream::StrongId<Tag>> {
  std::size_t operator()(pipedream::StrongId<Tag> id) const noexcept {
    return std::hash<std::int64_t>{}(id.value());
  }
};
