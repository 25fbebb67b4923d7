// Tests where evaluations stand in the lists, and that they fit into every plan and schedule.
#include "schedule/evaluations.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>

#include "base/failure.h"
#include "schedule/programs.h"
#include "schedule/validator.h"

namespace pipedream {
namespace {

ScheduleOptions evaluating(ScheduleOptions options) {
  options.evaluates = true;
  return options;
}

Programs make_evaluating(const ScheduleOptions& options, std::int64_t num_minibatches,
                         const std::vector<Evaluated>& evaluated) {
  Programs programs;
  for (std::int64_t worker = 0; worker < num_workers(options); ++worker) {
    programs.push_back(make_program(options, Rank(worker), num_minibatches, evaluated));
  }
  return programs;
}

// Returns the computing instructions of one worker as text: "F0 F1 B0 U0 E1.0 E1.1". E1.0 evaluates
// validation minibatch 0 before minibatch 1.
std::string evaluations_on_paper(const ScheduleOptions& options, std::int64_t worker,
                                 std::int64_t num_minibatches, const std::vector<Evaluated>& evaluated) {
  std::string text;
  for (const Instruction& instruction : make_program(options, Rank(worker), num_minibatches, evaluated)) {
    if (travels(instruction.opcode)) continue;
    if (!text.empty()) text += ' ';
    text += opcode_name(instruction.opcode)[0];
    if (num_workers(options) < num_stages(options)) text += std::to_string(instruction.stage.value()) + ':';
    text += std::to_string(instruction.minibatch.value());
    if (instruction.opcode == Opcode::kEvaluate ||
        (options.num_microbatches > 1 && instruction.opcode != Opcode::kUpdate)) {
      text += '.' + std::to_string(instruction.microbatch.value());
    }
  }
  return text;
}

const std::vector<Evaluated> kOnce = {{MinibatchId(2), 1}};

TEST(Evaluations, StandBehindTheUpdateAtTheFirstStageAndAsLateAsTheVersionIsThereAtTheOthers) {
  const ScheduleOptions options = evaluating(make_options("pipedream", straight(3)));
  EXPECT_EQ(evaluations_on_paper(options, 0, 5, kOnce),
            "F0 F1 F2 B0 U0 F3 B1 U1 E2.0 E2.1 F4 B2 U2 B3 U3 B4 U4");
  EXPECT_EQ(evaluations_on_paper(options, 1, 5, kOnce),
            "F0 F1 B0 U0 F2 B1 U1 F3 B2 E2.0 E2.1 U2 F4 B3 U3 B4 U4");
  EXPECT_EQ(evaluations_on_paper(options, 2, 5, kOnce),
            "F0 B0 U0 F1 B1 U1 F2 B2 E2.0 E2.1 U2 F3 B3 U3 F4 B4 U4");
}

TEST(Evaluations, LeaveTheLastStageAllMicrobatchesThatTheFirstHasForwardedBefore) {
  const ScheduleOptions options = evaluating(make_options("pipedream", {2, 1}, 3));
  EXPECT_EQ(evaluations_on_paper(options, 1, 3, {{MinibatchId(1), 0}}),
            "F0.0 B0.0 F0.1 B0.1 F0.2 B0.2 U0 F1.0 B1.0 E1.0 F1.1 B1.1 F1.2 B1.2 U1 F2.0 B2.0 F2.1 B2.1 F2.2 "
            "B2.2 U2");
}

TEST(Evaluations, StandBehindTheFirstForwardOfTheBoundaryWhereTheScheduleDrains) {
  const ScheduleOptions options = evaluating(make_options("flush", {2, 1}, 2));
  EXPECT_EQ(evaluations_on_paper(options, 0, 2, {{MinibatchId(1), 1}}),
            "F0.0 F0.1 B0.0 B0.1 U0 F1.0 E1.0 E1.1 F1.1 B1.0 B1.1 U1");
  EXPECT_EQ(evaluations_on_paper(options, 1, 2, {{MinibatchId(1), 1}}),
            "F0.0 B0.0 F0.1 B0.1 U0 F1.0 E1.0 E1.1 B1.0 F1.1 B1.1 U1");
}

TEST(Evaluations, OfTheEndComeLastAndThoseOfTheStartBeforeTheFirstUpdate) {
  const ScheduleOptions options = evaluating(make_options("pipedream", {1}));
  EXPECT_EQ(evaluations_on_paper(options, 0, 1, {{MinibatchId(0), 1}, {MinibatchId(1), 0}}),
            "F0 B0 E0.0 E0.1 U0 E1.0");
}

TEST(Evaluations, TakeAsManyInARowAsThereAreWorkersWhereAWorkerHasSeveralStages) {
  const ScheduleOptions options = evaluating(make_interleaved(2, 2, 2));
  const std::string text = evaluations_on_paper(options, 0, 1, {{MinibatchId(1), 2}});
  EXPECT_EQ(text.substr(text.find("E0:")), "E0:1.0 E0:1.1 E2:1.0 E2:1.1 E0:1.2 E2:1.2");
}

std::vector<ScheduleOptions> all_evaluating() {
  std::vector<ScheduleOptions> all;
  const auto add = [&](ScheduleOptions options) {
    options.evaluates = true;
    if (error_of(options).empty()) all.push_back(std::move(options));
  };
  for (const std::string& schedule : kStraightSchedules) {
    for (const std::int64_t m : {1, 2, 5}) {
      for (const Counts& in_flight : {Counts{1}, Counts{2, 1}, Counts{3, 2, 1}, Counts{5, 5, 2, 1}}) {
        add(make_options(schedule, in_flight, m));
        ScheduleOptions tied = make_options(schedule, in_flight, m);
        if (in_flight.size() < 3) continue;
        tied.ties = {{StageIndex(0), StageIndex(2)}};
        add(tied);
      }
      for (const Counts& replicas :
           {Counts{2, 1}, Counts{1, 2}, Counts{3, 2}, Counts{2, 3, 1}, Counts{1, 2, 1}, Counts{2, 2}}) {
        add(make_replicated(schedule, replicas, m));
        ScheduleOptions together = make_replicated(schedule, replicas, m);
        together.uses_allreduce = true;
        add(together);
        ScheduleOptions tied = make_replicated(schedule, replicas, m);
        tied.ties = {{StageIndex(0), StageIndex(1)}};
        add(tied);
        tied.exchanges_norms = true;
        add(tied);
      }
    }
  }
  for (const std::int64_t workers : {2, 3}) add(make_interleaved(workers, 2, 2 * workers));
  add(make_interleaved(2, 3, 3));
  ScheduleOptions spares = make_replicated("pipedream", {2, 1});
  spares.placement = Placement::in_order({2, 1}, {1, 0});
  add(spares);
  return all;
}

std::string name_of(const ScheduleOptions& options) {
  std::string name = options.schedule + ", " + std::to_string(options.num_microbatches) + " microbatches";
  const Placement placement = placement_of(options);
  for (const Place& place : placement.places()) {
    name += ", " + to_string({place.stage, place.replica});
  }
  return name + (options.ties.empty() ? "" : ", tied") + (options.uses_allreduce ? ", allreduce" : "");
}

// Returns an evaluation before every group of minibatches, and one with 4 validation minibatches at the end.
// Of those before groups every second one has 7, more than may be on their way between two stages; the others
// have none.
std::vector<Evaluated> everywhere(const ScheduleOptions& options, std::int64_t num_minibatches) {
  std::vector<Evaluated> evaluated;
  const std::int64_t group = minibatches_between_drains(options);
  for (std::int64_t boundary = 0; boundary < num_minibatches; boundary += group) {
    evaluated.push_back({MinibatchId(boundary), boundary / group % 2 == 0 ? 7 : 0});
  }
  evaluated.push_back({MinibatchId(num_minibatches), 4});
  return evaluated;
}

TEST(Evaluations, AreAcceptedByTheValidatorInEveryPlanAndScheduleThatHasThem) {
  const std::vector<ScheduleOptions> all = all_evaluating();
  ASSERT_GT(all.size(), 200U);
  for (const ScheduleOptions& options : all) {
    for (const std::int64_t num_minibatches : {1, 13}) {
      const auto evaluated = everywhere(options, num_minibatches);
      const ReplayReport report =
          replay(options, make_evaluating(options, num_minibatches, evaluated), num_minibatches);
      ASSERT_TRUE(report.ok) << name_of(options) << ": " << report.error;
      for (const auto& [edge, queued_max] : report.edges) {
        if (edge.kind != EdgeKind::kTiedVersion) continue;
        const TiedStages tied{edge.from.stage, edge.to.stage};
        ASSERT_LE(queued_max, num_tied_versions_ahead(options, tied)) << name_of(options);
      }
    }
  }
}

TEST(Evaluations, ChangeNothingOfTheOrderOfTheTraining) {
  for (const ScheduleOptions& options : all_evaluating()) {
    for (std::int64_t rank = 0; rank < num_workers(options); ++rank) {
      Instructions computed;
      for (const Instruction& instruction : make_program(options, Rank(rank), 9, everywhere(options, 9))) {
        const bool is_of_training = instruction.opcode != Opcode::kEvaluate && !travels(instruction.opcode);
        if (is_of_training) computed.push_back(instruction);
      }
      ASSERT_EQ(computed, make_compute_program(options, Rank(rank), 9)) << name_of(options);
    }
  }
}

TEST(Evaluations, AtOtherPlacesAreRefusedByTheValidator) {
  const ScheduleOptions options = evaluating(make_options("pipedream", {2, 1}));
  const Programs right = make_evaluating(options, 4, kOnce);
  const auto error_with = [&](std::size_t worker, Opcode moved_behind, std::int64_t minibatch) {
    Programs programs = right;
    Instructions& list = programs[worker];
    const auto is_evaluation = [](const Instruction& one) {
      return one.opcode == Opcode::kEvaluate || one.edge.kind == EdgeKind::kEvaluation;
    };
    Instructions block;
    std::ranges::copy_if(list, std::back_inserter(block), is_evaluation);
    std::erase_if(list, is_evaluation);
    const auto place = std::ranges::find_if(list, [&](const Instruction& one) {
      return one.opcode == moved_behind && one.minibatch.value() == minibatch;
    });
    list.insert(place + 1, block.begin(), block.end());
    return replay(options, programs, 4).error;
  };
  EXPECT_NE(error_with(0, Opcode::kUpdate, 2).find("the newest version is 3"), std::string::npos);
  EXPECT_NE(error_with(1, Opcode::kForward, 1).find("the newest version is 1"), std::string::npos);
  EXPECT_EQ(error_with(1, Opcode::kUpdate, 1), "");
}

TEST(Evaluations, ThatWaitForEachOtherAreADeadlock) {
  // The last stage's evaluation is moved behind an instruction that needs a forward of the first stage. The
  // first stage does that forward only after its own evaluation, which waits for the last stage.
  const ScheduleOptions options = evaluating(make_options("unstashed", {2, 1}, 4));
  const std::vector<Evaluated> evaluated = {{MinibatchId(1), 9}};
  Programs programs = make_evaluating(options, 3, evaluated);
  Instructions& list = programs[1];
  const auto first = std::ranges::find_if(
      list, [](const Instruction& one) { return one.edge.kind == EdgeKind::kEvaluation; });
  const auto next = std::ranges::find_if(first, list.end(), [](const Instruction& one) {
    return travels(one.opcode) && one.edge.kind == EdgeKind::kActivation;
  });
  const auto backward = std::ranges::find_if(
      next, list.end(), [](const Instruction& one) { return one.opcode == Opcode::kForward; });
  std::rotate(first, next, backward + 1);
  EXPECT_NE(replay(options, programs, 3).error.find("deadlock"), std::string::npos)
      << replay(options, programs, 3).error;
}

TEST(Evaluations, AreRefusedWithWhatHasNoVersionInCommon) {
  ScheduleOptions stale = evaluating(make_replicated("pipedream", {2, 1}, 1, 1));
  EXPECT_NE(error_of(stale).find("staleness is 1"), std::string::npos);
  ScheduleOptions asynchronous = evaluating(make_replicated("pipedream", {2, 1}));
  asynchronous.asynchronous = true;
  EXPECT_NE(error_of(asynchronous).find("sync is 'asp'"), std::string::npos);
  EXPECT_THROW((void)make_program(make_options("pipedream", {1}), Rank(0), 3, kOnce), UserError);
  const ScheduleOptions replicas = evaluating(make_replicated("pipedream", {2, 1}));
  EXPECT_THROW((void)make_program(replicas, Rank(0), 9, {{MinibatchId(3), 1}}), UserError);
}

}  // namespace
}  // namespace pipedream
