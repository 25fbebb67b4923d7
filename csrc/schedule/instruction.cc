// Text of an instruction. Pure; any thread.
#include "schedule/instruction.h"

#include <sstream>

#include "base/check.h"

namespace pipedream {

const char* opcode_name(Opcode opcode) {
  switch (opcode) {
    case Opcode::kForward:
      return "FORWARD";
    case Opcode::kBackward:
      return "BACKWARD";
    case Opcode::kUpdate:
      return "UPDATE";
  }
  PD_CHECK(false, "opcode " << static_cast<int>(opcode));
}

std::string to_string(const Instruction& instruction) {
  std::ostringstream text;
  text << opcode_name(instruction.opcode) << " minibatch " << instruction.minibatch.value() << " microbatch "
       << instruction.microbatch.value() << (instruction.opcode == Opcode::kUpdate ? " writes" : " reads")
       << " version " << instruction.version.value();
  return text.str();
}

}  // namespace pipedream
