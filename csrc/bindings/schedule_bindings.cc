// Binds for pipedream._core the options of schedules, the facts that follow from the options, and the
// placement of stages. Called with the GIL held.
#include <pybind11/operators.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include "base/failure.h"
#include "bindings/bindings.h"
#include "bindings/id_caster.h"
#include "schedule/exclusions.h"
#include "schedule/listed_program.h"
#include "schedule/schedule_rules.h"

namespace py = pybind11;

namespace pipedream {

namespace {

using Ties = std::vector<std::pair<StageIndex, StageIndex>>;  // (owner, user) of tied parameters

void bind_placement(py::module_& module) {
  py::class_<Placement>(module, "Placement")
      .def_static("at_ranks", &Placement::at_ranks, py::arg("rank_of_stage"))
      .def_static("in_order", &Placement::in_order, py::arg("num_replicas"),
                  py::arg("num_spares") = std::vector<std::int64_t>())
      .def_property_readonly("num_stages", &Placement::num_stages)
      .def_property_readonly("num_ranks", &Placement::num_ranks)
      .def("num_replicas", &Placement::num_replicas, py::arg("stage"))
      .def_property_readonly("num_spares", &Placement::num_spares)
      .def("rank_of", &Placement::rank_of, py::arg("stage"), py::arg("replica") = 0)
      .def(
          "ranks_of",
          [](const Placement& placement, StageIndex stage) {
            std::vector<Rank> ranks;
            for (ReplicaIndex replica; replica.value() < placement.num_replicas(stage);
                 replica = replica.next()) {
              ranks.push_back(placement.rank_of(stage, replica));
            }
            return ranks;
          },
          py::arg("stage"))
      .def(
          "replica_at",
          [](const Placement& placement, Rank rank) { return placement.places_at(rank).at(0).replica; },
          py::arg("rank"))
      .def("stages_at", &Placement::stages_at, py::arg("rank"))
      .def(py::self == py::self);
}

void bind_rounds(py::module_& module) {
  py::class_<Rounds>(module, "Rounds")
      .def(py::init([](std::int64_t num_replicas, std::int64_t minibatches_per_round,
                       std::int64_t first_minibatch, std::int64_t num_microbatches) {
             return Rounds{first_minibatch, num_replicas, minibatches_per_round, false, num_microbatches};
           }),
           py::kw_only(), py::arg("num_replicas"), py::arg("minibatches_per_round"),
           py::arg("first_minibatch") = 0, py::arg("num_microbatches") = 1)
      .def_readonly("first_minibatch", &Rounds::first_minibatch)
      .def_readonly("num_replicas", &Rounds::num_replicas)
      .def_readonly("minibatches_per_round", &Rounds::minibatches_per_round)
      .def_readonly("num_microbatches", &Rounds::num_microbatches)
      .def_property_readonly("own_per_round", &Rounds::own_per_round)
      .def(
          "own_microbatches",
          [](const Rounds& rounds, ReplicaIndex replica, MinibatchId minibatch) {
            std::vector<MicrobatchIndex> own;
            for (MicrobatchIndex index; index.value() < rounds.num_microbatches; index = index.next()) {
              if (rounds.replica_of(rounds.number_of(minibatch, index)) == replica) own.push_back(index);
            }
            return own;
          },
          py::arg("replica"), py::arg("minibatch"))
      .def("is_first_of_minibatch", &Rounds::is_first_of_minibatch, py::arg("microbatch"))
      .def("is_last_of_minibatch", &Rounds::is_last_of_minibatch, py::arg("microbatch"))
      .def(
          "is_first_of_round",
          [](const Rounds& rounds, MinibatchId minibatch, MicrobatchIndex microbatch) {
            return rounds.is_first_own(rounds.number_of(minibatch, microbatch));
          },
          py::arg("minibatch"), py::arg("microbatch"))
      .def_property_readonly("first_version", &Rounds::first_version)
      .def("round_of", &Rounds::round_of, py::arg("minibatch"))
      .def("num_own_in", &Rounds::num_own_in, py::arg("replica"), py::arg("round"),
           py::arg("num_minibatches"))
      .def("is_over_after", &Rounds::is_over_after, py::arg("replica"), py::arg("minibatch"),
           py::arg("num_minibatches"))
      .def("num_begun", &Rounds::num_begun, py::arg("replica"), py::arg("num_minibatches"));
}

void bind_options(py::module_& module) {
  py::class_<ScheduleOptions>(module, "ScheduleOptions")
      .def(py::init([](const std::string& schedule, std::vector<std::int64_t> in_flight,
                       std::int64_t num_microbatches, std::optional<Placement> placement,
                       std::vector<bool> recompute, const Ties& ties, bool exchanges_norms,
                       MinibatchId first_minibatch, std::optional<MinibatchId> oldest_minibatch,
                       std::int64_t staleness, bool uses_allreduce, bool asynchronous,
                       std::shared_ptr<ListedProgram> program, bool evaluates) {
             ScheduleOptions options{schedule, std::move(in_flight), num_microbatches,
                                     std::move(placement).value_or(Placement()), std::move(recompute)};
             if (const ScheduleRules* const rules = find_rules(schedule)) options.schedule = rules->name;
             for (const auto& [owner, user] : ties) options.ties.push_back({owner, user});
             options.exchanges_norms = exchanges_norms;
             options.first_minibatch = first_minibatch;
             options.oldest_minibatch = oldest_minibatch;
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
           py::arg("recompute") = std::vector<bool>(), py::arg("ties") = Ties(),
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
          py::arg("recompute"))
      .def_readonly("schedule", &ScheduleOptions::schedule)
      .def_readonly("in_flight", &ScheduleOptions::in_flight)
      .def_readonly("num_microbatches", &ScheduleOptions::num_microbatches)
      .def_property_readonly("placement", &placement_of)
      .def_readonly("recompute", &ScheduleOptions::recompute)
      .def_property_readonly("ties",
                             [](const ScheduleOptions& options) {
                               Ties ties;
                               for (const auto& [owner, user] : options.ties) ties.emplace_back(owner, user);
                               return ties;
                             })
      .def_readonly("exchanges_norms", &ScheduleOptions::exchanges_norms)
      .def_readonly("first_minibatch", &ScheduleOptions::first_minibatch)
      .def_readonly("staleness", &ScheduleOptions::staleness)
      .def_readonly("uses_allreduce", &ScheduleOptions::uses_allreduce)
      .def_readonly("asynchronous", &ScheduleOptions::asynchronous)
      .def_property_readonly("program",
                             [](const ScheduleOptions& options) {
                               // pybind11 cannot hold a pointer to const. Python has no way to change the
                               // program.
                               return std::const_pointer_cast<ListedProgram>(options.program);
                             })
      .def_property_readonly("rules", &rules_of)
      .def_readonly("evaluates", &ScheduleOptions::evaluates)
      .def_property_readonly("num_stages", &num_stages)
      .def_property_readonly("num_workers", &num_workers);
}

void bind_versions(py::module_& module) {
  module.def("forward_version", &forward_version, py::arg("options"), py::arg("stage"), py::arg("minibatch"),
             py::arg("microbatch") = 0);
  module.def("backward_version", &backward_version, py::arg("options"), py::arg("stage"),
             py::arg("minibatch"), py::arg("microbatch") = 0);
  module.def("tied_version", &tied_version, py::arg("options"), py::arg("owner"), py::arg("minibatch"),
             py::arg("microbatch") = 0);
  module.def("stashes_versions", &stashes_versions, py::arg("options"), py::arg("stage"));
  module.def("oldest_version", &oldest_version, py::arg("options"), py::arg("stage"));
  module.def(
      "oldest_tied_version",
      [](const ScheduleOptions& options, StageIndex owner, std::int64_t minibatch, std::int64_t microbatch) {
        return tied_rule_of(options, owner).oldest_from(minibatch * options.num_microbatches + microbatch);
      },
      py::arg("options"), py::arg("owner"), py::arg("minibatch"), py::arg("microbatch") = 0);
  module.def("num_tied_versions_kept", &num_tied_versions_kept, py::arg("options"), py::arg("owner"));
  module.def(
      "num_tied_versions_ahead",
      [](const ScheduleOptions& options, StageIndex owner, StageIndex user) {
        return num_tied_versions_ahead(options, {owner, user});
      },
      py::arg("options"), py::arg("owner"), py::arg("user"));
}

void bind_stages(py::module_& module) {
  module.def("num_versions_kept", &num_versions_kept, py::arg("options"), py::arg("stage"));
  module.def("num_microbatches_in_flight", &num_microbatches_in_flight, py::arg("options"), py::arg("stage"));
  module.def("num_gradients_kept", &num_gradients_kept, py::arg("options"), py::arg("stage"));
  module.def("mean_delay", &mean_delay, py::arg("options"), py::arg("stage"));
  module.def("rounds_of", &rounds_of, py::arg("options"), py::arg("stage"));
  module.def("minibatches_between_drains", &minibatches_between_drains, py::arg("options"));
  module.def("derive_in_flight", &derive_in_flight, py::arg("num_replicas"));
}

void bind_schedules(py::module_& module) {
  py::class_<ScheduleRules>(module, "ScheduleRules")
      .def_readonly("name", &ScheduleRules::name)
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
  module.def("schedule_names", &schedule_names);
  module.def("find_schedule_rules", &find_rules, py::return_value_policy::reference, py::arg("schedule"));
  module.def(
      "check_exclusions",
      [](const std::vector<std::pair<std::string, std::optional<std::string>>>& said) {
        std::map<std::string, std::string, std::less<>> by_key;
        for (const auto& [key, text] : said) by_key[std::string(trait_of(key).key)] = text.value_or("");
        check_exclusions(by_key);
      },
      py::arg("traits"));
  module.def("exclusions", [] {
    std::vector<std::tuple<std::string_view, std::string_view, std::string_view, std::string_view>> rows;
    for (const auto& [first, second, because, remedy] : exclusions())
      rows.emplace_back(first, second, because, remedy);
    return rows;
  });
  module.def("trait_names", [] {
    std::map<std::string_view, std::string_view> names;
    for (const Exclusion& row : exclusions()) {
      for (const std::string_view key : {row.first, row.second}) names.emplace(key, trait_of(key).name);
    }
    return names;
  });
  module.def(
      "num_microbatches_min",
      [](const std::string& schedule, std::vector<std::int64_t> in_flight, const Placement& placement) {
        return num_microbatches_min(
            {.schedule = schedule, .in_flight = std::move(in_flight), .placement = placement});
      },
      py::arg("schedule"), py::arg("in_flight"), py::arg("placement"));
  module.def("drains_every_minibatch", &drains_every_minibatch, py::arg("options"));
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
