// Places the evaluations of one worker in its list. An evaluation runs the forwards of validation minibatches
// with one weight version, that of a boundary. Pure; one thread.
//
// A boundary lies before a minibatch N that is a multiple of minibatches_between_drains(), or at the end of
// the run. Its version contains the updates of all minibatches before N. It is the newest version from UPDATE
// N - 1 to UPDATE N. Replica 0 of each stage evaluates this version in one block of EVALUATEs:
//
//   pipedream, stage 0 of 3, boundary 2    F2 B0 U0 F3 B1 U1 | E2.0 E2.1 E2.2 | F4 B2 U2 ...
//              stage 2                     F1 B1 U1 F2 B2 | E2.0 E2.1 E2.2 | U2 F3 B3 ...
//
// The number of validation minibatches is not known in advance. So the last item of a block, E2.2 above, only
// says that there are no more. It travels like the others, but computes nothing.

// The place of a block. An edge for evaluations holds kNumEvaluationSlots items (edge.h), so a stage may have
// to wait until the next stage downstream begins its block. There is no deadlock if no instruction before a
// worker's block needs one that another worker does after its block. So the block has one of two places:
//
// 1. With replicas, or if the schedule drains, it comes right after UPDATE N - 1 or the first forward of
//    minibatch N, whichever is later. A stage never has more forwards in flight than the stage upstream, so
//    the forwards before its block can be done.
// 2. Otherwise it comes before UPDATE N or the first forward of a microbatch from number
//    N m + max(1, n_0 - 1) on, whichever is earlier, or at the end of the program. So later stages have work
//    until the first evaluated activation reaches them.
//
// If the schedule drains, stage 0 may evaluate before the first forward of minibatch N instead, so that
// callbacks know the result before N starts. Stages downstream see from the next item that arrives which of
// the two stage 0 did first.

// A worker that holds several stages evaluates W validation minibatches at one stage, and then the same W at
// its next stage. W is the number of workers.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "base/ids.h"
#include "schedule/instruction.h"
#include "schedule/program.h"

namespace pipedream {

// The most validation minibatches of one evaluation. One number is left for the item that ends the block.
inline constexpr std::int64_t kEvaluatedMinibatchesMax = kNumMicrobatchesMax - 1;

// Returns the weight version that a stage with these rounds has at the boundary.
[[nodiscard]] WeightVersion version_at_boundary(const Rounds& rounds, MinibatchId boundary);

class Evaluations {
 public:
  Evaluations(const ScheduleOptions& options, Rank rank);

  // Requests an evaluation at the boundary. It is called while the first forward of the boundary's minibatch
  // is the worker's next instruction, or when the program is over. Boundaries ascend.
  void begin(MinibatchId boundary);
  // Returns whether an evaluation may come before `forward`, which the worker would do next. It may before
  // the first forward of a boundary's minibatch, if the schedule drains. newest: see is_due().
  [[nodiscard]] bool may_be_before(const Instruction& forward, WeightVersion newest) const;
  // Returns whether the EVALUATE current() comes before `next`, which the worker would compute next. `next`
  // is empty at the end of the program. newest: the newest version that all stages of the worker have.
  [[nodiscard]] bool is_due(const std::optional<Instruction>& next, WeightVersion newest) const;

  // Returns the EVALUATE to do next. This function and those below may be called only while is_due().
  [[nodiscard]] Instruction current() const;
  void advance();
  // Says that current() is the last EVALUATE of its stage. It has the same microbatch number at all stages of
  // a worker. So if end() is called for several stages, it must be at the same number.
  void end();
  // Returns whether current() may be the last EVALUATE of its stage; with is_last false, whether it may be an
  // earlier one. Call this before you trust what another process says about it.
  [[nodiscard]] bool may_be(bool is_last) const;

 private:
  [[nodiscard]] std::int64_t chunk() const { return index_ / group_ % num_chunks_; }
  [[nodiscard]] std::int64_t item() const {
    return index_ / (group_ * num_chunks_) * group_ + index_ % group_;
  }

  std::vector<StageIndex> stages_;  // the worker's
  ReplicaIndex replica_;
  Rounds rounds_;                // the same at all stages of the worker
  std::int64_t group_size_ = 1;  // minibatches between two boundaries
  bool may_be_first_ = false;    // an evaluation may come before the first forward of its minibatch
  bool is_early_ = true;         // the block has place 1 of the file's head, otherwise place 2
  // The number of microbatches after the boundary with which place 2 may begin: max(1, n_0 - 1).
  std::int64_t num_ahead_ = 1;
  std::int64_t num_chunks_ = 1;            // stages of the worker
  std::int64_t group_ = 1;                 // validation minibatches in a row at one stage
  std::vector<MinibatchId> boundaries_;    // boundaries that are not evaluated yet, ascending
  std::int64_t index_ = 0;                 // position of the EVALUATE in the block of the first boundary
  std::optional<std::int64_t> last_item_;  // microbatch number of the last EVALUATE of each stage
};

}  // namespace pipedream
