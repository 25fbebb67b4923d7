// Binds for pipedream._core the options of schedules, the facts that follow from the options, and the
// placement of stages. For Python an id is an int. Called with the GIL held.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "base/failure.h"
#include "bindings/bindings.h"
#include "schedule/exclusions.h"
#include "schedule/listed_program.h"
#include "schedule/schedule_rules.h"

namespace py = pybind11;

namespace pipedream {

namespace {

void bind_placement(py::module_& module) {
  py::class_<Placement>(module, "Placement", "Who is where: (stage, replica) <-> rank.")
      .def_static("at_ranks", &Placement::at_ranks, py::arg("rank_of_stage"),
                  "One replica of each stage, at these ranks.")
      .def_static("in_order", &Placement::in_order, py::arg("num_replicas"),
                  py::arg("num_spares") = std::vector<std::int64_t>(),
                  "Stage by stage, and in it replica by replica, each at the next rank; then so the spares.")
      .def_property_readonly("num_stages", &Placement::num_stages)
      .def_property_readonly("num_ranks", &Placement::num_ranks)
      .def(
          "num_replicas",
          [](const Placement& placement, std::int64_t stage) {
            return placement.num_replicas(StageIndex(stage));
          },
          py::arg("stage"))
      .def(
          "num_owners",
          [](const Placement& placement, std::int64_t stage) {
            return placement.num_owners(StageIndex(stage));
          },
          py::arg("stage"), "Of its shards: replicas and spares.")
      .def_property_readonly("num_spares", &Placement::num_spares, "Of all stages; they have the last ranks.")
      .def(
          "rank_of",
          [](const Placement& placement, std::int64_t stage, std::int64_t replica) {
            return placement.rank_of(StageIndex(stage), ReplicaIndex(replica)).value();
          },
          py::arg("stage"), py::arg("replica") = 0)
      .def(
          "ranks_of",
          [](const Placement& placement, std::int64_t stage) {
            std::vector<std::int64_t> ranks;
            const std::int64_t num_replicas = placement.num_replicas(StageIndex(stage));
            for (std::int64_t replica = 0; replica < num_replicas; ++replica) {
              ranks.push_back(placement.rank_of(StageIndex(stage), ReplicaIndex(replica)).value());
            }
            return ranks;
          },
          py::arg("stage"), "The ranks of its replicas, in order.")
      .def(
          "replica_at",
          [](const Placement& placement, std::int64_t rank) {
            const std::vector<Place> places = placement.places_at(Rank(rank));
            if (places.empty()) throw UserError("nothing is placed at rank " + std::to_string(rank));
            return places.front().replica.value();
          },
          py::arg("rank"), "The replica of its first stage; spares are numbered after the replicas.")
      .def(
          "stages_at",
          [](const Placement& placement, std::int64_t rank) {
            std::vector<std::int64_t> stages;
            for (const StageIndex stage : placement.stages_at(Rank(rank))) stages.push_back(stage.value());
            return stages;
          },
          py::arg("rank"), "Its stages, ascending; none if the rank is not in use.")
      .def(
          "__eq__", [](const Placement& placement, const Placement& other) { return placement == other; },
          py::is_operator());
}

void bind_rounds(py::module_& module) {
  py::class_<Rounds>(
      module, "Rounds",
      "How microbatches fall on the replicas of a stage and on its updates. num_minibatches: of "
      "the run; None where that is not known, and a round has all that it may have.")
      .def(py::init([](std::int64_t num_replicas, std::int64_t minibatches_per_round,
                       std::int64_t first_minibatch, std::int64_t num_microbatches) {
             return Rounds{first_minibatch, num_replicas, minibatches_per_round, false, num_microbatches};
           }),
           py::kw_only(), py::arg("num_replicas"), py::arg("minibatches_per_round"),
           py::arg("first_minibatch") = 0, py::arg("num_microbatches") = 1)
      .def_readonly("first_minibatch", &Rounds::first_minibatch)
      .def_readonly("num_replicas", &Rounds::num_replicas)
      .def_readonly("minibatches_per_round", &Rounds::minibatches_per_round, "Minibatches per update.")
      .def_readonly("num_microbatches", &Rounds::num_microbatches, "Per minibatch.")
      .def_property_readonly("own_per_round", &Rounds::own_per_round,
                             "Microbatches that each replica has of a whole round.")
      .def(
          "own_microbatches",
          [](const Rounds& rounds, std::int64_t replica, std::int64_t minibatch) {
            std::vector<std::int64_t> own;
            for (MicrobatchIndex index; index.value() < rounds.num_microbatches; index = index.next()) {
              const std::int64_t number = rounds.number_of(MinibatchId(minibatch), index);
              if (rounds.replica_of(number).value() == replica) own.push_back(index.value());
            }
            return own;
          },
          py::arg("replica"), py::arg("minibatch"), "The replica's microbatches of the minibatch.")
      .def(
          "is_first_of_minibatch",
          [](const Rounds& rounds, std::int64_t microbatch) {
            return rounds.is_first_of_minibatch(MicrobatchIndex(microbatch));
          },
          py::arg("microbatch"), "Whether it is its replica's first microbatch of the minibatch.")
      .def(
          "is_last_of_minibatch",
          [](const Rounds& rounds, std::int64_t microbatch) {
            return rounds.is_last_of_minibatch(MicrobatchIndex(microbatch));
          },
          py::arg("microbatch"), "Whether it is its replica's last microbatch of the minibatch.")
      .def(
          "is_first_of_round",
          [](const Rounds& rounds, std::int64_t minibatch, std::int64_t microbatch) {
            return rounds.is_first_own(rounds.number_of(MinibatchId(minibatch), MicrobatchIndex(microbatch)));
          },
          py::arg("minibatch"), py::arg("microbatch"),
          "Whether the microbatch is its replica's first of the round.")
      .def_property_readonly(
          "first_version", [](const Rounds& rounds) { return rounds.first_version().value(); },
          "The version with which the run starts.")
      .def(
          "round_of",
          [](const Rounds& rounds, std::int64_t minibatch) {
            return rounds.round_of(MinibatchId(minibatch));
          },
          py::arg("minibatch"))
      .def(
          "num_own_in",
          [](const Rounds& rounds, std::int64_t replica, std::int64_t round,
             std::optional<std::int64_t> num_minibatches) {
            return rounds.num_own_in(ReplicaIndex(replica), round, num_minibatches);
          },
          py::arg("replica"), py::arg("round"), py::arg("num_minibatches"),
          "The replica's microbatches in the round.")
      .def(
          "is_over_after",
          [](const Rounds& rounds, std::int64_t replica, std::int64_t minibatch,
             std::optional<std::int64_t> num_minibatches) {
            return rounds.is_over_after(ReplicaIndex(replica), MinibatchId(minibatch), num_minibatches);
          },
          py::arg("replica"), py::arg("minibatch"), py::arg("num_minibatches"),
          "Whether the replica has no microbatch of the minibatch's round in a later minibatch.")
      .def(
          "num_begun",
          [](const Rounds& rounds, std::int64_t replica, std::int64_t num_minibatches) {
            return rounds.num_begun(ReplicaIndex(replica), num_minibatches);
          },
          py::arg("replica"), py::arg("num_minibatches"),
          "The rounds in which the replica has a microbatch, those before the run's first included.");
}

void bind_options(py::module_& module) {
  py::class_<ScheduleOptions>(module, "ScheduleOptions",
                              "What a plan and the arguments of a run say about the schedule, checked.")
      .def(py::init([](const std::string& schedule, std::vector<std::int64_t> in_flight,
                       std::int64_t num_microbatches, std::optional<Placement> placement,
                       std::vector<bool> recompute,
                       const std::vector<std::pair<std::int64_t, std::int64_t>>& ties, bool exchanges_norms,
                       std::int64_t first_minibatch, std::optional<std::int64_t> oldest_minibatch,
                       std::int64_t staleness, bool uses_allreduce, bool asynchronous,
                       std::shared_ptr<ListedProgram> program, bool evaluates) {
             ScheduleOptions options{schedule, std::move(in_flight), num_microbatches,
                                     std::move(placement).value_or(Placement()), std::move(recompute)};
             if (const ScheduleRules* const rules = find_rules(schedule)) options.schedule = rules->name;
             for (const auto& [owner, user] : ties) {
               options.ties.push_back({StageIndex(owner), StageIndex(user)});
             }
             options.exchanges_norms = exchanges_norms;
             options.first_minibatch = MinibatchId(first_minibatch);
             if (oldest_minibatch) options.oldest_minibatch = MinibatchId(*oldest_minibatch);
             options.staleness = staleness;
             options.uses_allreduce = uses_allreduce;
             options.asynchronous = asynchronous;
             options.program = std::move(program);
             options.evaluates = evaluates;
             check_schedule_options(options);
             return options;
           }),
           py::arg("schedule") = "pipedream", py::arg("in_flight") = std::vector<std::int64_t>{1},
           py::arg("num_microbatches") = 1, py::arg("placement") = py::none(),
           py::arg("recompute") = std::vector<bool>(),
           py::arg("ties") = std::vector<std::pair<std::int64_t, std::int64_t>>(),
           py::arg("exchanges_norms") = false, py::arg("first_minibatch") = 0,
           py::arg("oldest_minibatch") = py::none(), py::arg("staleness") = 0,
           py::arg("uses_allreduce") = false, py::arg("asynchronous") = false,
           py::arg("program") = py::none(), py::arg("evaluates") = false)
      .def(
          "with_recompute",
          [](ScheduleOptions options, std::vector<bool> recompute) {
            options.recompute = std::move(recompute);
            check_schedule_options(options);
            return options;
          },
          py::arg("recompute"), "The same options, but for where is recomputed.")
      .def_readonly("schedule", &ScheduleOptions::schedule)
      .def_readonly("in_flight", &ScheduleOptions::in_flight)
      .def_readonly("num_microbatches", &ScheduleOptions::num_microbatches)
      .def_property_readonly("placement", &placement_of)
      .def_readonly("recompute", &ScheduleOptions::recompute)
      .def_property_readonly("ties",
                             [](const ScheduleOptions& options) {
                               std::vector<std::pair<std::int64_t, std::int64_t>> ties;
                               for (const auto& [owner, user] : options.ties) {
                                 ties.emplace_back(owner.value(), user.value());
                               }
                               return ties;
                             })
      .def_readonly("exchanges_norms", &ScheduleOptions::exchanges_norms)
      .def_property_readonly("first_minibatch",
                             [](const ScheduleOptions& options) { return options.first_minibatch.value(); })
      .def_readonly("staleness", &ScheduleOptions::staleness)
      .def_readonly("uses_allreduce", &ScheduleOptions::uses_allreduce)
      .def_readonly("asynchronous", &ScheduleOptions::asynchronous)
      .def_property_readonly(
          "program",
          [](const ScheduleOptions& options) {
            return std::const_pointer_cast<ListedProgram>(options.program);  // Python cannot change it
          })
      .def_property_readonly("rules", [](const ScheduleOptions& options) { return rules_of(options); })
      .def_readonly("evaluates", &ScheduleOptions::evaluates)
      .def_property_readonly("num_stages", &num_stages)
      .def_property_readonly("num_workers", &num_workers);
}

void bind_versions(py::module_& module) {
  const auto def_version = [&](const char* name, auto version, const char* doc) {
    module.def(
        name,
        [version](const ScheduleOptions& options, std::int64_t stage, std::int64_t minibatch,
                  std::int64_t microbatch) {
          return version(options, StageIndex(stage), MinibatchId(minibatch), MicrobatchIndex(microbatch))
              .value();
        },
        py::arg("options"), py::arg("stage"), py::arg("minibatch"), py::arg("microbatch") = 0, doc);
  };
  def_version("forward_version", &forward_version, "The weight version that the microbatch's forward reads.");
  def_version("backward_version", &backward_version,
              "The weight version that the microbatch's backward reads.");
  module.def(
      "tied_version",
      [](const ScheduleOptions& options, std::int64_t owner, std::int64_t minibatch,
         std::int64_t microbatch) {
        return tied_version(options, StageIndex(owner), MinibatchId(minibatch), MicrobatchIndex(microbatch))
            .value();
      },
      py::arg("options"), py::arg("owner"), py::arg("minibatch"), py::arg("microbatch") = 0,
      "The version that every use of a parameter tied across stages reads, in rounds of its owner.");
  module.def(
      "stashes_versions",
      [](const ScheduleOptions& options, std::int64_t stage) {
        return stashes_versions(options, StageIndex(stage));
      },
      py::arg("options"), py::arg("stage"), "Whether a backward reads what its forward read.");
  module.def(
      "oldest_version",
      [](const ScheduleOptions& options, std::int64_t stage) {
        return oldest_version(options, StageIndex(stage)).value();
      },
      py::arg("options"), py::arg("stage"), "The oldest that is kept at the stage when the run starts.");
  module.def(
      "oldest_tied_version",
      [](const ScheduleOptions& options, std::int64_t owner, std::int64_t minibatch,
         std::int64_t microbatch) {
        const std::int64_t number = minibatch * options.num_microbatches + microbatch;
        return tied_rule_of(options, StageIndex(owner)).oldest_from(number).value();
      },
      py::arg("options"), py::arg("owner"), py::arg("minibatch"), py::arg("microbatch") = 0,
      "The oldest version that this microbatch or a later one reads of such a parameter.");
  module.def(
      "num_tied_versions_kept",
      [](const ScheduleOptions& options, std::int64_t owner) {
        return num_tied_versions_kept(options, StageIndex(owner));
      },
      py::arg("options"), py::arg("owner"),
      "Versions kept of a parameter tied across stages, at each of them.");
  module.def(
      "num_tied_versions_ahead",
      [](const ScheduleOptions& options, std::int64_t owner, std::int64_t user) {
        return num_tied_versions_ahead(options, {StageIndex(owner), StageIndex(user)});
      },
      py::arg("options"), py::arg("owner"), py::arg("user"),
      "By how many versions the owner may be ahead of what a replica of the user has asked for.");
}

void bind_stages(py::module_& module) {
  const auto def_count = [&](const char* name, auto count, const char* doc) {
    module.def(
        name,
        [count](const ScheduleOptions& options, std::int64_t stage) {
          return count(options, StageIndex(stage));
        },
        py::arg("options"), py::arg("stage"), doc);
  };
  def_count("num_versions_kept", &num_versions_kept,
            "Weight versions kept at the stage: how many slots it needs.");
  def_count("num_microbatches_in_flight", &num_microbatches_in_flight,
            "The most microbatches that are forwarded and not yet backwarded at a replica of the stage.");
  def_count("num_gradients_kept", &num_gradients_kept,
            "How many rounds' gradients a replica of the stage may hold at once.");
  module.def(
      "mean_delay",
      [](const ScheduleOptions& options, std::int64_t stage) {
        return mean_delay(options, StageIndex(stage));
      },
      py::arg("options"), py::arg("stage"),
      "By how many updates forwards of the stage read older weights than their gradients change, in the "
      "mean.");
  module.def(
      "rounds_of",
      [](const ScheduleOptions& options, std::int64_t stage) {
        return rounds_of(options, StageIndex(stage));
      },
      py::arg("options"), py::arg("stage"), "How microbatches fall on the stage's replicas and updates.");
  module.def(
      "minibatches_between_drains", &minibatches_between_drains, py::arg("options"),
      "The pipeline may drain before every so many minibatches, where all rounds of all stages are over.");
  module.def("derive_in_flight", &derive_in_flight, py::arg("num_replicas"),
             "Microbatches in flight at each replica of every stage: n_s = 1 + ceil(n_{s+1} r_{s+1} / r_s).");
}

void bind_schedules(py::module_& module) {
  py::class_<ScheduleRules>(module, "ScheduleRules", "A schedule's row of schedule_rules.h.")
      .def_property_readonly("name", [](const ScheduleRules& rules) { return std::string(rules.name); })
      .def_property_readonly("drains", &ScheduleRules::drains)
      .def_property_readonly("is_round_late", &ScheduleRules::is_round_late)
      .def_property_readonly("needs_microbatches", &ScheduleRules::needs_microbatches)
      .def_readonly("stashes", &ScheduleRules::stashes)
      .def_readonly("has_stage_per_worker", &ScheduleRules::has_stage_per_worker)
      .def_readonly("has_one_stage", &ScheduleRules::has_one_stage)
      .def_readonly("may_be_stale", &ScheduleRules::may_be_stale)
      .def_readonly("may_be_asynchronous", &ScheduleRules::may_be_asynchronous)
      .def_readonly("has_cost_formulas", &ScheduleRules::has_cost_formulas)
      .def_readonly("has_equal_replicas", &ScheduleRules::has_equal_replicas)
      .def("works_as", &ScheduleRules::works_as, py::arg("other"));
  module.def("schedule_names", &schedule_names, "The names that `schedule` may have.");
  module.def(
      "find_schedule_rules",
      [](const std::string& schedule) -> std::optional<ScheduleRules> {
        const ScheduleRules* const found = find_rules(schedule);
        return found == nullptr ? std::nullopt : std::optional(*found);
      },
      py::arg("schedule"), "By a name, old ones included; None for any other text.");
  module.def(
      "check_exclusions",
      [](const std::vector<std::pair<std::string, std::optional<std::string>>>& said) {
        std::map<Trait, std::string> by_trait;
        Traits traits;
        for (const auto& [key, words] : said) {
          const std::optional<Trait> trait = find_trait(key);
          if (!trait) throw UserError("no trait of exclusions.h is called \"" + key + '"');
          traits.set(static_cast<std::size_t>(*trait));
          by_trait[*trait] = words.value_or(std::string(words_of(*trait).said));
        }
        const Exclusion* const row = first_exclusion(traits);
        if (row != nullptr) throw UserError(refusal(*row, by_trait.at(row->first), by_trait.at(row->second)));
      },
      py::arg("traits"),
      "Raises ValueError for two of these traits, each with how it is said, that exclude each other.");
  module.def(
      "exclusions",
      [] {
        std::vector<std::tuple<std::string, std::string, std::string, std::string>> rows;
        for (const Exclusion& row : exclusions())
          rows.emplace_back(words_of(row.first).key, words_of(row.second).key, row.because, row.remedy);
        return rows;
      },
      "All rows of exclusions.h: two traits, why they exclude each other, and what helps.");
  module.def(
      "trait_names",
      [] {
        std::map<std::string, std::string> names;
        for (const Exclusion& row : exclusions()) {
          for (const Trait trait : {row.first, row.second})
            names.emplace(words_of(trait).key, words_of(trait).name);
        }
        return names;
      },
      "What each trait is called in a table.");
  module.def(
      "num_microbatches_min",
      [](const std::string& schedule, std::vector<std::int64_t> in_flight, const Placement& placement) {
        return num_microbatches_min(
            {.schedule = schedule, .in_flight = std::move(in_flight), .placement = placement});
      },
      py::arg("schedule"), py::arg("in_flight"), py::arg("placement"),
      "The fewest microbatches of a minibatch that the schedule can have.");
  module.def("drains_every_minibatch", &drains_every_minibatch, py::arg("options"),
             "Whether every minibatch is finished at all stages before the next one starts at any.");
}

}  // namespace

void bind_schedule(py::module_& module) {
  bind_placement(module);
  bind_rounds(module);
  bind_options(module);
  bind_schedules(module);
  bind_stages(module);
  bind_versions(module);
}

}  // namespace pipedream
