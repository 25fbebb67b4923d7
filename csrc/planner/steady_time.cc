#include "planner/steady_time.h"

#include <algorithm>
#include <cstddef>
#include <deque>
#include <functional>
#include <limits>
#include <map>
#include <numeric>
#include <optional>
#include <queue>
#include <string>
#include <tuple>
#include <utility>

#include "base/failure.h"
#include "planner/lanes.h"
#include "schedule/transfers.h"

namespace pipedream {
namespace {

enum class StepKind : std::uint8_t { kWork, kUpdate, kSend, kRecv };

struct Step {
  StepKind kind = StepKind::kWork;
  std::uint32_t lane = 0;      // of kSend and kRecv
  std::int64_t minibatch = 0;  // of an update the first of its round
  double work_ms = 0;
  std::size_t waking = 0;  // of work: which of the worker's
};

// What a kind of a stage's work pays after waits.
struct Waking {
  StageIndex stage{0};
  Opcode opcode = Opcode::kForward;
  std::vector<double> costs_ms = {};
  std::optional<double> waited_then_ms = std::nullopt;  // when the last such item began
};

struct RoundEnd {
  std::int64_t minibatch = 0;
  double end_ms = 0;
};

struct Worker {
  std::vector<Step> steps = {};
  std::size_t position = 0;
  double now_ms = 0;
  std::vector<RoundEnd> updates = {};  // ascending; of a round the last of the worker's stages
  std::int64_t num_started = 0;        // minibatches, counted through all replicas, before the first update
  double waited_ms = 0;
  std::vector<Waking> wakings = {};
  // Where cores are shared: of the work at hand, at speed 1.
  std::optional<double> left_ms = std::nullopt;

  [[nodiscard]] bool is_done() const { return position == steps.size(); }
};

LaneKind lane_kind_of(const Edge& edge) {
  if (edge.kind == EdgeKind::kPush) return LaneKind::kPush;
  return edge.kind == EdgeKind::kPull ? LaneKind::kPull : LaneKind::kBoundary;
}

LaneChunks chunks_of(const Edge& edge, const StageDurations& stage) {
  const bool is_push = edge.kind == EdgeKind::kPush;
  if (!is_push && edge.kind != EdgeKind::kPull) return {};
  if (stage.num_chunks == 1 && stage.push_leads_ms.empty()) return {};
  LaneChunks chunks;
  if (!is_push && stage.updates_whole) return {};
  chunks.number = stage.num_chunks;
  chunks.update_ms = stage.updates_whole ? 0 : stage.update_ms / stage.num_chunks;
  if (is_push && !stage.push_leads_ms.empty()) {
    const auto owner = static_cast<std::size_t>(edge.to.replica.value());
    std::tie(chunks.first_lead_ms, chunks.last_lead_ms) = stage.push_leads_ms.at(owner);
  }
  return chunks;
}

double work_ms_of(const Instruction& step, const StageDurations& stage) {
  const bool is_first = step.microbatch.value() == 0;
  switch (step.opcode) {
    case Opcode::kForward:
      return is_first ? stage.forward_ms : stage.later_forward_ms;
    case Opcode::kRecompute:
      return stage.recompute_ms;
    case Opcode::kBackward:
      return is_first ? stage.backward_ms : stage.later_backward_ms;
    case Opcode::kUpdate:
      return stage.update_ms;
    case Opcode::kSend:
    case Opcode::kRecv:
      break;
  }
  return 0;  // they keep the link, not the worker
}

double waking_ms_of(Opcode opcode, const WakingDurations& waking) {
  switch (opcode) {
    case Opcode::kForward:
      return waking.forward_ms;
    case Opcode::kBackward:
      return waking.backward_ms;
    case Opcode::kUpdate:
      return waking.update_ms;
    case Opcode::kRecompute:
    case Opcode::kSend:
    case Opcode::kRecv:
      break;
  }
  return 0;  // a recomputation comes right before its backward
}

class Replay {
 public:
  Replay(const ScheduleOptions& options, std::int64_t num_minibatches,
         const std::vector<StageDurations>& stages, const std::vector<BoundaryDurations>& boundaries,
         const std::vector<double>& waking_after_ms, bool one_link)
      : placement_(placement_of(options)),
        stages_(stages),
        boundaries_(boundaries),
        workers_(static_cast<std::size_t>(num_workers(options))),
        network_(workers_.size()),
        waking_after_ms_(waking_after_ms),
        one_link_(one_link) {
    for (std::size_t rank = 0; rank < workers_.size(); ++rank) {
      prepare(workers_[rank], make_program(options, Rank(static_cast<std::int64_t>(rank)), num_minibatches));
    }
  }

