#include "schedule/exclusions.h"

#include <algorithm>
#include <array>
#include <iterator>

#include "base/check.h"

namespace pipedream {
namespace {

constexpr std::size_t kNumTraits = static_cast<std::size_t>(Trait::kNumTraits);

constexpr std::array<TraitWords, kNumTraits> kWords = {{
    {Trait::kAsp, "asp", "sync='asp'", "sync is 'asp'"},
    {Trait::kSsp, "ssp", "sync='ssp'", "sync is 'ssp'"},
    {Trait::kNotSsp, "not_ssp", "another sync than 'ssp'", "sync is not 'ssp'"},
    {Trait::kStaleness, "staleness", "staleness above 0", "staleness is above 0"},
    {Trait::kReduced, "reduced", "sync='allreduce', or sync_every above 1",
     "replicas update by a collective (sync='allreduce', or sync_every above 1)"},
    {Trait::kSyncEvery, "sync_every", "sync_every above 1", "sync_every is above 1"},
    {Trait::kPushCodec, "push_codec", "a codec of pushes", "codec names pushes"},
    {Trait::kFactors, "factors", "a codec that pushes factors", "codec pushes factors"},
    {Trait::kSpares, "spares", "spare shards", "the plan has spare shards"},
    {Trait::kTies, "ties", "parameters that stages share", "stages share a parameter"},
    {Trait::kUnevenTies, "uneven_ties", "parameters shared by unlike numbers of replicas",
     "stages of unlike numbers of replicas share a parameter"},
    {Trait::kReplicas, "replicas", "replicas", "a stage has several replicas"},
    {Trait::kSeveralStages, "several_stages", "several stages", "the plan has several stages"},
    {Trait::kProgram, "program", "a Program as schedule", "schedule is a program"},
    {Trait::kCommonRounds, "common_rounds", "a schedule whose replicas update together",
     "schedule is one whose replicas update together"},
    {Trait::kNewestVersions, "newest_versions", "another schedule than 'pipedream'",
     "schedule is not 'pipedream'"},
    {Trait::kOneStage, "one_stage", "schedule='data_parallel'", "schedule is 'data_parallel'"},
    {Trait::kOneReplica, "one_replica", "schedule='interleaved'", "schedule is 'interleaved'"},
    {Trait::kNorms, "norms", "max_grad_norm, or autocast='float16'",
     "norms of gradients are exchanged (max_grad_norm, or autocast='float16')"},
    {Trait::kNormsOfStages, "norms_of_stages",
     "autocast='float16', or max_grad_norm under a draining schedule, over several stages",
     "stages exchange norms of gradients"},
    {Trait::kFloat16, "float16", "autocast='float16'", "autocast is 'float16'"},
    {Trait::kTopkGradients, "topk_gradients", "codec 'topk' for gradients", "codec is 'topk' for gradients"},
    {Trait::kFloat32Masters, "float32_masters", "bfloat16 parameters with float32 masters",
     "a stage has bfloat16 parameters whose optimizer keeps float32 masters"},
    {Trait::kSparseAdam, "sparse_adam", "optimizer SparseAdam", "optimizer is SparseAdam"},
    {Trait::kValidation, "validation", "validation", "validation is given"},
    {Trait::kAveragedValidation, "averaged_validation", "Validation(ema=True)", "validation: ema is True"},
    {Trait::kAverages, "averages", "callbacks.EMA", "a callback is an EMA"},
    {Trait::kNoAverages, "no_averages", "no EMA among the callbacks", "no callback is an EMA"},
    {Trait::kShards, "shards", "replicas with shards (without sync='allreduce')", "a stage has shards"},
    {Trait::kCheckpoints, "checkpoints", "checkpoints", "checkpoints are given"},
    {Trait::kTimedCheckpoints, "timed_checkpoints", "checkpoints every so many seconds under sync='asp'",
     "checkpoints are written every so many seconds"},
    {Trait::kInputReplicas, "input_replicas", "replicas of stage 0", "stage 0 has replicas"},
    {Trait::kState, "state", "state", "state is given"},
    {Trait::kKeys, "keys", "keys", "keys are given"},
    {Trait::kPorts, "ports", "ports", "ports are given"},
    {Trait::kReadOnce, "read_once", "data that are an iterator",
     "data is an iterator, which can be read once"},
    {Trait::kEpochs, "epochs", "epochs above 1", "epochs is above 1"},
    {Trait::kMetaModel, "meta_model", "a model on the meta device", "the model is on the meta device"},
    {Trait::kModelWithValues, "model_with_values", "a model that has values", "the model has values"},
    {Trait::kGatherAll, "gather_all", "gather='all'", "gather is 'all'"},
    {Trait::kWeights, "weights", "weights", "weights is given"},
    {Trait::kPaperCosts, "paper_costs", "cost_model='paper'", "cost_model is 'paper'"},
    {Trait::kCalibratedCosts, "calibrated_costs", "cost_model='calibrated'", "cost_model is 'calibrated'"},
    {Trait::kNoFormulas, "no_formulas", "a plan for another schedule than 'pipedream'",
     "schedule is not 'pipedream'"},
    {Trait::kMeasuredLinks, "measured_links", "bandwidth from profile_links()",
     "bandwidth is what profile_links() measured"},
    {Trait::kSpeeds, "speeds", "speeds", "speeds are given"},
    {Trait::kWorkersPerHost, "workers_per_host", "workers_per_host", "workers_per_host is given"},
    {Trait::kDelayMax, "delay_max", "delay_max", "delay_max is given"},
    {Trait::kNothingChosen, "nothing_chosen", "a named schedule and a number of microbatches",
     "schedule and microbatches are given"},
    {Trait::kChosenMicrobatches, "chosen_microbatches", "microbatches='auto'", "microbatches is 'auto'"},
    {Trait::kFixedSchedule, "fixed_schedule", "a plan for a schedule that \"auto\" does not choose",
     "schedule is one that 'auto' does not choose"},
}};

// NOLINTNEXTLINE(modernize-avoid-c-arrays): the compiler counts the rows
constexpr Exclusion kExclusions[] = {
    // Synchronization of replicas.
    {Trait::kStaleness, Trait::kNotSsp, "ssp alone reads older versions", "use sync='ssp'"},
    {Trait::kStaleness, Trait::kNewestVersions, "schedule 'pipedream' alone reads older versions for it",
     "use that, or leave staleness out"},
    {Trait::kAsp, Trait::kCommonRounds, "asp has no rounds, in which its replicas would update together",
     "use schedule 'pipedream' or 'data_parallel', or sync='bsp'"},
    {Trait::kAsp, Trait::kReduced, "replicas under asp update one by one, without a collective",
     "use sync='bsp'"},
    {Trait::kAsp, Trait::kNorms, "norms are of a round's gradients, and asp has no rounds", "use sync='bsp'"},
    {Trait::kAsp, Trait::kTies, "the stages would have different versions of it", "use sync='bsp'"},
    {Trait::kAsp, Trait::kFactors, "replicas make equal versions of factors round by round",
     "use sync='bsp', or another codec (codec={} is none)"},
    {Trait::kSyncEvery, Trait::kSsp, "replicas that update alone have no rounds to be late by",
     "leave sync_every out"},
    {Trait::kSyncEvery, Trait::kNorms, "replicas that update alone have no common gradient",
     "leave sync_every out"},
    {Trait::kSyncEvery, Trait::kUnevenTies, "each replica that updates alone has a value of its own",
     "use a plan in which these stages have as many replicas, or leave sync_every out"},
    {Trait::kSyncEvery, Trait::kFloat32Masters, "replicas do not average masters",
     "leave sync_every out, or use model.float()"},
    {Trait::kReduced, Trait::kKeys, "torch.distributed does not encrypt",
     "use sync='bsp' without sync_every"},
    {Trait::kReduced, Trait::kPorts, "torch.distributed listens where the system chooses",
     "use sync='bsp' without sync_every"},
    {Trait::kReduced, Trait::kPushCodec, "a collective pushes nothing",
     "use sync='bsp' without sync_every, or another codec (codec={} is none)"},
    {Trait::kReduced, Trait::kNormsOfStages, "replicas of a collective tell other stages nothing",
     "use sync='bsp' without sync_every"},
    {Trait::kReplicas, Trait::kSparseAdam, "replicas exchange dense gradients",
     "use Adam, or a straight plan (partition(..., straight=True))"},

    // Spare shards.
    {Trait::kSpares, Trait::kAsp, "spares push and pull by rounds, which asp does not have",
     "use sync='bsp', or use a plan without num_spare_shards"},
    {Trait::kSpares, Trait::kReduced, "a collective pushes nothing to spares",
     "use sync='bsp' without sync_every, or use a plan without num_spare_shards"},
    {Trait::kSpares, Trait::kFactors, "replicas make versions of factors by themselves",
     "leave factors out, or use a plan without num_spare_shards"},
    {Trait::kSpares, Trait::kNorms, "replicas alone tell each other of norms and overflows",
     "leave that out, or use a plan without num_spare_shards"},
    {Trait::kSpares, Trait::kTies, "replicas alone exchange what stages share",
     "use a plan without num_spare_shards"},
    {Trait::kSpares, Trait::kProgram, "a program has no place for spares",
     "use a schedule by its name, or a plan without num_spare_shards"},
    {Trait::kSpares, Trait::kCheckpoints, "shards of spares are not saved",
     "use a plan without num_spare_shards"},

    // Schedules.
    {Trait::kOneStage, Trait::kSeveralStages, "it has one stage, with a replica at every worker",
     "use another schedule, or a plan of one stage"},
    {Trait::kOneReplica, Trait::kReplicas, "it runs one replica of each stage",
     "use another schedule, or partition(..., straight=True)"},
    {Trait::kProgram, Trait::kState, "a program begins with the version that is there",
     "use a schedule by its name"},

    // Evaluation, checkpoints, state.
    {Trait::kValidation, Trait::kProgram, "a program has no place for evaluations",
     "use a schedule by its name"},
    {Trait::kValidation, Trait::kAsp, "replicas under asp have no version in common", "use sync='bsp'"},
    {Trait::kValidation, Trait::kStaleness, "replicas come to a version at different times",
     "use sync='bsp' without staleness"},
    {Trait::kValidation, Trait::kSyncEvery, "replicas have weights of their own", "leave sync_every out"},
    {Trait::kAveragedValidation, Trait::kNoAverages, "there are no averages of the weights",
     "give callbacks=[pipedream.callbacks.EMA(0.999)]"},
    {Trait::kAveragedValidation, Trait::kShards, "each replica averages its own part of the weights",
     "use sync='allreduce', or a plan without replicas"},
    {Trait::kAverages, Trait::kAsp, "replicas under asp have no version in common", "use sync='bsp'"},
    {Trait::kAverages, Trait::kSyncEvery, "replicas have weights of their own", "leave sync_every out"},
    {Trait::kAverages, Trait::kSpares, "nobody collects the averages of spare shards",
     "use a plan without num_spare_shards"},
    {Trait::kCheckpoints, Trait::kState, "a run goes on from one of them", "leave one out"},
    {Trait::kCheckpoints, Trait::kProgram, "a program begins with the version that is there",
     "use a schedule by its name"},
    {Trait::kTimedCheckpoints, Trait::kInputReplicas,
     "with sync='asp' one may be ahead of another as far as it likes",
     "give every= a number of minibatches, or 'epoch'"},

    // Data, numbers, weights.
    {Trait::kReadOnce, Trait::kEpochs, "each epoch reads the data again",
     "give a DataLoader, a list, or an object whose __iter__ starts anew"},
    {Trait::kTopkGradients, Trait::kFloat16, "the loss scale changes while topk holds scaled gradients back",
     "use int8, or autocast='bfloat16'"},
    {Trait::kWeights, Trait::kModelWithValues, "weights are for a model on the meta device",
     "load them into it before run, or make it under torch.device('meta')"},
    {Trait::kGatherAll, Trait::kMetaModel, "the model stays there", "give save=FOLDER"},

    // Plans.
    {Trait::kSpares, Trait::kCalibratedCosts, "the paper's formulas alone plan spares",
     "leave spare_workers out, or give a plan's stages num_spare_shards yourself"},
    {Trait::kSpares, Trait::kNoFormulas, "the paper's formulas, for schedule 'pipedream', alone plan spares",
     "leave spare_workers out, or give a plan's stages num_spare_shards yourself"},
    {Trait::kSpares, Trait::kMeasuredLinks, "spares are planned for and simulated with one bandwidth",
     "give one bandwidth, or leave spares out"},
    {Trait::kSpeeds, Trait::kCalibratedCosts, "the paper's formulas alone take speeds", "leave speeds out"},
    {Trait::kSpeeds, Trait::kNoFormulas, "the paper's formulas, for schedule 'pipedream', alone take speeds",
     "leave speeds out"},
    {Trait::kWorkersPerHost, Trait::kPaperCosts, "calibrated costs alone count the workers of a host",
     "use cost_model='calibrated', or leave workers_per_host out"},
    {Trait::kDelayMax, Trait::kNothingChosen, "it limits a choice alone",
     "give schedule='auto' or microbatches='auto', or leave delay_max out"},
    {Trait::kChosenMicrobatches, Trait::kFixedSchedule,
     "microbatches are chosen for 'auto', 'flush', 'pipedream' and 'unstashed'",
     "leave microbatches out, or give a number"},
};

constexpr bool words_are_in_order() {
  for (std::size_t index = 0; index < kNumTraits; ++index) {
    if (static_cast<std::size_t>(kWords[index].trait) != index) return false;
  }
  return true;
}
static_assert(words_are_in_order());

}  // namespace

std::span<const Exclusion> exclusions() { return kExclusions; }

const TraitWords& words_of(Trait trait) {
  PD_CHECK(trait < Trait::kNumTraits, static_cast<int>(trait));
  return kWords[static_cast<std::size_t>(trait)];
}

std::optional<Trait> find_trait(std::string_view key) {
  const auto* const found = std::ranges::find(kWords, key, &TraitWords::key);
  return found == kWords.end() ? std::nullopt : std::optional(found->trait);
}

const Exclusion* first_exclusion(const Traits& traits) {
  const auto has = [&](Trait trait) { return traits[static_cast<std::size_t>(trait)]; };
  const auto* const found = std::ranges::find_if(
      kExclusions, [&](const Exclusion& row) { return has(row.first) && has(row.second); });
  return found == std::end(kExclusions) ? nullptr : found;
}

std::string refusal(const Exclusion& exclusion, std::string_view first, std::string_view second) {
  std::string text(first);
  text.append(", and ").append(second).append(": ");
  return text.append(exclusion.because).append("; ").append(exclusion.remedy);
}

}  // namespace pipedream
