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

// Two forwards, then two backwards, with an update after each backward.
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

// A program that is 1F1B on two stages, and drains after every third minibatch.
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
  options.placement = program->placement();
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
  for (std::int64_t m : {1, 2, 3, 4}) {
    for (const Counts& replicas : {Counts{2, 1}, {1, 2}, {3, 2}, {2, 2, 1}, {1, 3, 1}}) {
      for (const std::string& name : kStraightSchedules) {
        ScheduleOptions options = make_replicated(name, replicas, m);
        if (error_of(options).empty()) schedules.push_back(options);
      }
    }
    for (const auto& [workers, chunks] : {std::pair(2, 2), std::pair(3, 2), std::pair(2, 3)}) {
      schedules.push_back(make_interleaved(workers, chunks, m));
    }
  }
  return schedules;
}

std::string describe(const ScheduleOptions& options) {
  std::string name = options.schedule + ", m = " + std::to_string(options.num_microbatches) +
                     ", n_0 = " + std::to_string(options.in_flight.front());
  const Placement placement = placement_of(options);
  for (const Place& place : placement.places()) {
    name += ", " + to_string(StageReplica{place.stage, place.replica});
  }
  return name;
}

TEST(ListedProgram, OfASchedulesNameComputesTheSameAtEveryLength) {
  for (const ScheduleOptions& named : named_schedules()) {
    SCOPED_TRACE(describe(named));
    const auto program = std::make_shared<const ListedProgram>(ListedProgram::of(named));
    ScheduleOptions listed = options_of(program);
    SCOPED_TRACE(program->to_text());
    const bool is_plain = num_stages(named) == 1 && mean_delay(named, StageIndex(0)) == 0;
    const bool drains = drains_every_minibatch(named) || is_plain;
    EXPECT_EQ(drains_every_minibatch(listed), drains);
    for (StageIndex stage; stage.value() < num_stages(named); stage = stage.next()) {
      EXPECT_EQ(num_versions_kept(listed, stage), num_versions_kept(named, stage));
      EXPECT_EQ(num_microbatches_in_flight(listed, stage), num_microbatches_in_flight(named, stage));
      EXPECT_EQ(rounds_of(listed, stage).minibatches_per_round,
                rounds_of(named, stage).minibatches_per_round);
      EXPECT_DOUBLE_EQ(mean_delay(listed, stage), mean_delay(named, stage));
      const bool is_naive = !stashes_versions(named, stage);
      EXPECT_EQ(stashes_versions(listed, stage), !is_naive || mean_delay(named, stage) == 0);
      for (std::int64_t number = 0; number < 40; ++number) {
        const MinibatchId minibatch(number / named.num_microbatches);
        const MicrobatchIndex microbatch(number % named.num_microbatches);
        EXPECT_EQ(forward_version(listed, stage, minibatch, microbatch),
                  forward_version(named, stage, minibatch, microbatch));
        EXPECT_EQ(backward_version(listed, stage, minibatch, microbatch),
                  backward_version(named, stage, minibatch, microbatch));
      }
    }
    for (Rank rank; rank.value() < num_workers(named); rank = rank.next()) {
      for (std::int64_t length = 0; length < 14; ++length) {
        EXPECT_EQ(make_compute_program(listed, rank, length), make_compute_program(named, rank, length));
        // The list of "naive" only reads newest versions. So it does not show that pulls come right after
        // updates.
        if (named.schedule == "naive" && has_replicas(named)) continue;
        EXPECT_EQ(make_program(listed, rank, length), make_program(named, rank, length)) << length;
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
  EXPECT_EQ(
      refusal("worker 0\nbody every 1 minibatch\nFOREWARD stage 0\n"),
      "line 3: \"FOREWARD stage 0\" is not an instruction: \"FOREWARD\" where FORWARD, BACKWARD or UPDATE is "
      "expected");
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
  EXPECT_EQ(refusal(replaced(kByPairs, "body every 2 minibatches", "warm-up")),
            "line 10: worker 0 has no body; write \"body every 1 minibatch\" above the part that repeats");
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
      "worker 0: the body has 2 UPDATEs, and 3 minibatches of 1 microbatch need 3; the next is of minibatch "
      "2: add or take away lines, or change \"body every 3 minibatches\"");
  EXPECT_EQ(refusal("worker 0\nbody every 1 minibatch\n"
                    "FORWARD stage 0 minibatch 0 microbatch 0 reads version 0\n"
                    "FORWARD stage 0 minibatch 0 microbatch 1 reads version 0\n"
                    "BACKWARD stage 0 minibatch 0 microbatch 0 reads version 0\n"
                    "UPDATE stage 0 minibatch 0 writes version 1\n"),
            "worker 0: the body has 1 BACKWARD, and 1 minibatch of 2 microbatches needs 2; the next is of "
            "minibatch 0 microbatch 1: add or take away lines, or change \"body every 1 minibatch\"");
  EXPECT_EQ(with("BACKWARD stage 0 minibatch 1 microbatch 0 reads version 0\n", ""),
            "line 10: BACKWARD stage 0 minibatch 2 microbatch 0 reads version 1: BACKWARDs go in order; the "
            "next is of minibatch 1");
  EXPECT_EQ(
      with("FORWARD stage 0 minibatch 2 microbatch 0 reads version 1",
           "FORWARD stage 0 minibatch 2 microbatch 0 reads version 2"),
      "line 8: FORWARD stage 0 minibatch 2 microbatch 0 reads version 2: version 2 is not written yet; the "
      "newest is 1");
  EXPECT_EQ(
      with("BACKWARD stage 0 minibatch 1 microbatch 0 reads version 0",
           "BACKWARD stage 0 minibatch 1 microbatch 0 reads version 1"),
      "line 9: BACKWARD stage 0 minibatch 1 microbatch 0 reads version 1: its forward has read version 0, "
      "and the stage keeps 2: where several are kept a backward reads its forward's; the forward is line 5: "
      "let the backward read version 0");
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
  EXPECT_NE(
      with("FORWARD stage 1 minibatch 1", "FORWARD stage 1 replica 1 minibatch 1")
          .find("the program has 2 workers, and its lines name 2 stages, of replicas 1-2; write a worker"),
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

// Each of these texts leaves a minibatch without an update. If the text were accepted, a search for that
// update would never end.
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
      "has read version 0, and the stage keeps 2: where several are kept a backward reads its forward's; the "
      "forward is line 8: let the forward read version 1");
}

// Each minibatch has two microbatches, and the warm-up has only the first microbatch of minibatch 0. So a
// line of the body may read version 0 at first, and version 1 in the next repetition.
constexpr const char* kHalfAMinibatchAhead = R"(
worker 0
warm-up
FORWARD stage 0 minibatch 0 microbatch 0 reads version 0
body every 1 minibatch
FORWARD stage 0 minibatch 0 microbatch 1 reads version 0
BACKWARD stage 0 minibatch 0 microbatch 0 reads version 0
FORWARD stage 0 minibatch 1 microbatch 0 reads version 0
BACKWARD stage 0 minibatch 0 microbatch 1 reads version 0
UPDATE stage 0 minibatch 0 writes version 1
)";

std::string note_on(const std::string& text) { return ListedProgram::parse(text).note_on_unstashed(); }

TEST(ListedProgram, NotesTheFirstBackwardThatReadsAnotherVersionThanItsForward) {
  EXPECT_EQ(note_on(kHalfAMinibatchAhead),
            "line 7, time 2 of the body: BACKWARD stage 0 minibatch 1 microbatch 0 reads version 1, and its "
            "forward (line 8) version 0, as under unstashed; if both are to read one version, put all of "
            "minibatch 0, with its update, into the warm-up");
  EXPECT_NE(
      ListedProgram::parse(kHalfAMinibatchAhead)
          .to_text()
          .find("\n# BACKWARD stage 0 minibatch 1 microbatch 0 reads version 1, and its forward version 0"),
      std::string::npos);
  // This is the program that the note asks for.
  EXPECT_EQ(note_on(R"(
worker 0
warm-up
FORWARD stage 0 minibatch 0 microbatch 0 reads version 0
FORWARD stage 0 minibatch 0 microbatch 1 reads version 0
BACKWARD stage 0 minibatch 0 microbatch 0 reads version 0
FORWARD stage 0 minibatch 1 microbatch 0 reads version 0
BACKWARD stage 0 minibatch 0 microbatch 1 reads version 0
UPDATE stage 0 minibatch 0 writes version 1
body every 1 minibatch
FORWARD stage 0 minibatch 1 microbatch 1 reads version 1
BACKWARD stage 0 minibatch 1 microbatch 0 reads version 0
FORWARD stage 0 minibatch 2 microbatch 0 reads version 1
BACKWARD stage 0 minibatch 1 microbatch 1 reads version 1
UPDATE stage 0 minibatch 1 writes version 2
)"),
            "");
  EXPECT_EQ(note_on(kByPairs), "");
}

// The warm-up has three forwards. From the second repetition on, a backward reads a version that is two
// updates newer than its forward's version.
TEST(ListedProgram, NotesHowManyMinibatchesBelongIntoTheWarmUp) {
  EXPECT_NE(note_on(R"(
worker 0
warm-up
FORWARD stage 0 minibatch 0 microbatch 0 reads version 0
FORWARD stage 0 minibatch 1 microbatch 0 reads version 0
FORWARD stage 0 minibatch 2 microbatch 0 reads version 0
body every 1 minibatch
BACKWARD stage 0 minibatch 0 microbatch 0 reads version 0
UPDATE stage 0 minibatch 0 writes version 1
FORWARD stage 0 minibatch 3 microbatch 0 reads version 1
)")
                .find("put all of minibatch 1 and those before it, with their updates, into the warm-up"),
            std::string::npos);
}

TEST(ListedProgram, NotesTheVersionToReadWhereALineNamesAnother) {
  for (const ScheduleOptions& options : named_schedules()) {
    const ListedProgram program = ListedProgram::of(options);
    const std::string note = program.note_on_unstashed();
    bool stashes = true;
    for (StageIndex stage; stage.value() < program.num_stages(); stage = stage.next()) {
      stashes = stashes && program.stashes(stage);
    }
    EXPECT_EQ(note.empty(), stashes) << describe(options);
    EXPECT_EQ(note.ends_with("let the backward read version 0"), !stashes) << describe(options) << note;
  }
}

// Stage 0 has two replicas, so its updates are of two minibatches each. Stage 1 has one replica.
constexpr const char* kReplicated = R"(
worker 0
body every 2 minibatches
FORWARD stage 0 minibatch 0 microbatch 0 reads version 0
BACKWARD stage 0 minibatch 0 microbatch 0 reads version 0
UPDATE stage 0 minibatch 0 writes version 1
worker 1
body every 2 minibatches
FORWARD stage 0 replica 1 minibatch 1 microbatch 0 reads version 0
BACKWARD stage 0 replica 1 minibatch 1 microbatch 0 reads version 0
UPDATE stage 0 replica 1 minibatch 0 writes version 1
worker 2
body every 2 minibatches
FORWARD stage 1 minibatch 0 microbatch 0 reads version 0
BACKWARD stage 1 minibatch 0 microbatch 0 reads version 0
UPDATE stage 1 minibatch 0 writes version 1
FORWARD stage 1 minibatch 1 microbatch 0 reads version 0
BACKWARD stage 1 minibatch 1 microbatch 0 reads version 0
UPDATE stage 1 minibatch 1 writes version 2
)";

