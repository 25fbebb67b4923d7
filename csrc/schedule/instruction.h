// An Instruction is one step of a worker's program. A schedule is data: the runtime, the validator, the
// simulator and the pictures read the same instructions. Plain values; any thread.
//
// FORWARD, RECOMPUTE, BACKWARD, UPDATE and EVALUATE compute at a stage (opcode.h). SEND and RECV transfer one
// item over an edge: the tensors of one microbatch, for example (edge.h).
#pragma once

#include <string>
#include <string_view>

#include "base/ids.h"
#include "schedule/edge.h"
#include "schedule/opcode.h"

namespace pipedream {

struct Instruction {
  Opcode opcode = Opcode::kForward;
  StageIndex stage;            // the stage that computes; for SEND the edge's sender, for RECV its receiver
  MinibatchId minibatch;       // for UPDATE and transfers once per round: the round's first minibatch
  MicrobatchIndex microbatch;  // 0 for UPDATE and transfers once per minibatch or round
  // An EVALUATE and its transfers: `minibatch` is the boundary, the minibatch before which the weights are
  // evaluated. `microbatch` is the number of the validation minibatch.
  WeightVersion version;   // the version that is read or written; 0 if there is none
  Edge edge{};             // the edge of a SEND or RECV
  ReplicaIndex replica{};  // the stage's replica; for SEND and RECV the replica at this end of the edge

  friend bool operator==(const Instruction&, const Instruction&) = default;
};

// Returns the instruction as text, for example
//
//   FORWARD stage 0 minibatch 3 microbatch 0 reads version 1
//   UPDATE stage 0 minibatch 3 writes version 4
//   UPDATE stage 0 replica 1 minibatch 4 writes version 3       replica 0 is not named
//   SEND activation stage 0 to stage 1 minibatch 3 microbatch 0
//   RECV tied_version stage 0 to stage 2 minibatch 3            written by the owner's update of minibatch 3
//   EVALUATE stage 1 minibatch 4 microbatch 2 reads version 4   of validation minibatch 2, with the weights
//                                                               before minibatch 4
[[nodiscard]] std::string to_string(const Instruction& instruction);

// Parses text that to_string() returns. More blanks between its words and at both ends are allowed. Throws a
// UserError that names the text and what is wrong with it. For an unknown opcode the error lists the known
// ones. If is_of_program, it lists only opcodes that a user may write in a program (listed_program.h).
[[nodiscard]] Instruction parse_instruction(std::string_view text, bool is_of_program = false);

}  // namespace pipedream
