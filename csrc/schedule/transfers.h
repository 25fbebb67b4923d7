// Makes the transfers of a schedule: the edges between its stages, and the SENDs and RECVs around the
// instructions that a worker computes. The transfers and the computing instructions together are the worker's
// whole program. Pure; any thread.
//
// If several stages share a parameter, the most upstream of them is its owner and the others are its users. A
// member of a round is a replica that has a microbatch in it. All replicas are members, except perhaps in the
// last round of a run.

// The transfers stand at these places of a worker's list:
//
//   before FORWARD    RECV activation from upstream
//                     if the microbatch is the replica's first to read a version:
//                     at a user: RECV tied_version from every replica of the owner
//                     at a replica of a stage that stashes: RECV pull from every other replica
//   after FORWARD     SEND activation downstream
//   before BACKWARD   RECV gradient from downstream
//   after BACKWARD    SEND gradient upstream
//                     after the replica's last microbatch of a minibatch:
//                     at a user SEND tied_gradient, at an owner RECV tied_gradient from every user
//                     after its last microbatch of a whole round, if the schedule does not drain:
//                     SEND push to every other replica
//   before UPDATE     at a member of the round, if the schedule drains or the replica's part of the run's
//                     last round is short: SEND push to every other replica
//                     RECV push from every other member of the round
//                     if norms are exchanged, before the first of the worker's UPDATEs:
//                     RECV norm from downstream and SEND norm upstream, for partial sums
//                     RECV norm from upstream and SEND norm downstream, for the total
//   after UPDATE      at an owner: SEND tied_version to the replicas of every user
//                     at a replica: SEND pull to every other replica
//                     at a stage that does not stash, which has one slot: RECV pull from every other replica
//
// Replicas that update by a collective (uses_allreduce) push and pull nothing.

// Evaluations (evaluations.h) and the end of the list add:
//
//   before EVALUATE   RECV evaluation from upstream
//                     before the first EVALUATE of a boundary: RECV tied_version and RECV pull of the
//                     versions up to the boundary's that have not come yet
//   after EVALUATE    SEND evaluation downstream
//   at the end        RECV tied_version and RECV pull of the versions that no minibatch has read

// A SEND stands where its item is made, and a RECV where the item is needed. The item may arrive earlier, as
// long as the receiver has free slots. An edge between two stages at one rank has no channel: the worker
// hands the item over itself.

// With asynchronous shards no UPDATE waits for a push or sends a pull. Instead the owner of a shard serves
// each other replica by a second list, in which RECV push and SEND pull alternate (make_services()). A
// replica receives the answer to its push before it pushes again. So an owner keeps at most one answer for
// each replica. The replica's own list has:
//
//   before FORWARD    RECV pull from every other replica, if the microbatch is the first to read a version
//   after BACKWARD    in the cool-down: RECV pull from every other replica, of the version before
//                     SEND push to every other replica. Under data_parallel, and in a short last round, these
//                     transfers stand before UPDATE
//   at the end        RECV pull from every other replica, of the replica's last version

// A spare owns a shard and has no minibatches (program.h). Every replica pushes to it and pulls from it as
// with other replicas. The spare's own list has:
//
//   before UPDATE     RECV push from every member of the round
//   after UPDATE      SEND pull to every replica

// Activations and gradients: microbatch number k (rounds.h) goes from replica k mod r_s of stage s to replica
// k mod r_{s+1} of stage s + 1. So two replicas have an edge if they have a microbatch in common.
//
// Norms travel between the first stages of neighbouring workers. If the schedule drains, they pass along all
// workers, otherwise along the replicas of a stage. A norm is named by the minibatch of its UPDATE.

// Tied gradients: for each minibatch of which a replica of a user has a microbatch, it sends the sum of its
// gradients. The receiver is the replica of the owner that has the sender's last microbatch of the minibatch.
// It adds the sum to its own gradient.
//
// Tied versions: each replica of the owner sends its shard to every replica of a user. The item is named by
// the first minibatch of the owner's round. If the owner's r replicas update by a collective, each of them
// has the whole version. Then replica q of the user receives it from replica q mod r.

// Pushes and pulls: a push of round j is named by the minibatch of the sender's first microbatch in that
// round. A pull of version j + 1 is named by the first minibatch of round j.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "base/ids.h"
#include "schedule/edge.h"
#include "schedule/evaluations.h"
#include "schedule/instruction.h"
#include "schedule/placement.h"
#include "schedule/program.h"

namespace pipedream {

// Returns all edges, sorted by kind and stages.
[[nodiscard]] std::vector<Edge> edges_of(const ScheduleOptions& options);
// Names the items that an edge carries. A name is the number of a microbatch (rounds.h) or the index of a
// minibatch. The names are first, first + stride, first + 2 stride, and so on. If the stride is 0, they are
// any ascending numbers from `first` on.
struct EdgeItems {
  std::int64_t first = 0;
  std::int64_t stride = 1;

