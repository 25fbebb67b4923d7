// Lists the pairs of options that exclude each other, each pair once, as data. check_schedule_options() uses
// the table to refuse pairs of the core's own options. run(), reference.run() and partition() use it for
// pairs of their arguments (planning/job.py). `pipedream explain --options` prints it. Pure; any thread.
#pragma once

#include <bitset>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>

namespace pipedream {

// An option, or a property of a plan, a model or data. Exclusion, below, says which two of them exclude each
// other.
enum class Trait : std::uint8_t {
  kAsp,
  kSsp,
  kNotSsp,
  kStaleness,
  kReduced,
  kSyncEvery,
  kPushCodec,
  kFactors,
  kSpares,
  kTies,
  kUnevenTies,
  kReplicas,
  kSeveralStages,
  kProgram,
  kCommonRounds,
  kNewestVersions,
  kOneStage,
  kOneReplica,
  kNorms,
  kNormsOfStages,
  kFloat16,
  kTopkGradients,
  kFloat32Masters,
  kSparseAdam,
  kValidation,
  kAveragedValidation,
  kAverages,
  kNoAverages,
  kShards,
  kCheckpoints,
  kTimedCheckpoints,
  kInputReplicas,
  kState,
  kKeys,
  kPorts,
  kReadOnce,
  kEpochs,
  kMetaModel,
  kModelWithValues,
  kGatherAll,
  kWeights,
  kPaperCosts,
  kCalibratedCosts,
  kNoFormulas,
  kMeasuredLinks,
  kSpeeds,
  kWorkersPerHost,
  kDelayMax,
  kNothingChosen,
  kChosenMicrobatches,
  kFixedSchedule,
  kNumTraits
};
using Traits = std::bitset<static_cast<std::size_t>(Trait::kNumTraits)>;

struct TraitWords {
  Trait trait;
  std::string_view key;   // its name in Python
  std::string_view name;  // in the printed table
  std::string_view said;  // in an error, if the caller does not name the value
};

struct Exclusion {
  Trait first;
  Trait second;
  std::string_view because;
  std::string_view remedy;
};

[[nodiscard]] std::span<const Exclusion> exclusions();
[[nodiscard]] const TraitWords& words_of(Trait trait);
[[nodiscard]] std::optional<Trait> find_trait(std::string_view key);
// The first row whose two traits are both set; null if there is none.
[[nodiscard]] const Exclusion* first_exclusion(const Traits& traits);
// Returns the error's text, such as "sync is 'asp', and staleness is 1: ", then the reason and the remedy.
// first, second: the texts for the two traits.
[[nodiscard]] std::string refusal(const Exclusion& exclusion, std::string_view first,
                                  std::string_view second);

}  // namespace pipedream
