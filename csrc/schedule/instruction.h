// One step of a stage's program. A schedule is data: the runtime, the validator, the simulator and the
// pictures read the same instructions. Plain values; any thread.
#pragma once

#include <string>

#include "base/ids.h"

namespace pipedream {

enum class Opcode {
  kForward,   // reads `version` of the weights, and the activation from upstream
  kBackward,  // reads `version` (the one its forward read, when stashing), and the gradient from downstream
  kUpdate,    // reads the newest version and the gradient of `minibatch`, writes `version`
};

[[nodiscard]] const char* opcode_name(Opcode opcode);  // "FORWARD", "BACKWARD", "UPDATE"

struct Instruction {
  Opcode opcode = Opcode::kForward;
  MinibatchId minibatch;
  MicrobatchIndex microbatch;
  WeightVersion version;

  friend bool operator==(const Instruction&, const Instruction&) = default;
};

// "FORWARD minibatch 3 microbatch 0 reads version 1"
[[nodiscard]] std::string to_string(const Instruction& instruction);

}  // namespace pipedream
