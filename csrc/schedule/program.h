// The program of one stage: 1F1B with weight versions as data, as warm-up, repeating body, cool-down.
//
//   stage 0 of 3 (in_flight 3)   F0 F1 | F2 B0 U0  F3 B1 U1  F4 B2 U2 | B3 U3 B4 U4
//                                warm-up  steady: the repeating body    cool-down
//
// Pure: position -> instruction. The number of minibatches need not be known at the start (an iterable
// of unknown length): it is set once, at the latest when the stage would forward a minibatch that does
// not exist. Source: PipeDream (SOSP'19), section 3.2; design.md section 4.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/ids.h"
#include "schedule/instruction.h"

namespace pipedream {

struct ProgramOptions {
  std::string schedule = "pipedream";
  StageIndex stage;
  std::int64_t num_stages = 1;
  std::int64_t in_flight = 1;  // n_s: minibatches in flight at this stage
};

// Throws UserError for a schedule that is unknown or not built, in_flight < 1, stage outside num_stages.
void check_program_options(const ProgramOptions& options);

// Versions kept at the stage, n_s for weight stashing: how many weight slots it needs.
[[nodiscard]] std::int64_t num_versions_kept(const ProgramOptions& options);

// Version that (stage, minibatch) reads: max(0, i - n_s + 1) for weight stashing.
[[nodiscard]] WeightVersion forward_version(const ProgramOptions& options, MinibatchId minibatch);
[[nodiscard]] WeightVersion backward_version(const ProgramOptions& options, MinibatchId minibatch);

// n_s of every stage, from the replica counts r_s: n_{S-1} = 1, n_s = 1 + ceil(n_{s+1} r_{s+1} / r_s).
[[nodiscard]] std::vector<std::int64_t> derive_in_flight(const std::vector<std::int64_t>& num_replicas);

enum class Phase { kWarmUp, kSteady, kCoolDown };

[[nodiscard]] const char* phase_name(Phase phase);  // "warm-up", "steady", "cool-down"

// The phase that an instruction of the stage's program belongs to. While the number of minibatches is
// unknown nothing cools down.
[[nodiscard]] Phase phase_of(const ProgramOptions& options, const Instruction& instruction,
                             std::optional<std::int64_t> num_minibatches);

// Walks one stage's program.
class ProgramCursor {
 public:
  explicit ProgramCursor(ProgramOptions options);

  // The instruction to do next; empty when the program is over. While the number of minibatches is
  // unknown the program never ends.
  [[nodiscard]] std::optional<Instruction> current() const;
  void advance();

  // Says how many minibatches there are. Allowed once, and not below what was already forwarded.
  void set_num_minibatches(std::int64_t num_minibatches);
  [[nodiscard]] std::optional<std::int64_t> num_minibatches() const { return num_minibatches_; }

  [[nodiscard]] const ProgramOptions& options() const { return options_; }

 private:
  ProgramOptions options_;
  std::optional<std::int64_t> num_minibatches_;
  std::int64_t num_forwarded_ = 0;
  std::int64_t num_updated_ = 0;
  bool backward_done_ = false;  // of minibatch num_updated_; its update comes next
};

// The whole list, for replay, tests, text and pictures.
[[nodiscard]] std::vector<Instruction> make_program(const ProgramOptions& options,
                                                    std::int64_t num_minibatches);

}  // namespace pipedream
