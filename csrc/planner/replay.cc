#include "planner/replay.h"

#include <algorithm>
#include <deque>
#include <functional>
#include <limits>
#include <map>
#include <numeric>
#include <optional>
#include <queue>
#include <string>
#include <tuple>
#include <unordered_set>
#include <utility>

#include "base/check.h"
#include "base/failure.h"
#include "schedule/listed_program.h"
#include "schedule/transfers.h"

namespace pipedream {
namespace {

using Places = std::map<StageReplica, std::size_t>;  // the worker of every replica, and of every spare

// An instruction, with the values that are known before the replay.
struct Step {
  Opcode opcode = Opcode::kForward;
  std::uint32_t index = 0;  // SEND and RECV: index of the lane. Others: index in Worker::wakings
  MinibatchId minibatch;
  MicrobatchIndex microbatch;
  double work_ms = 0;
};

// The extra time that instructions of one stage and one opcode take after waits (WakingDurations).
struct Waking {
  StageIndex stage{0};
  Opcode opcode = Opcode::kForward;
  std::vector<double> costs_ms = {};
  // Worker::waited_ms when the last instruction of this kind began.
  std::optional<double> waited_then_ms = std::nullopt;
};

struct Worker {
  std::vector<Step> steps = {};
  std::vector<TimedStep> done = {};
  double waited_ms = 0;  // total of all waits so far
  std::vector<Waking> wakings = {};
  std::map<Opcode, std::vector<double>> decks = {};
  // How many milliseconds of the current work are left at speed 1. Used only if workers slow each other.
  std::optional<double> left_ms = std::nullopt;

