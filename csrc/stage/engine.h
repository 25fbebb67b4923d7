// The engine hands out the next work item of a stage's program and takes its completion: "the ML worker pulls
// its next work assignment" (PipeDream report, section 4). It knows schedules, versions and channels, but
// nothing about models, so that any framework can do the computing.
//
//   next_work() -> FORWARD   minibatch 3, read slot 0, input tensors     compute, complete(outputs)
//   next_work() -> RECOMPUTE minibatch 1, read slot 1                    compute, complete()
//   next_work() -> BACKWARD  minibatch 1, read slot 1, gradient tensors  compute, complete(gradients)
//   next_work() -> UPDATE    minibatch 1, read slot 1, write slot 2      step, complete()
//   next_work() -> EVALUATE  boundary 4, read slot 2, input tensors      compute, complete(outputs)
//   next_work() -> RECV      edge, minibatch 1, tensors                  use the tensors, complete()
//   next_work() -> SEND      edge, minibatch 1                           complete(tensors)
//   next_work() -> SEND      push, minibatch 1                           push to all owners, complete()
//   next_work() -> DONE      the run had num_minibatches
//
// The program (transfers.h) says which transfers happen when. Activations and gradients arrive with the work
// item that needs them and leave with the one that made them. Transfers of tied parameters and norms are work
// items of their own, SEND and RECV. The worker's ShardExchange does the transfers between replicas. Of these
// only the first SEND of a round's pushes is then a work item, which stands for all pushes of the round. A
// round is the minibatches of one update. A worker has one stage, or several with an interleaved schedule;
// each work item names its stage. The compute thread owns the engine and makes every call, unless a function
// says otherwise.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "base/clock.h"
#include "base/failure.h"
#include "base/ids.h"
#include "channel/receive_channel.h"
#include "channel/send_channel.h"
#include "channel/wakeup.h"
#include "param_server/shard_exchange.h"
#include "schedule/transfers.h"
#include "stage/work_times.h"
#include "weights/version_slots.h"
#include "wire/item_fields.h"

namespace pipedream {

struct WorkItem {
  std::optional<Opcode> opcode;  // none: all is done
  StageIndex stage;
  MinibatchId minibatch;
  MicrobatchIndex microbatch;
  WeightVersion read_version;
  SlotIndex read_slot;
  WeightVersion write_version;  // kUpdate
  SlotIndex write_slot;         // kUpdate
  Edge edge;                    // kSend, kRecv
  bool on_device = true;        // the item's tensors are in device memory
  // The received item that the opcode needs; a kRecv needs the edge's item. Absent if the opcode needs none,
  // if no item travels to it, as to the first stage's forward, or if the edge has no channel.
  std::optional<ReceivedItem> received;
  std::int64_t num_minibatches = 0;  // set when all is done, like end_events
  std::uint8_t end_events = 0;       // bits of the events due at the end of the run (ItemFields)
};

// One stage of this worker. The slots outlive the engine.
struct StagePart {
  StageIndex stage;
  VersionSlots* slots = nullptr;
};

// This worker's end of an edge: a channel in either `sends` or `receives`, which outlives the engine. An edge
// between two stages of this worker has no channel. The caller of the engine hands such an edge's items over
// itself, when it does the SEND and the RECV.
struct EdgeChannel {
  Edge edge;
  SendChannel* sends = nullptr;
  ReceiveChannel* receives = nullptr;
  bool on_device = true;  // false: its items live in host memory, even if the stage is on a GPU
};

// The tensors that the completed work item sends.
struct Outgoing {
  ItemFields fields{};
  std::vector<TensorView> tensors;
  std::unique_ptr<Event> ready;
  std::shared_ptr<void> keep_alive;
};

// The weight versions that one microbatch read.
struct VersionsRead {
  WeightVersion forward;
  WeightVersion backward;
};

class StageEngine {
 public:
  // parts: the worker's stages, ascending. channels: one for each edge with an end here. The engine keeps the
  // last num_spans_max spans. exchange: does the transfers between the stage's replicas and outlives the
  // engine; null if they are handed out as work items.
  StageEngine(const ScheduleOptions& options, Rank rank, const std::vector<StagePart>& parts,
              std::vector<EdgeChannel> channels, Wakeup& wakeup, std::size_t num_spans_max,
              ShardExchange* exchange = nullptr);