  double run(const std::optional<SharedCores>& shared) {
    if (shared) {
      pass_through(*shared);
    } else {
      follow_items();
    }
    return steady().value_or(makespan_ms() / static_cast<double>(num_minibatches_));
  }

 private:
  void follow_items() {
    std::deque<std::size_t> ready(workers_.size());
    std::iota(ready.begin(), ready.end(), std::size_t{0});
    while (!ready.empty() || !about_to_send_.empty()) {
      if (!ready.empty()) {
        const std::size_t rank = ready.front();
        ready.pop_front();
        advance(rank, ready, false);
      } else {  // all others send later, or wait for what is sent later
        const std::size_t rank = about_to_send_.top().second;
        about_to_send_.pop();
        advance(rank, ready, true);
      }
    }
    if (!are_done()) throw UserError("the lists deadlock");
  }

  [[nodiscard]] bool are_done() const {
    return std::ranges::all_of(workers_, [](const Worker& worker) { return worker.is_done(); });
  }

  // In the order of time, as who is at work now says how fast all are.
  void pass_through(const SharedCores& shared) {
    double now_ms = 0;
    while (!are_done()) {
      bool has_begun = true;
      while (has_begun) {  // what one sends another may be waiting for
        has_begun = false;
        for (Worker& worker : workers_) has_begun = begin_work(worker, now_ms) || has_begun;
      }
      if (!pass_time(shared, now_ms) && !are_done()) throw UserError("the lists deadlock");
    }
  }

  // Does what takes no time until there is work or a wait; whether anything was done.
  bool begin_work(Worker& worker, double now_ms) {
    const std::size_t before = worker.position;
    for (; !worker.left_ms && !worker.is_done(); ++worker.position) {
      const Step& step = worker.steps[worker.position];
      if (step.kind == StepKind::kSend) {
        send(worker, now_ms);
      } else if (step.kind == StepKind::kRecv) {
        Lane& lane = lanes_[step.lane];
        if (!lane.has_next() || lane.next_ms() > now_ms) break;
        network_.receive(lane, lane_before(worker), worker.now_ms);
        worker.waited_ms += now_ms - worker.now_ms;
      } else {
        worker.left_ms = work_ms(worker, step);
        break;
      }
      worker.now_ms = now_ms;
    }
    return worker.position > before;
  }

  // Until someone is done with their work, or something arrives that someone waits for; false: neither will
  // be.
  bool pass_time(const SharedCores& shared, double& now_ms) {
    const std::vector<std::pair<std::size_t, double>> speeds = speeds_now(shared);
    double passing_ms = std::numeric_limits<double>::infinity();
    for (const auto& [rank, speed] : speeds)
      passing_ms = std::min(passing_ms, *workers_[rank].left_ms / speed);
    for (const Worker& worker : workers_) {
      if (worker.left_ms || worker.is_done()) continue;
      const Lane& lane = lanes_[worker.steps[worker.position].lane];  // for which it waits
      if (lane.has_next()) passing_ms = std::min(passing_ms, lane.next_ms() - now_ms);
    }
    if (passing_ms == std::numeric_limits<double>::infinity()) return false;
    now_ms += passing_ms;
    for (const auto& [rank, speed] : speeds) {
      Worker& worker = workers_[rank];
      if (*worker.left_ms / speed > passing_ms) {
        *worker.left_ms -= passing_ms * speed;
        continue;
      }
      worker.left_ms.reset();
      worker.now_ms = now_ms;
      const Step& step = worker.steps[worker.position++];
      if (step.kind == StepKind::kUpdate) add_update(worker, step.minibatch);
    }
    return true;
  }

