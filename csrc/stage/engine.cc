#include "stage/engine.h"

#include <algorithm>
#include <utility>

namespace pipedream {

namespace {

// The number of microbatches for which the record of versions has memory from the start. In a longer run the
// record grows.
constexpr std::size_t kNumMicrobatchesReserved = std::size_t{1} << 16;

// Whether items of this kind are received and sent as part of a work item that computes.
bool goes_with_work(EdgeKind kind) { return find_user(kind).has_value(); }

Failure untrue_end_of_evaluation(const std::string& channel) {
  return {FailureKind::kCorruptFrame,
          channel + ": the sender says that the validation minibatches end elsewhere than they do"};
}

bool is_between_replicas(EdgeKind kind) { return kind == EdgeKind::kPush || kind == EdgeKind::kPull; }

Failure untrue_end(const std::string& channel, std::int64_t num_minibatches) {
  return {FailureKind::kCorruptFrame,
          channel + ": the sender says that the data ended after " + std::to_string(num_minibatches) +
              " minibatches, which cannot be: other channels have brought more, or the run began later"};
}

// Names the instruction in an error. A transfer that belongs to a computing instruction gets the name of that
// instruction.
std::string describe(const Instruction& instruction) {
  if (!travels(instruction.opcode)) return opcode_name(instruction.opcode);
  if (const auto user = find_user(instruction.edge.kind)) return opcode_name(*user);
  return std::string(opcode_name(instruction.opcode)) + " of " + to_string(instruction.edge);
}

}  // namespace

StageEngine::StageEngine(const ScheduleOptions& options, Rank rank, const std::vector<StagePart>& parts,
                         std::vector<EdgeChannel> channels, Wakeup& wakeup, std::size_t num_spans_max,
                         ShardExchange* exchange)
    : cursor_(options, rank),
      channels_(std::move(channels)),
      wakeup_(wakeup),
      exchange_(exchange),
      times_(num_spans_max) {
  const std::vector<Place> places = placement_of(options).places_at(rank);
  PD_CHECK(parts.size() == places.size(),
           parts.size() << " stages given for rank " << rank.value() << " of " << places.size());
  for (std::size_t part = 0; part < parts.size(); ++part) {
    const StagePart& given = parts[part];
    PD_CHECK(given.stage == places[part].stage,
             "stage " << given.stage.value() << " at rank " << rank.value());
    PD_CHECK(given.slots->num_slots() == num_versions_kept(options, given.stage),
             given.slots->num_slots()
                 << " slots for " << num_versions_kept(options, given.stage) << " versions");
    Part& made = parts_.emplace_back();
    made.stage_part = given;
    made.replica = places[part].replica;
    made.rounds = rounds_of(options, given.stage);
    made.rule = forward_rule_of(cursor_.options(), given.stage);
    made.stashes = stashes_versions(options, given.stage);
    PD_CHECK(
        given.slots->newest() == made.rounds.first_version(),
        "version " << given.slots->newest().value() << " at minibatch " << options.first_minibatch.value());
    made.versions.reserve(kNumMicrobatchesReserved);
  }
  for (const EdgeChannel& channel : channels_) {
    channel_of_edge_[channel.edge] = &channel;
    if (channel.edge.kind == EdgeKind::kEvaluation && channel.receives != nullptr) {
      part_of(channel.edge.to.stage).evaluations = channel.receives;
    }
  }
  sending_.reserve(channels_.size());
  if (const auto first = cursor_.current()) doing_ = *first;
}

StageEngine::Part& StageEngine::part_of(StageIndex stage) {
  for (Part& part : parts_) {
    if (part.stage_part.stage == stage) return part;
  }
  PD_CHECK(false, "stage " << stage.value() << " is not at rank " << cursor_.rank().value());
}

// NOLINTNEXTLINE(cppcoreguidelines-pro-type-const-cast): both overloads share one search
const StageEngine::Part& StageEngine::part_of(StageIndex stage) const {
  return const_cast<StageEngine*>(this)->part_of(stage);
}

std::size_t StageEngine::own_index(const Part& part, const Instruction& instruction) {
  return static_cast<std::size_t>(
      part.rounds.own_index(part.rounds.number_of(instruction.minibatch, instruction.microbatch)));
}

const std::vector<VersionsRead>& StageEngine::versions(StageIndex stage) const {
  return part_of(stage).versions;
}

std::map<WeightVersion, SlotIndex> StageEngine::kept_versions(StageIndex stage, MinibatchId minibatch) const {
  const Part& part = part_of(stage);
  const VersionSlots& slots = *part.stage_part.slots;
  const std::int64_t next = part.rounds.number_of(minibatch, MicrobatchIndex(0));
  std::map<WeightVersion, SlotIndex> kept;
  for (WeightVersion version = part.rule.oldest_from(next); version <= slots.newest();
       version = version.next()) {
    if (slots.is_held(version)) kept[version] = slots.slot_of(version);
  }
  return kept;
}

Result<std::optional<WorkItem>> StageEngine::next_work(Deadline deadline) {
  PD_CHECK(!handed_out_, "not completed: " << to_string(doing_));
  times_.ask();
  for (;;) {
    if (exchange_ != nullptr && cursor_.num_minibatches()) {
      const Result<bool> is_told = exchange_->tell_end(*cursor_.num_minibatches(), end_events_, deadline);
      if (!is_told) return is_told.failure();
      if (!is_told.value()) return std::optional<WorkItem>();
    }
    const std::optional<Instruction> instruction = cursor_.current();
    if (!instruction) {
      WorkItem done;
      done.num_minibatches = cursor_.num_minibatches().value_or(0);
      done.end_events = end_events_;
      return std::optional<WorkItem>(std::move(done));
    }
    doing_ = *instruction;
    if (!travels(instruction->opcode)) {
      // A wait notices a failure of the run. This call can return without a wait, so it looks for a failure
      // here.
      if (const auto failure = wakeup_.failure()) return located(*failure);
      if (is_of_evaluation(instruction->opcode)) {
        const Result<bool> may_begin = wait_to_evaluate(deadline);
        if (!may_begin) return may_begin.failure();
        if (!may_begin.value()) return std::optional<WorkItem>();
      }
      return std::optional<WorkItem>(hand_out(*instruction));
    }
    if (exchange_ != nullptr && is_between_replicas(instruction->edge.kind)) {
      const bool is_push = instruction->opcode == Opcode::kSend && instruction->edge.kind == EdgeKind::kPush;
      if (is_push && std::exchange(pushed_, instruction->minibatch) != instruction->minibatch) {
        return hand_out_transfer(std::nullopt);
      }
      const Result<bool> is_done = transfer_between_replicas(*instruction, deadline);
      if (!is_done) return is_done.failure();
      if (!is_done.value()) return std::optional<WorkItem>();
      continue;
    }
    if (instruction->opcode == Opcode::kSend) {
      if (SendChannel* target = target_of(*instruction)) {
        const Result<bool> has_room = wait_for_room(*target, deadline);
        if (!has_room) return has_room.failure();
        if (!has_room.value()) return std::optional<WorkItem>();
      }
      return hand_out_transfer(std::nullopt);
    }
    std::optional<ReceivedItem> item;
    if (ReceiveChannel* source = source_of(*instruction)) {
      if (begins_evaluation(*source, deadline)) continue;
      const Result<bool> received = receive(*source, deadline, item.emplace());
      if (!received) return received.failure();
      if (!received.value()) return std::optional<WorkItem>();
      if (item->is_end) {
        if (instruction->edge.kind != EdgeKind::kActivation) {
          return located(
              {FailureKind::kCorruptFrame, source->options().name + ": ended with items still due"});
        }
        if (!cursor_.may_set_num_minibatches(item->num_minibatches)) {
          return located(untrue_end(source->options().name, item->num_minibatches));
        }
        learn_end(item->num_minibatches, item->fields.boundary_events);
        continue;
      }
    }
    if (!goes_with_work(instruction->edge.kind)) return hand_out_transfer(std::move(item));
    if (item) received_of(part_of(doing_.stage), doing_.edge.kind) = std::move(item);
    cursor_.advance();
  }
}

// Does a RECV of a push or a pull by the exchange, and goes on to the next instruction. If the other replica
// says instead that the data have ended, notes the end. False if the deadline passed. A SEND needs no work
// here, because an earlier work item has sent its items.
Result<bool> StageEngine::transfer_between_replicas(const Instruction& instruction, Deadline deadline) {
  if (instruction.opcode == Opcode::kRecv) {
    const Part& part = part_of(instruction.stage);
    const ReplicaIndex other = instruction.edge.from.replica;
    const Result<bool> is_there =
        instruction.edge.kind == EdgeKind::kPull
            ? exchange_->pull_from(other, deadline)
            // begin_update() returns the slot that the gradient's update will write. No forward and no
            // backward reads this slot any more.
            : exchange_->begin_push_from(other, part.rounds.round_of(instruction.minibatch),
                                         part.stage_part.slots->begin_update(), deadline);
    if (!is_there || !is_there.value()) return is_there;
    if (const auto end = exchange_->take_end()) {
      const std::int64_t num_minibatches = end->num_minibatches;
      if (num_minibatches > instruction.minibatch.value() ||
          !cursor_.may_set_num_minibatches(num_minibatches)) {
        return located(untrue_end(to_string(instruction.edge), num_minibatches));
      }
      learn_end(num_minibatches, end->boundary_events);
      return true;
    }
  }
  cursor_.advance();
  return true;
}

void StageEngine::collect_released() {
  std::erase_if(sending_, [](SendChannel* channel) {
    // The number is read first. If it is 0, the collection surely destroys the keep_alives of all items.
    const bool all_have_left = channel->num_unreleased() == 0;
    channel->collect_released();
    return all_have_left;
  });
}

void StageEngine::begin_item() {
  handed_out_ = true;
  wakeup_.begin_item();
}

void StageEngine::end_item() {
  handed_out_ = false;
  wakeup_.end_item();
}

Result<std::optional<WorkItem>> StageEngine::hand_out_transfer(std::optional<ReceivedItem> received) {
  WorkItem work;
  work.opcode = doing_.opcode;
  work.stage = doing_.stage;
  work.minibatch = doing_.minibatch;
  work.edge = doing_.edge;
  if (const EdgeChannel* channel = find_channel(doing_.edge)) work.on_device = channel->on_device;
  work.received = std::move(received);
  begin_item();
  return std::optional<WorkItem>(std::move(work));
}

const EdgeChannel* StageEngine::find_channel(const Edge& edge) const {
  const auto found = channel_of_edge_.find(edge);
  return found != channel_of_edge_.end() ? found->second : nullptr;
}

ReceiveChannel* StageEngine::source_of(const Instruction& instruction) const {
  if (instruction.opcode != Opcode::kRecv) return nullptr;
  const EdgeChannel* channel = find_channel(instruction.edge);
  return channel == nullptr ? nullptr : channel->receives;
}

SendChannel* StageEngine::target_of(const Instruction& instruction) const {
  if (instruction.opcode != Opcode::kSend) return nullptr;
  const EdgeChannel* channel = find_channel(instruction.edge);
  return channel == nullptr ? nullptr : channel->sends;
}

const ReceiveChannel* StageEngine::starved_channel() const {
  const ReceiveChannel* source = source_of(doing_);
  return source != nullptr && source->all_slots_held() ? source : nullptr;
}

std::optional<WorkItem> StageEngine::upcoming() const {
  const std::optional<Instruction> following = cursor_.following();
  if (doing_.opcode != Opcode::kRecv || !goes_with_work(doing_.edge.kind) || !following ||
      travels(following->opcode)) {
    return std::nullopt;
  }
  WorkItem work;
  work.opcode = following->opcode;
  work.stage = following->stage;
  work.minibatch = following->minibatch;
  work.microbatch = following->microbatch;
  work.read_version = following->version;
  work.read_slot = slot_read_by(*following);
  return work;
}

// Returns the slot that a FORWARD or BACKWARD reads. If a stage that does not stash reads a version older
// than the run's first one, this is the first version's slot, and the caller of the engine loads the older
// weights into it.
SlotIndex StageEngine::slot_read_by(const Instruction& instruction) const {
  const Part& part = part_of(instruction.stage);
  const WeightVersion oldest = part.stashes ? instruction.version : part.rounds.first_version();
  return part.stage_part.slots->slot_of(std::max(instruction.version, oldest));
}

// Waits until the channel has room for the evaluation's item. The number of evaluations is not known, so the
// program does not bound the items that wait.
Result<bool> StageEngine::wait_to_evaluate(Deadline deadline) {
  const std::optional<ReceivedItem>& received = received_of(part_of(doing_.stage), EdgeKind::kEvaluation);
  const bool is_last = received && received->fields.is_end_of_data;
  if (received && !cursor_.may_evaluation_be(is_last)) {
    return located(untrue_end_of_evaluation(to_string(doing_)));
  }
  const std::optional<Instruction> next = cursor_.following();
  SendChannel* const target = next ? target_of(*next) : nullptr;
  return target == nullptr ? Result<bool>(true) : wait_for_room(*target, deadline);
}

// Whether the stage upstream evaluates before this forward. If an evaluation is possible, waits for the
// forward's activation or for an item to evaluate. True: an item to evaluate came first, and the evaluation
// is next. False: the caller calls receive(), which finds the activation or waits for it.
bool StageEngine::begins_evaluation(const ReceiveChannel& source, Deadline deadline) {
  if (doing_.edge.kind != EdgeKind::kActivation || !cursor_.may_evaluate_first()) return false;
  const ReceiveChannel* const evaluations = part_of(doing_.stage).evaluations;
  if (evaluations == nullptr) return false;
  const std::int64_t wait_began_ns = now_ns();
  bool is_first = false;
  const auto has_come = [&] {
    const bool is_there = source.has_item() || source.exhausted();
    is_first = !is_there && evaluations->has_item();
    return is_there || is_first;
  };
  static_cast<void>(wakeup_.wait_until(deadline, has_come));
  times_.add_wait(now_ns() - wait_began_ns);
  if (!is_first || wakeup_.failure()) return false;
  cursor_.evaluate_first();
  return true;
}

// Waits until the channel has room for one more item. The program bounds the items of tied parameters and
// norms, but the report that an item is sent may come a little late. The program does not bound evaluations.
Result<bool> StageEngine::wait_for_room(SendChannel& channel, Deadline deadline) {
  const std::int64_t wait_began_ns = now_ns();
  const bool has_room = channel.wait_for_room(deadline);
  times_.add_wait(now_ns() - wait_began_ns);
  if (const auto failure = wakeup_.failure()) return located(*failure);
  return has_room;
}

// Receives the item that the program needs now. False: the deadline passed.
Result<bool> StageEngine::receive(ReceiveChannel& channel, Deadline deadline, ReceivedItem& item) {
  const std::int64_t wait_began_ns = now_ns();
  bool exhausted = false;
  const bool accepted = wakeup_.wait_until(deadline, [&] {
    if (channel.try_take(item)) return true;
    exhausted = channel.exhausted();
    return exhausted;
  });
  const std::int64_t wait_ns = now_ns() - wait_began_ns;
  times_.add_wait(wait_ns);
  channel.add_wait(wait_ns);
  if (accepted && !exhausted) {
    PD_CHECK(item.is_end || (item.minibatch == doing_.minibatch && item.microbatch == doing_.microbatch),
             "received minibatch " << item.minibatch.value() << " for " << to_string(doing_));
    return true;
  }
  // The run's failure says more than the end of this channel: it may be an abort that arrived on another
  // channel.
  if (const auto failure = wakeup_.failure()) return located(*failure);
  if (exhausted) {
    return located(
        {FailureKind::kPeerLost, channel.options().name + ": closed by the peer before it was complete"});
  }
  return false;
}

WorkItem StageEngine::hand_out(const Instruction& instruction) {
  Part& part = part_of(instruction.stage);
  VersionSlots& slots = *part.stage_part.slots;
  WorkItem work;
  work.opcode = instruction.opcode;
  work.stage = instruction.stage;
  work.minibatch = instruction.minibatch;
  work.microbatch = instruction.microbatch;
  work.read_version = instruction.version;
  const OpcodeTraits& traits = traits_of(instruction.opcode);
  PD_CHECK(!traits.travels, to_string(instruction));
  if (traits.writes_version) {
    work.read_version = slots.newest();
    work.read_slot = slots.slot_of(slots.newest());
    work.write_version = slots.newest().next();
    work.write_slot = slots.begin_update();
    PD_CHECK(work.write_version == instruction.version, to_string(instruction));
  } else if (traits.stash == Stash::kKept) {
    // A stage that does not stash keeps no version for the backward, so an update may overwrite this version.
    work.read_slot = part.stashes ? slots.acquire(instruction.version) : slot_read_by(instruction);
    part.versions.push_back({instruction.version, instruction.version});
    ++part.num_forwards;
  } else {  // its version still has a slot: it is stashed, or no UPDATE has replaced it
    work.read_slot = slot_read_by(instruction);
  }
  if (traits.stash == Stash::kReleased) {
    part.versions.at(own_index(part, instruction)).backward = instruction.version;
  }
  if (traits.needs) work.received = std::exchange(received_of(part, *traits.needs), std::nullopt);
  begin_item();
  times_.begin();
  return work;
}

std::optional<SlotIndex> StageEngine::complete(Opcode opcode, Outgoing made, std::int64_t compute_ns) {
  PD_CHECK(handed_out_ && doing_.opcode == opcode, opcode_name(opcode)
                                                       << " completed while doing " << to_string(doing_));
  const OpcodeTraits& traits = traits_of(opcode);
  std::optional<SlotIndex> freed;
  if (traits.travels) {
    if (opcode == Opcode::kSend) send(doing_, std::move(made));
  } else {
    if (is_of_evaluation(opcode) && made.fields.is_end_of_data) cursor_.end_evaluation();
    if (traits.makes) send_with_work(std::move(made));
    if (traits.stash == Stash::kKept && parts_.size() > 1 && cursor_.num_minibatches()) {
      send_end_behind_last(doing_.stage);
    }
    if (traits.stash == Stash::kReleased) freed = release_version();
    if (traits.writes_version) {
      VersionSlots& slots = *part_of(doing_.stage).stage_part.slots;
      slots.publish(slots.begin_update());
    }
    times_.end(doing_, compute_ns);
  }
  cursor_.advance();
  end_item();
  return freed;
}

// Releases the version that the current backward reads. Returns its slot if the version is free now, as
// complete() says.
std::optional<SlotIndex> StageEngine::release_version() {
  const Part& part = part_of(doing_.stage);
  if (!part.stashes) return std::nullopt;
  VersionSlots& slots = *part.stage_part.slots;
  slots.release(doing_.version);
  const bool is_read_later = doing_.version == slots.newest() || slots.num_readers(doing_.version) > 0 ||
                             is_forwarded_later(part, doing_.version);
  if (is_read_later) return std::nullopt;
  return slots.slot_of(doing_.version);
}

// Whether a forward that is not handed out yet reads the version. Forwards of a later run that continues this
// run count too.
bool StageEngine::is_forwarded_later(const Part& part, WeightVersion version) const {
  const std::int64_t number = part.rounds.own_number(part.replica, part.num_forwards);
  return version >= part.rule.oldest_from(number);
}

void StageEngine::begin_evaluation(MinibatchId boundary) {
  PD_CHECK(!handed_out_ || keeps_stash(doing_.opcode), to_string(doing_));
  cursor_.begin_evaluation(boundary);
}

void StageEngine::evaluate_first() {
  PD_CHECK(handed_out_ && keeps_stash(doing_.opcode) && cursor_.may_evaluate_first(), to_string(doing_));
  take_back_forward();
  cursor_.evaluate_first();
}

// Returns the engine to its state before the FORWARD was handed out.
void StageEngine::take_back_forward() {
  Part& part = part_of(doing_.stage);
  if (part.stashes) part.stage_part.slots->release(doing_.version);
  part.versions.pop_back();
  --part.num_forwards;
  end_item();
}

void StageEngine::end_of_data(std::int64_t num_minibatches, std::uint8_t events) {
  PD_CHECK(handed_out_ && keeps_stash(doing_.opcode) && num_minibatches <= doing_.minibatch.value() &&
               cursor_.may_set_num_minibatches(num_minibatches),
           num_minibatches << " minibatches at " << to_string(doing_));
  const bool is_told = std::any_of(channels_.begin(), channels_.end(), [&](const EdgeChannel& channel) {
    return channel.receives != nullptr && channel.edge.kind == EdgeKind::kActivation &&
           channel.edge.to.stage == doing_.stage;
  });
  const Part& part = part_of(doing_.stage);
  PD_CHECK(part.rounds.is_first_of_minibatch(doing_.microbatch) && !is_told, to_string(doing_));
  take_back_forward();
  learn_end(num_minibatches, events);
}

void StageEngine::learn_end(std::int64_t num_minibatches, std::uint8_t events) {
  cursor_.set_num_minibatches(num_minibatches);
  end_events_ = events;
  for (const Part& part : parts_) send_end_behind_last(part.stage_part.stage);
}

// Tells the stage downstream that the data have ended, if this stage has handed out its last forward. Other
// stages of the worker may still have forwards to do.
void StageEngine::send_end_behind_last(StageIndex stage) {
  const Part& part = part_of(stage);
  const std::int64_t num_minibatches = *cursor_.num_minibatches();
  if (part.num_forwards < part.rounds.num_own(part.replica, num_minibatches)) return;
  for (const EdgeChannel& channel : channels_) {
    if (channel.edge.kind != EdgeKind::kActivation || channel.sends == nullptr) continue;
    if (channel.edge.from.stage == stage) channel.sends->send_end(num_minibatches, end_events_);
  }
}

// Sends the item that the work has made. The item's SEND comes right after the work in the program.
void StageEngine::send_with_work(Outgoing made) {
  const std::optional<Instruction> next = cursor_.following();
  if (!next || next->opcode != Opcode::kSend || !goes_with_work(next->edge.kind)) return;
  send(*next, std::move(made));
  cursor_.advance();
}

void StageEngine::send(const Instruction& instruction, Outgoing made) {
  SendChannel* const target = target_of(instruction);
  if (target == nullptr) return;
  if (std::ranges::find(sending_, target) == sending_.end()) sending_.push_back(target);
  target->send(instruction.minibatch, instruction.microbatch, made.fields, made.tensors,
               std::move(made.ready), std::move(made.keep_alive));
}

std::string StageEngine::position() const {
  return "stage " + std::to_string(doing_.stage.value()) + " at minibatch " +
         std::to_string(doing_.minibatch.value()) + " (" + describe(doing_) + ")";
}

Failure StageEngine::located(const Failure& failure) const {
  if (failure.kind == FailureKind::kAborted) return failure;  // the peer's message has the peer's position
  return {failure.kind, position() + ": " + failure.message};
}

}  // namespace pipedream
