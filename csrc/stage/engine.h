// Hands out the next work item of a stage's program and takes its completion: "the ML worker pulls its
// next work assignment" (PipeDream report, section 4). Knows schedules, versions and channels; knows
// nothing about models, so that any framework can do the computing.
//
//   next_work() -> FORWARD   minibatch 3, read slot 0, input tensors     compute, complete_forward(outputs)
//   next_work() -> RECOMPUTE minibatch 1, read slot 1                    compute, complete_recompute()
//   next_work() -> BACKWARD  minibatch 1, read slot 1, gradient tensors  compute,
//   complete_backward(gradients) next_work() -> UPDATE    minibatch 1, read slot 1, write slot 2      step,
//   complete_update() next_work() -> DONE      there were num_minibatches
//
// A worker has one stage, or several with an interleaved schedule; each item names its stage.
// Owned by the compute thread; every call is on it, but where another is said.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/clock.h"
#include "base/failure.h"
#include "base/ids.h"
#include "base/newest_log.h"
#include "channel/receive_channel.h"
#include "channel/send_channel.h"
#include "channel/wakeup.h"
#include "schedule/program.h"
#include "weights/version_slots.h"
#include "wire/item_fields.h"

namespace pipedream {

enum class WorkKind { kForward, kRecompute, kBackward, kUpdate, kDone };

[[nodiscard]] const char* work_kind_name(WorkKind kind);  // "FORWARD", "RECOMPUTE", ...

struct WorkItem {
  WorkKind kind = WorkKind::kDone;
  StageIndex stage;
  MinibatchId minibatch;
  MicrobatchIndex microbatch;
  WeightVersion read_version;
  SlotIndex read_slot;
  WeightVersion write_version;  // kUpdate
  SlotIndex write_slot;         // kUpdate
  // kForward: activations from upstream, absent at the first stage. kBackward: gradients from
  // downstream, absent at the last.
  std::optional<ReceivedItem> received;
  std::int64_t num_minibatches = 0;  // kDone
};

// A stage's neighbours; null where there is none.
struct StageChannels {
  ReceiveChannel* activations_in = nullptr;
  SendChannel* activations_out = nullptr;
  ReceiveChannel* gradients_in = nullptr;
  SendChannel* gradients_out = nullptr;
};

// One stage of this worker. The slots and channels outlive the engine.
struct StagePart {
  StageIndex stage;
  VersionSlots* slots = nullptr;
  StageChannels channels;
};

// The tensors that a completion sends on.
struct Outgoing {
  ItemFields fields{};
  std::vector<TensorView> tensors;
  std::unique_ptr<Event> ready;
  std::shared_ptr<void> keep_alive;
};

// When one work item was asked for, got its inputs and was completed; compute_ns of that was the user's.
// Where the device works on after a completion, as the device saw it once add_compute() has told: asked when
// it had nothing left to do, ready when it began and completed when it ended.
struct Span {
  WorkKind kind = WorkKind::kForward;
  StageIndex stage;
  MinibatchId minibatch;
  MicrobatchIndex microbatch;
  std::int64_t asked_ns = 0;
  std::int64_t ready_ns = 0;
  std::int64_t completed_ns = 0;
  std::int64_t wait_ns = 0;  // of asked to ready: blocked on a channel
  std::int64_t compute_ns = 0;
};

// As compute_ns of a completion: the device has yet to do what the caller enqueued; add_compute() follows.
inline constexpr std::int64_t kComputedLater = -1;

struct VersionsRead {
  WeightVersion forward;
  WeightVersion backward;
};

struct EngineTotals {
  std::int64_t num_work_items = 0;
  std::int64_t wait_ns = 0;     // blocked until the input was there
  std::int64_t compute_ns = 0;  // reported with the completions
  std::int64_t elapsed_ns = 0;  // first ask to last completion
};

class StageEngine {
 public:
  // parts: the worker's stages in ascending order. The last num_spans_max spans are kept.
  StageEngine(const ScheduleOptions& options, Rank rank, const std::vector<StagePart>& parts, Wakeup& wakeup,
              std::size_t num_spans_max);