  // Of the workers that are at work.
  [[nodiscard]] std::vector<std::pair<std::size_t, double>> speeds_now(const SharedCores& shared) const {
    std::vector<std::size_t> at_work((workers_.size() + shared.num_workers - 1) / shared.num_workers);
    for (std::size_t rank = 0; rank < workers_.size(); ++rank) {
      at_work[rank / shared.num_workers] += workers_[rank].left_ms ? 1 : 0;
    }
    std::vector<std::pair<std::size_t, double>> speeds;
    for (std::size_t rank = 0; rank < workers_.size(); ++rank) {
      const std::size_t beside = std::min(at_work[rank / shared.num_workers], shared.speeds.size());
      if (workers_[rank].left_ms) speeds.emplace_back(rank, shared.speeds[beside - 1]);
    }
    return speeds;
  }

  // Of an item that begins now.
  [[nodiscard]] double work_ms(Worker& worker, const Step& step) const {
    if (waking_after_ms_.empty()) return step.work_ms;
    Waking& waking = worker.wakings[step.waking];
    const double since_ms = worker.waited_ms - waking.waited_then_ms.value_or(worker.waited_ms);
    waking.waited_then_ms = worker.waited_ms;
    double waking_ms = 0;
    for (std::size_t index = 0; index < waking.costs_ms.size(); ++index) {
      const double after_ms = waking_after_ms_[index];
      waking_ms += waking.costs_ms[index] * (after_ms > 0 ? std::min(1.0, since_ms / after_ms) : 0.0);
    }
    return step.work_ms + waking_ms;
  }

  void prepare(Worker& worker, const std::vector<Instruction>& program) {
    worker.steps.reserve(program.size());
    bool is_before_update = true;
    for (const Instruction& made : program) {
      num_minibatches_ = std::max(num_minibatches_, made.minibatch.value() + 1);
      if (travels(made.opcode)) {
        const StepKind kind = made.opcode == Opcode::kSend ? StepKind::kSend : StepKind::kRecv;
        worker.steps.push_back({kind, lane_of(made.edge), made.minibatch.value(), 0, 0});
        continue;
      }
      const bool is_update = made.opcode == Opcode::kUpdate;
      is_before_update = is_before_update && !is_update;
      if (is_before_update) worker.num_started = std::max(worker.num_started, made.minibatch.value() + 1);
      worker.steps.push_back({is_update ? StepKind::kUpdate : StepKind::kWork, 0, made.minibatch.value(),
                              work_ms_of(made, stages_[static_cast<std::size_t>(made.stage.value())]),
                              waking_of(worker, made)});
    }
  }

  [[nodiscard]] std::size_t waking_of(Worker& worker, const Instruction& made) const {
    const auto found = std::ranges::find_if(worker.wakings, [&](const Waking& waking) {
      return waking.stage == made.stage && waking.opcode == made.opcode;
    });
    const auto index = static_cast<std::size_t>(found - worker.wakings.begin());
    if (found == worker.wakings.end()) {
      const StageDurations& stage = stages_[static_cast<std::size_t>(made.stage.value())];
      std::vector<double>& costs_ms = worker.wakings.emplace_back(Waking{made.stage, made.opcode}).costs_ms;
      for (const WakingDurations& waking : stage.wakings)
        costs_ms.push_back(waking_ms_of(made.opcode, waking));
    }
    return index;
  }

  // Of the step before the one at hand, if it is of one.
  [[nodiscard]] const Lane* lane_before(const Worker& worker) const {
    if (worker.position == 0) return nullptr;
    const Step& before = worker.steps[worker.position - 1];
    const bool travels = before.kind == StepKind::kSend || before.kind == StepKind::kRecv;
    return travels ? &lanes_[before.lane] : nullptr;
  }