  // Returns the next work item; nothing at the deadline, and then the caller calls again. Returns a failure,
  // whose message names stage and minibatch, if the run failed. Aborts if the previous work item was not
  // completed.
  [[nodiscard]] Result<std::optional<WorkItem>> next_work(Deadline deadline);

  // Completes the last work item, which has this opcode. made: the tensors that it sends. compute_ns: the
  // time that the caller measured in user code, or kComputedLater for every item. The time of a SEND or RECV
  // is in the span of the next item. After a BACKWARD it returns the slot whose version is now free, if there
  // is one: no later item reads that version, and it is not the newest version, which the next update reads.
  std::optional<SlotIndex> complete(Opcode opcode, Outgoing made, std::int64_t compute_ns);
  // Destroys the keep_alives of sent items. Called between work items, where their destructors may take any
  // lock.
  void collect_released();
  // Sets the device's times, on the clock of now_ns(), for the oldest item that was completed with
  // kComputedLater and has none yet. began_ns must not be before the end of the previous item.
  void add_compute(std::int64_t began_ns, std::int64_t ended_ns) { times_.add_compute(began_ns, ended_ns); }
  // Requests an evaluation of the weights before this minibatch. Called at replica 0 of every stage, during
  // the first FORWARD of the minibatch or when all is done. Then EVALUATEs come at their place in the
  // program. Complete the last EVALUATE with is_end_of_data; the stage downstream then knows that no further
  // item follows.
  void begin_evaluation(MinibatchId boundary);
  // Evaluates the weights before the current FORWARD, which is not completed but handed out again afterwards.
  // Allowed at the first stage of a schedule that drains, during the FORWARD of the first microbatch after a
  // drain.
  void evaluate_first();
  // Says that the run has num_minibatches minibatches. Called at the first stage when the engine hands out
  // the first FORWARD of a minibatch that does not exist. This FORWARD is not completed. events: the events
  // due at the end of the run.
  void end_of_data(std::int64_t num_minibatches, std::uint8_t events = 0);
  // The number of minibatches of the run, once it is known here.
  [[nodiscard]] std::optional<std::int64_t> num_minibatches() const { return cursor_.num_minibatches(); }

  // After next_work() returned nothing: the work item that waits for its tensors, if it is known. The
  // returned item has no tensors.
  [[nodiscard]] std::optional<WorkItem> upcoming() const;
  // After next_work() returned nothing: the channel that cannot receive because the user's code keeps every
  // tensor that it was given. Null when there is another reason.
  [[nodiscard]] const ReceiveChannel* starved_channel() const;

  // The versions that each microbatch's forward and backward actually read at one of the worker's stages. The
  // index counts the replica's own microbatches from the run's start. `backward` is valid for completed
  // microbatches.
  [[nodiscard]] const std::vector<VersionsRead>& versions(StageIndex stage) const;
  // The versions, with their slots, that a run needs at this stage if it continues with the minibatch. They
  // reach from the oldest version that any replica's microbatch still reads, counted from this minibatch on,
  // to the newest version. Call it between the update before the minibatch and the minibatch's own update.
  [[nodiscard]] std::map<WeightVersion, SlotIndex> kept_versions(StageIndex stage,
                                                                 MinibatchId minibatch) const;
  [[nodiscard]] std::vector<Span> spans() const { return times_.spans(); }  // oldest first
  [[nodiscard]] EngineTotals totals() const { return times_.totals(); }
  // The number of completed work items, without SENDs and RECVs. Any thread.
  [[nodiscard]] std::uint64_t num_completed() const { return times_.num_completed(); }
  // The worker's position: the instruction that it waits for or does.
  [[nodiscard]] std::string position() const;
  // The failure with the position in front of its message. What a peer reports by ABORT is returned
  // unchanged, because it has the peer's position already.
  [[nodiscard]] Failure located(const Failure& failure) const;
  // Adds time to the current item's wait: a wait outside the schedule, or other work that the caller did
  // until the item came.
  void add_wait(std::int64_t wait_ns) {
    if (handed_out_ || times_.is_asking()) times_.add_wait(wait_ns);
  }