  [[nodiscard]] bool is_done() const { return done.size() == steps.size(); }
  [[nodiscard]] const Step& next() const { return steps[done.size()]; }
  [[nodiscard]] double now_ms() const { return done.empty() ? 0 : done.back().end_ms; }
  void finish(double begin_ms, double end_ms) {
    done.push_back({next().opcode, next().minibatch.value(), begin_ms, end_ms});
  }
};

LaneChunks chunks_of(const Edge& edge, const StageDurations& stage, std::size_t owner) {
  const bool is_push = edge.kind == EdgeKind::kPush;
  if (stage.num_chunks == 1 && stage.push_leads_ms.empty()) return {};
  if (!is_push && stage.updates_whole) return {};
  LaneChunks chunks;
  chunks.number = stage.num_chunks;
  chunks.update_ms = stage.updates_whole ? 0 : stage.update_ms / stage.num_chunks;
  if (is_push && !stage.push_leads_ms.empty()) {
    std::tie(chunks.first_lead_ms, chunks.last_lead_ms) = stage.push_leads_ms[owner];
  }
  return chunks;
}

double exchange_ms(EdgeKind kind, const StageDurations& stage, ReplicaIndex owner) {
  if (!is_exchange(kind)) return 0;  // a gradient norm: it takes only the link's latency
  const bool is_push = kind == EdgeKind::kPush;
  if (stage.is_spare(owner)) return is_push ? stage.spare_push_ms : stage.spare_pull_ms;
  return is_push ? stage.push_ms : stage.pull_ms;
}

double work_ms_of(const Instruction& step, const StageDurations& stage) {
  const OpcodeTraits& traits = traits_of(step.opcode);
  // A validation minibatch gets the duration of a first microbatch, because the lists do not say how large it
  // is.
  const bool is_first = step.microbatch.value() == 0 || traits.scope == Scope::kBoundary;
  switch (traits.duration) {
    case Duration::kNone:
      return 0;
    case Duration::kForward:
      return is_first ? stage.forward_ms : stage.later_forward_ms;
    case Duration::kRecompute:
      return stage.recompute_ms;
    case Duration::kBackward:
      return is_first ? stage.backward_ms : stage.later_backward_ms;
    case Duration::kUpdate:
      return stage.is_spare(step.replica) ? stage.spare_update_ms : stage.update_ms;
  }
  PD_CHECK(false, to_string(step));
}

double waking_ms_of(Opcode opcode, const WakingDurations& waking) {
  switch (traits_of(opcode).duration) {
    case Duration::kForward:
      return waking.forward_ms;
    case Duration::kBackward:
      return waking.backward_ms;
    case Duration::kUpdate:
      return waking.update_ms;
    case Duration::kRecompute:  // it comes right before its backward, which has the extra time
    case Duration::kNone:
      return 0;
  }
  PD_CHECK(false, opcode_name(opcode));
}

std::string describe(const Instruction& instruction) {
  std::string text = opcode_name(instruction.opcode);
  text += ' ' + (travels(instruction.opcode) ? to_string(instruction.edge)
                                             : to_string({instruction.stage, instruction.replica}));
  text += " minibatch " + std::to_string(instruction.minibatch.value());
  if (writes_version(instruction.opcode)) return text;
  return text + " microbatch " + std::to_string(instruction.microbatch.value());
}

Places places_of(const std::vector<std::vector<Instruction>>& programs) {
  Places places;
  for (std::size_t worker = 0; worker < programs.size(); ++worker) {
    for (const Instruction& instruction : programs[worker]) {
      const StageReplica place{instruction.stage, instruction.replica};
      const auto [known, is_new] = places.try_emplace(place, worker);
      if (known->second == worker) continue;
      throw UserError(to_string(place) + " is at worker " + std::to_string(known->second) +
                      " and at worker " + std::to_string(worker));
    }
  }
  const std::int64_t last = places.empty() ? -1 : places.rbegin()->first.stage.value();
  for (StageIndex stage; stage.value() < last; stage = stage.next()) {
    if (places.contains({stage, ReplicaIndex(0)})) continue;
    throw UserError("stage " + std::to_string(stage.value()) + " has no instructions, but stage " +
                    std::to_string(last) + " has");
  }
  return places;
}

Places places_of(const Placement& placement) {
  Places places;
  for (const Place& place : placement.places()) {
    places.try_emplace({place.stage, place.replica}, static_cast<std::size_t>(place.rank.value()));
  }
  return places;
}

struct DoneHash {
  std::size_t operator()(const Instruction& done) const {
    std::size_t hash = EdgeHash{}(done.edge);
    for (const std::int64_t part : {static_cast<std::int64_t>(done.opcode), done.stage.value(),
                                    done.replica.value(), done.minibatch.value(), done.microbatch.value()}) {
      hash = hash * 0x9E3779B97F4A7C15ULL + static_cast<std::size_t>(part);
    }
    return hash;
  }
};

// Refuses a list that has an instruction twice, or a recompute or backward before its forward. It is enough
// to check each list alone, because all instructions of a replica are in one list.
void check_list(const std::vector<Instruction>& program) {
  std::unordered_set<Instruction, DoneHash> seen;
  for (const Instruction& instruction : program) {
    Instruction done = instruction;
    done.version = {};
    if (const auto follows = traits_of(instruction.opcode).follows) {
      done.opcode = *follows;
      if (!seen.contains(done)) {
        throw UserError(describe(instruction) + " comes before its " + traits_of(*follows).meaning);
      }
      done.opcode = instruction.opcode;
    }
    if (!seen.insert(done).second) throw UserError(describe(instruction) + " is in the lists twice");
  }
}

// Replays the lists. A worker's times depend only on what it receives, so workers may be visited in any
// order. There are two exceptions: senders that share a receiver's line must send in the order of time, and
// workers that slow each other (SharedCores) must compute in that order.
class Replay {
 public:
  Replay(Places places, std::size_t num_workers, const Timing& timing, std::vector<Transfer>* transfers)
      : places_(std::move(places)), timing_(timing), workers_(num_workers), network_(num_workers, transfers) {
    check_timing(timing,
                 places_.empty() ? 0 : static_cast<std::size_t>(places_.rbegin()->first.stage.value() + 1));
  }

