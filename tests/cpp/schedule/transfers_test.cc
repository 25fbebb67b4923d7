// Tests that transfers stand where transfers.h says, and that a cursor, which walks through a program and
// stores no list, gives the same list.
#include "schedule/transfers.h"

#include <gtest/gtest.h>

#include <map>

#include "base/failure.h"
#include "schedule/programs.h"

namespace pipedream {
namespace {

// Returns a program as text, "Ra0:0 F0 Sa2:0". R and S are followed by the kind of the edge, the stage at its
// other end, and the minibatch.
std::string with_transfers_on_paper(const ScheduleOptions& options, std::int64_t rank,
                                    std::int64_t num_minibatches) {
  const std::map<EdgeKind, std::string> letters = {{EdgeKind::kActivation, "a"},
                                                   {EdgeKind::kGradient, "g"},
                                                   {EdgeKind::kTiedGradient, "t"},
                                                   {EdgeKind::kTiedVersion, "v"},
                                                   {EdgeKind::kNorm, "n"}};
  std::string text;
  for (const Instruction& instruction : make_program(options, Rank(rank), num_minibatches)) {
    if (!text.empty()) text += ' ';
    const std::string minibatch = std::to_string(instruction.minibatch.value());
    if (travels(instruction.opcode)) {
      const bool sends = instruction.opcode == Opcode::kSend;
      const Edge& edge = instruction.edge;
      const std::string other = std::to_string((sends ? edge.to : edge.from).stage.value());
      text += (sends ? "S" : "R") + letters.at(edge.kind) + other + ':' + minibatch;
    } else {
      text += opcode_name(instruction.opcode)[0] + minibatch;
    }
    if (options.num_microbatches > 1 && instruction.opcode == Opcode::kForward) {
      text += '.' + std::to_string(instruction.microbatch.value());
    }
  }
  return text;
}

ScheduleOptions tied(ScheduleOptions options, const std::vector<TiedStages>& ties) {
  options.ties = ties;
  return options;
}

const std::vector<TiedStages> kEnds = {{StageIndex(0), StageIndex(2)}};

TEST(Transfers, StandAroundWhatTheStageComputes) {
  const ScheduleOptions options = make_options("pipedream", {3, 2, 1});
  EXPECT_EQ(with_transfers_on_paper(options, 0, 2), "F0 Sa1:0 F1 Sa1:1 Rg1:0 B0 U0 Rg1:1 B1 U1");
  EXPECT_EQ(with_transfers_on_paper(options, 1, 2),
            "Ra0:0 F0 Sa2:0 Ra0:1 F1 Sa2:1 Rg2:0 B0 Sg0:0 U0 Rg2:1 B1 Sg0:1 U1");
  EXPECT_EQ(with_transfers_on_paper(options, 2, 2), "Ra1:0 F0 B0 Sg1:0 U0 Ra1:1 F1 B1 Sg1:1 U1");
}

TEST(Transfers, OfOneStageAreNone) {
  EXPECT_EQ(with_transfers_on_paper(make_options("flush", {1}), 0, 2), "F0 B0 U0 F1 B1 U1");
  EXPECT_TRUE(edges_of(make_options("flush", {1})).empty());
}

TEST(Transfers, GradientIsWaitedForAfterTheRecompute) {
  ScheduleOptions options = make_options("flush", {2, 1});
  options.recompute = {true, false};
  EXPECT_EQ(with_transfers_on_paper(options, 0, 1), "F0 Sa1:0 R0 Rg1:0 B0 U0");
}

TEST(Transfers, OfATieBringGradientsToTheOwnerAndVersionsToTheUser) {
  const ScheduleOptions options = tied(make_options("flush", {3, 2, 1}), kEnds);
  EXPECT_EQ(with_transfers_on_paper(options, 0, 2),
            "F0 Sa1:0 Rg1:0 B0 Rt2:0 U0 Sv2:0 F1 Sa1:1 Rg1:1 B1 Rt2:1 U1 Sv2:1");
  EXPECT_EQ(with_transfers_on_paper(options, 2, 2),
            "Ra1:0 F0 B0 Sg1:0 St0:0 U0 Ra1:1 Rv0:0 F1 B1 Sg1:1 St0:1 U1 Rv0:1");
}

TEST(Transfers, OfATieReceiveAVersionWhenItIsReadFirstAndTheLastOnesAtTheEnd) {
  const ScheduleOptions options = tied(make_options("pipedream", {3, 2, 1}), kEnds);
  EXPECT_EQ(with_transfers_on_paper(options, 2, 4),
            "Ra1:0 F0 B0 Sg1:0 St0:0 U0 Ra1:1 F1 B1 Sg1:1 St0:1 U1 Ra1:2 F2 B2 Sg1:2 St0:2 U2 "
            "Ra1:3 Rv0:0 F3 B3 Sg1:3 St0:3 U3 Rv0:1 Rv0:2 Rv0:3");
  EXPECT_EQ(with_transfers_on_paper(options, 2, 1), "Ra1:0 F0 B0 Sg1:0 St0:0 U0 Rv0:0");
  EXPECT_EQ(with_transfers_on_paper(options, 2, 0), "");
}

TEST(Transfers, OfATieGoOncePerMinibatchHoweverManyMicrobatchesItHas) {
  const ScheduleOptions options = tied(make_options("gpipe", {2, 1}, 2), {{StageIndex(0), StageIndex(1)}});
  EXPECT_EQ(with_transfers_on_paper(options, 1, 1), "Ra0:0 F0.0 Ra0:0 F0.1 B0 Sg0:0 B0 Sg0:0 St0:0 U0 Rv0:0");
}

TEST(Transfers, OfNormsGoUpTheWorkersAndComeBackBeforeTheUpdate) {
  ScheduleOptions options = make_options("flush", {3, 2, 1});
  options.exchanges_norms = true;
  EXPECT_EQ(with_transfers_on_paper(options, 0, 1), "F0 Sa1:0 Rg1:0 B0 Rn1:0 Sn1:0 U0");
  EXPECT_EQ(with_transfers_on_paper(options, 1, 1),
            "Ra0:0 F0 Sa2:0 Rg2:0 B0 Sg0:0 Rn2:0 Sn0:0 Rn0:0 Sn2:0 U0");
  EXPECT_EQ(with_transfers_on_paper(options, 2, 1), "Ra1:0 F0 B0 Sg1:0 Sn1:0 Rn1:0 U0");
}

TEST(Transfers, OfNormsOfOneStageAreNone) {
  ScheduleOptions options = make_options("2bw", {2, 1}, 2);
  options.exchanges_norms = true;
  EXPECT_EQ(edges_of(options).size(), 2U) << "activations and gradients";
}

TEST(Transfers, OfATieReachEachOwnerAfterItsBackwardAndBeforeTheNorms) {
  ScheduleOptions options =
      tied(make_interleaved(2, 2, 1), {{StageIndex(0), StageIndex(2)}, {StageIndex(2), StageIndex(3)}});
  options.exchanges_norms = true;
  EXPECT_EQ(with_transfers_on_paper(options, 0, 1),
            "F0 Sa1:0 Ra1:0 F0 Sa3:0 Rg3:0 B0 Sg1:0 St0:0 Rt3:0 Rg1:0 B0 Rt2:0 Rn1:0 Sn1:0 U0 Sv2:0 U0 "
            "Sv3:0 Rv0:0");
}

TEST(Transfers, StartAtAnyMinibatchFromTheVersionsThatAreThere) {
  ScheduleOptions options = tied(make_options("pipedream", {2, 1}), {{StageIndex(0), StageIndex(1)}});
  options.first_minibatch = MinibatchId(7);
  EXPECT_EQ(with_transfers_on_paper(options, 1, 9),
            "Ra0:7 F7 B7 Sg0:7 St0:7 U7 Ra0:8 F8 B8 Sg0:8 St0:8 U8 Rv0:7 Rv0:8");
  const auto versions = [&] {
    std::string text;
    for (const Instruction& instruction : make_compute_program(options, Rank(0), 10)) {
      text += std::to_string(instruction.version.value()) + ' ';
    }
    return text;
  };
  EXPECT_EQ(versions(), "7 7 7 8 8 7 9 8 10 ") << "F7 F8 B7 U7 F9 B8 U8 B9 U9";
  options.oldest_minibatch = MinibatchId(0);
  EXPECT_EQ(versions(), "6 7 6 8 8 7 9 8 10 ") << "as if it had never stopped";
}

TEST(Transfers, OfStagesAtOneRankAreLocal) {
  const ScheduleOptions options =
      tied(make_interleaved(2, 2, 1), {{StageIndex(0), StageIndex(2)}, {StageIndex(0), StageIndex(3)}});
  const Placement placement = placement_of(options);
  std::size_t num_local = 0;
  for (const Edge& edge : edges_of(options)) {
    if (!is_local(placement, edge)) continue;
    ++num_local;
    EXPECT_EQ(std::max(edge.from.stage, edge.to.stage), StageIndex(2)) << to_string(edge);
  }
  EXPECT_EQ(num_local, 2U) << "the gradient and the version of the first tie";
}

TEST(Edges, HaveNamesAndAnOrder) {
  ScheduleOptions options = tied(make_options("flush", {2, 1}), {{StageIndex(0), StageIndex(1)}});
  options.exchanges_norms = true;
  std::string text;
  for (const Edge& edge : edges_of(options)) text += to_string(edge) + '\n';
  EXPECT_EQ(text,
            "activation stage 0 to stage 1\n"
            "gradient stage 1 to stage 0\n"
            "tied_gradient stage 1 to stage 0\n"
            "tied_version stage 0 to stage 1\n"
            "norm stage 0 to stage 1\n"
            "norm stage 1 to stage 0\n");
}

std::vector<ScheduleOptions> all_options() {
  std::vector<ScheduleOptions> all = {make_interleaved(2, 2, 3)};
  for (const std::string& schedule : kStraightSchedules) {
    all.push_back(make_options(schedule, {4, 3, 2, 1}, 4));
  }
  for (ScheduleOptions& options : all) {
    options.recompute = {true, false, true, false};
    options.ties = {
        {StageIndex(0), StageIndex(2)}, {StageIndex(0), StageIndex(3)}, {StageIndex(1), StageIndex(2)}};
    options.exchanges_norms = drains_every_minibatch(options);
  }
  return all;
}

// Walks a cursor, which is told the number of minibatches when an engine would learn it. That is when the
// next instruction is for a minibatch that does not exist and receives its activation or (at a first stage)
// does its forward.
Instructions walk(const ScheduleOptions& options, std::int64_t rank, std::int64_t num_minibatches) {
  ProgramCursor cursor(options, Rank(rank));
  Instructions instructions;
  while (const std::optional<Instruction> instruction = cursor.current()) {
    const bool is_first_of_it =
        instruction->opcode == Opcode::kForward || instruction->edge.kind == EdgeKind::kActivation;
    if (!cursor.num_minibatches() && is_first_of_it && instruction->minibatch.value() == num_minibatches) {
      cursor.set_num_minibatches(num_minibatches);
      continue;
    }
    instructions.push_back(*instruction);
    cursor.advance();
  }
  return instructions;
}

TEST(ProgramCursor, WalksTheListThatMakeProgramGivesHoweverLateItLearnsTheNumberOfMinibatches) {
  for (ScheduleOptions options : all_options()) {
    for (const std::int64_t first : {0, 3}) {
      options.first_minibatch = MinibatchId(first);
      for (std::int64_t rank = 0; rank < num_workers(options); ++rank) {
        for (const std::int64_t num_minibatches : {0, 1, 2, 6}) {
          EXPECT_EQ(walk(options, rank, first + num_minibatches),
                    make_program(options, Rank(rank), first + num_minibatches))
              << options.schedule << ", rank " << rank << ", " << num_minibatches << " from " << first;
        }
      }
    }
  }
}

TEST(Program, WithItsTransfersLeftOutIsWhatIsComputed) {
  for (const ScheduleOptions& options : all_options()) {
    for (std::int64_t rank = 0; rank < num_workers(options); ++rank) {
      Instructions instructions = make_program(options, Rank(rank), 5);
      std::erase_if(instructions, [](const Instruction& instruction) { return travels(instruction.opcode); });
      EXPECT_EQ(instructions, make_compute_program(options, Rank(rank), 5));
    }
  }
}

TEST(ScheduleOptions, RefuseTiesThatAreNotBetweenTwoStagesInOrder) {
  const auto error_of_ties = [](const std::vector<TiedStages>& ties) {
    return error_of(tied(make_options("flush", {3, 2, 1}), ties));
  };
  EXPECT_EQ(error_of_ties({{StageIndex(0), StageIndex(1)}, {StageIndex(0), StageIndex(2)}}), "");
  EXPECT_EQ(error_of_ties({{StageIndex(2), StageIndex(1)}}),
            "ties has stages 2 and 1; an owner is upstream of its user, and both are among the 3 stages");
  EXPECT_NE(error_of_ties({{StageIndex(1), StageIndex(1)}}), "");
  EXPECT_NE(error_of_ties({{StageIndex(-1), StageIndex(1)}}), "");
  EXPECT_NE(error_of_ties({{StageIndex(0), StageIndex(3)}}), "");
  EXPECT_EQ(error_of_ties({{StageIndex(0), StageIndex(2)}, {StageIndex(0), StageIndex(1)}}),
            "ties has stages 0 and 1 after stages 0 and 2; give each pair once, ascending");
  EXPECT_NE(error_of_ties({{StageIndex(0), StageIndex(2)}, {StageIndex(0), StageIndex(2)}}), "");
}

TEST(ScheduleOptions, RefuseAStartOutOfRange) {
  ScheduleOptions options = make_options("flush", {2, 1});
  options.first_minibatch = MinibatchId(-1);
  EXPECT_EQ(error_of(options), "first_minibatch is -1; it must be between 0 and 1099511627776");
  options.first_minibatch = MinibatchId(4);
  options.oldest_minibatch = MinibatchId(5);
  EXPECT_EQ(error_of(options), "oldest_minibatch is 5; it must be between 0 and 4, the first minibatch");
  options.oldest_minibatch = MinibatchId(-1);
  EXPECT_NE(error_of(options), "");
  options.oldest_minibatch.reset();
  EXPECT_THROW((void)make_program(options, Rank(0), 3), UserError);
}

}  // namespace
}  // namespace pipedream