  std::uint32_t lane_of(const Edge& edge) {
    const auto [found, is_new] = lane_by_edge_.try_emplace(edge, static_cast<std::uint32_t>(lanes_.size()));
    if (!is_new) return found->second;
    const auto rank_at = [&](const StageReplica& end) {
      return static_cast<std::size_t>(placement_.rank_of(end.stage, end.replica).value());
    };
    Lane lane;
    lane.kind = lane_kind_of(edge);
    lane.sender = rank_at(edge.from);
    lane.receiver = rank_at(edge.to);
    // Only the sender uses this direction of the link, and does its list in order: so first sent is first
    // carried. What replicas exchange leaves by one line, whoever it is for.
    if (lane.sender != lane.receiver) {
      const std::size_t to = one_link_ || lane.kind != LaneKind::kBoundary ? kNoLine : lane.receiver;
      const auto [line, is_new_line] = lines_.try_emplace({lane.sender, to}, 0);
      if (is_new_line) line->second = network_.add_line();
      lane.line = line->second;
      lane.queues_in = one_link_;
    }
    if (edge.from.stage == edge.to.stage) {
      const StageDurations& stage = stages_[static_cast<std::size_t>(edge.from.stage.value())];
      if (edge.kind == EdgeKind::kPush) lane.transfer_ms = stage.push_ms;
      if (edge.kind == EdgeKind::kPull) lane.transfer_ms = stage.pull_ms;
      lane.latency_ms = stage.sync_latency_ms;
      lane.chunks = chunks_of(edge, stage);
    } else {
      const StageIndex above = std::min(edge.from.stage, edge.to.stage);
      const BoundaryDurations& boundary = boundaries_[static_cast<std::size_t>(above.value())];
      if (edge.kind == EdgeKind::kActivation) lane.transfer_ms = boundary.activation_ms;
      if (edge.kind == EdgeKind::kGradient) lane.transfer_ms = boundary.gradient_ms;
      lane.latency_ms = boundary.latency_ms;
    }
    lanes_.push_back(std::move(lane));
    return found->second;
  }

  // Does the step at hand, and with one link those after it that send too: all but the last's own advance.
  void send(Worker& worker, double now_ms) {
    sending_.clear();
    for (std::size_t position = worker.position;; ++position) {
      sending_.push_back(&lanes_[worker.steps[position].lane]);
      worker.position = position;
      const bool sends_more = one_link_ && position + 1 < worker.steps.size() &&
                              worker.steps[position + 1].kind == StepKind::kSend;
      if (!sends_more) break;
    }
    network_.send(sending_, now_ms);
  }

  // Does all that the worker can do now, and adds those that waited for it to the ready ones.
  void advance(std::size_t rank, std::deque<std::size_t>& ready, bool is_first_to_send) {
    Worker& worker = workers_[rank];
    for (; !worker.is_done(); ++worker.position) {
      const Step& step = worker.steps[worker.position];
      if (step.kind == StepKind::kSend) {
        if (one_link_ && !is_first_to_send) {
          about_to_send_.emplace(worker.now_ms, rank);
          return;
        }
        is_first_to_send = false;
        send(worker, worker.now_ms);
        for (Lane* const lane : sending_) {
          if (!std::exchange(lane->is_awaited, false)) continue;
          ready.push_back(lane->receiver);
        }
      } else if (step.kind == StepKind::kRecv) {
        Lane& lane = lanes_[step.lane];
        if (!lane.has_next()) {
          lane.is_awaited = true;
          return;
        }
        const double begin_ms = std::max(worker.now_ms, lane.next_ms());
        network_.receive(lane, lane_before(worker), worker.now_ms);
        worker.waited_ms += begin_ms - worker.now_ms;
        worker.now_ms = begin_ms;
      } else {
        worker.now_ms += work_ms(worker, step);
        if (step.kind == StepKind::kUpdate) add_update(worker, step.minibatch);
      }
    }
  }

