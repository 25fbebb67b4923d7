#include "schedule/exclusions.h"

#include <algorithm>
#include <iterator>

#include "base/failure.h"

namespace pipedream {
namespace {

// NOLINTNEXTLINE(modernize-avoid-c-arrays): the compiler counts the rows
constexpr Trait kTraits[] = {
    {"asp", "sync='asp'", "sync is 'asp'"},
    {"ssp", "sync='ssp'", "sync is 'ssp'"},
    {"not_ssp", "another sync than 'ssp'", "sync is not 'ssp'"},
    {"staleness", "staleness above 0", "staleness is above 0"},
    {"reduced", "sync='allreduce', or sync_every above 1",
     "replicas update by a collective (sync='allreduce', or sync_every above 1)"},
    {"sync_every", "sync_every above 1", "sync_every is above 1"},
    {"push_codec", "a codec of pushes", "codec names pushes"},
    {"factors", "a codec that pushes factors", "codec pushes factors"},
    {"spares", "spare shards", "the plan has spare shards"},
    {"ties", "parameters that stages share", "stages share a parameter"},
    {"uneven_ties", "parameters shared by unlike numbers of replicas",
     "stages of unlike numbers of replicas share a parameter"},
    {"replicas", "replicas", "a stage has several replicas"},
    {"several_stages", "several stages", "the plan has several stages"},
    {"program", "a Program as schedule", "schedule is a program"},
    {"common_rounds", "a schedule whose replicas update together",
     "schedule is one whose replicas update together"},
    {"newest_versions", "another schedule than 'pipedream'", "schedule is not 'pipedream'"},
    {"one_stage", "schedule='data_parallel'", "schedule is 'data_parallel'"},
    {"one_replica", "schedule='interleaved'", "schedule is 'interleaved'"},
    {"norms", "max_grad_norm, or autocast='float16'",
     "norms of gradients are exchanged (max_grad_norm, or autocast='float16')"},
    {"norms_of_stages", "autocast='float16', or max_grad_norm under a draining schedule, over several stages",
     "stages exchange norms of gradients"},
    {"float16", "autocast='float16'", "autocast is 'float16'"},
    {"topk_gradients", "codec 'topk' for gradients", "codec is 'topk' for gradients"},
    {"float32_masters", "bfloat16 parameters with float32 masters",
     "a stage has bfloat16 parameters whose optimizer keeps float32 masters"},
    {"sparse_adam", "optimizer SparseAdam", "optimizer is SparseAdam"},
    {"validation", "validation", "validation is given"},
    {"averaged_validation", "Validation(ema=True)", "validation: ema is True"},
    {"averages", "callbacks.EMA", "a callback is an EMA"},
    {"no_averages", "no EMA among the callbacks", "no callback is an EMA"},
    {"shards", "replicas with shards (without sync='allreduce')", "a stage has shards"},
    {"checkpoints", "checkpoints", "checkpoints are given"},
    {"timed_checkpoints", "checkpoints every so many seconds under sync='asp'",
     "checkpoints are written every so many seconds"},
    {"input_replicas", "replicas of stage 0", "stage 0 has replicas"},
    {"state", "state", "state is given"},
    {"keys", "keys", "keys are given"},
    {"ports", "ports", "ports are given"},
    {"read_once", "data that are an iterator", "data is an iterator, which can be read once"},
    {"epochs", "epochs above 1", "epochs is above 1"},
    {"meta_model", "a model on the meta device", "the model is on the meta device"},
    {"model_with_values", "a model that has values", "the model has values"},
    {"gather_all", "gather='all'", "gather is 'all'"},
    {"weights", "weights", "weights is given"},
    {"paper_costs", "cost_model='paper'", "cost_model is 'paper'"},
    {"calibrated_costs", "cost_model='calibrated'", "cost_model is 'calibrated'"},
    {"no_formulas", "a plan for another schedule than 'pipedream'", "schedule is not 'pipedream'"},
    {"measured_links", "bandwidth from profile_links()", "bandwidth is what profile_links() measured"},
    {"speeds", "speeds", "speeds are given"},
    {"workers_per_host", "workers_per_host", "workers_per_host is given"},
    {"delay_max", "delay_max", "delay_max is given"},
    {"nothing_chosen", "a named schedule and a number of microbatches",
     "schedule and microbatches are given"},
    {"chosen_microbatches", "microbatches='auto'", "microbatches is 'auto'"},
    {"fixed_schedule", "a plan for a schedule that \"auto\" does not choose",
     "schedule is one that 'auto' does not choose"},
};

// NOLINTNEXTLINE(modernize-avoid-c-arrays): the compiler counts the rows
constexpr Exclusion kExclusions[] = {
    // Synchronization of replicas.
    {"staleness", "not_ssp", "ssp alone reads older versions", "use sync='ssp'"},
    {"staleness", "newest_versions", "schedule 'pipedream' alone reads older versions for it",
     "use that, or leave staleness out"},
    {"asp", "common_rounds", "asp has no rounds, in which its replicas would update together",
     "use schedule 'pipedream' or 'data_parallel', or sync='bsp'"},
    {"asp", "reduced", "replicas under asp update one by one, without a collective", "use sync='bsp'"},
    {"asp", "norms", "norms are of a round's gradients, and asp has no rounds", "use sync='bsp'"},
    {"asp", "ties", "the stages would have different versions of it", "use sync='bsp'"},
    {"asp", "factors", "replicas make equal versions of factors round by round",
     "use sync='bsp', or another codec (codec={} is none)"},
    {"sync_every", "ssp", "replicas that update alone have no rounds to be late by", "leave sync_every out"},
    {"sync_every", "norms", "replicas that update alone have no common gradient", "leave sync_every out"},
    {"sync_every", "uneven_ties", "each replica that updates alone has a value of its own",
     "use a plan in which these stages have as many replicas, or leave sync_every out"},
    {"sync_every", "float32_masters", "replicas do not average masters",
     "leave sync_every out, or use model.float()"},
    {"reduced", "keys", "torch.distributed does not encrypt", "use sync='bsp' without sync_every"},
    {"reduced", "ports", "torch.distributed listens where the system chooses",
     "use sync='bsp' without sync_every"},
    {"reduced", "push_codec", "a collective pushes nothing",
     "use sync='bsp' without sync_every, or another codec (codec={} is none)"},
    {"reduced", "norms_of_stages", "replicas of a collective tell other stages nothing",
     "use sync='bsp' without sync_every"},
    {"replicas", "sparse_adam", "replicas exchange dense gradients",
     "use Adam, or a straight plan (partition(..., straight=True))"},

    // Spare shards.
    {"spares", "asp", "spares push and pull by rounds, which asp does not have",
     "use sync='bsp', or use a plan without num_spare_shards"},
    {"spares", "reduced", "a collective pushes nothing to spares",
     "use sync='bsp' without sync_every, or use a plan without num_spare_shards"},
    {"spares", "factors", "replicas make versions of factors by themselves",
     "leave factors out, or use a plan without num_spare_shards"},
    {"spares", "norms", "replicas alone tell each other of norms and overflows",
     "leave that out, or use a plan without num_spare_shards"},
    {"spares", "ties", "replicas alone exchange what stages share", "use a plan without num_spare_shards"},
    {"spares", "program", "a program has no place for spares",
     "use a schedule by its name, or a plan without num_spare_shards"},
    {"spares", "checkpoints", "shards of spares are not saved", "use a plan without num_spare_shards"},

    // Schedules.
    {"one_stage", "several_stages", "it has one stage, with a replica at every worker",
     "use another schedule, or a plan of one stage"},
    {"one_replica", "replicas", "it runs one replica of each stage",
     "use another schedule, or partition(..., straight=True)"},
    {"program", "state", "a program begins with the version that is there", "use a schedule by its name"},

    // Evaluation, checkpoints, state.
    {"validation", "program", "a program has no place for evaluations", "use a schedule by its name"},
    {"validation", "asp", "replicas under asp have no version in common", "use sync='bsp'"},
    {"validation", "staleness", "replicas come to a version at different times",
     "use sync='bsp' without staleness"},
    {"validation", "sync_every", "replicas have weights of their own", "leave sync_every out"},
    {"averaged_validation", "no_averages", "there are no averages of the weights",
     "give callbacks=[pipedream.callbacks.EMA(0.999)]"},
    {"averaged_validation", "shards", "each replica averages its own part of the weights",
     "use sync='allreduce', or a plan without replicas"},
    {"averages", "asp", "replicas under asp have no version in common", "use sync='bsp'"},
    {"averages", "sync_every", "replicas have weights of their own", "leave sync_every out"},
    {"averages", "spares", "nobody collects the averages of spare shards",
     "use a plan without num_spare_shards"},
    {"checkpoints", "state", "a run goes on from one of them", "leave one out"},
    {"checkpoints", "program", "a program begins with the version that is there",
     "use a schedule by its name"},
    {"timed_checkpoints", "input_replicas", "with sync='asp' one may be ahead of another as far as it likes",
     "give every= a number of minibatches, or 'epoch'"},

    // Data, numbers, weights.
    {"read_once", "epochs", "each epoch reads the data again",
     "give a DataLoader, a list, or an object whose __iter__ starts anew"},
    {"topk_gradients", "float16", "the loss scale changes while topk holds scaled gradients back",
     "use int8, or autocast='bfloat16'"},
    {"weights", "model_with_values", "weights are for a model on the meta device",
     "load them into it before run, or make it under torch.device('meta')"},
    {"gather_all", "meta_model", "the model stays there", "give save=FOLDER"},

    // Plans.
    {"spares", "calibrated_costs", "the paper's formulas alone plan spares",
     "leave spare_workers out, or give a plan's stages num_spare_shards yourself"},
    {"spares", "no_formulas", "the paper's formulas, for schedule 'pipedream', alone plan spares",
     "leave spare_workers out, or give a plan's stages num_spare_shards yourself"},
    {"spares", "measured_links", "spares are planned for and simulated with one bandwidth",
     "give one bandwidth, or leave spares out"},
    {"speeds", "calibrated_costs", "the paper's formulas alone take speeds", "leave speeds out"},
    {"speeds", "no_formulas", "the paper's formulas, for schedule 'pipedream', alone take speeds",
     "leave speeds out"},
    {"workers_per_host", "paper_costs", "calibrated costs alone count the workers of a host",
     "use cost_model='calibrated', or leave workers_per_host out"},
    {"delay_max", "nothing_chosen", "it limits a choice alone",
     "give schedule='auto' or microbatches='auto', or leave delay_max out"},
    {"chosen_microbatches", "fixed_schedule",
     "microbatches are chosen for 'auto', 'flush', 'pipedream' and 'unstashed'",
     "leave microbatches out, or give a number"},
};

constexpr const Trait* find_trait(std::string_view key) {
  const auto* const found = std::ranges::find(kTraits, key, &Trait::key);
  return found == std::end(kTraits) ? nullptr : found;
}

static_assert(std::ranges::all_of(kExclusions, [](const Exclusion& row) {
  return find_trait(row.first) != nullptr && find_trait(row.second) != nullptr;
}));

}  // namespace

std::span<const Exclusion> exclusions() { return kExclusions; }

const Trait& trait_of(std::string_view key) {
  const Trait* const found = find_trait(key);
  if (found == nullptr) throw UserError("no trait of exclusions.h is called \"" + std::string(key) + '"');
  return *found;
}

void check_exclusions(const std::map<std::string, std::string, std::less<>>& said) {
  const auto text_of = [&](std::string_view key) {
    const std::string& text = said.find(key)->second;
    return text.empty() ? std::string(trait_of(key).said) : text;
  };
  for (const auto& [first, second, because, remedy] : kExclusions) {
    if (!said.contains(first) || !said.contains(second)) continue;
    std::string text = text_of(first) + ", and " + text_of(second) + ": ";
    throw UserError(text.append(because).append("; ").append(remedy));
  }
}

}  // namespace pipedream
