#include "schedule/listed_program.h"

#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <vector>

#include "base/failure.h"
#include "schedule/program.h"
#include "schedule/programs.h"
#include "schedule/transfers.h"
#include "schedule/validator.h"

namespace pipedream {
namespace {

// Two forwards, then two backwards, with an update after each of these.
constexpr const char* kByPairs = R"(
worker 0
body every 2 minibatches
FORWARD stage 0 minibatch 0 microbatch 0 reads version 0
FORWARD stage 0 minibatch 1 microbatch 0 reads version 0
BACKWARD stage 0 minibatch 0 microbatch 0 reads version 0
UPDATE stage 0 minibatch 0 writes version 1
BACKWARD stage 0 minibatch 1 microbatch 0 reads version 0
UPDATE stage 0 minibatch 1 writes version 2
worker 1
body every 2 minibatches
FORWARD stage 1 minibatch 0 microbatch 0 reads version 0
FORWARD stage 1 minibatch 1 microbatch 0 reads version 0
BACKWARD stage 1 minibatch 0 microbatch 0 reads version 0
UPDATE stage 1 minibatch 0 writes version 1   # a comment
BACKWARD stage 1 minibatch 1 microbatch 0 reads version 0
UPDATE stage 1 minibatch 1 writes version 2
)";

// 1F1B on two stages that drains after every third minibatch.
constexpr const char* kDrainsAfterThree = R"(
worker 0
body every 3 minibatches
FORWARD stage 0 minibatch 0 microbatch 0 reads version 0
FORWARD stage 0 minibatch 1 microbatch 0 reads version 0
BACKWARD stage 0 minibatch 0 microbatch 0 reads version 0
UPDATE stage 0 minibatch 0 writes version 1
FORWARD stage 0 minibatch 2 microbatch 0 reads version 1
BACKWARD stage 0 minibatch 1 microbatch 0 reads version 0
UPDATE stage 0 minibatch 1 writes version 2
BACKWARD stage 0 minibatch 2 microbatch 0 reads version 1
UPDATE stage 0 minibatch 2 writes version 3
worker 1
body every 3 minibatches
FORWARD stage 1 minibatch 0 microbatch 0 reads version 0
BACKWARD stage 1 minibatch 0 microbatch 0 reads version 0
UPDATE stage 1 minibatch 0 writes version 1
FORWARD stage 1 minibatch 1 microbatch 0 reads version 1
BACKWARD stage 1 minibatch 1 microbatch 0 reads version 1
UPDATE stage 1 minibatch 1 writes version 2
FORWARD stage 1 minibatch 2 microbatch 0 reads version 2
BACKWARD stage 1 minibatch 2 microbatch 0 reads version 2
UPDATE stage 1 minibatch 2 writes version 3
)";

ScheduleOptions options_of(const std::shared_ptr<const ListedProgram>& program) {
  ScheduleOptions options;
  options.schedule = kListedSchedule;
  options.program = program;
  options.num_microbatches = program->num_microbatches();
  options.in_flight = program->in_flight();
  return options;
}

ScheduleOptions options_of(const char* text) {
  return options_of(std::make_shared<const ListedProgram>(ListedProgram::parse(text)));
}

std::string refusal(const std::string& text) {
  try {
    (void)ListedProgram::parse(text);
  } catch (const UserError& error) {
    return error.what();
  }
  return {};
}

std::string replaced(std::string text, const std::string& from, const std::string& to) {
  const std::size_t begin = text.find(from);
  EXPECT_NE(begin, std::string::npos) << from;
  return text.replace(begin, from.size(), to);
}

std::vector<ScheduleOptions> named_schedules() {
  std::vector<ScheduleOptions> schedules;
  for (const char* name :
       {"pipedream", "vertical_sync", "unstashed", "2bw", "flush", "gpipe", "model_parallel"}) {
    for (std::int64_t m : {1, 2, 3, 5}) {
      for (const std::vector<std::int64_t>& in_flight :
           {std::vector<std::int64_t>{1}, {2, 1}, {3, 2, 1}, {4, 3, 2, 1}, {7, 2, 1}}) {
        ScheduleOptions options;
        options.schedule = name;
        options.in_flight = in_flight;
        options.num_microbatches = m;
        if (options.schedule == "2bw" && m < in_flight.front() - 1) continue;
        schedules.push_back(options);
      }
    }
  }
  return schedules;
}

