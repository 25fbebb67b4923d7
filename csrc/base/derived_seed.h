// Derives seeds from one seed and a number, for instance the number of a minibatch or of a random draw in the
// model. Pure; any thread.
#pragma once

#include <cstdint>

namespace pipedream {

// Returns the entry at index `number` of the sequence that SplitMix64 (Steele, Lea and Flood, 2014) makes
// from the seed. The result has 63 bits, because torch takes a signed number. Every random draw of a model
// calls this, so it must be cheap.
[[nodiscard]] constexpr std::int64_t derived_seed(std::uint64_t seed, std::uint64_t number) {
  std::uint64_t mixed = seed + (number + 1) * 0x9E3779B97F4A7C15U;
  mixed = (mixed ^ (mixed >> 30U)) * 0xBF58476D1CE4E5B9U;
  mixed = (mixed ^ (mixed >> 27U)) * 0x94D049BB133111EBU;
  return static_cast<std::int64_t>((mixed ^ (mixed >> 31U)) >> 1U);
}

}  // namespace pipedream