  // The next work item, or empty at the deadline (ask again), or why the run failed: the message names
  // stage and minibatch. Aborts when the item handed out before was not completed.
  [[nodiscard]] Result<std::optional<WorkItem>> next_work(Deadline deadline);

  // compute_ns: time spent in user code for this item, as the caller measured it, or kComputedLater for all.
  void complete_forward(Outgoing outgoing, std::int64_t compute_ns);
  void complete_recompute(std::int64_t compute_ns);
  // Gives the slot of the stage whose version nobody will read again because of this, if there is one: no
  // later item reads it, and it is not the newest, which the next update reads.
  std::optional<SlotIndex> complete_backward(Outgoing outgoing, std::int64_t compute_ns);
  void complete_update(std::int64_t compute_ns);
  // When the device did the user's work of the oldest item that was completed with kComputedLater and has not
  // been told yet, on the clock of now_ns(); not before the end of the one before.
  void add_compute(std::int64_t began_ns, std::int64_t ended_ns);
  // Instead of completing the FORWARD of a first microbatch at the first stage: there is no such minibatch.
  void end_of_data();

  // After next_work() gave nothing: the channel that cannot receive because the user's code keeps every
  // tensor it was given. Null when that is not the reason.
  [[nodiscard]] const ReceiveChannel* starved_channel() const;

  // What forward and backward of each minibatch actually read at one of the worker's stages; backward is
  // valid for completed ones.
  [[nodiscard]] const std::vector<VersionsRead>& versions(StageIndex stage) const;
  [[nodiscard]] std::vector<Span> spans() const { return spans_.items(); }  // oldest first
  [[nodiscard]] EngineTotals totals() const { return totals_; }
  // Work items so far. Any thread.
  [[nodiscard]] std::uint64_t num_completed() const { return num_completed_.load(); }
  // Where the stage is: the instruction that is being waited for or done.
  [[nodiscard]] std::string position() const;
  // The failure with the position in front; as it is when a peer has said where.
  [[nodiscard]] Failure located(const Failure& failure) const;
  // While an item is being done: it also waited for something outside the schedule.
  void add_wait(std::int64_t wait_ns) {
    if (handed_out_) wait_ns_ += wait_ns;
  }

 private:
  struct Part {
    StagePart stage_part;
    std::vector<VersionsRead> versions;  // by minibatch
    std::int64_t num_forwards = 0;       // microbatches handed out
  };

  [[nodiscard]] Part& part_of(StageIndex stage);
  [[nodiscard]] const Part& part_of(StageIndex stage) const;
  [[nodiscard]] ReceiveChannel* source_of(const Instruction& instruction) const;
  [[nodiscard]] Result<bool> receive(ReceiveChannel& channel, Deadline deadline, ReceivedItem& item);
  [[nodiscard]] WorkItem hand_out(const Instruction& instruction, std::optional<ReceivedItem> received);
  [[nodiscard]] std::optional<SlotIndex> release_version();
  [[nodiscard]] bool is_forwarded_later(const Part& part, WeightVersion version) const;
  void learn_num_minibatches(std::int64_t num_minibatches);
  void complete(WorkKind kind, std::int64_t compute_ns);

  ComputeCursor cursor_;
  const bool stashes_;
  std::vector<Part> parts_;
  std::vector<SendChannel*> senders_;  // of all parts
  Wakeup& wakeup_;

  bool handed_out_ = false;
  Instruction doing_;
  std::int64_t asked_ns_ = 0;  // 0: not asking
  std::int64_t ready_ns_ = 0;
  std::int64_t wait_ns_ = 0;
  std::int64_t started_ns_ = 0;
  std::uint64_t num_told_ = 0;         // by add_compute()
  std::int64_t compute_ended_ns_ = 0;  // of the last one
  NewestLog<Span> spans_;
  EngineTotals totals_;
  std::atomic<std::uint64_t> num_completed_{0};
};

}  // namespace pipedream
