// Makes the lists of the work that the workers of a plan compute. A list holds a schedule's order of work and
// its weight versions as data. transfers.h adds the transfers between workers. Pure.
//
//   pipedream, stage 0 of 3, one microbatch        F0 F1 | F2 B0 U0  F3 B1 U1  F4 B2 U2 | B3 U3 B4 U4
//                                                  warm-up  steady: the repeating body    cool-down
//   flush, stage 0 of 2, 3 microbatches            F0.0 F0.1 B0.0 F0.2 B0.1 B0.2 U0 | F1.0 ...
//   gpipe, stage 0 of 2, 3 microbatches            F0.0 F0.1 F0.2 B0.0 B0.1 B0.2 U0 | F1.0 ...
//
// docs/schedules.md explains the schedules. Sources: PipeDream (SOSP'19), section 3; PipeDream-2BW (ICML'21),
// sections 3.1 and 3.2; GPipe (NeurIPS'19), section 2.3; Megatron-LM (SC'21), section 2.2.

// Order of work. Every named schedule with one stage per worker is 1F1B over microbatches with a window. At
// stage s at most W_s microbatches are forwarded and not yet backwarded. The next instruction is a forward if
// the window has room, otherwise a backward. The update of a minibatch follows the backward of its last
// microbatch. A worker does the backwards of one stage in the order of its forwards.
//
// A minibatch has m microbatches. They are counted through the run: microbatch q of minibatch i has number
// k = i m + q. n_s is the number in flight that the plan gives stage s (derive_in_flight()).
//
//   schedule                  W_s             microbatch k reads                 versions kept
//   pipedream                 n_s             max(0, floor((k - n_s + 1) / m))   1 + ceil((n_s - 1) / m)
//   vertical_sync             n_s             max(0, floor((k - n_0 + 1) / m))   1 + ceil((n_0 - 1) / m)
//   unstashed                 n_s             as pipedream; its backward: i      1
//   2bw, m >= n_s - 1         n_s             max(0, i - 1)                      2
//   flush                     min(m, n_s)     i                                  1
//   gpipe                     m               i                                  1
//   model_parallel            1               i                                  1
//   data_parallel, one stage  1               i                                  1
//   interleaved               as Megatron-LM  i                                  1
//
// So under pipedream with m >= n_s only the first n_s - 1 microbatches of a minibatch are one update late.

// Draining. flush, gpipe, model_parallel, data_parallel and interleaved drain. Without replicas that means:
// they forward a minibatch only after the update of the minibatch before.

// Replicas. In a stage with r_s replicas, microbatch k goes to replica k mod r_s. Each replica has a program
// of its own, over its own microbatches in their order. A round is R_s = lcm(m, r_s) / m minibatches in a
// row, and the mean of their gradients makes one update. So each replica has c_s = R_s m / r_s microbatches
// of a round. If m is a multiple of every r_s, a round is one minibatch.
//
//   pipedream, stage 0 of 2-1: replica 0   F0 F2 | B0 U0 F4 B2 U2 F6 ...    U2: of the round from minibatch 2
//                              replica 1   F1 F3 | B1 U0 F5 B3 U2 F7 ...
//   flush, 2 microbatches, stage 0 of 2-1: replica 0   F0.0 B0.0 U0 F1.0 ...
//                                          replica 1   F0.1 B0.1 U0 F1.1 ...
//
// A schedule that drains has the same rounds at all stages, R = lcm(m, all r_s) / m, and drains after every
// round. The last round of a run may be short; its mean is over the minibatches that it has.

// Versions with replicas. A version counts rounds. j = floor(i / R_s) is the round of minibatch i. A replica
// counts its own microbatches by k' = floor(k / r_s).
//
//   schedule                 microbatch k reads at stage s            versions kept
//   pipedream, staleness x   max(0, floor((k' - n_s + 1) / c_s) - x)  1 + ceil((n_s - 1) / c_s) + x
//   vertical_sync            floor(v_0 R_0 / R_s), with               1 + ceil(d / M_s), with M_s = R_s m
//                            v_0 = max(0, floor((floor(k / r_0)       and d = (n_0 - 1) r_0 + M_0
//                                         - n_0 + 1) / c_0))                  - gcd(M_0, M_s)
//   unstashed                as pipedream; its backward: j            1
//   2bw, c_s >= n_s - 1      max(0, j - 1)                            2
//   flush, gpipe,            j = floor(i / R)                         1
//   model_parallel, data_parallel
//
// W_s is min(c_s, n_s) for flush and c_s for gpipe, and otherwise as in the table without replicas.