  void add(std::size_t index, const std::vector<Instruction>& program) {
    Worker& worker = workers_[index];
    worker.steps.reserve(program.size());
    worker.done.reserve(program.size());
    for (const Instruction& made : program) {
      Step step{made.opcode, 0, made.minibatch, made.microbatch, 0};
      if (travels(made.opcode)) {
        step.index = lane_of(made.edge);
        if (made.opcode == Opcode::kRecv) lanes_[step.index].is_received = true;
      } else {
        step.work_ms = work_ms_of(made, stage_at(made.stage));
        if (step.work_ms > 0) step.work_ms *= draw(worker, index, made.opcode);
        if (!timing_.waking_after_ms.empty()) step.index = waking_of(worker, made);
      }
      worker.steps.push_back(step);
    }
  }

  Timeline run() {
    find_answers();
    if (timing_.shared) {
      pass_through(*timing_.shared);
    } else {
      follow_items();
    }
    Timeline timeline;
    for (Worker& worker : workers_) timeline.push_back(std::move(worker.done));
    return timeline;
  }

 private:
  struct ReplayedLane : Lane {
    bool is_received = false;  // whether a list receives from the lane
  };

  [[nodiscard]] const StageDurations& stage_at(StageIndex stage) const {
    return timing_.stages[static_cast<std::size_t>(stage.value())];
  }

  [[nodiscard]] std::size_t worker_at(const StageReplica& place) const {
    const auto found = places_.find(place);
    if (found == places_.end())
      throw UserError(to_string(place) + " has no instructions, but items travel there");
    return found->second;
  }

  // Draws the factor by which the worker's next instruction with this opcode takes longer than the mean.
  double draw(Worker& worker, std::size_t index, Opcode opcode) const {
    const auto found = timing_.spread.factors.find(opcode);
    if (found == timing_.spread.factors.end() || found->second.empty()) return 1;
    std::vector<double>& deck = worker.decks[opcode];
    if (deck.empty()) deck = timing_.spread.shuffled(index, opcode);
    const double factor = deck.back();
    deck.pop_back();
    return factor;
  }

  [[nodiscard]] std::uint32_t waking_of(Worker& worker, const Instruction& made) const {
    const auto found = std::ranges::find_if(worker.wakings, [&](const Waking& waking) {
      return waking.stage == made.stage && waking.opcode == made.opcode;
    });
    const auto index = static_cast<std::uint32_t>(found - worker.wakings.begin());
    if (found == worker.wakings.end()) {
      std::vector<double>& costs_ms = worker.wakings.emplace_back(Waking{made.stage, made.opcode}).costs_ms;
      for (const WakingDurations& waking : stage_at(made.stage).wakings) {
        costs_ms.push_back(waking_ms_of(made.opcode, waking));
      }
    }
    return index;
  }

  std::uint32_t lane_of(const Edge& edge) {
    const auto [found, is_new] = lane_by_edge_.try_emplace(edge, static_cast<std::uint32_t>(lanes_.size()));
    if (!is_new) return found->second;
    ReplayedLane lane;
    lane.edge = edge;
    lane.sender = worker_at(edge.from);
    lane.receiver = worker_at(edge.to);
    // Only the sender uses its line, and it does its list in order. So the line carries items in the order in
    // which they are sent. Answers to pushes are an exception (find_answers()).
    if (lane.sender != lane.receiver) {
      const bool is_shared = timing_.one_link || is_exchange(edge.kind);
      const auto [line, is_new_line] =
          lines_.try_emplace({lane.sender, is_shared ? kNoLine : lane.receiver}, 0);
      if (is_new_line) line->second = network_.add_line();
      lane.line = line->second;
      lane.queues_in = timing_.one_link;
    }
    if (edge.from.stage == edge.to.stage) {
      take_exchange_times(lane);
    } else {
      const StageIndex above = std::min(edge.from.stage, edge.to.stage);
      const BoundaryDurations& boundary = timing_.boundaries[static_cast<std::size_t>(above.value())];
      // Tied parameters and norms take only the link's latency, because they are small compared with
      // activations and gradients.
      if (edge.kind == EdgeKind::kActivation || edge.kind == EdgeKind::kEvaluation)
        lane.transfer_ms = boundary.activation_ms;
      if (edge.kind == EdgeKind::kGradient) lane.transfer_ms = boundary.gradient_ms;
      lane.latency_ms = boundary.latency_ms;
    }
    lanes_.push_back(std::move(lane));
    return found->second;
  }

