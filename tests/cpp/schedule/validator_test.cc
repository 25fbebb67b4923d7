// Tests that the validator accepts every correct list and says where a broken list is wrong.
#include "schedule/validator.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <map>
#include <set>
#include <utility>

#include "schedule/programs.h"

namespace pipedream {
namespace {

std::string name_of(const ScheduleOptions& options, std::int64_t num_minibatches) {
  return options.schedule + ", " + std::to_string(num_stages(options)) + " stages, " +
         std::to_string(num_workers(options)) + " workers, n_0 " + std::to_string(options.in_flight[0]) +
         ", " + std::to_string(options.num_microbatches) + " microbatches, " +
         std::to_string(num_minibatches) + " minibatches";
}

// Returns numbers of microbatches in flight that never rise downstream: as many as needed, more at every
// stage, steeply falling, and all equal.
std::vector<Counts> in_flight_variants(std::int64_t num_stages) {
  std::vector<Counts> variants(4);
  for (std::int64_t stage = 0; stage < num_stages; ++stage) {
    const std::int64_t needed = num_stages - stage;
    variants[0].push_back(needed);
    variants[1].push_back(needed + 2);
    variants[2].push_back(2 * needed - 1);
    variants[3].push_back(2);
  }
  return variants;
}

// Calls body for every schedule with 1 to 6 stages and 1 to 8 microbatches. Every second stage recomputes.
void for_all_schedules(const std::function<void(const ScheduleOptions&)>& body) {
  for (std::int64_t num_stages = 1; num_stages <= 6; ++num_stages) {
    for (std::int64_t num_microbatches = 1; num_microbatches <= 8; ++num_microbatches) {
      std::vector<ScheduleOptions> all;
      for (const std::string& schedule : kStraightSchedules) {
        for (const Counts& in_flight : in_flight_variants(num_stages)) {
          if (schedule == "2bw" && num_microbatches < in_flight[0]) continue;
          all.push_back(make_options(schedule, in_flight, num_microbatches));
        }
      }
      for (std::int64_t num_workers = 2; num_workers <= num_stages; ++num_workers) {
        if (num_stages % num_workers != 0) continue;
        all.push_back(make_interleaved(num_workers, num_stages / num_workers, num_microbatches));
      }
      for (ScheduleOptions& options : all) {
        for (std::int64_t stage = 0; stage < num_stages; ++stage) options.recompute.push_back(stage % 2 == 1);
        body(options);
      }
    }
  }
}

// Lets every two stages share parameters. If every minibatch drains, also lets the workers exchange norms.
void tie_all_and_exchange_norms(ScheduleOptions& options) {
  options.ties.clear();
  for (StageIndex owner; owner.value() < num_stages(options); owner = owner.next()) {
    for (StageIndex user = owner.next(); user.value() < num_stages(options); user = user.next()) {
      options.ties.push_back({owner, user});
    }
  }
  options.exchanges_norms = drains_every_minibatch(options);
}

TEST(Validator, AcceptsEveryScheduleOfEveryShapeAndLength) {
  for_all_schedules([](const ScheduleOptions& options) {
    for (const std::int64_t num_minibatches : {0, 1, 2, 3, 5, 9}) {
      const ReplayReport report = replay(options, make_programs(options, num_minibatches), num_minibatches);
      ASSERT_TRUE(report.ok) << name_of(options, num_minibatches) << ": " << report.error;
      for (std::int64_t stage = 0; stage < num_stages(options); ++stage) {
        const auto stage_index = static_cast<std::size_t>(stage);
        const std::int64_t window = num_microbatches_in_flight(options, StageIndex(stage));
        const std::int64_t num_together = drains_every_minibatch(options) ? 1 : num_minibatches;
        ASSERT_EQ(report.activations_live_max[stage_index],
                  num_minibatches == 0 ? 0 : std::min(window, num_together * options.num_microbatches))
            << name_of(options, num_minibatches) << ", stage " << stage;
        ASSERT_LE(report.versions_live_max[stage_index], num_versions_kept(options, StageIndex(stage)))
            << name_of(options, num_minibatches) << ", stage " << stage;
      }
    }
  });
}

TEST(Validator, VersionsKeptIsTight) {
  // If the run is long enough, all slots are in use at some time. So a smaller number of slots would be too
  // few.
  for_all_schedules([](const ScheduleOptions& options) {
    const std::int64_t num_minibatches = 2 * options.in_flight[0];
    const ReplayReport report = replay(options, make_programs(options, num_minibatches), num_minibatches);
    ASSERT_TRUE(report.ok) << report.error;
    for (std::int64_t stage = 0; stage < num_stages(options); ++stage) {
      ASSERT_EQ(report.versions_live_max[static_cast<std::size_t>(stage)],
                num_versions_kept(options, StageIndex(stage)))
          << name_of(options, num_minibatches) << ", stage " << stage;
    }
  });
}

// Computes how many slots a stage with weight stashing uses at most. During the update of minibatch i these
// are version i, version i + 1 and the versions that minibatches i + 1 to i + n_s - 1 still read. n_s is the
// number in flight. With one slot the update is in place.
std::int64_t slots_from_formula(std::int64_t in_flight, std::int64_t num_minibatches) {
  std::size_t num_slots_max = 1;
  for (std::int64_t updated = 0; in_flight > 1 && updated < num_minibatches; ++updated) {
    std::set<std::int64_t> versions = {updated, updated + 1};
    for (std::int64_t reader = updated + 1; reader < std::min(updated + in_flight, num_minibatches);
         ++reader) {
      versions.insert(std::max<std::int64_t>(0, reader - in_flight + 1));
    }
    num_slots_max = std::max(num_slots_max, versions.size());
  }
  return static_cast<std::int64_t>(num_slots_max);
}

TEST(Validator, StashedVersionsOfShortRunsAreThoseOfTheFormula) {
  for (std::int64_t num_stages = 1; num_stages <= 16; ++num_stages) {
    for (const std::int64_t num_minibatches : {0, 1, 2, 3, 7, 15, 16, 17, 40}) {
      const ScheduleOptions options = make_options("pipedream", straight(num_stages));
      const ReplayReport report = replay(options, make_programs(options, num_minibatches), num_minibatches);
      ASSERT_TRUE(report.ok) << report.error;
      for (std::int64_t stage = 0; stage < num_stages; ++stage) {
        EXPECT_EQ(report.versions_live_max[static_cast<std::size_t>(stage)],
                  slots_from_formula(num_stages - stage, num_minibatches))
            << name_of(options, num_minibatches) << ", stage " << stage;
      }
    }
  }
}

TEST(Validator, InterleavedHasNoDeadlockForAnyNumberOfMicrobatches) {
  for (std::int64_t num_workers = 2; num_workers <= 4; ++num_workers) {
    for (std::int64_t num_chunks = 1; num_chunks <= 4; ++num_chunks) {
      for (std::int64_t num_microbatches = 1; num_microbatches <= 12; ++num_microbatches) {
        const ScheduleOptions options = make_interleaved(num_workers, num_chunks, num_microbatches);
        const ReplayReport report = replay(options, make_programs(options, 2), 2);
        ASSERT_TRUE(report.ok) << name_of(options, 2) << ": " << report.error;
      }
    }
  }
}

// Returns the longest possible queue of each edge. Tries every state that the workers can reach. A state is
// the position of each worker in its list.
std::map<Edge, std::int64_t> queued_max_by_trying_everything(const ScheduleOptions& options,
                                                             const Programs& programs) {
  std::map<Edge, std::int64_t> queued_max;
  for (const Edge& edge : edges_of(options)) queued_max[edge] = 0;
  std::set<std::vector<std::size_t>> seen;
  std::vector<std::vector<std::size_t>> to_do = {std::vector<std::size_t>(programs.size(), 0)};
  while (!to_do.empty()) {
    const std::vector<std::size_t> positions = to_do.back();
    to_do.pop_back();
    if (!seen.insert(positions).second) continue;
    std::map<Edge, std::int64_t> queued;
    for (std::size_t worker = 0; worker < programs.size(); ++worker) {
      for (std::size_t position = 0; position < positions[worker]; ++position) {
        const Instruction& done = programs[worker][position];
        if (done.opcode == Opcode::kSend) ++queued[done.edge];
        if (done.opcode == Opcode::kRecv) --queued[done.edge];
      }
    }
    const bool is_reached =
        std::all_of(queued.begin(), queued.end(), [](const auto& entry) { return entry.second >= 0; });
    if (!is_reached) continue;  // impossible: an item would be received before it is sent
    for (const auto& [edge, num_queued] : queued) queued_max[edge] = std::max(queued_max[edge], num_queued);
    for (std::size_t worker = 0; worker < programs.size(); ++worker) {
      if (positions[worker] == programs[worker].size()) continue;
      to_do.push_back(positions);
      ++to_do.back()[worker];
    }
  }
  return queued_max;
}

std::map<Edge, std::int64_t> queued_max_of(const ReplayReport& report) {
  std::map<Edge, std::int64_t> queued_max;
  for (const auto& [edge, most] : report.edges) queued_max[edge] = most;
  return queued_max;
}

TEST(Validator, QueuesAreExactlyTheWorstOverAllSpeeds) {
  std::vector<ScheduleOptions> all = {make_interleaved(2, 2, 2), make_interleaved(2, 2, 3),
                                      make_interleaved(3, 2, 1), make_options("pipedream", {5, 2, 1})};
  for (const std::string& schedule : kStraightSchedules) {
    all.push_back(make_options(schedule, {2, 1}, 3));
    if (schedule != "2bw") all.push_back(make_options(schedule, {3, 2, 1}, 1));
  }
  for (std::size_t index = all.size(); index-- > 0;) {
    all.push_back(all[index]);
    tie_all_and_exchange_norms(all.back());
  }
  for (const ScheduleOptions& options : all) {
    const Programs programs = make_programs(options, 3);
    const ReplayReport report = replay(options, programs, 3);
    ASSERT_TRUE(report.ok) << report.error;
    EXPECT_EQ(queued_max_of(report), queued_max_by_trying_everything(options, programs))
        << name_of(options, 3);
  }
}

TEST(Validator, QueuesOfAStraightPipelineHoldWhatUpstreamMayHaveInFlight) {
  for (std::int64_t num_stages = 2; num_stages <= 8; ++num_stages) {
    const ScheduleOptions options = make_options("pipedream", straight(num_stages));
    const ReplayReport report = replay(options, make_programs(options, 50), 50);
    ASSERT_TRUE(report.ok) << report.error;
    ASSERT_EQ(report.edges.size(), static_cast<std::size_t>(2 * (num_stages - 1)));
    for (const auto& [edge, queued_max] : report.edges) {
      EXPECT_EQ(queued_max, num_stages - std::min(edge.from.stage, edge.to.stage).value()) << to_string(edge);
    }
  }
}

// Channels rely on these bounds on the items of tied parameters and norms.
TEST(Validator, NoTiedEdgeHoldsMoreThanTheOwnerMayBeAheadAndNoNormEdgeMoreThanOneItem) {
  for_all_schedules([](const ScheduleOptions& given) {
    if (given.num_microbatches > 3) return;
    ScheduleOptions options = given;
    tie_all_and_exchange_norms(options);
    const ReplayReport report = replay(options, make_programs(options, 7), 7);
    ASSERT_TRUE(report.ok) << name_of(options, 7) << ": " << report.error;
    for (const auto& [edge, queued_max] : report.edges) {
      if (edge.kind == EdgeKind::kNorm) {
        ASSERT_EQ(queued_max, 1) << name_of(options, 7) << ": " << to_string(edge);
      } else if (edge.kind == EdgeKind::kTiedVersion) {
        ASSERT_LE(queued_max, num_tied_versions_ahead(options, {edge.from.stage, edge.to.stage}))
            << name_of(options, 7) << ": " << to_string(edge);
      } else if (edge.kind == EdgeKind::kTiedGradient) {
        ASSERT_LE(queued_max, std::max<std::int64_t>(options.in_flight[0], 2) + 1)
            << name_of(options, 7) << ": " << to_string(edge);
      }
    }
  });
}

TEST(Validator, AcceptsAStartAtAnyMinibatchFromAnyVersionsThatAreThere) {
  for_all_schedules([](const ScheduleOptions& given) {
    if (given.in_flight.size() > 3 || given.num_microbatches > 2) return;
    ScheduleOptions options = given;
    tie_all_and_exchange_norms(options);
    options.first_minibatch = MinibatchId(5);
    for (const std::int64_t oldest : {5, 4, 2, 0}) {
      options.oldest_minibatch = MinibatchId(oldest);
      for (const std::int64_t num_minibatches : {5, 6, 12}) {
        const ReplayReport report = replay(options, make_programs(options, num_minibatches), num_minibatches);
        ASSERT_TRUE(report.ok) << name_of(options, num_minibatches) << ", oldest minibatch " << oldest << ": "
                               << report.error;
      }
    }
  });
}

// These lists are correct, although make_program() would make others.

TEST(Validator, AcceptsABackwardThatGoesAheadOfAForward) {
  // 1F1B with a smaller window: F0.0 B0.0 F0.1 B0.1 ... instead of F0.0 F0.1 B0.0 ...
  const ScheduleOptions options = make_options("flush", {2, 1}, 4);
  Programs programs = make_programs(options, 2);
  programs[0] = make_program(make_options("flush", {1, 1}, 4), Rank(0), 2);
  const ReplayReport report = replay(options, programs, 2);
  EXPECT_TRUE(report.ok) << report.error;
  EXPECT_EQ(report.activations_live_max, (Counts{1, 1}));
}

TEST(Validator, AcceptsUpdatesOfAWorkersStagesInAnyOrder) {
  const ScheduleOptions options = make_interleaved(2, 2, 2);
  Programs programs = make_compute_programs(options, 1);
  std::swap(programs[0][programs[0].size() - 1], programs[0][programs[0].size() - 2]);
  const ReplayReport report = replay(options, with_transfers(options, programs, 1), 1);
  EXPECT_TRUE(report.ok) << report.error;
}

TEST(Validator, AcceptsARecomputeThatGoesAheadOfAForward) {
  ScheduleOptions options = make_options("gpipe", {1}, 2);
  options.recompute = {true};
  Programs programs = make_programs(options, 1);  // F0.0 F0.1 R0.0 B0.0 ... becomes F0.0 R0.0 F0.1 B0.0 ...
  std::swap(programs[0][1], programs[0][2]);
  EXPECT_TRUE(replay(options, programs, 1).ok);
}

TEST(Validator, AcceptsTextThatAPersonWrote) {
  const ScheduleOptions options = make_options("gpipe", {1}, 2);
  const Programs programs = parse_programs(R"(
      worker 0
      FORWARD  stage 0 minibatch 0 microbatch 0 reads version 0
      BACKWARD stage 0 minibatch 0 microbatch 0 reads version 0   # not as GPipe does it, but right
      FORWARD  stage 0 minibatch 0 microbatch 1 reads version 0
      BACKWARD stage 0 minibatch 0 microbatch 1 reads version 0
      UPDATE   stage 0 minibatch 0 writes version 1)");
  EXPECT_TRUE(replay(options, programs, 1).ok);
}

// Broken lists.

Instructions::iterator find(Instructions& program, Opcode opcode, std::int64_t minibatch,
                            std::int64_t microbatch = 0, std::int64_t stage = -1) {
  const auto found = std::find_if(program.begin(), program.end(), [&](const Instruction& instruction) {
    return instruction.opcode == opcode && instruction.minibatch.value() == minibatch &&
           instruction.microbatch.value() == microbatch && (stage < 0 || instruction.stage.value() == stage);
  });
  EXPECT_NE(found, program.end());
  return found;
}

void move_before(Instructions& program, Instructions::iterator moved, Instructions::iterator target) {
  const Instruction instruction = *moved;
  const auto target_index = target - program.begin();
  program.erase(moved);
  program.insert(program.begin() + target_index - (target > moved ? 1 : 0), instruction);
}

// The validator checks a list's computing instructions first, so most of the broken lists in these tests need
// no transfers.
class BrokenList : public testing::Test {
 protected:
  void use(const ScheduleOptions& options, std::int64_t num_minibatches) {
    options_ = options;
    num_minibatches_ = num_minibatches;
    programs_ = make_compute_programs(options, num_minibatches);
  }
  // Loads the programs of all workers, with their transfers.
  void use_all(const ScheduleOptions& options, std::int64_t num_minibatches) {
    use(options, num_minibatches);
    programs_ = make_programs(options, num_minibatches);
  }
  void use(const std::string& schedule, const Counts& in_flight, std::int64_t num_microbatches,
           std::int64_t num_minibatches) {
    use(make_options(schedule, in_flight, num_microbatches), num_minibatches);
  }
  [[nodiscard]] Instructions& program(std::size_t worker) { return programs_.at(worker); }

