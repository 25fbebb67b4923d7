// Lists of what the workers of a plan compute: a schedule's order of work and its weight versions, as data.
// transfers.h has what travels between them, and with it their whole programs.
//
//   pipedream, stage 0 of 3, one microbatch        F0 F1 | F2 B0 U0  F3 B1 U1  F4 B2 U2 | B3 U3 B4 U4
//                                                  warm-up  steady: the repeating body    cool-down
//   flush, stage 0 of 2, 3 microbatches            F0.0 F0.1 B0.0 F0.2 B0.1 B0.2 U0 | F1.0 ...
//   gpipe, the same                                F0.0 F0.1 F0.2 B0.0 B0.1 B0.2 U0 | F1.0 ...
//
// Every schedule without chunks is 1F1B over microbatches with a window: at most W_s of them are forwarded
// and not yet backwarded at stage s, a forward goes first when the window has room, and the update of a
// minibatch follows the backward of its last microbatch. Microbatches are counted through the run: k is
// number i m + q for microbatch q of minibatch i.
//
//   schedule                  W_s             microbatch k reads                 versions kept
//   pipedream                 n_s             max(0, floor((k - n_s + 1) / m))   1 + ceil((n_s - 1) / m)
//   vertical_sync             n_s             max(0, floor((k - n_0 + 1) / m))   1 + ceil((n_0 - 1) / m)
//   unstashed                 n_s             as pipedream, its backward i       1
//   2bw, m >= n_s - 1         n_s             max(0, i - 1)                      2
//   flush                     min(m, n_s)     i                                  1
//   gpipe                     m               i                                  1
//   model_parallel            1               i                                  1
//   data_parallel, one stage  1               i                                  1
//   interleaved               as Megatron-LM  i                                  1
//
// So with m >= n_s only the first n_s - 1 microbatches of a minibatch are one update late. flush, gpipe,
// model_parallel, data_parallel and interleaved drain: they forward no minibatch before the one before it was
// updated. `interleaved` is the only one whose workers hold several stages: stage s lies at worker s mod W.
// Inside a worker the backwards of one stage go in the order of its forwards.
//
// Replicas. Microbatch k goes to replica k mod r_s of a stage with r_s replicas, which has a program of its
// own over its own microbatches, in their order. A round is R_s minibatches in a row, and the mean of their
// gradients is one update: R_s = lcm(m, r_s) / m, so that each replica has as many microbatches of it, c_s =
// R_s m / r_s. Where the schedule drains, all stages have the same rounds, R = lcm(m, all r_s) / m, and what
// drains is a round; with m a multiple of every r_s it is a minibatch. The last round of a run may be short,
// a mean over those minibatches that there are. A version counts rounds; j = floor(i / R_s) is the round of
// minibatch i. k' counts a replica's own microbatches, k' = floor(k / r_s).
//
//   pipedream, stage 0 of 2-1: replica 0   F0 F2 | B0 U0 F4 B2 U2 F6 ...    U2: of the round from minibatch 2
//                              replica 1   F1 F3 | B1 U0 F5 B3 U2 F7 ...
//   flush, 2 microbatches, stage 0 of 2-1: replica 0   F0.0 B0.0 U0 F1.0 ...
//                                          replica 1   F0.1 B0.1 U0 F1.1 ...
//
//   schedule                 microbatch k reads at stage s            versions kept
//   pipedream, staleness x   max(0, floor((k' - n_s + 1) / c_s) - x)  1 + ceil((n_s - 1) / c_s) + x
//   vertical_sync            floor(v_0 R_0 / R_s), with               1 + ceil(d / M_s), with M_s = R_s m
//                            v_0 = max(0, floor((floor(k / r_0)       and d = (n_0 - 1) r_0 + M_0
//                                         - n_0 + 1) / c_0))                  - gcd(M_0, M_s)
//   unstashed                as pipedream, its backward j             1
//   2bw, c_s >= n_s - 1      max(0, j - 1)                            2
//   flush, gpipe,            j = floor(i / R)                         1
//   model_parallel, data_parallel
//
// With replicas W_s is min(c_s, n_s) of flush, and c_s of gpipe.
//
// Every replica owns a shard of the stage's parameters, which it alone updates: it needs the gradients of all
// members of the round there, and the others its new version (PUSH and PULL, transfers.h). So the UPDATE of a
// round stands at every replica, in the short last round also at those without a minibatch in it. It stands
// after the backward of the replica's last microbatch of the round; with a staleness of k rounds it waits at
// replicated stages until ceil(k / 2) more of the replica's rounds went backward: as long as it may wait for
// the others' gradients, so long may they wait for what it writes. So with k = 2 no replica waits for one
// that is up to a round behind. What is kept is what may be there at once when a version is written as soon
// as it comes: version j + 1 may come when the replica has pushed for round j.
//
// Workers beside the replicas may own shards, too: spares, which have no minibatches (BytePS, OSDI'20: CPU
// machines that share the load of summing). A spare's program is the UPDATE of every round, from version 0
// on, when all members have pushed; nobody reads another version because of it. As an owner it counts on from
// the replicas.
//
//   stage 0 of 2-1 with a spare: replica 2   RECV push from 0, from 1   U0   SEND pull to 0, to 1   RECV ...
//
// Where shards are asynchronous (Downpour SGD, NIPS'12; Project Adam, OSDI'14) a replica's microbatches of a
// round are a round of its own, and its version j + 1 of a shard what the owner had right after it had added
// this replica's gradient of round j, with whatever others' had come by then. So every list is as static as
// the others, and no replica waits for another's gradient; what is dynamic is the content alone.
//
// interleaved is 1F1B too, over the order of microbatch_order.h and with a window over the whole worker w of
// W: 2 (W - w - 1) + (C - 1) W + 1 with C > 1 chunks. With one chunk it is flush with n_s = S - s. Worker 0
// of 2 with stages 0 and 2 and 4 microbatches, where f and b are stage 0's, F and B stage 2's:
//
//   f0.0 f0.1 F0.0 F0.1 | f0.2 B0.0 f0.3 B0.1 F0.2 b0.0 F0.3 b0.1 | B0.2 B0.3 b0.2 b0.3 u0 U0 | f1.0 ...
//
// Where recompute is asked for, a RECOMPUTE stands right before its BACKWARD and reads the same version: the
// one its FORWARD read, or for unstashed the newest, which is then also what the gradient is computed with.
//
// Pure: position -> instruction. The number of minibatches need not be known at the start (an iterable
// of unknown length): it is set once, at the latest when the first stage would forward a minibatch that does
// not exist. Sources: PipeDream (SOSP'19), section 3; PipeDream-2BW (ICML'21), sections 3.1 and 3.2; GPipe
// (NeurIPS'19), section 2.3; Megatron-LM (SC'21), section 2.2; design.md section 4.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/ids.h"
#include "schedule/instruction.h"
#include "schedule/microbatch_order.h"
#include "schedule/placement.h"
#include "schedule/rounds.h"

