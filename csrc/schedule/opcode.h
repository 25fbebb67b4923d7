// Defines the opcodes of instructions, and one table of their traits that all other sources read. A new
// opcode needs a row here, a generator and an executor (stage/engine.cc, python/pipedream/stage/). Plain
// values; any thread.
#pragma once

#include <array>
#include <cstddef>
#include <optional>
#include <string_view>

#include "schedule/edge.h"

namespace pipedream {

enum class Opcode {
  // Opcodes that compute.
  kForward,    // reads `version` of the weights, and the activation from upstream
  kRecompute,  // the forward again, from the stashed input and with the same version; needs no neighbour
  kBackward,   // reads `version` (its forward's, if the stage stashes) and the gradient from downstream
  kUpdate,     // reads the newest version and the mean gradient of the round, and writes `version`
  kEvaluate,   // the forward of a validation minibatch at `version`; keeps nothing (evaluations.h)
  // Opcodes of transfers (transfers.h). A SEND stands where its tensors are made, a RECV where they are
  // needed.
  kSend,  // never waits, except on a full edge of evaluations (edge.h)
  kRecv,  // waits for the edge's next item
};

// The meaning of an instruction's minibatch and microbatch numbers.
enum class Scope {
  kMicrobatch,
  kRound,     // the instruction belongs to a round, and has the number of the round's first minibatch
  kBoundary,  // the minibatch before which the weights are evaluated, and the validation minibatch's number
};

// The effect of an opcode on the stash of its microbatch. The stash is the weight version that the forward
// has read and the activations that it has saved.
enum class Stash {
  kNone,
  kKept,      // the forward has filled the stash
  kRestored,  // activations that were not kept are computed again, just before they are used
  kReleased,  // the stash is not needed any more, because the microbatch's gradient is complete
};

// The measured duration that a simulated instruction takes. Transfers have none, because they occupy a link
// and not the worker.
enum class Duration { kNone, kForward, kRecompute, kBackward, kUpdate };

struct OpcodeTraits {
  const char* name = "";     // its word in programs
  const char* meaning = "";  // its word in pictures and sentences
  char letter = ' ';         // its letter in pictures and traces
  bool travels = false;
  Scope scope = Scope::kMicrobatch;
  bool writes_version = false;  // if false, an opcode that computes reads a version
  Stash stash = Stash::kNone;
  // The opcode that must come before it, for the same microbatch.
  std::optional<Opcode> follows = std::nullopt;
  std::optional<EdgeKind> needs = std::nullopt;  // the kind of item that the instruction takes as its input
  std::optional<EdgeKind> makes = std::nullopt;  // the kind of item that the instruction makes
  Duration duration = Duration::kNone;
  const char* unlisted_because = nullptr;  // why a written program may not list it; null if it may
};

inline constexpr const char* kAdded =
    "sends, receives and recomputing are added to a program; leave the line out";

inline constexpr auto kOpcodeTraits = std::to_array<OpcodeTraits>({
    {.name = "FORWARD",
     .meaning = "forward",
     .letter = 'F',
     .stash = Stash::kKept,
     .needs = EdgeKind::kActivation,
     .makes = EdgeKind::kActivation,
     .duration = Duration::kForward},
    {.name = "RECOMPUTE",
     .meaning = "recompute",
     .letter = 'R',
     .stash = Stash::kRestored,
     .follows = Opcode::kForward,
     .duration = Duration::kRecompute,
     .unlisted_because = kAdded},
    {.name = "BACKWARD",
     .meaning = "backward",
     .letter = 'B',
     .stash = Stash::kReleased,
     .follows = Opcode::kForward,
     .needs = EdgeKind::kGradient,
     .makes = EdgeKind::kGradient,
     .duration = Duration::kBackward},
    {.name = "UPDATE",
     .meaning = "update",
     .letter = 'U',
     .scope = Scope::kRound,
     .writes_version = true,
     .duration = Duration::kUpdate},
    {.name = "EVALUATE",
     .meaning = "evaluation",
     .letter = 'E',
     .scope = Scope::kBoundary,
     .needs = EdgeKind::kEvaluation,
     .makes = EdgeKind::kEvaluation,
     .duration = Duration::kForward,
     .unlisted_because = "a program of your own has no evaluations"},
    // A transfer's numbers are the name of its item (items_of() in transfers.h).
    {.name = "SEND", .travels = true, .unlisted_because = kAdded},
    {.name = "RECV", .travels = true, .unlisted_because = kAdded},
});

[[nodiscard]] constexpr const OpcodeTraits& traits_of(Opcode opcode) {
  return kOpcodeTraits.at(static_cast<std::size_t>(opcode));
}
[[nodiscard]] constexpr const char* opcode_name(Opcode opcode) { return traits_of(opcode).name; }
[[nodiscard]] constexpr bool travels(Opcode opcode) { return traits_of(opcode).travels; }
[[nodiscard]] constexpr bool writes_version(Opcode opcode) { return traits_of(opcode).writes_version; }
[[nodiscard]] constexpr bool keeps_stash(Opcode opcode) { return traits_of(opcode).stash == Stash::kKept; }
[[nodiscard]] constexpr bool releases_stash(Opcode opcode) {
  return traits_of(opcode).stash == Stash::kReleased;
}
[[nodiscard]] constexpr bool is_of_boundary(Opcode opcode) {
  return traits_of(opcode).scope == Scope::kBoundary;
}
// Returns whether instructions with this opcode belong to an evaluation (evaluations.h).
[[nodiscard]] constexpr bool is_of_evaluation(Opcode opcode) {
  return traits_of(opcode).makes == EdgeKind::kEvaluation;
}

[[nodiscard]] constexpr std::optional<Opcode> find_opcode(std::string_view name) {
  for (std::size_t opcode = 0; opcode < kOpcodeTraits.size(); ++opcode) {
    if (name == kOpcodeTraits.at(opcode).name) return static_cast<Opcode>(opcode);
  }
  return std::nullopt;
}

// Finds the opcode that takes items of this kind as its input. Some kinds, such as pushes and norms, have
// none.
[[nodiscard]] constexpr std::optional<Opcode> find_user(EdgeKind kind) {
  for (std::size_t opcode = 0; opcode < kOpcodeTraits.size(); ++opcode) {
    if (kOpcodeTraits.at(opcode).needs == kind) return static_cast<Opcode>(opcode);
  }
  return std::nullopt;
}

}  // namespace pipedream