// Shards. Every replica owns a shard of the stage's parameters, and only the owner updates it, unless
// replicas update by a collective (uses_allreduce). The owner needs the gradients of all members of the
// round, which are the replicas with a microbatch in it. The other replicas need the owner's new version
// (pushes and pulls, transfers.h). So every replica has the UPDATE of every round, even of a short last round
// in which it has no minibatch. Asynchronous shards, see below, are an exception.
//
// The UPDATE follows the backward of the replica's last microbatch of the round. With a staleness of x
// rounds, at replicated stages, it comes ceil(x / 2) of the replica's rounds later. Half of the staleness is
// time for gradients to arrive. The other half is time for the new version to reach the other replicas.

// Spares are workers that own shards but have no minibatches (BytePS, OSDI'20). A spare's program has the
// UPDATE of every round, after all members of the round have pushed. Spares do not change which versions are
// read. Their replica indices come after those of the replicas.
//
//   stage 0 of 2-1 with a spare: replica 2   RECV push from 0, from 1   U0   SEND pull to 0, to 1   RECV ...

// Asynchronous shards (Downpour SGD, NIPS'12; Project Adam, OSDI'14). Each replica's microbatches of a round
// are a round of their own. The replica's version j + 1 of a shard is the owner's state right after it added
// this replica's gradient of round j. The lists are as in other schedules, and only the contents of a version
// depend on time.

// interleaved gives a worker several stages: stage s lies at worker s mod W. It is also 1F1B, over the order
// of microbatch_order.h. Its window counts the microbatches of all stages of a worker: at worker w of W, with
// C > 1 stages per worker, it is 2 (W - w - 1) + (C - 1) W + 1. With one stage per worker the schedule is
// flush with n_s = S - s. This is the list of worker 0 of 2, with stages 0 and 2 and 4 microbatches. Small
// letters are of stage 0, capitals of stage 2:
//
//   f0.0 f0.1 F0.0 F0.1 | f0.2 B0.0 f0.3 B0.1 F0.2 b0.0 F0.3 b0.1 | B0.2 B0.3 b0.2 b0.3 u0 U0 | f1.0 ...

// With recompute a RECOMPUTE stands right before its BACKWARD and reads the same version as the BACKWARD.

// The number of minibatches may be unknown at the start, as for an iterable of unknown length. It is set
// once, at the latest when the first stage would forward a minibatch that does not exist.
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

// Two stages that share parameters. The owner, upstream of the user, updates them.
struct TiedStages {
  StageIndex owner;
  StageIndex user;

  // NOLINTNEXTLINE(modernize-use-nullptr): as in ids.h
  friend auto operator<=>(const TiedStages&, const TiedStages&) = default;
};

class ListedProgram;

// The name of the schedule in the options of a written program (listed_program.h).
inline constexpr const char* kListedSchedule = "program";

