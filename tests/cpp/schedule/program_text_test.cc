// Tests programs as text: they are printed, changed by hand and parsed back.
#include <gtest/gtest.h>

#include "base/failure.h"
#include "schedule/programs.h"

namespace pipedream {
namespace {

std::string error_of(std::string_view text) {
  try {
    (void)parse_programs(text);
  } catch (const UserError& error) {
    return error.what();
  }
  return "";
}

TEST(ProgramText, IsOneInstructionALineUnderItsWorker) {
  EXPECT_EQ(print_programs(make_programs(make_options("pipedream", {2, 1}), 1)),
            "worker 0\n"
            "FORWARD stage 0 minibatch 0 microbatch 0 reads version 0\n"
            "SEND activation stage 0 to stage 1 minibatch 0 microbatch 0\n"
            "RECV gradient stage 1 to stage 0 minibatch 0 microbatch 0\n"
            "BACKWARD stage 0 minibatch 0 microbatch 0 reads version 0\n"
            "UPDATE stage 0 minibatch 0 writes version 1\n"
            "worker 1\n"
            "RECV activation stage 0 to stage 1 minibatch 0 microbatch 0\n"
            "FORWARD stage 1 minibatch 0 microbatch 0 reads version 0\n"
            "BACKWARD stage 1 minibatch 0 microbatch 0 reads version 0\n"
            "SEND gradient stage 1 to stage 0 minibatch 0 microbatch 0\n"
            "UPDATE stage 1 minibatch 0 writes version 1\n");
}

TEST(ProgramText, EveryScheduleIsParsedBack) {
  std::vector<ScheduleOptions> all = {make_interleaved(2, 2, 4)};
  for (const std::string& schedule : kStraightSchedules) {
    all.push_back(make_options(schedule, straight(4), 4));
    all.push_back(make_replicated(schedule, {4, 2, 2, 1}, 20));
  }
  for (ScheduleOptions& options : all) {
    options.recompute = {true, false, true, false};
    const Programs programs = make_programs(options, 3);
    EXPECT_EQ(parse_programs(print_programs(programs)), programs) << options.schedule;
  }
}

TEST(ProgramText, NoProgramsAndEmptyProgramsAreParsedBack) {
  EXPECT_EQ(print_programs({}), "");
  EXPECT_EQ(parse_programs(""), Programs());
  EXPECT_EQ(parse_programs(print_programs(Programs(2))), Programs(2));
}

TEST(ProgramText, CommentsEmptyLinesAndForeignLineEndsArePassedOver) {
  const Programs programs = parse_programs(
      "# by hand\r\n"
      "\r\n"
      "  worker 0   # the only one\r\n"
      "\tUPDATE stage 0 minibatch 0 writes version 1 # early\r\n"
      "   \n"
      "UPDATE stage 0 minibatch 1 writes version 2");
  ASSERT_EQ(programs.size(), 1u);
  ASSERT_EQ(programs[0].size(), 2u);
  EXPECT_EQ(programs[0][1].version, WeightVersion(2));
}

TEST(ProgramText, ErrorsNameTheLine) {
  EXPECT_EQ(error_of("worker 0\n\n# nothing\nFORWRD stage 0\n"),
            "line 4: \"FORWRD stage 0\" is not an instruction: \"FORWRD\" where FORWARD, RECOMPUTE, "
            "BACKWARD, UPDATE, EVALUATE, SEND or RECV is expected");
  EXPECT_EQ(error_of("UPDATE stage 0 minibatch 0 writes version 1"),
            "line 1: \"UPDATE stage 0 minibatch 0 writes version 1\" stands before the first worker; write "
            "\"worker 0\" above");
  EXPECT_EQ(error_of("worker 1"), "line 1: \"worker 1\" where \"worker 0\" is due");
  EXPECT_EQ(error_of("worker 0\nworker 0"), "line 2: \"worker 0\" where \"worker 1\" is due");
  EXPECT_EQ(error_of("worker 0\nworker 2"), "line 2: \"worker 2\" where \"worker 1\" is due");
  EXPECT_EQ(error_of("worker zero"), "line 1: \"worker zero\" where \"worker 0\" is due");
}

}  // namespace
}  // namespace pipedream
