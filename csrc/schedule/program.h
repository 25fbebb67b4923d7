// What the workers of a plan compute: a schedule's order of work and its weight versions, as data.
// transfers.h has what travels between them, and with it their whole programs.
//
//   pipedream, stage 0 of 3, one microbatch        F0 F1 | F2 B0 U0  F3 B1 U1  F4 B2 U2 | B3 U3 B4 U4
//                                                  warm-up  steady: the repeating body    cool-down
//   flush, stage 0 of 2, 3 microbatches            F0.0 F0.1 B0.0 F0.2 B0.1 B0.2 U0 | F1.0 ...
//   gpipe, the same                                F0.0 F0.1 F0.2 B0.0 B0.1 B0.2 U0 | F1.0 ...
//
// Every schedule without chunks is 1F1B over microbatches with a window: at most W_s of them are forwarded
// and not yet backwarded at stage s, a forward goes first when the window has room, and the update of a
// minibatch follows the backward of its last microbatch.
//
//   schedule                      W_s                     minibatch i reads                     versions kept
//   pipedream                     (n_s - 1) m + 1         max(0, i - n_s + 1)                   n_s
//   vertical_sync                 (n_s - 1) m + 1         max(0, i - n_0 + 1)                   n_0
//   naive                         (n_s - 1) m + 1         as pipedream, its backward i          1
//   2bw, m >= n_0                 n_s                     max(0, i - 1)                         2
//   flush                         min(m, n_s)             i                                     1
//   gpipe                         m                       i                                     1
//   model_parallel                1                       i                                     1
//   interleaved                   as Megatron-LM orders   i                                     1
//
// flush, gpipe and interleaved forward no minibatch before the one before it was updated; n_s counts
// minibatches for the first three and microbatches for 2bw and flush. `interleaved` is the only one whose
// workers hold several stages: stage s lies at worker s mod W. Inside a worker the backwards of one stage go
// in the order of its forwards.
//
// interleaved is 1F1B too, over the order of microbatch_order.h and with a window over the whole worker w of
// W: 2 (W - w - 1) + (C - 1) W + 1 with C > 1 chunks. With one chunk it is flush with n_s = S - s. Worker 0
// of 2 with stages 0 and 2 and 4 microbatches, where f and b are stage 0's, F and B stage 2's:
//
//   f0.0 f0.1 F0.0 F0.1 | f0.2 B0.0 f0.3 B0.1 F0.2 b0.0 F0.3 b0.1 | B0.2 B0.3 b0.2 b0.3 u0 U0 | f1.0 ...
//
// Where recompute is asked for, a RECOMPUTE stands right before its BACKWARD and reads the same version: the
// one its FORWARD read, or for naive the newest, which is then also what the gradient is computed with.
//
// Pure: position -> instruction. The number of minibatches need not be known at the start (an iterable
// of unknown length): it is set once, at the latest when the first stage would forward a minibatch that does
// not exist. Sources: PipeDream (SOSP'19), section 3; PipeDream-2BW (ICML'21), sections 3.1 and 3.2; GPipe
// (NeurIPS'19), section 2.3; Megatron-LM (SC'21), section 2.2; design.md section 4.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/ids.h"
#include "schedule/instruction.h"
#include "schedule/microbatch_order.h"
#include "schedule/placement.h"

namespace pipedream {

// Two stages that share parameters: the owner, upstream of the user, updates them.
struct TiedStages {
  StageIndex owner;
  StageIndex user;