// The schedule's options, made from a plan and the arguments of a run. They are the same at every worker.
struct ScheduleOptions {
  std::string schedule = "pipedream";
  std::vector<std::int64_t> in_flight = {1};  // n_s of every replica of each stage
  std::int64_t num_microbatches = 1;          // m, the same for every minibatch
  Placement placement;                        // empty: stage s at rank s, one replica of each
  std::vector<bool> recompute{};              // one entry per stage; empty: no stage recomputes
  std::vector<TiedStages> ties{};             // ascending, each pair once
  // Whether norms of gradients are exchanged before every update: over all stages if the schedule drains,
  // otherwise over the replicas of a stage.
  bool exchanges_norms = false;
  // The minibatch i0 with which the run starts, a multiple of every R_s. The weights then have version i0 /
  // R_s. A microbatch reads max(oldest, ...) where the table says max(0, ...). Here `oldest` is i0 / R_s, or
  // an older version if oldest_minibatch is set.
  MinibatchId first_minibatch{};
  // Set in a run that continues an earlier pipeline exactly as if that had never stopped. It is the minibatch
  // with which the earlier pipeline began, also a multiple of every R_s. The first microbatches then read
  // versions older than i0 / R_s. A stage that stashes has them in its slots. A stage that does not stash has
  // one slot, and the worker itself holds them.
  std::optional<MinibatchId> oldest_minibatch{};
  std::int64_t staleness = 0;  // x: microbatches read versions that are older by this many rounds
  // Whether the replicas make an update by a collective. If so, no shards are pushed or pulled.
  bool uses_allreduce = false;
  // Whether a shard is updated with each replica's gradient separately, as soon as it comes.
  bool asynchronous = false;
  // The written program, if the schedule is kListedSchedule (listed_program.h). in_flight and
  // num_microbatches must be the program's.
  std::shared_ptr<const ListedProgram> program{};
  // Whether there are edges for validation minibatches (evaluations.h).
  bool evaluates = false;
};

// Throws UserError, one line with the value and the remedy, for
//   - an unknown schedule, no stage, and lists or a placement of the wrong length
//   - numbers out of range: in_flight, num_microbatches, first_minibatch, oldest_minibatch, staleness
//   - a first_minibatch or oldest_minibatch that is no multiple of every R_s
//   - stages that are not at ranks 0, 1, 2, ... in order, replica by replica; for interleaved, stages that
//     are not at rank s mod W, an S that is no multiple of W, or W = 1 with several stages
//   - 2bw with c_s < n_s - 1 at any stage
//   - a schedule that drains with rounds of more than kMinibatchesPerRoundMax
//   - ties that do not ascend, or whose owner is not upstream of their user
//   - spares of a stage without replicas, and more spares than replicas
//   - a written program for another plan, or together with a schedule's name
//   - options that exclude each other (exclusions.h).
// Except for num_microbatches_min(), the functions below expect options that this function accepts, and
// stages and microbatches of the plan.
void check_schedule_options(const ScheduleOptions& options);
// Returns the smallest num_microbatches that 2bw allows with the other options; 1 for other schedules.
[[nodiscard]] std::int64_t num_microbatches_min(const ScheduleOptions& options);

inline constexpr std::int64_t kNumMicrobatchesMax = std::int64_t{1} << 20;
// These maxima keep products with the number of microbatches inside 64 bits.
inline constexpr std::int64_t kInFlightMax = std::int64_t{1} << 40;
inline constexpr std::int64_t kNumMinibatchesMax = std::int64_t{1} << 40;
inline constexpr std::int64_t kMinibatchesPerRoundMax = std::int64_t{1} << 20;
inline constexpr std::int64_t kStalenessMax = std::int64_t{1} << 20;

// Throws UserError if the number is below the first minibatch or above kNumMinibatchesMax.
void check_num_minibatches(const ScheduleOptions& options, std::int64_t num_minibatches);

// Returns the names that `schedule` may have, in the order of the table above.
[[nodiscard]] const std::vector<std::string>& schedule_names();

[[nodiscard]] std::int64_t num_stages(const ScheduleOptions& options);
[[nodiscard]] std::int64_t num_workers(const ScheduleOptions& options);
// Returns options.placement. If that is empty, returns a placement with stage s at rank s.
[[nodiscard]] Placement placement_of(const ScheduleOptions& options);
[[nodiscard]] bool has_replicas(const ScheduleOptions& options);  // whether any stage has replicas
// Returns the stage's Rounds: how its microbatches go to replicas and updates.
[[nodiscard]] Rounds rounds_of(const ScheduleOptions& options, StageIndex stage);
[[nodiscard]] std::vector<Rounds> rounds_of_stages(const ScheduleOptions& options);
// Returns the number of minibatches after which the rounds of all stages end together: lcm(m, all r_s) / m.
// The result is exact up to kMinibatchesPerRoundMax. A larger result only says that the number is larger.
[[nodiscard]] std::int64_t minibatches_between_drains(const ScheduleOptions& options);