  // Sets the times of a lane between replicas of one stage.
  void take_exchange_times(Lane& lane) const {
    const Edge& edge = lane.edge;
    const StageDurations& stage = stage_at(edge.from.stage);
    const ReplicaIndex owner = edge.kind == EdgeKind::kPush ? edge.to.replica : edge.from.replica;
    lane.transfer_ms = exchange_ms(edge.kind, stage, owner);
    lane.latency_ms = stage.sync_latency_ms;
    if (!is_exchange(edge.kind)) return;
    const auto owner_index = static_cast<std::size_t>(owner.value());
    if (!stage.push_leads_ms.empty() && owner_index >= stage.push_leads_ms.size()) {
      throw UserError("stage " + std::to_string(edge.from.stage.value()) + " has " +
                      std::to_string(stage.push_leads_ms.size()) + " push leads and an owner " +
                      std::to_string(owner.value()) + ": give one for each");
    }
    lane.chunks = chunks_of(edge, stage, owner_index);
  }

  // Finds the pushes to asynchronous shards, which no list receives, and the lanes of their answers. An
  // answer uses the line by which its receiver pushes, not its sender's line. The load of each line is still
  // right, because each line carries as many answers as pushes.
  void find_answers() {
    for (const auto& [edge, index] : lane_by_edge_) {
      ReplayedLane& push = lanes_[index];
      if (edge.kind != EdgeKind::kPush || push.is_received) continue;
      const auto pull = lane_by_edge_.find({EdgeKind::kPull, edge.to, edge.from});
      if (pull == lane_by_edge_.end()) continue;
      push.answer = pull->second;
      lanes_[pull->second].line = push.line;
      lanes_[pull->second].queues_in = false;
    }
  }

  void follow_items() {
    std::deque<std::size_t> ready(workers_.size());
    std::iota(ready.begin(), ready.end(), std::size_t{0});
    while (!ready.empty() || !about_to_send_.empty()) {
      if (!ready.empty()) {
        const std::size_t worker = ready.front();
        ready.pop_front();
        advance(worker, ready, false);
      } else {  // all other workers send later, or wait for an item that is not sent yet
        const std::size_t worker = about_to_send_.top().second;
        about_to_send_.pop();
        advance(worker, ready, true);
      }
    }
    if (!are_done()) throw UserError(describe_deadlock());
  }

  // Does all instructions that the worker can do now. Workers that waited for its items become ready.
  // is_first_to_send: whether no other worker sends earlier. With one link a worker sends only then.
  void advance(std::size_t index, std::deque<std::size_t>& ready, bool is_first_to_send) {
    Worker& worker = workers_[index];
    while (!worker.is_done()) {
      const Step& step = worker.next();
      const double now_ms = worker.now_ms();
      if (step.opcode == Opcode::kSend) {
        if (timing_.one_link && !is_first_to_send) {
          about_to_send_.emplace(now_ms, index);
          return;
        }
        is_first_to_send = false;
        send(worker, now_ms);
        for (const SentItem& item : sending_) {
          if (std::exchange(item.lane->is_awaited, false)) ready.push_back(item.lane->receiver);
        }
      } else if (step.opcode == Opcode::kRecv) {
        Lane& lane = lanes_[step.index];
        if (!lane.has_next()) {
          lane.is_awaited = true;
          return;
        }
        receive(worker, lane, std::max(now_ms, lane.next_ms()));
      } else {
        worker.finish(now_ms, now_ms + work_ms(worker, step));
      }
    }
  }

  // Replays in the order of time, because workers that compute at the same time slow each other.
  void pass_through(const SharedCores& shared) {
    double now_ms = 0;
    std::vector<double> began_ms(workers_.size());
    while (!are_done()) {
      bool has_begun = true;
      while (has_begun) {  // another worker may wait for an item that one worker has just sent
        has_begun = false;
        for (std::size_t index = 0; index < workers_.size(); ++index) {
          has_begun = begin_work(workers_[index], now_ms, began_ms[index]) || has_begun;
        }
      }
      if (!pass_time(shared, now_ms, began_ms) && !are_done()) throw UserError(describe_deadlock());
    }
  }

