// Tests that instructions are written as text and parsed back.
#include "schedule/instruction.h"

#include <gtest/gtest.h>

#include "base/failure.h"

namespace pipedream {
namespace {

Instruction make(Opcode opcode, std::int64_t stage, std::int64_t minibatch, std::int64_t microbatch,
                 std::int64_t version) {
  return {
      opcode, StageIndex(stage), MinibatchId(minibatch), MicrobatchIndex(microbatch), WeightVersion(version),
      {}};
}

Instruction transfer(Opcode opcode, EdgeKind kind, std::int64_t from, std::int64_t to, std::int64_t minibatch,
                     std::int64_t microbatch) {
  const Edge edge{kind, {StageIndex(from), {}}, {StageIndex(to), {}}};
  return {opcode,
          StageIndex(opcode == Opcode::kSend ? from : to),
          MinibatchId(minibatch),
          MicrobatchIndex(microbatch),
          {},
          edge};
}

std::string error_of(std::string_view text) {
  try {
    (void)parse_instruction(text);
  } catch (const UserError& error) {
    return error.what();
  }
  return "";
}

TEST(Instruction, TextSaysWhatIsReadAndWhatIsWritten) {
  EXPECT_EQ(to_string(make(Opcode::kForward, 0, 3, 2, 1)),
            "FORWARD stage 0 minibatch 3 microbatch 2 reads version 1");
  EXPECT_EQ(to_string(make(Opcode::kRecompute, 5, 3, 0, 1)),
            "RECOMPUTE stage 5 minibatch 3 microbatch 0 reads version 1");
  EXPECT_EQ(to_string(make(Opcode::kBackward, 1, 3, 0, 1)),
            "BACKWARD stage 1 minibatch 3 microbatch 0 reads version 1");
  EXPECT_EQ(to_string(make(Opcode::kUpdate, 0, 3, 0, 4)), "UPDATE stage 0 minibatch 3 writes version 4");
}

TEST(Instruction, TextIsParsedBack) {
  for (const Opcode opcode :
       {Opcode::kForward, Opcode::kRecompute, Opcode::kBackward, Opcode::kUpdate, Opcode::kEvaluate}) {
    const Instruction instruction = make(opcode, 7, 12345678901, opcode == Opcode::kUpdate ? 0 : 31, 99);
    EXPECT_EQ(parse_instruction(to_string(instruction)), instruction);
  }
  Instruction replicated = make(Opcode::kUpdate, 1, 6, 0, 4);
  replicated.replica = ReplicaIndex(2);
  EXPECT_EQ(to_string(replicated), "UPDATE stage 1 replica 2 minibatch 6 writes version 4");
  EXPECT_EQ(parse_instruction(to_string(replicated)), replicated);
}

TEST(Instruction, TextOfATransferNamesItsEdgeAndItsItem) {
  EXPECT_EQ(to_string(transfer(Opcode::kSend, EdgeKind::kActivation, 0, 1, 3, 2)),
            "SEND activation stage 0 to stage 1 minibatch 3 microbatch 2");
  EXPECT_EQ(to_string(transfer(Opcode::kRecv, EdgeKind::kTiedVersion, 0, 4, 3, 0)),
            "RECV tied_version stage 0 to stage 4 minibatch 3");
  Instruction replicated = transfer(Opcode::kRecv, EdgeKind::kGradient, 2, 1, 3, 0);
  replicated.edge.from.replica = ReplicaIndex(5);
  EXPECT_EQ(to_string(replicated), "RECV gradient stage 2 replica 5 to stage 1 minibatch 3 microbatch 0");
}

TEST(Instruction, TextOfATransferIsParsedBack) {
  for (const Opcode opcode : {Opcode::kSend, Opcode::kRecv}) {
    for (const EdgeKind kind : kEdgeKinds) {
      const bool is_by_microbatch = kind == EdgeKind::kActivation || kind == EdgeKind::kGradient;
      Instruction instruction = transfer(opcode, kind, 7, 8, 12345678901, is_by_microbatch ? 31 : 0);
      EXPECT_EQ(parse_instruction(to_string(instruction)), instruction);
      instruction.edge.to.replica = ReplicaIndex(3);
      if (opcode == Opcode::kRecv) instruction.replica = ReplicaIndex(3);
      EXPECT_EQ(parse_instruction(to_string(instruction)), instruction);
      instruction.edge.from.replica = ReplicaIndex(2);
      if (opcode == Opcode::kSend) instruction.replica = ReplicaIndex(2);
      EXPECT_EQ(parse_instruction(to_string(instruction)), instruction);
    }
  }
}

TEST(Instruction, TextOfATransferThatIsBrokenIsRefusedAndNamed) {
  EXPECT_EQ(error_of("SEND weights stage 0 to stage 1 minibatch 0"),
            "\"SEND weights stage 0 to stage 1 minibatch 0\" is not an instruction: \"weights\" where "
            "activation, gradient, tied_gradient, tied_version, norm, push, pull or "
            "evaluation is expected");
  EXPECT_EQ(error_of("RECV norm stage 0 stage 1 minibatch 0"),
            "\"RECV norm stage 0 stage 1 minibatch 0\" is not an instruction: \"stage\" where \"to\" is "
            "expected");
  EXPECT_EQ(error_of("SEND activation stage 0 to stage 1 minibatch 0"),
            "\"SEND activation stage 0 to stage 1 minibatch 0\" is not an instruction: the text ends where "
            "\"microbatch\" is expected");
  EXPECT_EQ(error_of("SEND norm stage 0 to stage 1 minibatch 0 microbatch 0"),
            "\"SEND norm stage 0 to stage 1 minibatch 0 microbatch 0\" is not an instruction: \"microbatch\" "
            "where the end is expected");
}

TEST(Opcode, NamesAndLettersOfTheTableTellOpcodesApart) {
  std::string letters;
  for (std::size_t opcode = 0; opcode < kOpcodeTraits.size(); ++opcode) {
    const OpcodeTraits& traits = kOpcodeTraits.at(opcode);
    EXPECT_EQ(find_opcode(traits.name), static_cast<Opcode>(opcode));
    if (traits.travels) continue;
    EXPECT_EQ(letters.find(traits.letter), std::string::npos) << traits.name;
    letters += traits.letter;
  }
  EXPECT_EQ(find_opcode("forward"), std::nullopt);
}

TEST(Instruction, BlanksAtBothEndsAndBetweenWordsAreAllowed) {
  EXPECT_EQ(parse_instruction(" \tUPDATE  stage 1\tminibatch 2 writes version 3 \r\n"),
            make(Opcode::kUpdate, 1, 2, 0, 3));
}

TEST(Instruction, TextThatIsNoInstructionIsRefusedAndNamed) {
  EXPECT_EQ(error_of(""),
            "\"\" is not an instruction: the text ends where FORWARD, RECOMPUTE, BACKWARD, UPDATE, "
            "EVALUATE, SEND or RECV is expected");
  EXPECT_EQ(error_of("forward stage 0"),
            "\"forward stage 0\" is not an instruction: \"forward\" where FORWARD, RECOMPUTE, "
            "BACKWARD, UPDATE, EVALUATE, SEND or RECV is expected");
  EXPECT_EQ(error_of("FORWARD minibatch 0"),
            "\"FORWARD minibatch 0\" is not an instruction: \"minibatch\" where \"stage\" is expected");
  EXPECT_EQ(error_of("FORWARD stage 0 minibatch"),
            "\"FORWARD stage 0 minibatch\" is not an instruction: the text ends where the number of the "
            "minibatch, 0 or more, is expected");
  for (const std::string number : {"x", "-1", "1x", "1.5", "+1", "0x1"}) {
    const std::string text = "FORWARD stage " + number + " minibatch 0 microbatch 0 reads version 0";
    EXPECT_EQ(error_of(text), "\"" + text + "\" is not an instruction: \"" + number +
                                  "\" where the number of the stage, 0 or more, is expected");
  }
  EXPECT_EQ(error_of("UPDATE stage 99999999999999999999"),
            "\"UPDATE stage 99999999999999999999\" is not an instruction: \"99999999999999999999\" is too "
            "large a number");
}

TEST(Instruction, ReadsAndWritesDoNotMix) {
  EXPECT_EQ(error_of("UPDATE stage 0 minibatch 0 reads version 1"),
            "\"UPDATE stage 0 minibatch 0 reads version 1\" is not an instruction: \"reads\" where "
            "\"writes\" is expected");
  EXPECT_EQ(error_of("UPDATE stage 0 minibatch 0 microbatch 0 writes version 1"),
            "\"UPDATE stage 0 minibatch 0 microbatch 0 writes version 1\" is not an instruction: "
            "\"microbatch\" where \"writes\" is expected");
  EXPECT_EQ(error_of("BACKWARD stage 0 minibatch 0 microbatch 0 writes version 1"),
            "\"BACKWARD stage 0 minibatch 0 microbatch 0 writes version 1\" is not an instruction: "
            "\"writes\" where \"reads\" is expected");
}

TEST(Instruction, NothingMayFollow) {
  EXPECT_EQ(error_of("UPDATE stage 0 minibatch 0 writes version 1 now"),
            "\"UPDATE stage 0 minibatch 0 writes version 1 now\" is not an instruction: \"now\" where the "
            "end is expected");
}

}  // namespace
}  // namespace pipedream