  static void add_update(Worker& worker, std::int64_t minibatch) {
    if (worker.updates.empty() || worker.updates.back().minibatch != minibatch) {
      worker.updates.push_back({minibatch, worker.now_ms});
    } else {
      worker.updates.back().end_ms = worker.now_ms;
    }
  }

  [[nodiscard]] std::optional<double> steady() const {
    std::int64_t skipped = -1;
    std::int64_t together = 1;  // minibatches after which all stages begin a round
    for (const Worker& worker : workers_) {
      if (worker.updates.empty()) return std::nullopt;
      skipped = std::max(skipped, worker.num_started - 1);
      if (worker.updates.size() > 1) {
        together = std::lcm(together, worker.updates[1].minibatch - worker.updates[0].minibatch);
      }
    }
    if (skipped < 0) return std::nullopt;
    const std::int64_t first = (skipped + together - 1) / together * together;
    const std::int64_t beyond = num_minibatches_ - 1 - skipped;
    if (beyond <= first) return std::nullopt;
    const std::int64_t last = beyond / together * together;
    if (last <= first) return std::nullopt;
    double first_ms = 0;
    double last_ms = 0;
    for (const Worker& worker : workers_) {
      const std::optional<double> begin_ms = end_of(worker, first);
      const std::optional<double> end_ms = end_of(worker, last);
      if (!begin_ms || !end_ms) return std::nullopt;
      first_ms = std::max(first_ms, *begin_ms);
      last_ms = std::max(last_ms, *end_ms);
    }
    return (last_ms - first_ms) / static_cast<double>(last - first);
  }

  static std::optional<double> end_of(const Worker& worker, std::int64_t minibatch) {
    const auto found = std::lower_bound(
        worker.updates.begin(), worker.updates.end(), minibatch,
        [](const RoundEnd& update, std::int64_t wanted) { return update.minibatch < wanted; });
    if (found == worker.updates.end() || found->minibatch != minibatch) return std::nullopt;
    return found->end_ms;
  }

  [[nodiscard]] double makespan_ms() const {
    double latest_ms = 0;
    for (const Worker& worker : workers_) latest_ms = std::max(latest_ms, worker.now_ms);
    return latest_ms;
  }

  Placement placement_;
  const std::vector<StageDurations>& stages_;
  const std::vector<BoundaryDurations>& boundaries_;
  std::vector<Worker> workers_;
  std::vector<Lane> lanes_;
  std::map<Edge, std::uint32_t> lane_by_edge_;
  Network network_;
  std::vector<Lane*> sending_;                                        // what was sent last
  std::map<std::pair<std::size_t, std::size_t>, std::size_t> lines_;  // (sender, receiver or kNoLine)
  // Who is next to send, and when, where that is in the order of time.
  using Sending = std::pair<double, std::size_t>;
  std::priority_queue<Sending, std::vector<Sending>, std::greater<>> about_to_send_;
  const std::vector<double>& waking_after_ms_;
  bool one_link_ = false;
  std::int64_t num_minibatches_ = 0;
};

}  // namespace

double steady_ms(const ScheduleOptions& options, std::int64_t num_minibatches,
                 const std::vector<StageDurations>& stages, const std::vector<BoundaryDurations>& boundaries,
                 const std::optional<SharedCores>& shared, const std::vector<double>& waking_after_ms,
                 bool one_link) {
  check_durations(options, stages, boundaries, waking_after_ms.size());
  if (options.asynchronous || placement_of(options).num_spares() > 0) {
    throw UserError("asynchronous shards and spares have no steady_ms(): simulate them");
  }
  if (shared && (shared->num_workers == 0 || shared->speeds.empty())) {
    throw UserError("machines have " + std::to_string(shared->num_workers) + " workers and " +
                    std::to_string(shared->speeds.size()) + " cores: give at least 1 of each");
  }
  return Replay(options, num_minibatches, stages, boundaries, waking_after_ms, one_link).run(shared);
}

}  // namespace pipedream