TEST(ListedProgram, OfASchedulesNameComputesTheSameAtEveryLength) {
  for (const ScheduleOptions& named : named_schedules()) {
    const auto program = std::make_shared<const ListedProgram>(ListedProgram::of(named));
    ScheduleOptions listed = options_of(program);
    listed.num_microbatches = named.num_microbatches;
    SCOPED_TRACE(named.schedule + ", m = " + std::to_string(named.num_microbatches) +
                 ", n_0 = " + std::to_string(named.in_flight.front()) + "\n" + program->to_text());
    for (StageIndex stage; stage.value() < num_stages(named); stage = stage.next()) {
      EXPECT_EQ(num_versions_kept(listed, stage), num_versions_kept(named, stage));
      EXPECT_EQ(num_microbatches_in_flight(listed, stage), num_microbatches_in_flight(named, stage));
      EXPECT_EQ(stashes_versions(listed, stage),
                named.schedule != "unstashed" || num_microbatches_in_flight(named, stage) == 1);
      for (std::int64_t number = 0; number < 40; ++number) {
        const MinibatchId minibatch(number / named.num_microbatches);
        const MicrobatchIndex microbatch(number % named.num_microbatches);
        EXPECT_EQ(forward_version(listed, stage, minibatch, microbatch),
                  forward_version(named, stage, minibatch, microbatch));
        EXPECT_EQ(backward_version(listed, stage, minibatch, microbatch),
                  backward_version(named, stage, minibatch, microbatch));
      }
      const Rank rank(stage.value());
      for (std::int64_t length = 0; length < 12; ++length) {
        EXPECT_EQ(make_program(listed, rank, length), make_program(named, rank, length));
      }
    }
  }
}

TEST(ListedProgram, IsTheSameWhereItIsReadBack) {
  for (const ScheduleOptions& named : named_schedules()) {
    const ListedProgram program = ListedProgram::of(named);
    EXPECT_EQ(ListedProgram::parse(program.to_text()), program) << program.to_text();
  }
  const std::string once = ListedProgram::parse(kDrainsAfterThree).to_text();
  EXPECT_EQ(ListedProgram::parse(once).to_text(), once);
}

TEST(ListedProgram, ShowsWarmUpBodyAndCoolDown) {
  ScheduleOptions options;
  options.in_flight = {2, 1};
  EXPECT_EQ(ListedProgram::of(options).to_text(),
            "worker 0  # keeps 2 versions; backwards read what their forwards have read\n"
            "warm-up\n"
            "FORWARD stage 0 minibatch 0 microbatch 0 reads version 0\n"
            "FORWARD stage 0 minibatch 1 microbatch 0 reads version 0\n"
            "BACKWARD stage 0 minibatch 0 microbatch 0 reads version 0\n"
            "UPDATE stage 0 minibatch 0 writes version 1\n"
            "body every 1 minibatch\n"
            "FORWARD stage 0 minibatch 2 microbatch 0 reads version 1\n"
            "BACKWARD stage 0 minibatch 1 microbatch 0 reads version 0\n"
            "UPDATE stage 0 minibatch 1 writes version 2\n"
            "# cool-down, where a run has 3 minibatches\n"
            "#   BACKWARD stage 0 minibatch 2 microbatch 0 reads version 1\n"
            "#   UPDATE stage 0 minibatch 2 writes version 3\n"
            "worker 1  # keeps 1 version; backwards read what their forwards have read\n"
            "body every 1 minibatch\n"
            "FORWARD stage 1 minibatch 0 microbatch 0 reads version 0\n"
            "BACKWARD stage 1 minibatch 0 microbatch 0 reads version 0\n"
            "UPDATE stage 1 minibatch 0 writes version 1\n");
  options.schedule = "unstashed";
  EXPECT_NE(ListedProgram::of(options).to_text().find("keeps 1 version; backwards read the newest"),
            std::string::npos);
}

