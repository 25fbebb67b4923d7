// One step of a worker's program. A schedule is data: the runtime, the validator, the simulator and the
// pictures read the same instructions. Plain values; any thread.
#pragma once

#include <optional>
#include <string>
#include <string_view>

#include "base/ids.h"

namespace pipedream {

enum class Opcode {
  kForward,    // reads `version` of the weights, and the activation from upstream
  kRecompute,  // the forward again, from the stashed input and the same version; needs nothing from a
               // neighbour
  kBackward,   // reads `version` (the one its forward read, when stashing), and the gradient from downstream
  kUpdate,     // reads the newest version and the gradient of `minibatch`, writes `version`
};

[[nodiscard]] const char* opcode_name(Opcode opcode);  // "FORWARD", "RECOMPUTE", "BACKWARD", "UPDATE"

struct Instruction {
  Opcode opcode = Opcode::kForward;
  StageIndex stage;
  MinibatchId minibatch;
  MicrobatchIndex microbatch;  // 0 for an update
  WeightVersion version;

  friend bool operator==(const Instruction&, const Instruction&) = default;
};

// "FORWARD stage 0 minibatch 3 microbatch 0 reads version 1", "UPDATE stage 0 minibatch 3 writes version 4"
[[nodiscard]] std::string to_string(const Instruction& instruction);

// The inverse, blanks at both ends allowed. Throws UserError naming the text and what is wrong with it.
[[nodiscard]] Instruction parse_instruction(std::string_view text);

}  // namespace pipedream