  friend bool operator==(const EdgeItems&, const EdgeItems&) = default;
};
[[nodiscard]] EdgeItems items_of(const ScheduleOptions& options, const Edge& edge);
// Returns whether both ends are at one rank.
[[nodiscard]] bool is_local(const Placement& placement, const Edge& edge);

// The transfers of one worker.
class Transfers {
 public:
  Transfers(ScheduleOptions options, Rank rank);

  // Adds the transfers before, or after, an instruction that the worker computes.
  void add_before(const Instruction& computed, std::vector<Instruction>& instructions) const;
  void add_after(const Instruction& computed, std::vector<Instruction>& instructions) const;
  // Adds the RECVs before an EVALUATE of a replica that has forwarded num_forwarded microbatches. They
  // receive the versions up to the EVALUATE's that the replica has not received for those microbatches.
  void add_versions_of(const Instruction& evaluate, std::int64_t num_forwarded,
                       std::vector<Instruction>& instructions) const;
  // Adds RECVs after the last update, of versions that no minibatch has read. For every tied parameter and
  // for every other replica's shard it adds the RECV of one such version: the index-th, counted from 0. Adds
  // nothing if there is none.
  void add_final(std::int64_t index, std::int64_t num_minibatches,
                 std::vector<Instruction>& instructions) const;
  // Returns the most instructions that one of the functions above may add in a call. add_before() and
  // add_after() together add no more than that.
  [[nodiscard]] std::size_t num_added_max() const;
  // Sets the number of minibatches. From then on the last round's members are the replicas that have a
  // microbatch in it. Before, all replicas count as members.
  void set_num_minibatches(std::int64_t num_minibatches) { num_minibatches_ = num_minibatches; }

 private:
  void add_before_forward(const Instruction& forward, std::vector<Instruction>& instructions) const;
  void add_before_update(const Instruction& update, std::vector<Instruction>& instructions) const;
  void add_after_backward(const Instruction& backward, std::vector<Instruction>& instructions) const;
  void add_after_update(const Instruction& update, std::vector<Instruction>& instructions) const;
  [[nodiscard]] std::optional<StageReplica> neighbour_of(const Instruction& computed,
                                                         std::int64_t distance) const;
  void send_version(const TiedStages& tied, MinibatchId first, std::vector<Instruction>& instructions) const;
  void receive_version(const TiedStages& tied, WeightVersion version,
                       std::vector<Instruction>& instructions) const;
  // Returns the newest version that `reader` has read for the replica's microbatches before own_index. If
  // there is no such microbatch, returns the version at the start of the run.
  [[nodiscard]] WeightVersion newest_read(const VersionRule& rule, StageIndex reader, StageIndex updater,
                                          std::int64_t own_index) const;
  void add_norms(MinibatchId minibatch, std::vector<Instruction>& instructions) const;
  void send_pushes(std::int64_t round, std::vector<Instruction>& instructions) const;
  void receive_pushes(std::int64_t round, std::vector<Instruction>& instructions) const;
  void send_pulls(WeightVersion version, std::vector<Instruction>& instructions) const;
  void receive_pulls(WeightVersion version, std::vector<Instruction>& instructions) const;
  void receive_answer_before_push(std::int64_t round, std::vector<Instruction>& instructions) const;
  // Returns the newest version that the replica has pulled before the RECVs of add_final().
  [[nodiscard]] WeightVersion newest_pulled(std::int64_t num_minibatches) const;
  // Returns which replica of the stage has the microbatch with this number.
  [[nodiscard]] StageReplica end_at(StageIndex stage, std::int64_t number) const {
    return {stage, rounds_at(stage).replica_of(number)};
  }
  void add_tied_gradients(const Instruction& backward, std::vector<Instruction>& instructions) const;
  [[nodiscard]] bool pushes_before_update(std::int64_t round) const;
  [[nodiscard]] bool is_member(ReplicaIndex replica, std::int64_t round) const;
  [[nodiscard]] const Rounds& rounds() const { return rounds_at(stages_.front()); }
  [[nodiscard]] const Rounds& rounds_at(StageIndex stage) const {
    return rounds_[static_cast<std::size_t>(stage.value())];
  }

