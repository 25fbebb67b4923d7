// One step of a worker's program. A schedule is data: the runtime, the validator, the simulator and the
// pictures read the same instructions. Plain values; any thread.
//
//   computes       FORWARD, RECOMPUTE, BACKWARD, UPDATE, EVALUATE of a stage
//   travels        SEND, RECV: one item over an edge (edge.h)
#pragma once

#include <array>
#include <cstddef>
#include <optional>
#include <string>
#include <string_view>

#include "base/ids.h"
#include "schedule/edge.h"

namespace pipedream {

enum class Opcode {
  // Opcodes that compute.
  kForward,    // reads `version` of the weights, and the activation from upstream
  kRecompute,  // the forward again, from the stashed input and the same version; needs nothing from a
               // neighbour
  kBackward,   // reads `version` (the one its forward read, when stashing), and the gradient from downstream
  kUpdate,     // reads the newest version and the mean gradient of the round, writes `version`
  kEvaluate,   // the forward of a validation minibatch at `version`; keeps nothing (evaluations.h)
  // Opcodes that travel. An item is made by the instruction before it, or needed by the one after it.
  kSend,  // never waits: the validator bounds the items on an edge (validator.h)
  kRecv,  // waits for the edge's next item
};

struct OpcodeTraits {
  const char* name;
  bool travels = false;
  bool is_of_microbatch = true;  // otherwise of a minibatch, which names its round
  bool writes_version = false;   // otherwise an instruction that computes reads one
};

inline constexpr std::array<OpcodeTraits, 7> kOpcodeTraits = {{
    {.name = "FORWARD"},
    {.name = "RECOMPUTE"},
    {.name = "BACKWARD"},
    {.name = "UPDATE", .is_of_microbatch = false, .writes_version = true},
    {.name = "EVALUATE"},
    {.name = "SEND", .travels = true},  // as its edge's items are
    {.name = "RECV", .travels = true},
}};

[[nodiscard]] constexpr const OpcodeTraits& traits_of(Opcode opcode) {
  return kOpcodeTraits.at(static_cast<std::size_t>(opcode));
}
[[nodiscard]] std::optional<Opcode> find_opcode(std::string_view name);
[[nodiscard]] constexpr const char* opcode_name(Opcode opcode) { return traits_of(opcode).name; }
[[nodiscard]] constexpr bool travels(Opcode opcode) { return traits_of(opcode).travels; }

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

// "FORWARD stage 0 minibatch 3 microbatch 0 reads version 1", "UPDATE stage 0 minibatch 3 writes version 4",
// of replicas but the first "UPDATE stage 0 replica 1 minibatch 4 writes version 3",
// "SEND activation stage 0 to stage 1 minibatch 3 microbatch 0", "RECV tied_version stage 0 to stage 2
// minibatch 3": the version that the owner's update of minibatch 3 wrote; "EVALUATE stage 1 minibatch 4
// microbatch 2 reads version 4": validation minibatch 2, with the weights before minibatch 4
[[nodiscard]] std::string to_string(const Instruction& instruction);

// The inverse, blanks at both ends allowed. Throws UserError naming the text and what is wrong with it.
[[nodiscard]] Instruction parse_instruction(std::string_view text);

}  // namespace pipedream