namespace pipedream {

// Two stages that share parameters: the owner, upstream of the user, updates them.
struct TiedStages {
  StageIndex owner;
  StageIndex user;

  // NOLINTNEXTLINE(modernize-use-nullptr): as in ids.h
  friend auto operator<=>(const TiedStages&, const TiedStages&) = default;
};

class ListedProgram;

// The `schedule` of options with a program of their own.
inline constexpr const char* kListedSchedule = "program";

// The schedule's options, by a plan and the arguments of a run; the same at every worker.
struct ScheduleOptions {
  std::string schedule = "pipedream";
  std::vector<std::int64_t> in_flight = {1};  // n_s of every replica of each stage
  std::int64_t num_microbatches = 1;          // m, of every minibatch
  Placement placement;                        // empty: stage s at rank s, one replica of each
  std::vector<bool> recompute{};              // per stage; empty: nowhere
  std::vector<TiedStages> ties{};             // ascending, each pair once
  // Before every update: over all stages where the schedule drains, else over the replicas of a stage.
  bool exchanges_norms = false;
  // The run starts with this minibatch i0, a multiple of every R_s, with version i0 / R_s of the weights. A
  // microbatch reads max(oldest, ...) where the table says max(0, ...): the version of the start, where
  // nothing older is there, as after a drain.
  MinibatchId first_minibatch{};
  // The minibatch with which the pipeline began that the run goes on with, exactly as if it had never
  // stopped; a multiple as i0 is. What is kept of the versions since then is there beside that of the start.
  // A stage that does not stash keeps one; what its first n_s - 1 microbatches read before that the worker
  // holds itself.
  std::optional<MinibatchId> oldest_minibatch{};
  std::int64_t staleness = 0;  // k, in rounds: how much older a version may be
  // Whether an update is a collective of all replicas: then nothing is pushed or pulled over edges.
  bool uses_allreduce = false;
  // Whether a shard makes an update of every replica's gradient by itself, when it comes.
  bool asynchronous = false;
  // The lists of kListedSchedule (listed_program.h), which also say in_flight and num_microbatches.
  std::shared_ptr<const ListedProgram> program{};
  // Whether there are edges for validation minibatches (evaluations.h).
  bool evaluates = false;
};

// Throws UserError, one line with the value and the remedy, for: an unknown schedule, no stage, in_flight < 1
// or above kInFlightMax, num_microbatches < 1 or above kNumMicrobatchesMax, lists and a placement of the
// wrong length, 2bw with c_s < n_s - 1 anywhere, stages at ranks other than 0, 1, 2, ... in order, replica by
// replica (for interleaved stage s at rank s mod W, with S a multiple of W, and W > 1 unless there is one
// stage), several stages at a rank without interleaved, rounds of more than kMinibatchesPerRoundMax, ties
// that do not ascend or whose owner is not upstream of their user, a first minibatch, an oldest minibatch or
// a staleness out of range, spares of a stage without replicas, more of them than replicas, a program of its
// own that is another size than the plan, or with a schedule's name; and for what excludes each other
// (exclusions.h).
void check_schedule_options(const ScheduleOptions& options);
// The fewest microbatches with which the other options pass.
[[nodiscard]] std::int64_t num_microbatches_min(const ScheduleOptions& options);

inline constexpr std::int64_t kNumMicrobatchesMax = std::int64_t{1} << 20;
// These keep products with the number of microbatches inside 64 bits.
inline constexpr std::int64_t kInFlightMax = std::int64_t{1} << 40;
inline constexpr std::int64_t kNumMinibatchesMax = std::int64_t{1} << 40;
inline constexpr std::int64_t kMinibatchesPerRoundMax = std::int64_t{1} << 20;
inline constexpr std::int64_t kStalenessMax = std::int64_t{1} << 20;

// Throws UserError outside 0 to kNumMinibatchesMax, and below the first minibatch.
void check_num_minibatches(const ScheduleOptions& options, std::int64_t num_minibatches);

// The names that `schedule` may have, in the order of the table above.
[[nodiscard]] const std::vector<std::string>& schedule_names();

[[nodiscard]] std::int64_t num_stages(const ScheduleOptions& options);
[[nodiscard]] std::int64_t num_workers(const ScheduleOptions& options);
// The placement of the stages: options.placement, or the one that its being empty stands for.
[[nodiscard]] Placement placement_of(const ScheduleOptions& options);
[[nodiscard]] bool has_replicas(const ScheduleOptions& options);  // of any stage
// How the stage's microbatches fall on its replicas, and on updates.
[[nodiscard]] Rounds rounds_of(const ScheduleOptions& options, StageIndex stage);
[[nodiscard]] std::vector<Rounds> rounds_of_stages(const ScheduleOptions& options);
// Before every so many minibatches all rounds of all stages are over: lcm(m, all r_s) / m.
[[nodiscard]] std::int64_t minibatches_between_drains(const ScheduleOptions& options);

// Whether every round, of one minibatch where there are no replicas, is finished at all stages before the
// next one starts at any: flush, gpipe, interleaved, model_parallel, data_parallel. Then a norm over all
// stages can be taken before the updates.
[[nodiscard]] bool drains_every_minibatch(const ScheduleOptions& options);
// Whether a backward reads what its forward read: at every stage of all but unstashed and listed programs.
[[nodiscard]] bool stashes_versions(const ScheduleOptions& options, StageIndex stage);

// How many weight slots the stage needs: the table's last column.
[[nodiscard]] std::int64_t num_versions_kept(const ScheduleOptions& options, StageIndex stage);
[[nodiscard]] WeightVersion forward_version(const ScheduleOptions& options, StageIndex stage,
                                            MinibatchId minibatch, MicrobatchIndex microbatch = {});
[[nodiscard]] VersionRule forward_rule_of(const ScheduleOptions& options, StageIndex stage);
// The mean delay of the stage's forwards: (n_s - 1) / c_s updates if it counts its own microbatches
// (VersionRule).
[[nodiscard]] double mean_delay(const ScheduleOptions& options, StageIndex stage);
[[nodiscard]] WeightVersion backward_version(const ScheduleOptions& options, StageIndex stage,
                                             MinibatchId minibatch, MicrobatchIndex microbatch = {});
// The oldest that is kept when the run starts.
[[nodiscard]] WeightVersion oldest_version(const ScheduleOptions& options, StageIndex stage);
// The version of a parameter tied across stages, at each of them, forward and backward. It counts the owner's
// rounds, as the owner updates it: what vertical sync would read at the owner, less the staleness, where the
// stages read different versions, else what the owner reads. Of a program of its own listed_program.h says
// it.
[[nodiscard]] WeightVersion tied_version(const ScheduleOptions& options, StageIndex owner,
                                         MinibatchId minibatch, MicrobatchIndex microbatch = {});
[[nodiscard]] VersionRule tied_rule_of(const ScheduleOptions& options, StageIndex owner);
[[nodiscard]] std::int64_t num_tied_versions_kept(const ScheduleOptions& options, StageIndex owner);
// By how many versions the owner may be ahead of what a replica of the user has asked for.
[[nodiscard]] std::int64_t num_tied_versions_ahead(const ScheduleOptions& options, const TiedStages& tied);

// How many rounds' gradients a replica may hold at once: 1, and where there are others half of the staleness.
[[nodiscard]] std::int64_t num_gradients_kept(const ScheduleOptions& options, StageIndex stage);

// W_s: the most microbatches that are forwarded and not yet backwarded at a replica of the stage.
[[nodiscard]] std::int64_t num_microbatches_in_flight(const ScheduleOptions& options, StageIndex stage);

// n_s of every stage, from the replica counts r_s: n_{S-1} = 1, n_s = 1 + ceil(n_{s+1} r_{s+1} / r_s).
[[nodiscard]] std::vector<std::int64_t> derive_in_flight(const std::vector<std::int64_t>& num_replicas);

enum class Phase { kWarmUp, kSteady, kCoolDown };

[[nodiscard]] const char* phase_name(Phase phase);  // "warm-up", "steady", "cool-down"

// The phase that an instruction belongs to. Schedules that drain go through all three in every round; the
// others, and listed programs, once in a run, and while the number of minibatches is unknown nothing cools
// down. A spare's are all steady.
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
  // Whether that is so: to be asked where the number comes from another process.
  [[nodiscard]] bool may_set_num_minibatches(std::int64_t num_minibatches) const;
  [[nodiscard]] std::optional<std::int64_t> num_minibatches() const { return num_minibatches_; }