  ScheduleOptions options_;
  std::optional<std::int64_t> num_minibatches_;
  std::vector<StageIndex> stages_;  // the worker's stages
  ReplicaIndex replica_;            // the worker's replica of its only stage; 0 if it has several stages
  std::int64_t num_owners_ = 1;     // owners of the stage's shards
  std::vector<Rounds> rounds_;      // one entry per stage of the plan
  bool drains_ = false;
  bool stashes_ = true;
  bool exchanges_shards_ = false;        // whether replicas of the stage push and pull shards
  VersionRule rule_;                     // the rule of forwards; used if the worker's only stage has replicas
  std::vector<VersionRule> tied_rules_;  // one entry per entry of options_.ties
  std::optional<StageReplica> upstream_;  // the neighbouring worker for norms, named by its first stage
  std::optional<StageReplica> downstream_;
};

// Walks one worker's whole program. As it walks, it allocates only before the first EVALUATE of a boundary.
class ProgramCursor {
 public:
  ProgramCursor(const ScheduleOptions& options, Rank rank);

  // Returns the instruction to do next; empty when the program is over. As long as the number of minibatches
  // is unknown, the program never ends.
  [[nodiscard]] std::optional<Instruction> current() const;
  // Returns the instruction after current(). Empty if it belongs to another computing instruction than
  // current() does.
  [[nodiscard]] std::optional<Instruction> following() const;
  void advance();

  // Sets the number of minibatches. Call it once. The number must not be below the minibatches that are
  // forwarded already. The current instruction may belong to a minibatch that turns out not to exist. If a
  // RECV of a version before that minibatch's forward is done already, it is not repeated later.
  void set_num_minibatches(std::int64_t num_minibatches);
  [[nodiscard]] bool may_set_num_minibatches(std::int64_t num_minibatches) const {
    return compute_.may_set_num_minibatches(num_minibatches);
  }
  [[nodiscard]] std::optional<std::int64_t> num_minibatches() const { return compute_.num_minibatches(); }

  // Requests an evaluation at the boundary (Evaluations::begin()). current() stays the same, unless the
  // program is over.
  void begin_evaluation(MinibatchId boundary);
  // Returns whether evaluate_first() may be called now, because the worker's next computing instruction is a
  // forward before which an evaluation may come (Evaluations::may_be_before()).
  [[nodiscard]] bool may_evaluate_first() const {
    return computed_ && evaluations_.may_be_before(*computed_, compute_.newest_version());
  }
  // Begins the evaluation of the boundary before the next forward. Transfers of this forward that are done
  // already are not repeated.
  void evaluate_first();
  void end_evaluation() { evaluations_.end(); }
  [[nodiscard]] bool may_evaluation_be(bool is_last) const { return evaluations_.may_be(is_last); }

  [[nodiscard]] const ScheduleOptions& options() const { return compute_.options(); }
  [[nodiscard]] Rank rank() const { return compute_.rank(); }

 private:
  void refill();
  void fill_evaluation(const Instruction& evaluate);
  void refill_at_end();
  void keep_done();
  void fill();
  void leave_out_early();

  ComputeCursor compute_;
  Evaluations evaluations_;
  Transfers transfers_;
  std::vector<Instruction> instructions_;  // the next computing instruction and its transfers
  std::size_t position_ = 0;               // position of current() in instructions_
  std::optional<Instruction> computed_;    // the next computing instruction; none at the end
  std::int64_t num_finals_ = 0;            // how often add_final() was called
  // RECVs of versions that are done already: before a forward that turned out not to exist, or for an
  // evaluation.
  std::vector<Instruction> early_;
};

// One evaluation of a run.
struct Evaluated {
  MinibatchId boundary;
  std::int64_t num_minibatches = 0;  // validation minibatches
};

// Makes the whole list of one worker, for replay, tests, text and pictures. Throws UserError as
// make_compute_program() does.
[[nodiscard]] std::vector<Instruction> make_program(const ScheduleOptions& options, Rank rank,
                                                    std::int64_t num_minibatches);
// Makes the whole list of one worker with these evaluations. Also throws UserError for boundaries that do not
// ascend or that the run does not have, and for more than kEvaluatedMinibatchesMax validation minibatches.
[[nodiscard]] std::vector<Instruction> make_program(const ScheduleOptions& options, Rank rank,
                                                    std::int64_t num_minibatches,
                                                    const std::vector<Evaluated>& evaluated);

// Makes the lists by which the owners of asynchronous shards serve other replicas, in addition to their own
// lists. There is one list for each push edge, in the order of edges_of(). The receiver of the edge carries
// it out. Empty for schedules without asynchronous shards.
[[nodiscard]] std::vector<std::vector<Instruction>> make_services(const ScheduleOptions& options,
                                                                  std::int64_t num_minibatches);

// Adds the transfers to the list of what one worker computes.
[[nodiscard]] std::vector<Instruction> add_transfers(const ScheduleOptions& options, Rank rank,
                                                     const std::vector<Instruction>& computed,
                                                     std::int64_t num_minibatches);

}  // namespace pipedream
