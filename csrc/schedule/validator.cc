// Replays all workers' programs in memory. See validator.h.
//
// The first step checks every list by itself (list_checks.h). That is possible because the versions that a
// stage reads, keeps and writes depend on its worker's own list alone. It checks the computing instructions,
// and the transfers that belong to them.

// The second step checks that the lists fit together (check_items, Pipeline). The workers form a Kahn
// network: each does its instructions in a fixed order and waits only for queues. So whether there is a
// deadlock does not depend on the workers' speeds, and one replay in any order decides it.
//
// The length of a queue does depend on speeds. A queue is longest if all workers but its reader have gone as
// far as they can. So a replay in which one worker moves only when no other can gives the worst case of all
// queues that this worker reads. A SEND also waits if it finds the queue of an evaluation edge full. That is
// as if it read from a queue of free places. An UPDATE by a collective waits for the other replicas' UPDATEs,
// as if it read from queues of their signs. So the workers are still a Kahn network.

// Both steps are linear in the number of instructions; the second runs once per worker. Asynchronous shards
// serve other replicas by lists of their own, which the second step treats as lists of further workers. Each
// of these lists waits for only one replica. So this is a Kahn network, too, although the order in which a
// shard adds gradients is not fixed.
#include "schedule/validator.h"

#include <algorithm>
#include <map>
#include <sstream>
#include <utility>

#include "base/check.h"
#include "base/failure.h"
#include "schedule/evaluations.h"
#include "schedule/list_checks.h"

namespace pipedream {
namespace {

using Programs = std::vector<std::vector<Instruction>>;

std::size_t index_of(StageIndex stage) { return static_cast<std::size_t>(stage.value()); }

std::size_t index_of(Rank rank) { return static_cast<std::size_t>(rank.value()); }

std::string place(std::size_t worker, const std::vector<Instruction>& program, std::size_t position) {
  return name_position(Rank(static_cast<std::int64_t>(worker)), program, position);
}

constexpr std::size_t kNoEdge = static_cast<std::size_t>(-1);

// The items that wait on an edge. check_items() has compared them one by one before, so a count is enough
// here.
struct Queue {
  std::size_t reader = 0;  // the worker that receives from the edge
  std::size_t writer = 0;
  bool is_bounded = false;  // a SEND waits while kNumEvaluationSlots items are queued
  std::int64_t num_queued = 0;
  std::int64_t num_queued_max = 0;
};

// Replays the lists of all workers together, after each list has passed its own checks. If replicas update by
// a collective, an UPDATE waits until all replicas of its stage have reached theirs.
class Pipeline {
 public:
  Pipeline(const ScheduleOptions& options, const std::vector<Edge>& edges, const Programs& programs);

  // Runs every program from its start as far as it goes. The worker `slowest` moves only when no other worker
  // can.
  void run(std::size_t slowest);

  [[nodiscard]] bool is_finished() const;
  // Says where each of the first num_workers lists waits, if it is not finished. The lists after these are
  // services (make_services()), which wait only for workers.
  [[nodiscard]] std::vector<ListPosition> stuck(std::size_t num_workers) const;
  [[nodiscard]] std::string describe(const std::vector<ListPosition>& stuck) const;
  [[nodiscard]] const std::vector<Queue>& queues() const { return queues_; }  // one entry per edge

 private:
  bool step(std::size_t worker);
  bool step_together(std::size_t worker);
  void run_others(std::size_t slowest);

  [[nodiscard]] bool is_over(std::size_t worker) const {
    return positions_[worker] == programs_[worker].size();
  }