TEST(ListedProgram, OfReplicasCountsItsRoundsByItsUpdates) {
  const ScheduleOptions options = options_of(kReplicated);
  EXPECT_EQ(rounds_of(options, StageIndex(0)).minibatches_per_round, 2);
  EXPECT_EQ(rounds_of(options, StageIndex(1)).minibatches_per_round, 1);
  EXPECT_EQ(num_versions_kept(options, StageIndex(1)), 2);
  EXPECT_FALSE(drains_every_minibatch(options));
  std::string together = replaced(kReplicated, "UPDATE stage 1 minibatch 0 writes version 1\n", "");
  together = replaced(together, "UPDATE stage 1 minibatch 1 writes version 2",
                      "UPDATE stage 1 minibatch 0 writes version 1");
  const ScheduleOptions drained = options_of(together.c_str());
  EXPECT_EQ(rounds_of(drained, StageIndex(1)).minibatches_per_round, 2);
  EXPECT_TRUE(drains_every_minibatch(drained));
}

TEST(ListedProgram, OfReplicasNamesTheLineThatIsAnothers) {
  const auto with = [](const std::string& from, const std::string& to) {
    return refusal(replaced(kReplicated, from, to));
  };
  EXPECT_EQ(
      with("FORWARD stage 0 replica 1 minibatch 1", "FORWARD stage 0 minibatch 1"),
      "line 9: FORWARD stage 0 minibatch 1 microbatch 0 reads version 0: worker 1 runs stage 0 replica 1 "
      "alone: write stage 0 replica 1, or move the line below \"worker 0\"");
  EXPECT_EQ(
      with("FORWARD stage 0 replica 1 minibatch 1", "FORWARD stage 0 replica 1 minibatch 0"),
      "line 9: FORWARD stage 0 replica 1 minibatch 0 microbatch 0 reads version 0: FORWARDs go in order; "
      "the next is of minibatch 1");
  EXPECT_EQ(
      with("UPDATE stage 0 replica 1 minibatch 0 writes version 1\n", ""),
      "worker 1: the body has 0 UPDATEs, and 2 minibatches of 1 microbatch need 1 at each replica; the next "
      "is of minibatch 0: add or take away lines, or change \"body every 2 minibatches\"");
  std::string short_body = kReplicated;
  for (int worker = 0; worker < 3; ++worker) {
    short_body = replaced(short_body, "body every 2 minibatches", "body every 1 minibatch");
  }
  EXPECT_EQ(
      refusal(short_body),
      "stage 0 of 2 replicas updates once in 2 minibatches, and there is \"body every 1 minibatch\": let a "
      "body have whole rounds");
  EXPECT_EQ(
      with("FORWARD stage 1 minibatch 0", "FORWARD stage 3 minibatch 0"),
      "line 14: FORWARD stage 3 minibatch 0 microbatch 0 reads version 0: there is no stage 2; stages are "
      "counted from 0, without gaps");
}