  // NOLINTNEXTLINE(modernize-use-nullptr): as in ids.h
  friend auto operator<=>(const TiedStages&, const TiedStages&) = default;
};

// What a plan and the arguments of a run say about the schedule; the same at every worker.
struct ScheduleOptions {
  std::string schedule = "pipedream";
  std::vector<std::int64_t> in_flight = {1};  // n_s of every stage
  std::int64_t num_microbatches = 1;          // m, of every minibatch
  Placement placement;                        // empty: stage s at rank s
  std::vector<bool> recompute{};              // per stage; empty: nowhere
  std::vector<TiedStages> ties{};             // ascending, each pair once
  bool exchanges_norms = false;               // over all stages, before every update
  // Where the run starts: its first minibatch i0, with version i0 of the weights, and the oldest version that
  // is there beside it. Minibatch i reads max(oldest, i - delay) where the table says max(0, i - delay).
  MinibatchId first_minibatch{};
  std::optional<WeightVersion> oldest_version{};  // none: i0 alone
};

// Throws UserError, one line with the value and the remedy, for: a schedule that is unknown or not built
// (data_parallel), no stage, in_flight < 1 or above kInFlightMax, num_microbatches < 1 or above
// kNumMicrobatchesMax, lists and a placement of the wrong length, 2bw with m < n_s anywhere, stages at ranks
// other than 0, 1, 2, ... in order (stage s at rank s; for interleaved s mod W, with S a multiple of W, and
// W > 1 unless there is one stage), several stages at a rank without interleaved, replicas and shards, which
// are not built, ties that do not ascend or whose owner is not upstream of their user, norms over all stages
// where not every minibatch drains, a first minibatch or an oldest version out of range.
void check_schedule_options(const ScheduleOptions& options);

inline constexpr std::int64_t kNumMicrobatchesMax = std::int64_t{1} << 20;
// Both keep products with the number of microbatches inside 64 bits.
inline constexpr std::int64_t kInFlightMax = std::int64_t{1} << 40;
inline constexpr std::int64_t kNumMinibatchesMax = std::int64_t{1} << 40;

// Throws UserError outside 0 to kNumMinibatchesMax, and below the first minibatch.
void check_num_minibatches(const ScheduleOptions& options, std::int64_t num_minibatches);

// The names that `schedule` may have, in the order of the table above: those that are built.
[[nodiscard]] const std::vector<std::string>& schedule_names();

[[nodiscard]] std::int64_t num_stages(const ScheduleOptions& options);
[[nodiscard]] std::int64_t num_workers(const ScheduleOptions& options);
// Where the stages are: options.placement, or what its being empty stands for.
[[nodiscard]] Placement placement_of(const ScheduleOptions& options);

// Whether every minibatch is finished at all stages before the next one starts at any: flush, gpipe,
// interleaved, model_parallel. Then a norm over all stages can be taken before the updates.
[[nodiscard]] bool drains_every_minibatch(const ScheduleOptions& options);
// Whether a backward reads what its forward read: all but naive.
[[nodiscard]] bool stashes_versions(const ScheduleOptions& options);

// How many weight slots the stage needs: the table's last column.
[[nodiscard]] std::int64_t num_versions_kept(const ScheduleOptions& options, StageIndex stage);
[[nodiscard]] WeightVersion forward_version(const ScheduleOptions& options, StageIndex stage,
                                            MinibatchId minibatch);
[[nodiscard]] WeightVersion backward_version(const ScheduleOptions& options, StageIndex stage,
                                             MinibatchId minibatch);
// That is there when the run starts.
[[nodiscard]] WeightVersion oldest_version(const ScheduleOptions& options);
// Of a parameter tied across stages, at each of them, forward and backward: max(0, i - n_0 + 1) where the
// stages would read different versions, else what they read.
[[nodiscard]] WeightVersion tied_version(const ScheduleOptions& options, MinibatchId minibatch);
[[nodiscard]] std::int64_t num_tied_versions_kept(const ScheduleOptions& options);

// W_s: the most microbatches that are forwarded and not yet backwarded at the stage.
[[nodiscard]] std::int64_t num_microbatches_in_flight(const ScheduleOptions& options, StageIndex stage);

// n_s of every stage, from the replica counts r_s: n_{S-1} = 1, n_s = 1 + ceil(n_{s+1} r_{s+1} / r_s).
[[nodiscard]] std::vector<std::int64_t> derive_in_flight(const std::vector<std::int64_t>& num_replicas);

enum class Phase { kWarmUp, kSteady, kCoolDown };

[[nodiscard]] const char* phase_name(Phase phase);  // "warm-up", "steady", "cool-down"

// The phase that an instruction belongs to. Schedules that drain every minibatch go through all three in
// each; the others once in a run, and while the number of minibatches is unknown nothing cools down.
[[nodiscard]] Phase phase_of(const ScheduleOptions& options, const Instruction& instruction,
                             std::optional<std::int64_t> num_minibatches);

// Walks what one worker computes. current() and advance() allocate nothing.
class ComputeCursor {
 public:
  ComputeCursor(ScheduleOptions options, Rank rank);

  // The instruction to do next; empty when the program is over. While the number of minibatches is
  // unknown the program never ends.
  [[nodiscard]] std::optional<Instruction> current() const;
  void advance();

  // Says how many minibatches there are. Allowed once, and not below what was already forwarded.
  void set_num_minibatches(std::int64_t num_minibatches);
  [[nodiscard]] std::optional<std::int64_t> num_minibatches() const { return num_minibatches_; }

  [[nodiscard]] const ScheduleOptions& options() const { return options_; }
  [[nodiscard]] Rank rank() const { return rank_; }

 private:
  [[nodiscard]] bool is_update_due() const;
  [[nodiscard]] bool may_forward() const;
  [[nodiscard]] Instruction update() const;
  [[nodiscard]] Instruction forward() const;
  [[nodiscard]] Instruction recompute_or_backward() const;
  [[nodiscard]] StageIndex stage_of(std::int64_t chunk) const;
  [[nodiscard]] MinibatchId minibatch_at(std::int64_t position) const;
  [[nodiscard]] bool must_recompute(StageIndex stage) const;
  void pass_over_absent();

  ScheduleOptions options_;
  Rank rank_;
  std::optional<std::int64_t> num_minibatches_;

  // What the options come down to at this worker.
  std::vector<StageIndex> stages_;  // chunk by chunk
  MicrobatchOrder order_;
  std::int64_t window_ = 1;
  bool drains_ = false;
  std::int64_t forward_delay_ = 0;  // the same at all stages here
  std::int64_t backward_delay_ = 0;

  // Positions of order_ since the first minibatch, absent ones counted too.
  std::int64_t num_forwarded_ = 0;
  std::int64_t num_backwarded_ = 0;
  std::int64_t num_updates_ = 0;  // of all stages here
  bool recomputed_ = false;       // the next to go backward
};

// What one worker computes, up to minibatch num_minibatches - 1. Throws UserError as check_num_minibatches
// and for a rank that the plan does not have.
[[nodiscard]] std::vector<Instruction> make_compute_program(const ScheduleOptions& options, Rank rank,
                                                            std::int64_t num_minibatches);

// All workers' programs as text that a person can read, write and change:
//   worker 0
//   FORWARD stage 0 minibatch 0 microbatch 0 reads version 0
//   ...
// '#' starts a comment, empty lines are skipped. parse_programs throws UserError naming the line.
[[nodiscard]] std::string print_programs(const std::vector<std::vector<Instruction>>& programs);
[[nodiscard]] std::vector<std::vector<Instruction>> parse_programs(std::string_view text);

}  // namespace pipedream