TEST(ListedProgram, OfOnesOwnRunsAtEveryLength) {
  for (const char* text : {kByPairs, kDrainsAfterThree}) {
    const ScheduleOptions options = options_of(text);
    for (std::int64_t length = 0; length < 20; ++length) {
      std::vector<std::vector<Instruction>> programs;
      for (Rank rank; rank.value() < 2; rank = rank.next()) {
        programs.push_back(make_program(options, rank, length));
      }
      const ReplayReport report = replay(options, programs, length);
      EXPECT_TRUE(report.ok) << report.error;
    }
  }
  EXPECT_EQ(num_versions_kept(options_of(kByPairs), StageIndex(0)), 2);
  EXPECT_EQ(num_versions_kept(options_of(kByPairs), StageIndex(1)), 2);
  EXPECT_EQ(num_versions_kept(options_of(kDrainsAfterThree), StageIndex(0)), 2);
  EXPECT_EQ(num_versions_kept(options_of(kDrainsAfterThree), StageIndex(1)), 1);
}

TEST(ListedProgram, EndsWhereverTheDataTurnOutToBeOver) {
  for (const char* text : {kByPairs, kDrainsAfterThree}) {
    const ScheduleOptions options = options_of(text);
    for (std::int64_t length = 0; length < 8; ++length) {
      ComputeCursor cursor(options, Rank(0));
      std::vector<Instruction> done;
      while (const auto next = cursor.current()) {
        if (!cursor.num_minibatches() && next->minibatch.value() >= length) {
          cursor.set_num_minibatches(length);
          continue;
        }
        done.push_back(*next);
        cursor.advance();
      }
      EXPECT_EQ(done, make_compute_program(options, Rank(0), length)) << length;
    }
  }
}

TEST(ListedProgram, BeginsAtALaterMinibatchAndRecomputes) {
  ScheduleOptions options = options_of(kDrainsAfterThree);
  options.recompute = {true, false};
  const std::vector<Instruction> first = make_compute_program(options, Rank(0), 7);
  options.first_minibatch = MinibatchId(10);
  std::vector<Instruction> later = make_compute_program(options, Rank(0), 17);
  EXPECT_EQ(std::ranges::count(first, Opcode::kRecompute, &Instruction::opcode), 7);
  for (Instruction& instruction : later) {
    EXPECT_EQ(instruction.version, instruction.opcode == Opcode::kUpdate
                                       ? WeightVersion(instruction.minibatch.next().value())
                                       : forward_version(options, StageIndex(0), instruction.minibatch));
    instruction.minibatch = MinibatchId(instruction.minibatch.value() - 10);
    instruction.version = WeightVersion(instruction.version.value() - 10);
  }
  EXPECT_EQ(later, first);
}

TEST(ListedProgram, SaysWhichPhaseAnInstructionBelongsTo) {
  ScheduleOptions named;
  named.in_flight = {2, 1};
  const ScheduleOptions listed = options_of(std::make_shared<const ListedProgram>(ListedProgram::of(named)));
  std::string phases;
  for (const Instruction& instruction : make_compute_program(listed, Rank(0), 4)) {
    phases += phase_name(phase_of(listed, instruction, 4))[0];
  }
  EXPECT_EQ(phases, "wwwwsssssscc");  // F0 F1 B0 U0 | F2 B1 U1 F3 B2 U2 | B3 U3
  const Instruction last = make_compute_program(listed, Rank(0), 4).back();
  EXPECT_EQ(phase_of(listed, last, std::nullopt), Phase::kSteady);
  Instruction again = last;
  again.opcode = Opcode::kRecompute;
  EXPECT_EQ(phase_of(listed, again, 4), Phase::kCoolDown);
}

