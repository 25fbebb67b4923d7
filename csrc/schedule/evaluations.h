// Places the evaluations of one worker in its list. An evaluation runs the forwards of validation minibatches
// with the weights of a boundary. Pure; one thread.
//
// A boundary lies before a minibatch N that is a multiple of minibatches_between_drains(), or at the end of
// the run. Its version is made by the updates of all minibatches before N, and is the newest version from
// UPDATE N - 1 to UPDATE N. Replica 0 of each stage evaluates this version, in a block of EVALUATEs without
// other work in between:
//
//   pipedream, stage 0 of 3, boundary 2    F2 B0 U0 F3 B1 U1 | E2.0 E2.1 E2.2 | F4 B2 U2 ...
//              stage 2                     F1 B1 U1 F2 B2 | E2.0 E2.1 E2.2 | U2 F3 B3 ...
//
// The number of validation minibatches is not known in advance. The last item of a block, E2.2 above, says
// that there are no more. It computes nothing and travels like the others.
//
// An edge for evaluations holds kNumEvaluationSlots items (edge.h), so a stage may wait until the stage
// downstream begins its block. There is no deadlock if no instruction before a block needs an instruction
// after a block, at any worker. So the block has one of two places:
//
//   replicas, or a schedule that drains   right behind UPDATE N - 1 and the first forward of minibatch N,
//                                         whichever is later. A stage never has more forwards in flight than
//                                         the stage upstream of it, so the forwards before its block can be
//                                         done
//   otherwise                             before UPDATE N or the first forward of a microbatch from number
//                                         N m + max(1, n_0 - 1) on, whichever is earlier. So later stages
//                                         have work until the first evaluated activation reaches them
//
// If the schedule drains, stage 0 may also evaluate before the first forward of minibatch N, so that
// callbacks know the result before N starts. Stages downstream learn from the next item that arrives whether
// stage 0 did the forward or the evaluation first.
//
// A worker with several stages evaluates W validation minibatches at one stage, then the same W at its next
// stage. W is the number of workers.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "base/ids.h"
#include "schedule/instruction.h"
#include "schedule/program.h"

namespace pipedream {

// The most minibatches of one evaluation. One number is left for the item that ends it.
inline constexpr std::int64_t kEvaluatedMinibatchesMax = kNumMicrobatchesMax - 1;

// The weight version that a stage with these rounds has before minibatch `boundary`. `boundary` must be a
// boundary, as explained above.
[[nodiscard]] WeightVersion version_at_boundary(const Rounds& rounds, MinibatchId boundary);

class Evaluations {
 public:
  Evaluations(const ScheduleOptions& options, Rank rank);

  // Requests an evaluation at the boundary. Called while the first forward of the boundary's minibatch is
  // current, or when the program is over. Boundaries ascend.
  void begin(MinibatchId boundary);
  // Whether begin() may be called for the boundary right before this forward, as long as the forward is not
  // done. newest: see is_due().
  [[nodiscard]] bool may_be_before(const Instruction& forward, WeightVersion newest) const;
  // Whether the EVALUATE current() comes right before `next`, the instruction that the worker would compute
  // next. `next` is empty at the end of the program. newest: the version that all stages of the worker have.
  [[nodiscard]] bool is_due(const std::optional<Instruction>& next, WeightVersion newest) const;

  // The EVALUATE to do next. Call this and the functions below only while an evaluation is_due().
  [[nodiscard]] Instruction current() const;
  void advance();
  // Says that current() is the last EVALUATE of its stage. The last EVALUATE has the same microbatch number
  // at all stages of a worker. So a later call, for another stage, must come at the same number.
  void end();
  // Whether current() may be the last EVALUATE of its stage. With is_last false: whether it may be an
  // EVALUATE before the last. Call this before you trust what another process says about it.
  [[nodiscard]] bool may_be(bool is_last) const;

 private:
  [[nodiscard]] std::int64_t chunk() const { return index_ / group_ % num_chunks_; }
  [[nodiscard]] std::int64_t item() const {
    return index_ / (group_ * num_chunks_) * group_ + index_ % group_;
  }

  std::vector<StageIndex> stages_;  // of the worker
  ReplicaIndex replica_;
  Rounds rounds_;                          // the same at all stages here
  std::int64_t group_size_ = 1;            // minibatches between two boundaries
  bool may_be_first_ = false;              // before the first forward behind a boundary
  bool is_early_ = true;                   // the first of the two places above
  std::int64_t num_ahead_ = 1;             // of the second place: max(1, n_0 - 1) microbatches
  std::int64_t num_chunks_ = 1;            // stages here
  std::int64_t group_ = 1;                 // validation minibatches in a row at one of them
  std::vector<MinibatchId> boundaries_;    // still to be evaluated, ascending
  std::int64_t index_ = 0;                 // in the block of the first boundary
  std::optional<std::int64_t> last_item_;  // of each stage
};

}  // namespace pipedream