// Returns whether every round is finished at all stages before the next round starts at any stage, as under
// flush, gpipe, interleaved, model_parallel and data_parallel. Then a norm over all stages can be taken
// before the updates. Without replicas a round is one minibatch.
[[nodiscard]] bool drains_every_minibatch(const ScheduleOptions& options);
// Returns whether every backward of the stage reads the version that its forward read. Under unstashed the
// answer is no. Under a written program it depends on the program.
[[nodiscard]] bool stashes_versions(const ScheduleOptions& options, StageIndex stage);

// Returns how many weight slots the stage needs: the table's last column.
[[nodiscard]] std::int64_t num_versions_kept(const ScheduleOptions& options, StageIndex stage);
[[nodiscard]] WeightVersion forward_version(const ScheduleOptions& options, StageIndex stage,
                                            MinibatchId minibatch, MicrobatchIndex microbatch = {});
[[nodiscard]] VersionRule forward_rule_of(const ScheduleOptions& options, StageIndex stage);
// Returns how many updates older, on average, the version that a forward reads is than the version that its
// round updates. Under `pipedream` it is (n_s - 1) / c_s plus the staleness.
[[nodiscard]] double mean_delay(const ScheduleOptions& options, StageIndex stage);
[[nodiscard]] WeightVersion backward_version(const ScheduleOptions& options, StageIndex stage,
                                             MinibatchId minibatch, MicrobatchIndex microbatch = {});
// Returns the oldest version that is kept when the run starts.
[[nodiscard]] WeightVersion oldest_version(const ScheduleOptions& options, StageIndex stage);
// Returns the version of a shared parameter that all stages with this parameter read, forward and backward.
// It counts the owner's rounds, because the owner updates the parameter. Under pipedream and unstashed, where
// stages read different versions, it is the version that vertical sync would read at the owner, less the
// staleness. Under other schedules it is the version that the owner's forward reads. listed_program.h has the
// rule for written programs.
[[nodiscard]] WeightVersion tied_version(const ScheduleOptions& options, StageIndex owner,
                                         MinibatchId minibatch, MicrobatchIndex microbatch = {});
[[nodiscard]] VersionRule tied_rule_of(const ScheduleOptions& options, StageIndex owner);
[[nodiscard]] std::int64_t num_tied_versions_kept(const ScheduleOptions& options, StageIndex owner);
// Returns a bound on how many versions of the tied parameters the owner may have made after the newest
// version that a replica of the using stage (tied.user) needs.
[[nodiscard]] std::int64_t num_tied_versions_ahead(const ScheduleOptions& options, const TiedStages& tied);

// Returns the number of rounds whose gradients a replica may hold at once: 1, plus half of the staleness
// (rounded up) at a replicated stage.
[[nodiscard]] std::int64_t num_gradients_kept(const ScheduleOptions& options, StageIndex stage);

// Returns W_s, the most microbatches that are forwarded and not yet backwarded at a replica of the stage.
[[nodiscard]] std::int64_t num_microbatches_in_flight(const ScheduleOptions& options, StageIndex stage);

// Returns n_s of each of S stages with r_s replicas: n_{S-1} = 1, n_s = 1 + ceil(n_{s+1} r_{s+1} / r_s).
// Throws UserError if there is no stage, and for a number of replicas below 1 or too large.
[[nodiscard]] std::vector<std::int64_t> derive_in_flight(const std::vector<std::int64_t>& num_replicas);

enum class Phase { kWarmUp, kSteady, kCoolDown };

[[nodiscard]] const char* phase_name(Phase phase);  // "warm-up", "steady", "cool-down"

// Returns the phase of an instruction. Named schedules that drain go through all three phases in every round.
// Other schedules and written programs do so once in a run, and have no cool-down as long as the number of
// minibatches is unknown. All EVALUATEs, and all instructions of a spare, are in the steady phase.
[[nodiscard]] Phase phase_of(const ScheduleOptions& options, const Instruction& instruction,
                             std::optional<std::int64_t> num_minibatches);

// Walks through the instructions that one worker computes. current() and advance() allocate nothing.
class ComputeCursor {
 public:
  ComputeCursor(ScheduleOptions options, Rank rank);