TEST(ListedProgram, NamesTheLineThatIsNone) {
  EXPECT_EQ(refusal("worker 0\nbody every 1 minibatch\nFOREWARD stage 0\n").substr(0, 8), "line 3: ");
  EXPECT_EQ(refusal("worker 1\n"), "line 1: \"worker 1\" where \"worker 0\" is due");
  EXPECT_EQ(
      refusal("warm-up\n"),
      "line 1: \"warm-up\" stands before the first worker; write \"worker 0\" above, or give the text of "
      "a file, which Program.load() reads");
  EXPECT_EQ(
      refusal("worker 0\nbody each 2 minibatches\n"),
      "line 2: \"body each 2 minibatches\" is no beginning of a body; write \"body every 2 minibatches\"");
  EXPECT_EQ(refusal("worker 0\nbody every 1 minibatch\nwarm-up\n"),
            "line 3: \"warm-up\" is out of place; a worker has \"warm-up\", \"body every N minibatches\" and "
            "\"cool-down\", in this order");
  EXPECT_NE(refusal("worker 0\nFORWARD stage 0 minibatch 0 microbatch 0 reads version 0\n")
                .find("line 2: \"FORWARD stage 0 minibatch 0 microbatch 0 reads version 0\" stands above"),
            std::string::npos);
  EXPECT_EQ(refusal(""), "the program is empty; it begins with \"worker 0\"");
  EXPECT_EQ(refusal("worker 0\nwarm-up\n"),
            "worker 0 has no body; write \"body every 1 minibatch\" above the part that repeats");
  EXPECT_EQ(refusal(replaced(kByPairs, "worker 1\nbody every 2", "worker 1\nbody every 3")),
            "line 11: \"body every 3 minibatches\" where other workers have 2; all bodies are of as many "
            "minibatches");
}

TEST(ListedProgram, NamesWhatCannotRunWithItsLine) {
  const auto with = [](const std::string& from, const std::string& to) {
    return refusal(replaced(kDrainsAfterThree, from, to));
  };
  EXPECT_EQ(
      with("UPDATE stage 0 minibatch 2 writes version 3\n", ""),
      "worker 0: the body has 2 UPDATEs, and 3 minibatches of 1 microbatch need 3: add or take away lines, "
      "or change \"body every 3 minibatches\"");
  EXPECT_EQ(
      with("FORWARD stage 0 minibatch 2 microbatch 0 reads version 1",
           "FORWARD stage 0 minibatch 2 microbatch 0 reads version 2"),
      "line 8: FORWARD stage 0 minibatch 2 microbatch 0 reads version 2: version 2 is not written yet; the "
      "newest is 1");
  EXPECT_EQ(
      with("BACKWARD stage 0 minibatch 1 microbatch 0 reads version 0",
           "BACKWARD stage 0 minibatch 1 microbatch 0 reads version 1"),
      "line 9: BACKWARD stage 0 minibatch 1 microbatch 0 reads version 1: its forward has read version 0, "
      "and the stage keeps 2: where several are kept a backward reads its forward's");
  EXPECT_EQ(
      with("UPDATE stage 1 minibatch 1 writes version 2", "UPDATE stage 1 minibatch 1 writes version 3"),
      "line 20: UPDATE stage 1 minibatch 1 writes version 3: the newest version is 1, so the update writes "
      "version 2");
  EXPECT_NE(with("FORWARD stage 1 minibatch 1 microbatch 0 reads version 1",
                 "SEND activation stage 1 to stage 2 minibatch 1 microbatch 0")
                .find("sends, receives and recomputing are added to a program"),
            std::string::npos);
  EXPECT_NE(with("FORWARD stage 1 minibatch 1", "FORWARD stage 0 minibatch 1")
                .find("worker 1 runs stage 1 alone: write stage 1, or move the line below \"worker 0\""),
            std::string::npos);
  EXPECT_NE(with("FORWARD stage 1 minibatch 1", "FORWARD stage 1 replica 1 minibatch 1")
                .find("one replica of each stage"),
            std::string::npos);
  EXPECT_NE(with("FORWARD stage 1 minibatch 1 microbatch 0 reads version 1",
                 "FORWARD stage 1 minibatch 70000 microbatch 0 reads version 1")
                .find("numbers of a program are at most 65536"),
            std::string::npos);
  EXPECT_NE(with("body every 3 minibatches", "body every 9223372036854775807 minibatches")
                .find("is no beginning of a body"),
            std::string::npos);
  EXPECT_NE(with("body every 3 minibatches", "body every 3 minibatchfoo").find("is no beginning of a body"),
            std::string::npos);
}