  void expect_fault(const std::string& error) const {
    const ReplayReport report = replay(options_, programs_, num_minibatches_);
    EXPECT_FALSE(report.ok);
    EXPECT_EQ(report.error, error);
  }

  void expect_fault_at_end(const std::string& error) const {
    const ReplayReport report = replay(options_, programs_, num_minibatches_);
    EXPECT_FALSE(report.ok);
    EXPECT_TRUE(report.error.ends_with(error)) << report.error;
  }

  ScheduleOptions options_;
  std::int64_t num_minibatches_ = 0;
  Programs programs_;
};

TEST_F(BrokenList, InFlightThatRisesDownstreamDeadlocks) {
  use_all(make_options("pipedream", {1, 2}), 4);
  expect_fault(
      "deadlock; worker 0, position 2, RECV gradient stage 1 to stage 0 minibatch 0 microbatch 0: waits for "
      "stage 1; worker 1, position 2, RECV activation stage 0 to stage 1 minibatch 1 microbatch 0: waits for "
      "stage 0");
  use_all(make_options("pipedream", {1, 2}), 1);
  EXPECT_TRUE(replay(options_, programs_, num_minibatches_).ok) << "harmless in a run of one minibatch";
}

TEST_F(BrokenList, OrderThatIsRightAtEveryWorkerAndDeadlocksTogether) {
  use_all(make_options("flush", {3, 2, 1}, 3), 1);
  programs_[0] = make_program(make_options("flush", {1, 1, 1}, 3), Rank(0), 1);
  expect_fault(
      "deadlock; worker 0, position 2, RECV gradient stage 1 to stage 0 minibatch 0 microbatch 0: waits for "
      "stage 1; worker 1, position 3, RECV activation stage 0 to stage 1 minibatch 0 microbatch 1: waits for "
      "stage 0; worker 2, position 4, RECV activation stage 1 to stage 2 minibatch 0 microbatch 1: waits for "
      "stage 1");
}

TEST_F(BrokenList, MissingInstructionIsNamedWhereTheNextOneNeedsIt) {
  use("pipedream", {2, 1}, 1, 4);
  program(1).erase(find(program(1), Opcode::kForward, 1));
  expect_fault(
      "worker 1, position 3, BACKWARD stage 1 minibatch 1 microbatch 0 reads version 1: the "
      "microbatch's forward was not done yet");
  use("pipedream", {2, 1}, 1, 4);
  program(1).erase(find(program(1), Opcode::kBackward, 1));
  expect_fault(
      "worker 1, position 4, UPDATE stage 1 minibatch 1 writes version 2: the gradient is not complete: the "
      "backward of 0 of 1 microbatches was done");
  use("pipedream", {2, 1}, 1, 4);
  program(1).erase(find(program(1), Opcode::kUpdate, 1));
  expect_fault(
      "worker 1, position 5, FORWARD stage 1 minibatch 2 microbatch 0 reads version 2: version 2 is not "
      "written yet; the newest is 1");
}

TEST_F(BrokenList, MissingInstructionAtTheEndIsNamedRatherThanTheDeadlockItCauses) {
  use("pipedream", {2, 1}, 1, 3);
  program(1).pop_back();
  expect_fault("worker 1, position 8, end of the program: UPDATE stage 1 minibatch 2 is missing");
  program(1).pop_back();
  expect_fault(
      "worker 1, position 7, end of the program: BACKWARD stage 1 minibatch 2 microbatch 0 is missing");
  program(1).pop_back();
  expect_fault(
      "worker 1, position 6, end of the program: FORWARD stage 1 minibatch 2 microbatch 0 is missing");
  program(1).clear();
  expect_fault(
      "worker 1, position 0, end of the program: FORWARD stage 1 minibatch 0 microbatch 0 is missing");
}

TEST_F(BrokenList, UpdateOfOneOfAWorkersStagesThatIsMissing) {
  use(make_interleaved(2, 2, 2), 2);
  program(1).pop_back();
  expect_fault("worker 1, position 19, end of the program: UPDATE stage 3 minibatch 1 is missing");
}

TEST_F(BrokenList, RepeatedForwardBackwardAndUpdate) {
  use("pipedream", {3, 2, 1}, 1, 3);
  program(0).insert(program(0).begin(), program(0).front());
  expect_fault(
      "worker 0, position 1, FORWARD stage 0 minibatch 0 microbatch 0 reads version 0: the "
      "microbatch's forward was already done");
  use("pipedream", {3, 2, 1}, 1, 3);
  program(0).insert(find(program(0), Opcode::kUpdate, 0), *find(program(0), Opcode::kBackward, 0));
  expect_fault(
      "worker 0, position 4, BACKWARD stage 0 minibatch 0 microbatch 0 reads version 0: the "
      "microbatch's backward was already done");
  use("pipedream", {3, 2, 1}, 1, 3);
  program(0).insert(find(program(0), Opcode::kUpdate, 0), *find(program(0), Opcode::kUpdate, 0));
  expect_fault(
      "worker 0, position 5, UPDATE stage 0 minibatch 0 writes version 1: the update was already done");
}

TEST_F(BrokenList, WrongVersionOfAForwardABackwardAndAnUpdate) {
  use("pipedream", {3, 2, 1}, 1, 5);
  // Version 0 is still kept, but the rule names another.
  find(program(0), Opcode::kForward, 3)->version = WeightVersion(0);
  expect_fault(
      "worker 0, position 5, FORWARD stage 0 minibatch 3 microbatch 0 reads version 0: the rule names "
      "version "
      "1");
  use("pipedream", {3, 2, 1}, 1, 5);
  // The newest version, as without weight stashing.
  find(program(0), Opcode::kBackward, 1)->version = WeightVersion(1);
  expect_fault(
      "worker 0, position 6, BACKWARD stage 0 minibatch 1 microbatch 0 reads version 1: the rule names "
      "version "
      "0");
  use("pipedream", {3, 2, 1}, 1, 5);
  find(program(0), Opcode::kUpdate, 1)->version = WeightVersion(3);
  expect_fault(
      "worker 0, position 7, UPDATE stage 0 minibatch 1 writes version 3: the newest version is 1, so the "
      "update writes version 2");
}

TEST_F(BrokenList, VersionsOfAnotherScheduleAreNotThisOnes) {
  use("vertical_sync", {3, 2, 1}, 1, 5);
  programs_ = make_compute_programs(make_options("pipedream", {3, 2, 1}), 5);
  expect_fault(
      "worker 1, position 4, FORWARD stage 1 minibatch 2 microbatch 0 reads version 1: the rule names "
      "version "
      "0");
  use("naive", {3, 2, 1}, 1, 5);
  programs_ = make_compute_programs(make_options("pipedream", {3, 2, 1}), 5);
  expect_fault(
      "worker 0, position 6, BACKWARD stage 0 minibatch 1 microbatch 0 reads version 0: the rule names "
      "version "
      "1");
}

TEST_F(BrokenList, ForwardThatReadsAVersionNotWrittenYet) {
  use("pipedream", {2, 1}, 1, 5);  // F0 F1 B0 U0 F2 ... becomes F0 F1 B0 F2 U0 ...
  move_before(program(0), find(program(0), Opcode::kForward, 2), find(program(0), Opcode::kUpdate, 0));
  expect_fault(
      "worker 0, position 3, FORWARD stage 0 minibatch 2 microbatch 0 reads version 1: version 1 is not "
      "written yet; the newest is 0");
}

TEST_F(BrokenList, NaiveForwardThatComesTooLateForItsVersion) {
  use("naive", {2, 1}, 1, 4);  // F0 F1 B0 U0 F2 B1 U1 ... becomes F0 F1 B0 U0 B1 U1 F2 ...
  move_before(program(0), find(program(0), Opcode::kForward, 2), find(program(0), Opcode::kUpdate, 1) + 1);
  expect_fault(
      "worker 0, position 6, FORWARD stage 0 minibatch 2 microbatch 0 reads version 1: version 1 was "
      "overwritten; the newest is 2, and 1 are kept");
}

TEST_F(BrokenList, SwappedForwardsAndBackwards) {
  use("gpipe", {2, 1}, 3, 1);
  std::swap(program(0)[0], program(0)[1]);
  expect_fault(
      "worker 0, position 0, FORWARD stage 0 minibatch 0 microbatch 1 reads version 0: forwards go in order; "
      "the next is minibatch 0 microbatch 0");
  use("gpipe", {2, 1}, 3, 1);
  // GPipe's figure shows the backwards in this order, but the queues are in the order of the forwards.
  std::swap(program(1)[3], program(1)[5]);
  expect_fault(
      "worker 1, position 3, BACKWARD stage 1 minibatch 0 microbatch 2 reads version 0: backwards go in "
      "order; "
      "the next is minibatch 0 microbatch 0");
}

TEST_F(BrokenList, BackwardBeforeItsForward) {
  use("pipedream", {1}, 1, 2);
  std::swap(program(0)[0], program(0)[1]);
  expect_fault(
      "worker 0, position 0, BACKWARD stage 0 minibatch 0 microbatch 0 reads version 0: the "
      "microbatch's forward was not done yet");
}

TEST_F(BrokenList, UpdateBeforeAllMicrobatchesWentBackward) {
  use("2bw", {2, 1}, 3, 2);
  move_before(program(0), find(program(0), Opcode::kUpdate, 0), find(program(0), Opcode::kBackward, 0, 2));
  expect_fault(
      "worker 0, position 6, UPDATE stage 0 minibatch 0 writes version 1: the gradient is not complete: the "
      "backward of 2 of 3 microbatches was done");
}

TEST_F(BrokenList, BackwardOfTheNextMinibatchBeforeTheUpdate) {
  use("pipedream", {2}, 1, 3);  // F0 F1 B0 U0 F2 B1 ... becomes F0 F1 B0 B1 U0 F2 ...
  move_before(program(0), find(program(0), Opcode::kBackward, 1), find(program(0), Opcode::kUpdate, 0));
  expect_fault(
      "worker 0, position 3, BACKWARD stage 0 minibatch 1 microbatch 0 reads version 0: the update of "
      "minibatch 0 is due first: gradients of two minibatches would be added up");
}

TEST_F(BrokenList, UpdatesOutOfOrder) {
  use("pipedream", {2, 1}, 1, 3);
  std::swap(*find(program(0), Opcode::kUpdate, 0), *find(program(0), Opcode::kUpdate, 1));
  expect_fault(
      "worker 0, position 3, UPDATE stage 0 minibatch 1 writes version 2: the gradient is not complete: the "
      "backward of 0 of 1 microbatches was done");
}

TEST_F(BrokenList, MoreInFlightThanTheWindow) {
  use("pipedream", {2, 1}, 2, 3);
  programs_[0] = make_compute_program(make_options("pipedream", {3, 2}, 2), Rank(0), 3);
  expect_fault(
      "worker 0, position 2, FORWARD stage 0 minibatch 1 microbatch 0 reads version 0: at most 2 "
      "microbatches "
      "may be in flight at the stage, and as many wait for their backward");
  use("flush", {2, 1}, 4, 1);
  programs_ = make_compute_programs(make_options("gpipe", {2, 1}, 4), 1);
  expect_fault(
      "worker 0, position 2, FORWARD stage 0 minibatch 0 microbatch 2 reads version 0: at most 2 "
      "microbatches "
      "may be in flight at the stage, and as many wait for their backward");
}

TEST_F(BrokenList, ForwardOfTheNextMinibatchBeforeADrainingScheduleHasUpdated) {
  for (const std::string schedule : {"flush", "gpipe", "model_parallel"}) {
    use(schedule, {1, 1}, 1, 2);
    move_before(program(1), find(program(1), Opcode::kForward, 1), find(program(1), Opcode::kUpdate, 0));
    expect_fault(
        "worker 1, position 2, FORWARD stage 1 minibatch 1 microbatch 0 reads version 1: the schedule drains "
        "every minibatch, and the update of minibatch 0 was not done yet");
  }
}

TEST_F(BrokenList, UpdateBeforeAnotherStageOfTheWorkerHasDrained) {
  use(make_interleaved(2, 2, 1), 1);  // F0 F2 B2 B0 U0 U2 becomes F0 F2 B2 U2 B0 U0
  move_before(program(0), find(program(0), Opcode::kUpdate, 0, 0, 2),
              find(program(0), Opcode::kBackward, 0, 0, 0));
  expect_fault(
      "worker 0, position 3, UPDATE stage 2 minibatch 0 writes version 1: the schedule drains every "
      "minibatch, "
      "and stage 0 still has backwards to do");
}

TEST_F(BrokenList, RecomputeWhereItIsNotAskedForOrMissingWhereItIs) {
  use("flush", {2, 1}, 1, 1);
  ScheduleOptions with_recompute = options_;
  with_recompute.recompute = {true, false};
  programs_ = make_compute_programs(with_recompute, 1);
  expect_fault(
      "worker 0, position 1, RECOMPUTE stage 0 minibatch 0 microbatch 0 reads version 0: the options ask for "
      "no recompute at the stage");
  use(with_recompute, 1);
  programs_ = make_compute_programs(make_options("flush", {2, 1}), 1);
  expect_fault(
      "worker 0, position 1, BACKWARD stage 0 minibatch 0 microbatch 0 reads version 0: the options ask for "
      "a "
      "recompute first");
}

TEST_F(BrokenList, RecomputeThatIsEarlyRepeatedLateOrOfAnotherVersion) {
  ScheduleOptions options = make_options("gpipe", {1}, 2);
  options.recompute = {true};
  use(options, 1);
  std::swap(program(0)[0], program(0)[2]);  // F0.0 F0.1 R0.0 B0.0 ...
  expect_fault(
      "worker 0, position 0, RECOMPUTE stage 0 minibatch 0 microbatch 0 reads version 0: the "
      "microbatch's forward was not done yet");
  use(options, 1);
  program(0).insert(program(0).begin() + 2, program(0)[2]);
  expect_fault(
      "worker 0, position 3, RECOMPUTE stage 0 minibatch 0 microbatch 0 reads version 0: the "
      "microbatch's recompute was already done");
  use(options, 1);
  std::swap(program(0)[2], program(0)[4]);
  expect_fault(
      "worker 0, position 2, RECOMPUTE stage 0 minibatch 0 microbatch 1 reads version 0: recomputes go "
      "in order; the next is minibatch 0 microbatch 0");
  use(options, 1);
  program(0)[2].version = WeightVersion(1);
  expect_fault(
      "worker 0, position 2, RECOMPUTE stage 0 minibatch 0 microbatch 0 reads version 1: the rule names "
      "version 0");
}

TEST_F(BrokenList, RecomputeOfTwoMicrobatchesAtOnce) {
  ScheduleOptions options = make_options("gpipe", {1}, 2);
  options.recompute = {true};
  use(options, 1);
  std::swap(program(0)[3], program(0)[4]);  // F F R0.0 B0.0 R0.1 B0.1 becomes F F R0.0 R0.1 B0.0 B0.1
  expect_fault(
      "worker 0, position 3, RECOMPUTE stage 0 minibatch 0 microbatch 1 reads version 0: the microbatch "
      "before waits for its backward: only the next one is recomputed");
}

TEST_F(BrokenList, WrongStage) {
  use("pipedream", {3, 2, 1}, 1, 2);
  program(1)[1].stage = StageIndex(2);
  expect_fault(
      "worker 1, position 1, FORWARD stage 2 minibatch 1 microbatch 0 reads version 0: the stage lies at "
      "worker "
      "2");
  program(1)[1].stage = StageIndex(3);
  expect_fault(
      "worker 1, position 1, FORWARD stage 3 minibatch 1 microbatch 0 reads version 0: the stage does not "
      "exist; there are 3");
  program(1)[1].stage = StageIndex(-1);
  expect_fault(
      "worker 1, position 1, FORWARD stage -1 minibatch 1 microbatch 0 reads version 0: the stage does not "
      "exist; there are 3");
  use(make_interleaved(2, 2, 1), 1);
  program(0)[1].stage = StageIndex(0);
  expect_fault(
      "worker 0, position 1, FORWARD stage 0 minibatch 0 microbatch 0 reads version 0: the "
      "microbatch's forward was already done");
}

TEST_F(BrokenList, MinibatchesAndMicrobatchesThatDoNotExist) {
  use("pipedream", {1}, 1, 3);
  num_minibatches_ = 2;
  expect_fault(
      "worker 0, position 6, FORWARD stage 0 minibatch 2 microbatch 0 reads version 2: the minibatch does "
      "not "
      "exist; there are 2");
  program(0)[0].minibatch = MinibatchId(-1);
  expect_fault(
      "worker 0, position 0, FORWARD stage 0 minibatch -1 microbatch 0 reads version 0: the minibatch does "
      "not "
      "exist; there are 2");
  use("pipedream", {1}, 2, 1);
  program(0)[1].microbatch = MicrobatchIndex(2);
  expect_fault(
      "worker 0, position 1, BACKWARD stage 0 minibatch 0 microbatch 2 reads version 0: the microbatch does "
      "not "
      "exist; a minibatch has 2");
  use("pipedream", {1}, 2, 1);
  program(0).back().microbatch = MicrobatchIndex(1);
  expect_fault(
      "worker 0, position 4, UPDATE stage 0 minibatch 0 writes version 1: an update is of the whole "
      "minibatch, "
      "not of microbatch 1");
}

TEST_F(BrokenList, ProgramsThatAreNotThePlans) {
  use("pipedream", {2, 1}, 1, 1);
  programs_.pop_back();
  expect_fault("there are 1 programs; the plan has 2 workers");
  programs_.clear();
  expect_fault("there are 0 programs; the plan has 2 workers");
  use("pipedream", {2, 1}, 1, 1);
  std::swap(programs_[0], programs_[1]);
  expect_fault(
      "worker 0, position 0, FORWARD stage 1 minibatch 0 microbatch 0 reads version 0: the stage lies at "
      "worker "
      "1");
}

TEST_F(BrokenList, OptionsThatAreRefused) {
  use("pipedream", {2, 1}, 1, 1);
  num_minibatches_ = -1;
  expect_fault("num_minibatches is -1; it must be between 0 and 1099511627776");
  use("pipedream", {2, 1}, 1, 1);
  options_.in_flight = {2, 0};
  expect_fault("in_flight is 0 at stage 1; it must be at least 1 and at most 1099511627776");
}

// The transfers of these lists are broken. In the comments S and R are the SENDs and RECVs of a pipeline of
// two stages:
//   worker 0   F0 S  F1 S  R B0 U0 ...
//   worker 1   R F0  R B0...

TEST_F(BrokenList, ActivationThatIsNotReceivedBeforeItsForwardOrNotSentAfterIt) {
  use_all(make_options("pipedream", {2, 1}), 3);
  std::swap(program(1)[0], program(1)[1]);
  expect_fault(
      "worker 1, position 0, FORWARD stage 1 minibatch 0 microbatch 0 reads version 0: RECV activation stage "
      "0 to stage 1 minibatch 0 microbatch 0 comes first");
  use_all(make_options("pipedream", {2, 1}), 3);
  std::swap(program(0)[1], program(0)[2]);
  expect_fault(
      "worker 0, position 1, FORWARD stage 0 minibatch 1 microbatch 0 reads version 0: SEND activation stage "
      "0 to stage 1 minibatch 0 microbatch 0 comes first");
}

TEST_F(BrokenList, ItemThatIsReceivedBeforeTheLastOneIsUsed) {
  use_all(make_options("gpipe", {2, 1}, 2), 1);
  std::swap(program(1)[1], program(1)[2]);
  expect_fault(
      "worker 1, position 1, RECV activation stage 0 to stage 1 minibatch 0 microbatch 1: RECV activation "
      "stage 0 to stage 1 minibatch 0 microbatch 0 was not used yet");
}

TEST_F(BrokenList, TransferOfAnEdgeThatTheScheduleOrTheWorkerDoesNotHave) {
  use_all(make_options("pipedream", {2, 1}), 1);
  program(0)[1].edge.to.stage = StageIndex(0);
  expect_fault(
      "worker 0, position 1, SEND activation stage 0 to stage 0 minibatch 0 microbatch 0: there is no such "
      "edge in the schedule");
  use_all(make_options("pipedream", {2, 1}), 1);
  program(0)[1].edge.to.replica = ReplicaIndex(1);
  expect_fault(
      "worker 0, position 1, SEND activation stage 0 to stage 1 replica 1 minibatch 0 microbatch 0: there is "
      "no such edge in the schedule");
  use_all(make_options("pipedream", {2, 1}), 1);
  program(0)[1] = program(1)[0];
  expect_fault(
      "worker 0, position 1, RECV activation stage 0 to stage 1 minibatch 0 microbatch 0: stage 1 is at "
      "another worker");
}

TEST_F(BrokenList, ItemThatIsSentTwiceNeverMadeOrNeverSent) {
  use_all(make_options("pipedream", {2, 1}), 1);
  program(0).insert(program(0).begin() + 1, program(0)[1]);
  expect_fault(
      "worker 0, position 2, SEND activation stage 0 to stage 1 minibatch 0 microbatch 0: there is nothing "
      "to "
      "send: it was not made yet, or it was sent already");
  use_all(make_options("pipedream", {2, 1}), 1);
  program(1).erase(find(program(1), Opcode::kSend, 0));
  expect_fault(
      "worker 1, position 4, end of the program: SEND gradient stage 1 to stage 0 minibatch 0 microbatch 0 "
      "is "
      "missing");
}

TEST_F(BrokenList, TiedVersionThatIsMissingOrOutOfOrder) {
  ScheduleOptions options = make_options("vertical_sync", {2, 1});
  options.ties = {{StageIndex(0), StageIndex(1)}};
  use_all(options, 4);
  const auto version_of = [&](std::int64_t minibatch) {
    return std::find_if(program(1).begin(), program(1).end(), [&](const Instruction& instruction) {
      return instruction.edge.kind == EdgeKind::kTiedVersion && instruction.minibatch.value() == minibatch;
    });
  };
  program(1).erase(version_of(0));
  expect_fault_at_end(
      "FORWARD stage 1 minibatch 2 microbatch 0 reads version 1: RECV tied_version "
      "stage 0 to stage 1 minibatch 0 comes first");
  use_all(options, 4);
  std::swap(*version_of(0), *version_of(1));
  expect_fault_at_end("versions come in order; the next is that of minibatch 0");
  use_all(options, 4);
  program(1).erase(version_of(3));
  expect_fault_at_end("RECV tied_version stage 0 to stage 1 minibatch 3 is missing");
}

TEST_F(BrokenList, TiedVersionThatOverwritesOneStillRead) {
  ScheduleOptions options = make_options("flush", {1, 1});
  options.ties = {{StageIndex(0), StageIndex(1)}};
  use_all(options, 2);
  // The list is R F0 R B0 S S U0 | R R F1 .... The version of minibatch 0 is moved before its own backward.
  const auto version = std::find_if(program(1).begin(), program(1).end(), [](const Instruction& instruction) {
    return instruction.edge.kind == EdgeKind::kTiedVersion;
  });
  move_before(program(1), version, find(program(1), Opcode::kBackward, 0));
  expect_fault_at_end("it overwrites version 0, which minibatch 0 still reads");
}

TEST_F(BrokenList, TiedGradientsThatTheUpdateOrTheNormDoesNotWaitFor) {
  ScheduleOptions options = make_options("flush", {2, 1});
  options.ties = {{StageIndex(0), StageIndex(1)}};
  options.exchanges_norms = true;
  use_all(options, 1);
  const auto gradient = [&] {
    return std::find_if(program(0).begin(), program(0).end(), [](const Instruction& instruction) {
      return instruction.edge.kind == EdgeKind::kTiedGradient;
    });
  };
  std::swap(*gradient(), *(gradient() + 1));
  expect_fault_at_end("RECV tied_gradient stage 1 to stage 0 minibatch 0 comes first");
  use_all(options, 1);
  std::swap(*gradient(), *(gradient() - 1));
  expect_fault_at_end(
      "RECV tied_gradient stage 1 to stage 0 minibatch 0: it is added to the owner's own, which its last "
      "backward of the minibatch makes");
  options.exchanges_norms = false;
  use_all(options, 1);
  std::swap(*gradient(), *(gradient() + 1));
  expect_fault_at_end(
      "writes version 1: RECV tied_gradient stage 1 to stage 0 minibatch 0 comes "
      "first");
}

TEST_F(BrokenList, NormsInAnotherOrderThanTheOneWithoutDeadlock) {
  ScheduleOptions options = make_options("flush", {3, 2, 1});
  options.exchanges_norms = true;
  use_all(options, 1);
  const auto first = std::find_if(program(1).begin(), program(1).end(), [](const Instruction& instruction) {
    return instruction.edge.kind == EdgeKind::kNorm;
  });
  const auto first_norm = first - program(1).begin();
  // Worker 1 sends its norm upstream before it has received the norm from downstream.
  std::swap(*first, *(first + 1));
  expect_fault_at_end(
      "SEND norm stage 1 to stage 0 minibatch 0: RECV norm stage 2 to stage 1 "
      "minibatch 0 comes first");
  use_all(options, 1);
  move_before(program(1), find(program(1), Opcode::kUpdate, 0), program(1).begin() + first_norm);
  expect_fault_at_end("writes version 1: RECV norm stage 2 to stage 1 minibatch 0 comes first");
}

TEST_F(BrokenList, MinibatchBeforeTheFirst) {
  ScheduleOptions options = make_options("pipedream", {1});
  options.first_minibatch = MinibatchId(3);
  use(options, 5);
  program(0)[0].minibatch = MinibatchId(2);
  expect_fault(
      "worker 0, position 0, FORWARD stage 0 minibatch 2 microbatch 0 reads version 3: the minibatch is "
      "before the first, 3");
}

TEST_F(BrokenList, NoInstructionCanBeLeftOutGivenTwiceOrRenumbered) {
  std::vector<ScheduleOptions> all = {make_interleaved(2, 2, 3)};
  for (const std::string& schedule : kStraightSchedules) all.push_back(make_options(schedule, {3, 2, 1}, 3));
  for (ScheduleOptions& options : all) {
    options.recompute.assign(options.in_flight.size(), true);
    tie_all_and_exchange_norms(options);
    const Programs right = make_programs(options, 3);
    for (std::size_t worker = 0; worker < right.size(); ++worker) {
      for (std::size_t position = 0; position < right[worker].size(); ++position) {
        const auto offset = static_cast<std::ptrdiff_t>(position);
        const std::string changed = to_string(right[worker][position]) + " of " + options.schedule;
        programs_ = right;
        program(worker).erase(program(worker).begin() + offset);
        EXPECT_FALSE(replay(options, programs_, 3).ok) << changed << " left out";
        programs_ = right;
        program(worker).insert(program(worker).begin() + offset, right[worker][position]);
        EXPECT_FALSE(replay(options, programs_, 3).ok) << changed << " given twice";
        programs_ = right;
        if (!travels(right[worker][position].opcode)) {
          program(worker)[position].version = program(worker)[position].version.next();
          EXPECT_FALSE(replay(options, programs_, 3).ok) << changed << " of another version";
        }
        programs_ = right;
        program(worker)[position].minibatch = program(worker)[position].minibatch.next();
        EXPECT_FALSE(replay(options, programs_, 3).ok) << changed << " of another minibatch";
        programs_ = right;
        program(worker)[position].microbatch = program(worker)[position].microbatch.next();
        EXPECT_FALSE(replay(options, programs_, 3).ok) << changed << " of another microbatch";
      }
    }
  }
}

}  // namespace
}  // namespace pipedream