 private:
  struct Part {
    StagePart stage_part;
    ReplicaIndex replica;
    Rounds rounds;                       // of the stage
    VersionRule rule;                    // of its forwards
    bool stashes = true;                 // a forward keeps its version until its backward
    std::vector<VersionsRead> versions;  // by the replica's own microbatches, from the first
    std::int64_t num_forwards = 0;       // microbatches handed out
    // For each edge kind: the received item for the next instruction that needs one.
    std::array<std::optional<ReceivedItem>, kEdgeKinds.size()> received;
    ReceiveChannel* evaluations = nullptr;  // from upstream
  };

  [[nodiscard]] Part& part_of(StageIndex stage);
  [[nodiscard]] const Part& part_of(StageIndex stage) const;
  [[nodiscard]] static std::size_t own_index(const Part& part, const Instruction& instruction);
  [[nodiscard]] static std::optional<ReceivedItem>& received_of(Part& part, EdgeKind kind) {
    return part.received.at(static_cast<std::size_t>(kind));
  }
  [[nodiscard]] const EdgeChannel* find_channel(const Edge& edge) const;
  [[nodiscard]] ReceiveChannel* source_of(const Instruction& instruction) const;
  [[nodiscard]] SendChannel* target_of(const Instruction& instruction) const;
  [[nodiscard]] SlotIndex slot_read_by(const Instruction& instruction) const;
  [[nodiscard]] Result<bool> receive(ReceiveChannel& channel, Deadline deadline, ReceivedItem& item);
  [[nodiscard]] Result<bool> wait_to_evaluate(Deadline deadline);
  [[nodiscard]] bool begins_evaluation(const ReceiveChannel& source, Deadline deadline);
  void take_back_forward();
  [[nodiscard]] Result<bool> wait_for_room(SendChannel& channel, Deadline deadline);
  [[nodiscard]] Result<std::optional<WorkItem>> hand_out_transfer(std::optional<ReceivedItem> received);
  [[nodiscard]] Result<bool> transfer_between_replicas(const Instruction& instruction, Deadline deadline);
  void begin_item();
  void end_item();
  void send_with_work(Outgoing made);
  void send(const Instruction& instruction, Outgoing made);
  [[nodiscard]] WorkItem hand_out(const Instruction& instruction);
  [[nodiscard]] std::optional<SlotIndex> release_version();
  [[nodiscard]] bool is_forwarded_later(const Part& part, WeightVersion version) const;
  void learn_end(std::int64_t num_minibatches, std::uint8_t events);
  void send_end_behind_last(StageIndex stage);

  ProgramCursor cursor_;
  std::vector<Part> parts_;
  const std::vector<EdgeChannel> channels_;
  // Index of channels_, because a worker with replicas may have hundreds.
  std::unordered_map<Edge, const EdgeChannel*, EdgeHash> channel_of_edge_;
  std::vector<SendChannel*> sending_;  // channels that may have items for collect_released()
  Wakeup& wakeup_;
  ShardExchange* const exchange_;
  std::optional<MinibatchId> pushed_;  // the minibatch of the last push that was handed out

  std::uint8_t end_events_ = 0;
  bool handed_out_ = false;
  Instruction doing_;
  WorkTimes times_;
};

}  // namespace pipedream