// Each of these once left a minibatch without an update, for which the list was walked for ever.
TEST(ListedProgram, NamesALineThatIsOutOfOrder) {
  const auto one_stage = [](const std::string& updated, const std::string& forwarded) {
    return refusal("worker 0\nbody every 1 minibatch\nFORWARD stage 0 minibatch " + forwarded +
                   " microbatch 0 reads version 0\nBACKWARD stage 0 minibatch " + forwarded +
                   " microbatch 0 reads version 0\nUPDATE stage 0 minibatch " + updated +
                   " writes version 1\n");
  };
  EXPECT_EQ(one_stage("0", "0"), "");
  EXPECT_EQ(
      one_stage("1", "0"),
      "line 5: UPDATE stage 0 minibatch 1 writes version 1: UPDATEs go in order; the next is of minibatch "
      "0");
  EXPECT_EQ(
      one_stage("1", "1"),
      "line 3: FORWARD stage 0 minibatch 1 microbatch 0 reads version 0: FORWARDs go in order; the next is "
      "of minibatch 0");
  EXPECT_NE(refusal(replaced(kByPairs, "UPDATE stage 0 minibatch 1", "UPDATE stage 0 minibatch 0")), "");
}

TEST(ListedProgram, NamesTheTimeOfTheBodyAtWhichARunWouldFail) {
  ScheduleOptions options;
  options.in_flight = {2, 1};
  const std::string text =
      replaced(ListedProgram::of(options).to_text(), "minibatch 2 microbatch 0 reads version 1",
               "minibatch 2 microbatch 0 reads version 0");
  EXPECT_EQ(
      refusal(text),
      "line 9, time 2 of the body: BACKWARD stage 0 minibatch 2 microbatch 0 reads version 1: its forward "
      "has read version 0, and the stage keeps 2: where several are kept a backward reads its forward's");
}

// Stage 1 wants a forward more than stage 0 gives before its first backward.
TEST(ListedProgram, NamesADeadlock) {
  const std::string text = R"(
worker 0
body every 2 minibatches
FORWARD stage 0 minibatch 0 microbatch 0 reads version 0
BACKWARD stage 0 minibatch 0 microbatch 0 reads version 0
UPDATE stage 0 minibatch 0 writes version 1
FORWARD stage 0 minibatch 1 microbatch 0 reads version 1
BACKWARD stage 0 minibatch 1 microbatch 0 reads version 1
UPDATE stage 0 minibatch 1 writes version 2
)" + std::string(kByPairs).substr(std::string(kByPairs).find("worker 1"));
  EXPECT_NE(refusal(text).find("deadlock; worker 0"), std::string::npos) << refusal(text);
}

TEST(ListedProgram, TakesACoolDownThatIsWhatIsLeftAlone) {
  const std::string text = replaced(kDrainsAfterThree, "worker 1\n", "cool-down\nworker 1\n");
  EXPECT_EQ(refusal(text), "");
  EXPECT_EQ(
      refusal(replaced(text, "cool-down\n", "cool-down\nUPDATE stage 0 minibatch 2 writes version 3\n")),
      "worker 0: the cool-down is not what is left of the body when the data are over; leave "
      "\"cool-down\" and what follows it out");
}

TEST(ListedProgram, IsRefusedForAnotherPlan) {
  const ScheduleOptions options = options_of(kByPairs);
  EXPECT_EQ(error_of(options), "");
  ScheduleOptions other = options;
  other.in_flight = {3, 2, 1};
  EXPECT_EQ(error_of(other), "the program has 2 stages, and the plan 3; give a plan of as many");
  other = options;
  other.num_microbatches = 4;
  EXPECT_EQ(error_of(other), "num_microbatches is 4, and the program has 1; leave the number to the program");
  other = options;
  other.in_flight = {9, 9};
  EXPECT_EQ(error_of(other), "in_flight is 9 at stage 0, and the program has 2; leave it to the program");
  other = options;
  other.schedule = "flush";
  EXPECT_EQ(error_of(other), "schedule is \"flush\", and there is a program; give one of the two");
  other = options;
  other.ties = {{StageIndex(0), StageIndex(1)}};
  EXPECT_NE(error_of(other).find("parameters that stages share with a program of your own"),
            std::string::npos);
  other = options;
  other.placement = Placement::in_order({2, 1});
  EXPECT_NE(error_of(other).find("replicas with a program of your own"), std::string::npos);
  other = options;
  other.program = nullptr;
  EXPECT_EQ(error_of(other), "schedule \"program\" has no program; give one");
}

}  // namespace
}  // namespace pipedream