  // The newest version that all stages here have.
  [[nodiscard]] WeightVersion newest_version() const {
    return WeightVersion(rounds_.first_version().value() + num_updates_ / order_.num_chunks);
  }
  // The replica's own microbatches that are forwarded, absent ones counted too.
  [[nodiscard]] std::int64_t num_forwarded() const { return num_forwarded_; }

  [[nodiscard]] const ScheduleOptions& options() const { return options_; }
  [[nodiscard]] Rank rank() const { return rank_; }

 private:
  // Number of the replica's own positions; without a bound while it is unknown.
  [[nodiscard]] std::int64_t num_own() const;
  [[nodiscard]] bool is_update_due() const;
  [[nodiscard]] bool may_forward() const;
  [[nodiscard]] Instruction update() const;
  [[nodiscard]] Instruction forward() const;
  [[nodiscard]] Instruction recompute_or_backward() const;
  [[nodiscard]] StageIndex stage_of(std::int64_t chunk) const;
  [[nodiscard]] bool must_recompute(StageIndex stage) const;
  void pass_over_absent();
  [[nodiscard]] std::optional<Instruction> listed() const;
  void advance_listed();
  void pass_over_absent_of_list();

  ScheduleOptions options_;
  Rank rank_;
  std::optional<std::int64_t> num_minibatches_;

  // The options as they apply to this worker.
  std::vector<StageIndex> stages_;  // chunk by chunk
  ReplicaIndex replica_;            // of the only stage, where it has several
  MicrobatchOrder order_;
  // The same at all stages here.
  Rounds rounds_;
  Rounds positions_;  // of order_, as the microbatches of the rounds
  VersionRule forward_rule_;
  VersionRule backward_rule_;
  std::int64_t window_ = 1;
  bool drains_ = false;
  std::int64_t num_delayed_ = 0;  // rounds by which an update stands later than the backward it needs

  // The replica's own positions since the start, absent ones counted too.
  std::int64_t num_forwarded_ = 0;
  std::int64_t num_backwarded_ = 0;
  std::int64_t num_updates_ = 0;  // of all stages here
  bool recomputed_ = false;       // the next to go backward
  std::int64_t position_ = 0;     // in a listed program
};

// The list of what one worker computes, up to minibatch num_minibatches - 1. Throws UserError as
// check_num_minibatches and for a rank that the plan does not have.
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
