#include "stage/engine.h"

#include <algorithm>
#include <utility>

namespace pipedream {

namespace {

constexpr std::size_t kNumMinibatchesReserved = std::size_t{1} << 16;  // beyond, the record grows by doubling

WorkKind work_kind_of(Opcode opcode) {
  switch (opcode) {
    case Opcode::kForward:
      return WorkKind::kForward;
    case Opcode::kRecompute:
      return WorkKind::kRecompute;
    case Opcode::kBackward:
      return WorkKind::kBackward;
    case Opcode::kUpdate:
      return WorkKind::kUpdate;
    case Opcode::kSend:
    case Opcode::kRecv:
      break;
  }
  PD_CHECK(false, "opcode " << static_cast<int>(opcode));
}

}  // namespace

const char* work_kind_name(WorkKind kind) {
  switch (kind) {
    case WorkKind::kForward:
      return "FORWARD";
    case WorkKind::kRecompute:
      return "RECOMPUTE";
    case WorkKind::kBackward:
      return "BACKWARD";
    case WorkKind::kUpdate:
      return "UPDATE";
    case WorkKind::kDone:
      return "DONE";
  }
  PD_CHECK(false, "work kind " << static_cast<int>(kind));
}

StageEngine::StageEngine(const ScheduleOptions& options, Rank rank, const std::vector<StagePart>& parts,
                         Wakeup& wakeup, std::size_t num_spans_max)
    : cursor_(options, rank), stashes_(stashes_versions(options)), wakeup_(wakeup), spans_(num_spans_max) {
  PD_CHECK(num_spans_max > 0, num_spans_max);
  const std::vector<StageIndex> stages = placement_of(options).stages_at(rank);
  PD_CHECK(parts.size() == stages.size(),
           parts.size() << " stages given for rank " << rank.value() << " of " << stages.size());
  for (std::size_t part = 0; part < parts.size(); ++part) {
    const StagePart& given = parts[part];
    PD_CHECK(given.stage == stages[part], "stage " << given.stage.value() << " at rank " << rank.value());
    PD_CHECK(given.slots->num_slots() == num_versions_kept(options, given.stage),
             given.slots->num_slots()
                 << " slots for " << num_versions_kept(options, given.stage) << " versions");
    parts_.push_back({given, {}, 0});
    parts_.back().versions.reserve(kNumMinibatchesReserved);
    for (SendChannel* channel : {given.channels.activations_out, given.channels.gradients_out}) {
      if (channel != nullptr) senders_.push_back(channel);
    }
  }
  if (const auto first = cursor_.current()) doing_ = *first;
}

StageEngine::Part& StageEngine::part_of(StageIndex stage) {
  for (Part& part : parts_) {
    if (part.stage_part.stage == stage) return part;
  }
  PD_CHECK(false, "stage " << stage.value() << " is not at rank " << cursor_.rank().value());
}

// NOLINTNEXTLINE(cppcoreguidelines-pro-type-const-cast): one search for both
const StageEngine::Part& StageEngine::part_of(StageIndex stage) const {
  return const_cast<StageEngine*>(this)->part_of(stage);
}

const std::vector<VersionsRead>& StageEngine::versions(StageIndex stage) const {
  return part_of(stage).versions;
}

Result<std::optional<WorkItem>> StageEngine::next_work(Deadline deadline) {
  PD_CHECK(!handed_out_, "not completed: " << to_string(doing_));
  for (SendChannel* channel : senders_) channel->collect_released();
  if (asked_ns_ == 0) asked_ns_ = now_ns();
  if (started_ns_ == 0) started_ns_ = asked_ns_;

  for (;;) {
    const std::optional<Instruction> instruction = cursor_.current();
    if (!instruction) {
      WorkItem done;
      done.num_minibatches = cursor_.num_minibatches().value_or(0);
      return std::optional<WorkItem>(std::move(done));
    }
    doing_ = *instruction;
    ReceiveChannel* source = source_of(*instruction);
    if (source == nullptr) {
      // Nothing to wait for here, so a failure elsewhere would pass unseen.
      if (const auto failure = wakeup_.failure()) return located(*failure);
      return std::optional<WorkItem>(hand_out(*instruction, std::nullopt));
    }
    ReceivedItem item;
    const std::int64_t wait_began_ns = now_ns();
    const Result<bool> received = receive(*source, deadline, item);
    const std::int64_t wait_ns = now_ns() - wait_began_ns;
    wait_ns_ += wait_ns;
    source->add_wait(wait_ns);
    if (!received) return received.failure();
    if (!received.value()) return std::optional<WorkItem>();
    if (!item.is_end) return std::optional<WorkItem>(hand_out(*instruction, std::move(item)));
    if (instruction->opcode != Opcode::kForward) {
      return located(
          {FailureKind::kCorruptFrame, source->options().name + ": ended with gradients still due"});
    }
    learn_num_minibatches(item.num_minibatches);
  }
}

ReceiveChannel* StageEngine::source_of(const Instruction& instruction) const {
  const StageChannels& channels = part_of(instruction.stage).stage_part.channels;
  switch (instruction.opcode) {
    case Opcode::kForward:
      return channels.activations_in;
    case Opcode::kBackward:
      return channels.gradients_in;
    case Opcode::kRecompute:
    case Opcode::kUpdate:
      return nullptr;
    case Opcode::kSend:
    case Opcode::kRecv:
      break;
  }
  PD_CHECK(false, to_string(instruction));
}

const ReceiveChannel* StageEngine::starved_channel() const {
  const ReceiveChannel* source = source_of(doing_);
  return source != nullptr && source->all_slots_held() ? source : nullptr;
}

// True: item is what the program needs now. False: the deadline passed.
Result<bool> StageEngine::receive(ReceiveChannel& channel, Deadline deadline, ReceivedItem& item) {
  bool exhausted = false;
  const bool accepted = wakeup_.wait_until(deadline, [&] {
    if (channel.try_take(item)) return true;
    exhausted = channel.exhausted();
    return exhausted;
  });
  if (accepted && !exhausted) {
    PD_CHECK(item.is_end || (item.minibatch == doing_.minibatch && item.microbatch == doing_.microbatch),
             "received minibatch " << item.minibatch.value() << " for " << to_string(doing_));
    return true;
  }
  // A failure says more than a farewell: it may be the abort that came on another channel.
  if (const auto failure = wakeup_.failure()) return located(*failure);
  if (exhausted) {
    return located(
        {FailureKind::kPeerLost, channel.options().name + ": closed by the peer before it was complete"});
  }
  return false;
}

WorkItem StageEngine::hand_out(const Instruction& instruction, std::optional<ReceivedItem> received) {
  Part& part = part_of(instruction.stage);
  VersionSlots& slots = *part.stage_part.slots;
  WorkItem work;
  work.kind = work_kind_of(instruction.opcode);
  work.stage = instruction.stage;
  work.minibatch = instruction.minibatch;
  work.microbatch = instruction.microbatch;
  work.received = std::move(received);
  work.read_version = instruction.version;
  switch (instruction.opcode) {
    case Opcode::kForward:
      // Without stashing the version is not kept for the backward: the update writes over it.
      work.read_slot = stashes_ ? slots.acquire(instruction.version) : slots.slot_of(instruction.version);
      if (instruction.microbatch.value() == 0)
        part.versions.push_back({instruction.version, instruction.version});
      ++part.num_forwards;
      break;
    case Opcode::kRecompute:
      work.read_slot = slots.slot_of(instruction.version);
      break;
    case Opcode::kBackward:
      work.read_slot = slots.slot_of(instruction.version);
      part.versions.at(static_cast<std::size_t>(instruction.minibatch.value())).backward =
          instruction.version;
      break;
    case Opcode::kUpdate:
      work.read_version = slots.newest();
      work.read_slot = slots.slot_of(slots.newest());
      work.write_version = slots.newest().next();
      work.write_slot = slots.begin_update();
      PD_CHECK(work.write_version == instruction.version, to_string(instruction));
      break;
    case Opcode::kSend:
    case Opcode::kRecv:
      PD_CHECK(false, to_string(instruction) << " is not computed");
  }
  handed_out_ = true;
  ready_ns_ = now_ns();
  return work;
}

void StageEngine::complete_forward(Outgoing outgoing, std::int64_t compute_ns) {
  if (SendChannel* channel = part_of(doing_.stage).stage_part.channels.activations_out) {
    channel->send(doing_.minibatch, doing_.microbatch, outgoing.fields, outgoing.tensors,
                  std::move(outgoing.ready), std::move(outgoing.keep_alive));
  }
  complete(WorkKind::kForward, compute_ns);
}

void StageEngine::complete_recompute(std::int64_t compute_ns) { complete(WorkKind::kRecompute, compute_ns); }

std::optional<SlotIndex> StageEngine::complete_backward(Outgoing outgoing, std::int64_t compute_ns) {
  if (SendChannel* channel = part_of(doing_.stage).stage_part.channels.gradients_out) {
    channel->send(doing_.minibatch, doing_.microbatch, outgoing.fields, outgoing.tensors,
                  std::move(outgoing.ready), std::move(outgoing.keep_alive));
  }
  const std::optional<SlotIndex> freed = release_version();
  complete(WorkKind::kBackward, compute_ns);
  return freed;
}

// Of the backward that is being done.
std::optional<SlotIndex> StageEngine::release_version() {
  if (!stashes_) return std::nullopt;
  const Part& part = part_of(doing_.stage);
  VersionSlots& slots = *part.stage_part.slots;
  slots.release(doing_.version);
  const bool is_read_later = doing_.version == slots.newest() || slots.num_readers(doing_.version) > 0 ||
                             is_forwarded_later(part, doing_.version);
  if (is_read_later) return std::nullopt;
  return slots.slot_of(doing_.version);
}

// The next microbatch may still belong to a minibatch that others are forwarded of.
bool StageEngine::is_forwarded_later(const Part& part, WeightVersion version) const {
  const ScheduleOptions& options = cursor_.options();
  const MinibatchId next(part.num_forwards / options.num_microbatches);
  if (cursor_.num_minibatches() && next.value() >= *cursor_.num_minibatches()) return false;
  return version >= forward_version(options, part.stage_part.stage, next);
}

void StageEngine::complete_update(std::int64_t compute_ns) {
  VersionSlots& slots = *part_of(doing_.stage).stage_part.slots;
  slots.publish(slots.begin_update());
  complete(WorkKind::kUpdate, compute_ns);
}

void StageEngine::end_of_data() {
  Part& part = part_of(doing_.stage);
  PD_CHECK(handed_out_ && doing_.opcode == Opcode::kForward && doing_.microbatch.value() == 0 &&
               part.stage_part.channels.activations_in == nullptr,
           to_string(doing_));
  if (stashes_) part.stage_part.slots->release(doing_.version);
  part.versions.pop_back();
  --part.num_forwards;
  handed_out_ = false;
  learn_num_minibatches(doing_.minibatch.value());
}

void StageEngine::learn_num_minibatches(std::int64_t num_minibatches) {
  cursor_.set_num_minibatches(num_minibatches);
  for (const Part& part : parts_) {
    if (SendChannel* channel = part.stage_part.channels.activations_out) channel->send_end(num_minibatches);
  }
}

void StageEngine::complete(WorkKind kind, std::int64_t compute_ns) {
  PD_CHECK(handed_out_ && work_kind_of(doing_.opcode) == kind,
           work_kind_name(kind) << " completed while doing " << to_string(doing_));
  const std::int64_t completed_ns = now_ns();
  const bool is_later = compute_ns == kComputedLater;
  PD_CHECK(is_later || num_told_ == 0, "compute_ns " << compute_ns << " after some that came later");
  spans_.add({kind, doing_.stage, doing_.minibatch, doing_.microbatch, asked_ns_, ready_ns_, completed_ns,
              wait_ns_, is_later ? 0 : compute_ns});
  ++totals_.num_work_items;
  num_completed_.fetch_add(1);
  totals_.wait_ns += wait_ns_;
  if (!is_later) totals_.compute_ns += compute_ns;
  totals_.elapsed_ns = std::max(totals_.elapsed_ns, completed_ns - started_ns_);
  handed_out_ = false;
  asked_ns_ = 0;
  wait_ns_ = 0;
  cursor_.advance();
}

//   host    | wait for item 2 |launch|
//   device  | item 1 |               | item 2 |
//                    |--wait--|        only now it had nothing to do but to wait
void StageEngine::add_compute(std::int64_t began_ns, std::int64_t ended_ns) {
  PD_CHECK(num_told_ < spans_.num_added(), "no item is left of " << spans_.num_added());
  PD_CHECK(compute_ended_ns_ <= began_ns && began_ns <= ended_ns,
           compute_ended_ns_ << ", " << began_ns << ", " << ended_ns);
  totals_.compute_ns += ended_ns - began_ns;
  totals_.elapsed_ns = std::max(totals_.elapsed_ns, ended_ns - started_ns_);
  if (Span* span = spans_.find(num_told_)) {
    const std::int64_t free_ns = std::min(std::max(span->asked_ns, compute_ended_ns_), began_ns);
    const std::int64_t idle_wait_ns = std::clamp<std::int64_t>(span->ready_ns - free_ns, 0, span->wait_ns);
    totals_.wait_ns -= span->wait_ns - idle_wait_ns;
    span->asked_ns = free_ns;
    span->ready_ns = began_ns;
    span->completed_ns = ended_ns;
    span->wait_ns = idle_wait_ns;
    span->compute_ns = ended_ns - began_ns;
  }
  ++num_told_;
  compute_ended_ns_ = ended_ns;
}

std::string StageEngine::position() const {
  return "stage " + std::to_string(doing_.stage.value()) + " at minibatch " +
         std::to_string(doing_.minibatch.value()) + " (" + opcode_name(doing_.opcode) + ")";
}

Failure StageEngine::located(const Failure& failure) const {
  if (failure.kind == FailureKind::kAborted) return failure;  // the peer has said where
  return {failure.kind, position() + ": " + failure.message};
}

}  // namespace pipedream