  // Returns the instruction to do next; empty when the program is over. As long as the number of minibatches
  // is unknown, the program never ends.
  [[nodiscard]] std::optional<Instruction> current() const;
  void advance();

  // Sets the number of minibatches. Call it once. The number must not be below the minibatches that are
  // forwarded already.
  void set_num_minibatches(std::int64_t num_minibatches);
  // Returns whether set_num_minibatches() would accept the number. Ask first when the number comes from
  // another process.
  [[nodiscard]] bool may_set_num_minibatches(std::int64_t num_minibatches) const;
  [[nodiscard]] std::optional<std::int64_t> num_minibatches() const { return num_minibatches_; }

  // Returns the newest version that all stages of this worker have.
  [[nodiscard]] WeightVersion newest_version() const {
    return WeightVersion(rounds_.first_version().value() + num_updates_ / order_.num_chunks);
  }
  // Returns the number of microbatches that the replica has forwarded. Positions without a microbatch
  // (microbatch_order.h) count too.
  [[nodiscard]] std::int64_t num_forwarded() const { return num_forwarded_; }

  [[nodiscard]] const ScheduleOptions& options() const { return options_; }
  [[nodiscard]] Rank rank() const { return rank_; }

 private:
  // Returns the number of the replica's positions in the run. As long as num_minibatches is unknown, it is
  // larger than in any run.
  [[nodiscard]] std::int64_t num_own() const;
  [[nodiscard]] bool is_update_due() const;
  [[nodiscard]] bool may_forward() const;
  [[nodiscard]] Instruction update() const;
  [[nodiscard]] Instruction forward() const;
  [[nodiscard]] Instruction recompute_or_backward() const;
  [[nodiscard]] Instruction pass(Opcode opcode, MinibatchId minibatch, const MicrobatchOrder::Item& item,
                                 const VersionRule& rule) const;
  [[nodiscard]] StageIndex stage_of(std::int64_t chunk) const;
  [[nodiscard]] bool must_recompute(StageIndex stage) const;
  void pass_over_absent();
  [[nodiscard]] std::optional<Instruction> listed() const;
  void pass_over_absent_of_list();

  ScheduleOptions options_;
  Rank rank_;
  std::optional<std::int64_t> num_minibatches_;

  // Values that the options give for this worker.
  std::vector<StageIndex> stages_;  // the worker's stages, by chunk (microbatch_order.h)
  ReplicaIndex replica_;            // the worker's replica of its only stage; 0 if it has several stages
  MicrobatchOrder order_;
  // These members are the same for every stage of this worker.
  Rounds rounds_;
  Rounds positions_;  // rounds_, but counting positions of order_ instead of microbatches
  VersionRule forward_rule_;
  VersionRule backward_rule_;
  std::int64_t window_ = 1;
  bool drains_ = false;
  std::int64_t num_delayed_ = 0;  // how many rounds an update stands behind the last backward that it needs

  // These count the replica's own positions (microbatch_order.h) since the start of the run. Positions
  // without a microbatch count too.
  std::int64_t num_forwarded_ = 0;
  std::int64_t num_backwarded_ = 0;
  std::int64_t num_updates_ = 0;  // updates of all stages of this worker
  bool recomputed_ = false;       // whether the RECOMPUTE before the next BACKWARD is done
  std::int64_t position_ = 0;     // position in the list of a written program
};

// Makes the list of what one worker computes, up to minibatch num_minibatches - 1. Throws UserError as
// check_num_minibatches() does. Aborts for a rank that the plan does not have.
[[nodiscard]] std::vector<Instruction> make_compute_program(const ScheduleOptions& options, Rank rank,
                                                            std::int64_t num_minibatches);

// print_programs() writes all workers' programs as text that a person can read and change. parse_programs()
// reads such a text:
//   worker 0
//   FORWARD stage 0 minibatch 0 microbatch 0 reads version 0
//   ...
// '#' starts a comment, and empty lines are skipped. parse_programs() throws a UserError that names the line.
[[nodiscard]] std::string print_programs(const std::vector<std::vector<Instruction>>& programs);
[[nodiscard]] std::vector<std::vector<Instruction>> parse_programs(std::string_view text);

}  // namespace pipedream