  const Programs& programs_;
  // Per worker and instruction: the index of its edge, or kNoEdge if it computes.
  std::vector<std::vector<std::size_t>> edge_indices_;
  std::vector<std::size_t> positions_;  // each worker's position in its list
  std::vector<Queue> queues_;
  // These members count updates by a collective, per worker: the replicas that update together with the
  // worker, itself included; how many updates it has reached; whether it waits at an update.
  std::vector<std::vector<std::size_t>> groups_;
  std::vector<std::int64_t> num_come_to_;
  std::vector<bool> is_waiting_;
  std::vector<std::size_t> awake_;  // workers that may be able to go on
};

Pipeline::Pipeline(const ScheduleOptions& options, const std::vector<Edge>& edges, const Programs& programs)
    : programs_(programs), groups_(programs.size()) {
  const Placement placement = placement_of(options);
  queues_.resize(edges.size());
  for (std::size_t edge = 0; edge < edges.size(); ++edge) {
    queues_[edge].is_bounded = edges[edge].kind == EdgeKind::kEvaluation;
  }
  for (const Place& place : placement.places()) {
    for (ReplicaIndex other; options.uses_allreduce && other.value() < placement.num_replicas(place.stage);
         other = other.next()) {
      groups_[index_of(place.rank)].push_back(index_of(placement.rank_of(place.stage, other)));
    }
  }
  for (std::size_t worker = 0; worker < programs.size(); ++worker) {
    std::vector<std::size_t>& indices = edge_indices_.emplace_back();
    indices.reserve(programs[worker].size());
    for (const Instruction& instruction : programs[worker]) {
      const auto found = std::lower_bound(edges.begin(), edges.end(), instruction.edge);
      const std::size_t edge =
          travels(instruction.opcode) ? static_cast<std::size_t>(found - edges.begin()) : kNoEdge;
      if (instruction.opcode == Opcode::kRecv) queues_[edge].reader = worker;
      if (instruction.opcode == Opcode::kSend) queues_[edge].writer = worker;
      indices.push_back(edge);
    }
  }
}

void Pipeline::run(std::size_t slowest) {
  positions_.assign(programs_.size(), 0);
  num_come_to_.assign(programs_.size(), 0);
  is_waiting_.assign(programs_.size(), false);
  for (Queue& queue : queues_) queue.num_queued = queue.num_queued_max = 0;
  for (std::size_t worker = programs_.size(); worker-- > 0;) awake_.push_back(worker);
  do {
    run_others(slowest);
  } while (step(slowest));
}

void Pipeline::run_others(std::size_t slowest) {
  while (!awake_.empty()) {
    const std::size_t worker = awake_.back();
    awake_.pop_back();
    while (worker != slowest && step(worker)) continue;
  }
}

// Does the worker's next instruction, if it can. Wakes a worker that may have waited for it. Returns whether
// the worker got further.
bool Pipeline::step(std::size_t worker) {
  if (is_over(worker)) return false;
  const std::size_t position = positions_[worker];
  const std::size_t edge = edge_indices_[worker][position];
  if (writes_version(programs_[worker][position].opcode) && groups_[worker].size() > 1) {
    return step_together(worker);
  }
  if (edge != kNoEdge) {
    Queue& queue = queues_[edge];
    if (programs_[worker][position].opcode == Opcode::kRecv) {
      if (queue.num_queued == 0) return false;
      if (queue.is_bounded && queue.num_queued == kNumEvaluationSlots) awake_.push_back(queue.writer);
      --queue.num_queued;
    } else {
      if (queue.is_bounded && queue.num_queued == kNumEvaluationSlots) return false;
      if (++queue.num_queued == 1) awake_.push_back(queue.reader);
      queue.num_queued_max = std::max(queue.num_queued_max, queue.num_queued);
    }
  }
  ++positions_[worker];
  return true;
}

// Does an update by a collective, in two steps. First the worker reaches the update and wakes the other
// replicas. Then, once all replicas have reached it, it does the update.
bool Pipeline::step_together(std::size_t worker) {
  const std::vector<std::size_t>& group = groups_[worker];
  if (!is_waiting_[worker]) {
    is_waiting_[worker] = true;
    ++num_come_to_[worker];
    awake_.insert(awake_.end(), group.begin(), group.end());
    return true;
  }
  const bool have_all_come = std::all_of(group.begin(), group.end(), [&](std::size_t other) {
    return num_come_to_[other] >= num_come_to_[worker];
  });
  if (!have_all_come) return false;
  is_waiting_[worker] = false;
  ++positions_[worker];
  return true;
}

bool Pipeline::is_finished() const {
  for (std::size_t worker = 0; worker < programs_.size(); ++worker) {
    if (!is_over(worker)) return false;
  }
  return true;
}

std::vector<ListPosition> Pipeline::stuck(std::size_t num_workers) const {
  std::vector<ListPosition> positions;
  for (std::size_t worker = 0; worker < num_workers; ++worker) {
    if (is_over(worker)) continue;
    positions.push_back({Rank(static_cast<std::int64_t>(worker)), positions_[worker]});
  }
  return positions;
}

std::string Pipeline::describe(const std::vector<ListPosition>& stuck) const {
  std::ostringstream text;
  text << "deadlock";
  for (const auto& [rank, position] : stuck) {
    const std::vector<Instruction>& program = programs_[index_of(rank)];
    const Instruction& instruction = program[position];
    text << "; " << place(index_of(rank), program, position) << ": waits for ";
    if (instruction.opcode == Opcode::kRecv) {
      text << to_string(instruction.edge.from);
    } else if (instruction.opcode == Opcode::kSend) {
      text << "room at " << to_string(instruction.edge.to);
    } else {
      text << "the other replicas";
    }
  }
  return text.str();
}

std::string check_shape(const ScheduleOptions& options, const Programs& programs,
                        std::int64_t num_minibatches) {
  try {
    check_schedule_options(options);
    check_num_minibatches(options, num_minibatches);
  } catch (const UserError& error) {
    return error.what();
  }
  const auto workers = static_cast<std::size_t>(num_workers(options));
  if (programs.size() == workers) return {};
  return "there are " + std::to_string(programs.size()) + " programs; the plan has " +
         std::to_string(workers) + " workers";
}

// Checks every list by itself: first all computing instructions, then all transfers. Fills in the report's
// counts per stage, and returns the first fault, or an empty text.
std::string check_lists(const ScheduleOptions& options, const Programs& programs,
                        std::int64_t num_minibatches, ReplayReport& report) {
  report.versions_live_max.assign(options.in_flight.size(), 0);
  report.activations_live_max.assign(options.in_flight.size(), 0);
  const Placement placement = placement_of(options);
  std::vector<ListToCheck> lists;
  for (std::size_t worker = 0; worker < programs.size(); ++worker) {
    const Rank rank(static_cast<std::int64_t>(worker));
    lists.push_back({options, placement, rank, programs[worker], num_minibatches});
  }
  std::vector<StageCounts> counts;
  for (const ListToCheck& list : lists) {
    if (std::string error = check_computed(list, counts); !error.empty()) return error;
  }
  for (const ListToCheck& list : lists) {
    if (std::string error = check_transfers(list); !error.empty()) return error;
  }
  for (const auto& [stage, versions, activations] : counts) {
    std::int64_t& versions_max = report.versions_live_max[index_of(stage)];
    std::int64_t& activations_max = report.activations_live_max[index_of(stage)];
    versions_max = std::max(versions_max, versions);
    activations_max = std::max(activations_max, activations);
  }
  return {};
}

Programs add_services(const ScheduleOptions& options, Programs programs, std::int64_t num_minibatches) {
  for (std::vector<Instruction>& service : make_services(options, num_minibatches)) {
    programs.push_back(std::move(service));
  }
  return programs;
}

// Compares the items of each edge in the sender's list with those in the receiver's list. Returns the first
// difference, or an empty text.
std::string check_items(const Programs& programs) {
  std::map<Edge, std::vector<const Instruction*>> sent;
  for (const std::vector<Instruction>& program : programs) {
    for (const Instruction& instruction : program) {
      if (instruction.opcode == Opcode::kSend) sent[instruction.edge].push_back(&instruction);
    }
  }
  std::map<Edge, std::size_t> num_received;
  for (std::size_t worker = 0; worker < programs.size(); ++worker) {
    for (std::size_t position = 0; position < programs[worker].size(); ++position) {
      const Instruction& received = programs[worker][position];
      if (received.opcode != Opcode::kRecv) continue;
      const std::vector<const Instruction*>& items = sent[received.edge];
      const std::size_t index = num_received[received.edge]++;
      const bool is_sent = index < items.size() && items[index]->minibatch == received.minibatch &&
                           items[index]->microbatch == received.microbatch;
      if (is_sent) continue;
      return place(worker, programs[worker], position) +
             (index < items.size() ? ": the edge's next is " + to_string(*items[index])
                                   : std::string(": the edge carries no more"));
    }
  }
  for (const auto& [edge, items] : sent) {
    if (items.size() > num_received[edge])
      return to_string(*items[num_received[edge]]) + " is never received";
  }
  return {};
}

// Replays the lists of all workers and all services together. Fills in the report's counts per edge, and
// returns the deadlock, or an empty text if there is none.
std::string check_together(const ScheduleOptions& options, const Programs& programs, ReplayReport& report) {
  const std::vector<Edge> edges = edges_of(options);
  const auto workers = static_cast<std::size_t>(num_workers(options));
  for (const Edge& edge : edges) report.edges.push_back({edge, 0});
  Pipeline pipeline(options, edges, programs);
  for (std::size_t slowest = 0; slowest < programs.size(); ++slowest) {
    pipeline.run(slowest);
    if (!pipeline.is_finished()) {
      report.stuck = pipeline.stuck(workers);
      const std::string error = pipeline.describe(report.stuck);
      PD_CHECK(slowest == 0, "the outcome depends on the speeds: " << error);
      return error;
    }
    for (std::size_t edge = 0; edge < edges.size(); ++edge) {
      const Queue& queue = pipeline.queues()[edge];
      if (queue.reader == slowest) report.edges[edge].queued_max = queue.num_queued_max;
    }
  }
  return {};
}

}  // namespace

std::string name_position(Rank rank, const std::vector<Instruction>& program, std::size_t position) {
  return "worker " + std::to_string(rank.value()) + ", position " + std::to_string(position) + ", " +
         (position == program.size() ? "end of the program" : to_string(program[position]));
}

ReplayReport replay(const ScheduleOptions& options, const Programs& programs, std::int64_t num_minibatches) {
  ReplayReport report;
  report.error = check_shape(options, programs, num_minibatches);
  if (report.error.empty()) report.error = check_lists(options, programs, num_minibatches, report);
  if (report.error.empty()) {
    const Programs with_services =
        options.asynchronous ? add_services(options, programs, num_minibatches) : Programs();
    const Programs& all = options.asynchronous ? with_services : programs;
    report.error = check_items(all);
    if (report.error.empty()) report.error = check_together(options, all, report);
  }
  if (!report.error.empty())
    return {false, report.error, report.stuck, {}, {}, {}};  // the counts are not complete
  return report;
}

}  // namespace pipedream
