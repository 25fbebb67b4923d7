// One step of a worker's program. A schedule is data: the runtime, the validator, the simulator and the
// pictures read the same instructions. Plain values; any thread.
//
//   computes       FORWARD, RECOMPUTE, BACKWARD, UPDATE, EVALUATE of a stage (opcode.h)
//   travels        SEND, RECV: one item over an edge (edge.h)
#pragma once

#include <string>
#include <string_view>

#include "base/ids.h"
#include "schedule/edge.h"
#include "schedule/opcode.h"

namespace pipedream {

struct Instruction {
  Opcode opcode = Opcode::kForward;
  StageIndex stage;            // for SEND the edge's sender, for RECV its receiver
  MinibatchId minibatch;       // for UPDATE and transfers once a round: the round's first
  MicrobatchIndex microbatch;  // 0 for UPDATE and for transfers once a minibatch
  // An EVALUATE and its transfers name the boundary's minibatch, before which the weights are evaluated.
  // Their microbatch is the number of the validation minibatch.
  WeightVersion version;   // 0 if no version is read or written
  Edge edge{};             // of SEND and RECV
  ReplicaIndex replica{};  // of the stage; for SEND and RECV this end of the edge

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

// The inverse of to_string(). Allows blanks at both ends. Throws UserError naming the text and what is wrong.
// For an unknown opcode the error lists the known opcodes. is_of_program: list only those that a written
// program may have.
[[nodiscard]] Instruction parse_instruction(std::string_view text, bool is_of_program = false);

}  // namespace pipedream