  // Does the worker's transfers up to its next work or wait, and begins that work. Returns whether a transfer
  // was done.
  bool begin_work(Worker& worker, double now_ms, double& began_ms) {
    const std::size_t before = worker.done.size();
    while (!worker.left_ms && !worker.is_done()) {
      const Step& step = worker.next();
      if (step.opcode == Opcode::kSend) {
        send(worker, now_ms);
      } else if (step.opcode == Opcode::kRecv) {
        Lane& lane = lanes_[step.index];
        if (!lane.has_next() || lane.next_ms() > now_ms) break;
        receive(worker, lane, now_ms);
      } else {
        began_ms = now_ms;
        worker.left_ms = work_ms(worker, step);
      }
    }
    return worker.done.size() > before;
  }

  // Lets time pass until a worker finishes its work, or an item arrives for which a worker waits. Returns
  // false if neither will ever happen.
  bool pass_time(const SharedCores& shared, double& now_ms, const std::vector<double>& began_ms) {
    const std::vector<std::pair<std::size_t, double>> speeds = speeds_now(shared);
    double passing_ms = std::numeric_limits<double>::infinity();
    for (const auto& [index, speed] : speeds)
      passing_ms = std::min(passing_ms, *workers_[index].left_ms / speed);
    for (const Worker& worker : workers_) {
      if (worker.left_ms || worker.is_done()) continue;
      const Lane& lane = lanes_[worker.next().index];  // the worker waits for its next item
      if (lane.has_next()) passing_ms = std::min(passing_ms, lane.next_ms() - now_ms);
    }
    if (passing_ms == std::numeric_limits<double>::infinity()) return false;
    now_ms += passing_ms;
    for (const auto& [index, speed] : speeds) {
      Worker& worker = workers_[index];
      if (*worker.left_ms / speed > passing_ms) {
        *worker.left_ms -= passing_ms * speed;
        continue;
      }
      worker.left_ms.reset();
      worker.finish(began_ms[index], now_ms);
    }
    return true;
  }

  // Returns the workers that compute now, with their speeds.
  [[nodiscard]] std::vector<std::pair<std::size_t, double>> speeds_now(const SharedCores& shared) const {
    std::vector<std::size_t> at_work((workers_.size() + shared.num_workers - 1) / shared.num_workers);
    for (std::size_t index = 0; index < workers_.size(); ++index) {
      at_work[index / shared.num_workers] += workers_[index].left_ms ? 1 : 0;
    }
    std::vector<std::pair<std::size_t, double>> speeds;
    for (std::size_t index = 0; index < workers_.size(); ++index) {
      const std::size_t beside = std::min(at_work[index / shared.num_workers], shared.speeds.size());
      if (workers_[index].left_ms) speeds.emplace_back(index, shared.speeds[beside - 1]);
    }
    return speeds;
  }

  // Returns how many milliseconds the worker's step takes if it begins now. It must be called once for each
  // step, because it also notes how long the worker waited before the step.
  [[nodiscard]] double work_ms(Worker& worker, const Step& step) const {
    if (timing_.waking_after_ms.empty()) return step.work_ms;
    Waking& waking = worker.wakings[step.index];
    const double since_ms = worker.waited_ms - waking.waited_then_ms.value_or(worker.waited_ms);
    waking.waited_then_ms = worker.waited_ms;
    double waking_ms = 0;
    for (std::size_t index = 0; index < waking.costs_ms.size(); ++index) {
      const double after_ms = timing_.waking_after_ms[index];
      waking_ms += waking.costs_ms[index] * (after_ms > 0 ? std::min(1.0, since_ms / after_ms) : 0.0);
    }
    return step.work_ms + waking_ms;
  }

  // Does the worker's next step, a RECV.
  void receive(Worker& worker, Lane& lane, double at_ms) {
    const Step* const before = worker.done.empty() ? nullptr : &worker.steps[worker.done.size() - 1];
    const bool has_lane = before != nullptr && travels(before->opcode);
    network_.receive(lane, has_lane ? &lanes_[before->index] : nullptr, worker.now_ms());
    worker.waited_ms += at_ms - worker.now_ms();
    worker.finish(at_ms, at_ms);
  }