// Megatron-LM's order for two workers of two stages each, but without a drain: minibatch 1 is forwarded
// before the update of minibatch 0.
TEST(ListedProgram, OfSeveralStagesAtAWorkerNeedNotDrain) {
  const auto list = [](std::int64_t worker) {
    std::string text = "worker " + std::to_string(worker) + "\nwarm-up\n";
    const auto line = [&](const char* opcode, std::int64_t stage, std::int64_t minibatch,
                          std::int64_t version) {
      text += std::string(opcode) + " stage " + std::to_string(stage) + " minibatch " +
              std::to_string(minibatch) + (opcode[0] == 'U' ? " writes" : " microbatch 0 reads") +
              " version " + std::to_string(version) + '\n';
    };
    line("FORWARD", worker, 0, 0);
    line("FORWARD", worker + 2, 0, 0);
    for (const std::int64_t minibatch : {0, 1}) {
      if (minibatch == 1) text += "body every 1 minibatch\n";
      line("FORWARD", worker, minibatch + 1, minibatch);
      line("BACKWARD", worker + 2, minibatch, minibatch);
      line("UPDATE", worker + 2, minibatch, minibatch + 1);
      line("BACKWARD", worker, minibatch, 0);
      line("UPDATE", worker, minibatch, minibatch + 1);
      line("FORWARD", worker + 2, minibatch + 1, minibatch + 1);
    }
    return text;
  };
  const std::string text = list(0) + list(1);
  const ScheduleOptions options = options_of(text.c_str());
  EXPECT_EQ(num_stages(options), 4);
  EXPECT_EQ(num_workers(options), 2);
  EXPECT_FALSE(drains_every_minibatch(options));
  EXPECT_EQ(options.program->versions_kept(), (Counts{2, 2, 1, 1}));
  for (std::int64_t length = 0; length < 6; ++length) {
    const ReplayReport report = replay(options, make_programs(options, length), length);
    EXPECT_TRUE(report.ok) << report.error;
  }
  EXPECT_NE(refusal(replaced(text, "UPDATE stage 2 minibatch 1 writes version 2\n", ""))
                .find("worker 0: the body has 0 UPDATEs of stage 2, and 1 minibatch"),
            std::string::npos);
}

