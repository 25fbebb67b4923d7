#include "planner/steady_time.h"

#include <algorithm>
#include <cstddef>
#include <deque>
#include <limits>
#include <map>
#include <numeric>
#include <optional>
#include <string>
#include <utility>

#include "base/failure.h"
#include "schedule/transfers.h"

namespace pipedream {
namespace {

constexpr std::size_t kNone = static_cast<std::size_t>(-1);

enum class StepKind : std::uint8_t { kWork, kUpdate, kSend, kRecv };

struct Step {
  StepKind kind = StepKind::kWork;
  std::uint32_t lane = 0;      // of kSend and kRecv
  std::int64_t minibatch = 0;  // of an update the first of its round
  double work_ms = 0;
};

// An edge, on which items arrive in the order in which they are sent.
struct Lane {
  std::size_t receiver = 0;
  std::size_t link = kNone;  // none between stages of one worker
  double transfer_ms = 0;
  double latency_ms = 0;
  std::vector<double> arrivals_ms = {};
  std::size_t num_taken = 0;
  bool is_awaited = false;
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
  // Where cores are shared: of the work at hand, at speed 1.
  std::optional<double> left_ms = std::nullopt;

  [[nodiscard]] bool is_done() const { return position == steps.size(); }
};

bool is_between_replicas(const Edge& edge) {
  return edge.kind == EdgeKind::kPush || edge.kind == EdgeKind::kPull;
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

class Replay {
 public:
  Replay(const ScheduleOptions& options, std::int64_t num_minibatches,
         const std::vector<StageDurations>& stages, const std::vector<BoundaryDurations>& boundaries)
      : placement_(placement_of(options)), stages_(stages), boundaries_(boundaries) {
    const std::int64_t num_ranks = num_workers(options);
    workers_.resize(static_cast<std::size_t>(num_ranks));
    for (std::int64_t rank = 0; rank < num_ranks; ++rank) {
      prepare(workers_[static_cast<std::size_t>(rank)], make_program(options, Rank(rank), num_minibatches));
    }
    link_free_ms_.resize(links_.size());
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
    while (!ready.empty()) {
      const std::size_t worker = ready.front();
      ready.pop_front();
      advance(workers_[worker], ready);
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
        send(lanes_[step.lane], now_ms);
      } else if (step.kind == StepKind::kRecv) {
        Lane& lane = lanes_[step.lane];
        if (lane.num_taken == lane.arrivals_ms.size() || lane.arrivals_ms[lane.num_taken] > now_ms) break;
        ++lane.num_taken;
      } else {
        worker.left_ms = step.work_ms;
        break;
      }
      worker.now_ms = now_ms;
    }
    return worker.position > before;
  }

  // Until someone is done with their work, or something arrives that someone waits for; false: neither will
  // be.
  bool pass_time(const SharedCores& shared, double& now_ms) {
    const std::vector<double> speeds = speeds_now(shared);
    double passing_ms = std::numeric_limits<double>::infinity();
    for (std::size_t rank = 0; rank < workers_.size(); ++rank) {
      const Worker& worker = workers_[rank];
      if (worker.left_ms) {
        passing_ms = std::min(passing_ms, *worker.left_ms / speeds[rank]);
      } else if (!worker.is_done()) {  // it waits
        const Lane& lane = lanes_[worker.steps[worker.position].lane];
        if (lane.num_taken < lane.arrivals_ms.size()) {
          passing_ms = std::min(passing_ms, lane.arrivals_ms[lane.num_taken] - now_ms);
        }
      }
    }
    if (passing_ms == std::numeric_limits<double>::infinity()) return false;
    now_ms += passing_ms;
    for (std::size_t rank = 0; rank < workers_.size(); ++rank) {
      Worker& worker = workers_[rank];
      if (!worker.left_ms) continue;
      if (*worker.left_ms / speeds[rank] > passing_ms) {
        *worker.left_ms -= passing_ms * speeds[rank];
        continue;
      }
      worker.left_ms.reset();
      worker.now_ms = now_ms;
      const Step& step = worker.steps[worker.position++];
      if (step.kind == StepKind::kUpdate) add_update(worker, step.minibatch);
    }
    return true;
  }

  [[nodiscard]] std::vector<double> speeds_now(const SharedCores& shared) const {
    const std::size_t of_host = shared.speeds.size();
    std::vector<std::size_t> at_work(1 + (workers_.size() - 1) / of_host);
    for (std::size_t rank = 0; rank < workers_.size(); ++rank) {
      if (workers_[rank].left_ms) ++at_work[rank / of_host];
    }
    std::vector<double> speeds(workers_.size(), 1.0);
    for (std::size_t rank = 0; rank < workers_.size(); ++rank) {
      if (at_work[rank / of_host] > 0) speeds[rank] = shared.speeds[at_work[rank / of_host] - 1];
    }
    return speeds;
  }

  void prepare(Worker& worker, const std::vector<Instruction>& program) {
    worker.steps.reserve(program.size());
    bool is_before_update = true;
    for (const Instruction& made : program) {
      num_minibatches_ = std::max(num_minibatches_, made.minibatch.value() + 1);
      if (travels(made.opcode)) {
        const StepKind kind = made.opcode == Opcode::kSend ? StepKind::kSend : StepKind::kRecv;
        worker.steps.push_back({kind, lane_of(made.edge), made.minibatch.value(), 0});
        continue;
      }
      const bool is_update = made.opcode == Opcode::kUpdate;
      is_before_update = is_before_update && !is_update;
      if (is_before_update) worker.num_started = std::max(worker.num_started, made.minibatch.value() + 1);
      worker.steps.push_back({is_update ? StepKind::kUpdate : StepKind::kWork, 0, made.minibatch.value(),
                              work_ms_of(made, stages_[static_cast<std::size_t>(made.stage.value())])});
    }
  }

  std::uint32_t lane_of(const Edge& edge) {
    const auto [found, is_new] = lane_by_edge_.try_emplace(edge, static_cast<std::uint32_t>(lanes_.size()));
    if (!is_new) return found->second;
    const auto rank_at = [&](const StageReplica& end) {
      return static_cast<std::size_t>(placement_.rank_of(end.stage, end.replica).value());
    };
    Lane lane;
    const std::size_t sender = rank_at(edge.from);
    lane.receiver = rank_at(edge.to);
    // Only the sender uses this direction of the link, and does its list in order: so first sent is first
    // carried. What replicas exchange leaves by one link, whoever it is for.
    if (sender != lane.receiver) {
      const std::size_t to = is_between_replicas(edge) ? kNone : lane.receiver;
      lane.link = links_.try_emplace({sender, to}, links_.size()).first->second;
    }
    if (edge.from.stage == edge.to.stage) {
      const StageDurations& stage = stages_[static_cast<std::size_t>(edge.from.stage.value())];
      if (edge.kind == EdgeKind::kPush) lane.transfer_ms = stage.push_ms;
      if (edge.kind == EdgeKind::kPull) lane.transfer_ms = stage.pull_ms;
      lane.latency_ms = stage.sync_latency_ms;
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

  // Does all that the worker can do now, and adds those that waited for it to the ready ones.
  void advance(Worker& worker, std::deque<std::size_t>& ready) {
    for (; !worker.is_done(); ++worker.position) {
      const Step& step = worker.steps[worker.position];
      if (step.kind == StepKind::kSend) {
        Lane& lane = lanes_[step.lane];
        send(lane, worker.now_ms);
        if (lane.is_awaited) {
          lane.is_awaited = false;
          ready.push_back(lane.receiver);
        }
      } else if (step.kind == StepKind::kRecv) {
        Lane& lane = lanes_[step.lane];
        if (lane.num_taken == lane.arrivals_ms.size()) {
          lane.is_awaited = true;
          return;
        }
        worker.now_ms = std::max(worker.now_ms, lane.arrivals_ms[lane.num_taken++]);
      } else {
        worker.now_ms += step.work_ms;
        if (step.kind == StepKind::kUpdate) add_update(worker, step.minibatch);
      }
    }
  }

  void send(Lane& lane, double now_ms) {
    double arrives_ms = now_ms;
    if (lane.link != kNone) {
      const double begin_ms = std::max(now_ms, link_free_ms_[lane.link]);
      link_free_ms_[lane.link] = begin_ms + lane.transfer_ms;
      arrives_ms = begin_ms + lane.transfer_ms + lane.latency_ms;
    }
    lane.arrivals_ms.push_back(arrives_ms);
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
  std::map<std::pair<std::size_t, std::size_t>, std::size_t> links_;  // (sender, receiver or kNone)
  std::vector<double> link_free_ms_;
  std::int64_t num_minibatches_ = 0;
};

void check_durations(const ScheduleOptions& options, std::size_t num_of_stages,
                     std::size_t num_of_boundaries) {
  const auto stages = static_cast<std::size_t>(num_stages(options));
  if (num_of_stages != stages || num_of_boundaries + 1 != stages) {
    throw UserError("durations of " + std::to_string(num_of_stages) + " stages and " +
                    std::to_string(num_of_boundaries) + " boundaries for " + std::to_string(stages) +
                    " stages: give one per stage, and one per boundary");
  }
  if (options.asynchronous || placement_of(options).num_spares() > 0) {
    throw UserError("asynchronous shards and spares have no steady_ms(): simulate them");
  }
}

}  // namespace

double steady_ms(const ScheduleOptions& options, std::int64_t num_minibatches,
                 const std::vector<StageDurations>& stages, const std::vector<BoundaryDurations>& boundaries,
                 const std::optional<SharedCores>& shared) {
  check_durations(options, stages.size(), boundaries.size());
  if (shared && shared->speeds.empty()) throw UserError("machines have 0 workers: give at least 1");
  return Replay(options, num_minibatches, stages, boundaries).run(shared);
}

}  // namespace pipedream