  // Does the worker's next step, a SEND. With one link it also does the SENDs right after it.
  void send(Worker& worker, double now_ms) {
    sending_.clear();
    do {
      const Step& step = worker.next();
      sending_.push_back({&lanes_[step.index], step.minibatch, step.microbatch});
      worker.finish(now_ms, now_ms);
    } while (timing_.one_link && !worker.is_done() && worker.next().opcode == Opcode::kSend);
    network_.send(sending_, now_ms);
    for (const SentItem& item : sending_) {
      if (!item.lane->answer) continue;
      // An asynchronous shard adds the gradient that has come, and answers with its new version.
      const double update_ms = stage_at(item.lane->edge.from.stage).update_ms;
      std::vector<SentItem> answer = {{&lanes_[*item.lane->answer], item.minibatch, item.microbatch}};
      network_.send(answer, item.arrives_ms + update_ms);
    }
  }

  [[nodiscard]] bool are_done() const {
    return std::ranges::all_of(workers_, [](const Worker& worker) { return worker.is_done(); });
  }

  [[nodiscard]] std::string describe_deadlock() const {
    std::string waits;
    for (std::size_t index = 0; index < workers_.size(); ++index) {
      const Worker& worker = workers_[index];
      if (worker.is_done()) continue;
      const Step& step = worker.next();
      const Lane& lane = lanes_[step.index];
      waits += (waits.empty() ? "worker " : "; worker ") + std::to_string(index) + " at position " +
               std::to_string(worker.done.size()) + " (" + opcode_name(step.opcode) + " " +
               to_string(lane.edge) + " minibatch " + std::to_string(step.minibatch.value()) +
               " microbatch " + std::to_string(step.microbatch.value()) + ") waits for " +
               to_string(lane.edge.from) + " at worker " + std::to_string(lane.sender);
    }
    return "the lists deadlock: " + waits;
  }

  Places places_;
  const Timing& timing_;
  std::vector<Worker> workers_;
  std::vector<ReplayedLane> lanes_;
  std::map<Edge, std::uint32_t> lane_by_edge_;
  std::map<std::pair<std::size_t, std::size_t>, std::size_t> lines_;  // (sender, receiver or kNoLine)
  Network network_;
  std::vector<SentItem> sending_;  // the items of the latest send()
  // With one link: the workers that are about to send, by time.
  using Sending = std::pair<double, std::size_t>;
  std::priority_queue<Sending, std::vector<Sending>, std::greater<>> about_to_send_;
};

}  // namespace

SimulatedRun simulate(const std::vector<std::vector<Instruction>>& programs, const Timing& timing) {
  SimulatedRun simulated;
  Replay replay(places_of(programs), programs.size(), timing, &simulated.transfers);
  for (std::size_t worker = 0; worker < programs.size(); ++worker) {
    check_list(programs[worker]);
    replay.add(worker, programs[worker]);
  }
  simulated.timeline = replay.run();
  return simulated;
}

std::size_t num_stages_of(const std::vector<std::vector<Instruction>>& programs) {
  std::int64_t last = -1;
  for (const std::vector<Instruction>& program : programs) {
    for (const Instruction& instruction : program) last = std::max(last, instruction.stage.value());
  }
  return static_cast<std::size_t>(last + 1);
}

double steady_ms(const ScheduleOptions& options, std::int64_t num_minibatches, const Timing& timing) {
  const auto workers = static_cast<std::size_t>(num_workers(options));
  Replay replay(places_of(placement_of(options)), workers, timing, nullptr);
  for (std::size_t worker = 0; worker < workers; ++worker) {
    replay.add(worker, make_program(options, Rank(static_cast<std::int64_t>(worker)), num_minibatches));
  }
  const std::int64_t per_body = options.program == nullptr ? 1 : options.program->minibatches_per_body();
  return summarize(replay.run(), per_body).ms_per_minibatch();
}

}  // namespace pipedream