// All stages read the same version of a tied parameter in one microbatch. It is the version that the input
// stage has read, or the owner's if that is older.
TEST(ListedProgram, ReadsTiedParametersAsTheScheduleOfItsNameDoes) {
  for (const ScheduleOptions& plain : named_schedules()) {
    ScheduleOptions named = plain;
    const std::int64_t stages = num_stages(named);
    if (stages == 1) continue;
    for (StageIndex owner; owner.value() + 1 < stages; owner = owner.next()) {
      named.ties.push_back({owner, StageIndex(stages - 1)});
    }
    const auto replicas_differ = has_replicas(named) && named.schedule == "2bw";
    if (replicas_differ || !error_of(named).empty()) continue;
    ScheduleOptions listed = options_of(std::make_shared<const ListedProgram>(ListedProgram::of(named)));
    listed.ties = named.ties;
    SCOPED_TRACE(describe(named) + "\n" + listed.program->to_text());
    for (const auto& [owner, user] : named.ties) {
      EXPECT_EQ(num_tied_versions_kept(listed, owner), num_tied_versions_kept(named, owner));
      for (std::int64_t number = 0; number < 40; ++number) {
        const MinibatchId minibatch(number / named.num_microbatches);
        const MicrobatchIndex microbatch(number % named.num_microbatches);
        EXPECT_EQ(tied_version(listed, owner, minibatch, microbatch),
                  tied_version(named, owner, minibatch, microbatch));
      }
    }
    for (std::int64_t length = 0; length < 10; ++length) {
      const ReplayReport report = replay(listed, make_programs(listed, length), length);
      EXPECT_TRUE(report.ok) << report.error;
    }
  }
}

// The versions that are read go up and down: a microbatch may read an older version than the microbatch
// before it. So a received tied version is kept until no later microbatch reads it.
TEST(ListedProgram, KeepsTiedVersionsThatAreReadAgain) {
  std::string text = kDrainsAfterThree;
  for (const char* stage : {"0", "1"}) {
    for (const char* opcode : {"FORWARD", "BACKWARD"}) {
      const std::string line =
          std::string(opcode) + " stage " + stage + " minibatch 2 microbatch 0 reads version ";
      text = replaced(text, line + (stage[0] == '0' ? '1' : '2'), line + '0');
    }
  }
  ScheduleOptions options = options_of(text.c_str());
  options.ties = {{StageIndex(0), StageIndex(1)}};
  EXPECT_EQ(tied_version(options, StageIndex(0), MinibatchId(2)), WeightVersion(0));
  for (std::int64_t length = 0; length < 12; ++length) {
    const ReplayReport report = replay(options, make_programs(options, length), length);
    EXPECT_TRUE(report.ok) << report.error;
  }
}

// Before its first backward, stage 1 waits for more forwards than stage 0 does before its own first backward.
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
  EXPECT_EQ(
      refusal(text),
      "deadlock: line 5, BACKWARD stage 0 minibatch 0 microbatch 0 waits for the gradient from stage 1; "
      "line 13, FORWARD stage 1 minibatch 1 microbatch 0 waits for the activation from stage 0");
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
  other.placement = {};
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
  other.placement = Placement::in_order({2, 1});
  EXPECT_EQ(
      error_of(other),
      "the program has stage 0 of 1 at worker 0, and the plan has not; give a plan of as many replicas and "
      "workers");
  other = options;
  other.placement = Placement::in_order({1, 1}, {0, 0});
  other.ties = {{StageIndex(0), StageIndex(1)}};
  EXPECT_EQ(error_of(other), "");
  other = options;
  other.program = nullptr;
  EXPECT_EQ(error_of(other), "schedule \"program\" has no program; give one");
}

}  // namespace
}  // namespace pipedream
