#include "schedule/transfers.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "base/check.h"
#include "base/failure.h"

namespace pipedream {
namespace {

StageIndex last_stage(const ScheduleOptions& options) {
  return StageIndex(static_cast<std::int64_t>(options.in_flight.size()) - 1);
}

Instruction send(const Edge& edge, MinibatchId minibatch, MicrobatchIndex microbatch = {}) {
  return {Opcode::kSend, edge.from.stage, minibatch, microbatch, {}, edge, edge.from.replica};
}

Instruction receive(const Edge& edge, MinibatchId minibatch, MicrobatchIndex microbatch = {}) {
  return {Opcode::kRecv, edge.to.stage, minibatch, microbatch, {}, edge, edge.to.replica};
}

StageReplica first_place_at(const Placement& placement, std::int64_t rank) {
  const Place place = placement.places_at(Rank(rank)).front();
  return {place.stage, place.replica};
}

// Returns the two ends of the norm edge between the workers at this rank and at the next rank, or nothing if
// there is no such edge. If the schedule drains, norms are added up over all workers, otherwise over the
// replicas of a stage.
std::optional<std::pair<StageReplica, StageReplica>> norm_ends(const Placement& placement, std::int64_t rank,
                                                               bool drains) {
  if (rank < 0 || rank + 1 >= placement.num_ranks()) return std::nullopt;
  const StageReplica upstream = first_place_at(placement, rank);
  const StageReplica downstream = first_place_at(placement, rank + 1);
  if (!drains && upstream.stage != downstream.stage) return std::nullopt;
  return std::pair(upstream, downstream);
}

// Adds the edges between a stage and the next, for each pair of replicas that have a microbatch in common.
void add_cut(const Placement& placement, StageIndex upstream, std::vector<Edge>& edges) {
  const StageIndex downstream = upstream.next();
  const std::int64_t num_upstream = placement.num_replicas(upstream);
  const std::int64_t num_downstream = placement.num_replicas(downstream);
  const std::int64_t num_edges = std::lcm(num_upstream, num_downstream);
  for (std::int64_t number = 0; number < num_edges; ++number) {
    const StageReplica from{upstream, ReplicaIndex(number % num_upstream)};
    const StageReplica to{downstream, ReplicaIndex(number % num_downstream)};
    edges.push_back({EdgeKind::kActivation, from, to});
    edges.push_back({EdgeKind::kGradient, to, from});
  }
}

// Returns the edge for evaluations from the stage to the next stage downstream.
Edge evaluation_edge(StageIndex stage) { return {EdgeKind::kEvaluation, {stage, {}}, {stage.next(), {}}}; }

// Adds the edges for pushes from every replica to each other owner of a shard, and for the pulls back.
void add_replicas(const Placement& placement, StageIndex stage, std::vector<Edge>& edges) {
  const std::int64_t num_replicas = placement.num_replicas(stage);
  for (ReplicaIndex replica; replica.value() < num_replicas; replica = replica.next()) {
    for (ReplicaIndex owner; owner.value() < placement.num_owners(stage); owner = owner.next()) {
      if (replica == owner) continue;
      edges.push_back({EdgeKind::kPush, {stage, replica}, {stage, owner}});
      edges.push_back({EdgeKind::kPull, {stage, owner}, {stage, replica}});
    }
  }
}

// Returns whether this replica of the owner sends versions to this replica of the user. If replicas update by
// a collective, each of them has the whole version, so the user's replica receives it from one of them only.
bool has_version_for(const ScheduleOptions& options, std::int64_t num_owners, ReplicaIndex owner,
                     ReplicaIndex user) {
  return !options.uses_allreduce || user.value() % num_owners == owner.value();
}

void add_tie(const ScheduleOptions& options, const Placement& placement, const TiedStages& tied,
             std::vector<Edge>& edges) {
  const std::int64_t num_owners = placement.num_replicas(tied.owner);
  const std::int64_t num_users = placement.num_replicas(tied.user);
  for (std::int64_t number = 0; number < std::lcm(num_owners, num_users); ++number) {
    edges.push_back({EdgeKind::kTiedGradient,
                     {tied.user, ReplicaIndex(number % num_users)},
                     {tied.owner, ReplicaIndex(number % num_owners)}});
  }
  for (ReplicaIndex owner; owner.value() < num_owners; owner = owner.next()) {
    for (ReplicaIndex user; user.value() < num_users; user = user.next()) {
      if (!has_version_for(options, num_owners, owner, user)) continue;
      edges.push_back({EdgeKind::kTiedVersion, {tied.owner, owner}, {tied.user, user}});
    }
  }
}

// Returns the number of the first microbatch that both replicas have.
std::int64_t first_in_common(const Rounds& one, ReplicaIndex replica, const Rounds& other,
                             ReplicaIndex other_replica) {
  for (std::int64_t index = 0; index < other.num_replicas; ++index) {
    const std::int64_t number = one.own_number(replica, index);
    if (other.replica_of(number) == other_replica) return number;
  }
  throw UserError("stage replicas " + std::to_string(replica.value()) + " of " +
                  std::to_string(one.num_replicas) + " and " + std::to_string(other_replica.value()) +
                  " of " + std::to_string(other.num_replicas) + " have no microbatch in common");
}

}  // namespace

std::vector<Edge> edges_of(const ScheduleOptions& options) {
  const Placement placement = placement_of(options);
  std::vector<Edge> edges;
  for (StageIndex stage; stage <= last_stage(options); stage = stage.next()) {
    if (stage < last_stage(options)) add_cut(placement, stage, edges);
    if (!options.uses_allreduce) add_replicas(placement, stage, edges);
  }
  for (StageIndex stage; options.evaluates && stage < last_stage(options); stage = stage.next()) {
    edges.push_back(evaluation_edge(stage));
  }
  for (const TiedStages& tied : options.ties) add_tie(options, placement, tied, edges);
  const bool drains = drains_every_minibatch(options);
  for (std::int64_t rank = 0; options.exchanges_norms && rank < placement.num_ranks(); ++rank) {
    const auto ends = norm_ends(placement, rank, drains);
    if (!ends) continue;
    edges.push_back({EdgeKind::kNorm, ends->first, ends->second});
    edges.push_back({EdgeKind::kNorm, ends->second, ends->first});
  }
  std::sort(edges.begin(), edges.end());
  return edges;
}

EdgeItems items_of(const ScheduleOptions& options, const Edge& edge) {
  const Rounds from = rounds_of(options, edge.from.stage);
  const Rounds to = rounds_of(options, edge.to.stage);
  switch (edge.kind) {
    case EdgeKind::kActivation:
    case EdgeKind::kGradient:
      return {first_in_common(from, edge.from.replica, to, edge.to.replica),
              std::lcm(from.num_replicas, to.num_replicas)};
    case EdgeKind::kTiedGradient: {
      const std::int64_t number = first_in_common(from, edge.from.replica, to, edge.to.replica);
      const std::int64_t stride = std::lcm(from.num_replicas, to.num_replicas);
      return {from.minibatch_of(number).value(), options.num_microbatches == 1 ? stride : 0};
    }
    case EdgeKind::kPush:
      return {from.first_of(edge.from.replica, from.first_version().value()).value(),
              from.minibatches_per_round};
    case EdgeKind::kEvaluation:
      return {0, 0};
    case EdgeKind::kPull:
    case EdgeKind::kNorm:
    case EdgeKind::kTiedVersion:
      return {options.first_minibatch.value(), from.minibatches_per_round};
  }
  PD_CHECK(false, "edge kind " << static_cast<int>(edge.kind));
}

bool is_local(const Placement& placement, const Edge& edge) {
  return placement.rank_of(edge.from.stage, edge.from.replica) ==
         placement.rank_of(edge.to.stage, edge.to.replica);
}

Transfers::Transfers(ScheduleOptions options, Rank rank) : options_(std::move(options)) {
  const Placement placement = placement_of(options_);
  stages_ = placement.stages_at(rank);
  PD_CHECK(!stages_.empty(), "nothing is at rank " << rank.value());
  replica_ = placement.places_at(rank).front().replica;
  rounds_ = rounds_of_stages(options_);
  drains_ = drains_every_minibatch(options_);
  stashes_ = stashes_versions(options_, stages_.front());
  num_owners_ = placement.num_owners(stages_.front());
  exchanges_shards_ = rounds().num_replicas > 1 && !options_.uses_allreduce;
  rule_ = forward_rule_of(options_, stages_.front());
  for (const TiedStages& tied : options_.ties) tied_rules_.push_back(tied_rule_of(options_, tied.owner));
  if (!options_.exchanges_norms) return;
  if (const auto ends = norm_ends(placement, rank.value() - 1, drains_)) upstream_ = ends->first;
  if (const auto ends = norm_ends(placement, rank.value(), drains_)) downstream_ = ends->second;
}

void Transfers::add_before(const Instruction& computed, std::vector<Instruction>& instructions) const {
  const OpcodeTraits& traits = traits_of(computed.opcode);
  if (traits.needs) {
    const std::int64_t distance = goes_upstream(*traits.needs) ? 1 : -1;
    if (const auto neighbour = neighbour_of(computed, distance)) {
      const Edge edge{*traits.needs, *neighbour, {computed.stage, computed.replica}};
      instructions.push_back(receive(edge, computed.minibatch, computed.microbatch));
    }
  }
  if (traits.stash == Stash::kKept) add_before_forward(computed, instructions);
  if (traits.writes_version) add_before_update(computed, instructions);
}

// Adds RECVs of the versions that no earlier microbatch of this replica reads.
void Transfers::add_before_forward(const Instruction& forward, std::vector<Instruction>& instructions) const {
  const std::int64_t number = rounds().number_of(forward.minibatch, forward.microbatch);
  const std::int64_t own_index = rounds().own_index(number);
  for (std::size_t tie = 0; tie < options_.ties.size(); ++tie) {
    const TiedStages& tied = options_.ties[tie];
    const VersionRule& rule = tied_rules_[tie];
    if (tied.user != forward.stage) continue;
    WeightVersion newest = newest_read(rule, tied.user, tied.owner, own_index);
    while (newest < rule.newest_until(number)) {
      newest = newest.next();
      receive_version(tied, newest, instructions);
    }
  }
  if (!exchanges_shards_ || !stashes_) return;
  WeightVersion newest = newest_read(rule_, forward.stage, forward.stage, own_index);
  while (newest < rule_.newest_until(number)) {
    newest = newest.next();
    receive_pulls(newest, instructions);
  }
}

void Transfers::add_versions_of(const Instruction& evaluate, std::int64_t num_forwarded,
                                std::vector<Instruction>& instructions) const {
  for (std::size_t tie = 0; tie < options_.ties.size(); ++tie) {
    const TiedStages& tied = options_.ties[tie];
    if (tied.user != evaluate.stage) continue;
    WeightVersion newest = newest_read(tied_rules_[tie], tied.user, tied.owner, num_forwarded);
    while (newest < version_at_boundary(rounds_at(tied.owner), evaluate.minibatch)) {
      newest = newest.next();
      receive_version(tied, newest, instructions);
    }
  }
  if (!exchanges_shards_ || !stashes_) return;
  WeightVersion newest = newest_read(rule_, evaluate.stage, evaluate.stage, num_forwarded);
  while (newest < evaluate.version) {
    newest = newest.next();
    receive_pulls(newest, instructions);
  }
}

WeightVersion Transfers::newest_read(const VersionRule& rule, StageIndex reader, StageIndex updater,
                                     std::int64_t own_index) const {
  const WeightVersion first = rounds_at(updater).first_version();
  if (own_index == 0) return first;
  return std::max(first, rule.newest_until(rounds_at(reader).own_number(replica_, own_index - 1)));
}

void Transfers::add_before_update(const Instruction& update, std::vector<Instruction>& instructions) const {
  if (exchanges_shards_) {
    const std::int64_t round = rounds().round_of(update.minibatch);
    if (pushes_before_update(round)) send_pushes(round, instructions);
    if (!options_.asynchronous) receive_pushes(round, instructions);
  }
  if (update.stage == stages_.front()) add_norms(update.minibatch, instructions);
}

void Transfers::add_after(const Instruction& computed, std::vector<Instruction>& instructions) const {
  const OpcodeTraits& traits = traits_of(computed.opcode);
  if (traits.makes) {
    const std::int64_t distance = goes_upstream(*traits.makes) ? -1 : 1;
    if (const auto neighbour = neighbour_of(computed, distance)) {
      const Edge edge{*traits.makes, {computed.stage, computed.replica}, *neighbour};
      instructions.push_back(send(edge, computed.minibatch, computed.microbatch));
    }
  }
  if (traits.stash == Stash::kReleased) add_after_backward(computed, instructions);
  if (traits.writes_version) add_after_update(computed, instructions);
}

// Returns the replica with the microbatch of `computed` at the stage that lies `distance` stages downstream,
// or upstream if the distance is negative. Returns nothing if there is no such stage.
std::optional<StageReplica> Transfers::neighbour_of(const Instruction& computed,
                                                    std::int64_t distance) const {
  const StageIndex stage(computed.stage.value() + distance);
  if (stage < StageIndex(0) || stage > last_stage(options_)) return std::nullopt;
  if (is_of_boundary(computed.opcode)) return StageReplica{stage, {}};
  return end_at(stage, rounds().number_of(computed.minibatch, computed.microbatch));
}

void Transfers::add_after_backward(const Instruction& backward,
                                   std::vector<Instruction>& instructions) const {
  if (rounds().is_last_of_minibatch(backward.microbatch)) add_tied_gradients(backward, instructions);
  const std::int64_t number = rounds().number_of(backward.minibatch, backward.microbatch);
  if (!exchanges_shards_ || drains_ || !rounds().is_last_own(number, std::nullopt)) return;
  send_pushes(rounds().round_of(backward.minibatch), instructions);
}

void Transfers::add_after_update(const Instruction& update, std::vector<Instruction>& instructions) const {
  for (const TiedStages& tied : options_.ties) {
    if (tied.owner == update.stage) send_version(tied, update.minibatch, instructions);
  }
  if (!exchanges_shards_ || options_.asynchronous) return;
  send_pulls(update.version, instructions);
  if (!stashes_) receive_pulls(update.version, instructions);
}

// Adds the transfers of one minibatch's tied gradients (see the header).
void Transfers::add_tied_gradients(const Instruction& backward,
                                   std::vector<Instruction>& instructions) const {
  const MinibatchId minibatch = backward.minibatch;
  for (const auto& [owner, user] : options_.ties) {
    if (owner != backward.stage && user != backward.stage) continue;
    const std::int64_t end = options_.num_microbatches;
    for (std::int64_t index = std::max<std::int64_t>(0, end - rounds_at(user).num_replicas); index < end;
         ++index) {
      const std::int64_t number = rounds().number_of(minibatch, MicrobatchIndex(index));
      const Edge edge{EdgeKind::kTiedGradient, end_at(user, number), end_at(owner, number)};
      const bool is_sent = user == backward.stage && edge.from.replica == replica_;
      const bool is_received = owner == backward.stage && edge.to.replica == replica_;
      if (is_sent) instructions.push_back(send(edge, minibatch));
      if (is_received) instructions.push_back(receive(edge, minibatch));
    }
  }
}

// Returns whether this replica pushes the round before the UPDATE instead of after its last backward. It does
// if the schedule drains. It also does if the run ends before the replica has all its microbatches of the
// round, because this may become known only after the replica's last backward.
bool Transfers::pushes_before_update(std::int64_t round) const {
  return drains_ || rounds().num_own_in(replica_, round, num_minibatches_) < rounds().own_per_round();
}

// While the number of minibatches is unknown, every replica counts as a member of every round.
bool Transfers::is_member(ReplicaIndex replica, std::int64_t round) const {
  if (!num_minibatches_) return !rounds().is_spare(replica);
  return rounds().is_member(replica, round, *num_minibatches_);
}

void Transfers::send_pushes(std::int64_t round, std::vector<Instruction>& instructions) const {
  if (!is_member(replica_, round)) return;
  if (options_.asynchronous) receive_answer_before_push(round, instructions);
  const StageReplica here{stages_.front(), replica_};
  const MinibatchId first = rounds().first_of(replica_, round);
  for (ReplicaIndex other; other.value() < num_owners_; other = other.next()) {
    if (other == replica_) continue;
    instructions.push_back(send({EdgeKind::kPush, here, {here.stage, other}}, first));
  }
}

void Transfers::receive_pushes(std::int64_t round, std::vector<Instruction>& instructions) const {
  const StageReplica here{stages_.front(), replica_};
  for (ReplicaIndex other; other.value() < rounds().num_replicas; other = other.next()) {
    if (other == replica_ || !is_member(other, round)) continue;
    const MinibatchId first = rounds().first_of(other, round);
    instructions.push_back(receive({EdgeKind::kPush, {here.stage, other}, here}, first));
  }
}

// Receives the answer to the push of the round before, if no forward has received it. That happens only in
// the cool-down. Before the cool-down a forward stands between any two backwards. The RECV pull of that
// forward receives the answer.
void Transfers::receive_answer_before_push(std::int64_t round, std::vector<Instruction>& instructions) const {
  if (!num_minibatches_) return;
  const std::int64_t num_own = rounds().num_own(replica_, *num_minibatches_);
  const WeightVersion answer(round);
  const WeightVersion read = newest_read(rule_, stages_.front(), stages_.front(), num_own);
  if (answer > read) receive_pulls(answer, instructions);
}

WeightVersion Transfers::newest_pulled(std::int64_t num_minibatches) const {
  const StageIndex stage = stages_.front();
  const WeightVersion read = newest_read(rule_, stage, stage, rounds().num_own(replica_, num_minibatches));
  if (!options_.asynchronous) return read;
  const WeightVersion last = rounds().last_version(replica_, num_minibatches);
  return std::max(read, WeightVersion(last.value() - 1));
}

// The update of round v - 1 writes version v.
void Transfers::send_pulls(WeightVersion version, std::vector<Instruction>& instructions) const {
  const StageReplica here{stages_.front(), replica_};
  const MinibatchId first = rounds().begin_of(version.value() - 1);
  for (ReplicaIndex other; other.value() < rounds().num_replicas; other = other.next()) {
    if (other == replica_) continue;
    instructions.push_back(send({EdgeKind::kPull, here, {here.stage, other}}, first));
  }
}

void Transfers::receive_pulls(WeightVersion version, std::vector<Instruction>& instructions) const {
  if (rounds().is_spare(replica_)) return;  // a spare reads no version
  const StageReplica here{stages_.front(), replica_};
  const MinibatchId first = rounds().begin_of(version.value() - 1);
  for (ReplicaIndex other; other.value() < num_owners_; other = other.next()) {
    if (other == replica_) continue;
    instructions.push_back(receive({EdgeKind::kPull, {here.stage, other}, here}, first));
  }
}

// first: the first minibatch of the owner's round, which names the item.
void Transfers::send_version(const TiedStages& tied, MinibatchId first,
                             std::vector<Instruction>& instructions) const {
  const std::int64_t num_owners = rounds_at(tied.owner).num_replicas;
  for (ReplicaIndex user; user.value() < rounds_at(tied.user).num_replicas; user = user.next()) {
    if (!has_version_for(options_, num_owners, replica_, user)) continue;
    instructions.push_back(send({EdgeKind::kTiedVersion, {tied.owner, replica_}, {tied.user, user}}, first));
  }
}

void Transfers::receive_version(const TiedStages& tied, WeightVersion version,
                                std::vector<Instruction>& instructions) const {
  const MinibatchId first = rounds_at(tied.owner).begin_of(version.value() - 1);
  const std::int64_t num_owners = rounds_at(tied.owner).num_replicas;
  for (ReplicaIndex owner; owner.value() < num_owners; owner = owner.next()) {
    if (!has_version_for(options_, num_owners, owner, replica_)) continue;
    instructions.push_back(
        receive({EdgeKind::kTiedVersion, {tied.owner, owner}, {tied.user, replica_}}, first));
  }
}

void Transfers::add_norms(MinibatchId minibatch, std::vector<Instruction>& instructions) const {
  const StageReplica own{stages_.front(), replica_};
  if (downstream_) instructions.push_back(receive({EdgeKind::kNorm, *downstream_, own}, minibatch));
  if (upstream_) {
    instructions.push_back(send({EdgeKind::kNorm, own, *upstream_}, minibatch));
    instructions.push_back(receive({EdgeKind::kNorm, *upstream_, own}, minibatch));
  }
  if (downstream_) instructions.push_back(send({EdgeKind::kNorm, own, *downstream_}, minibatch));
}

void Transfers::add_final(std::int64_t index, std::int64_t num_minibatches,
                          std::vector<Instruction>& instructions) const {
  const std::int64_t num_own = rounds().num_own(replica_, num_minibatches);
  const auto version_after = [&](WeightVersion received, StageIndex updater) {
    const WeightVersion version(received.value() + 1 + index);
    const bool is_there = version <= rounds_at(updater).last_version(replica_, num_minibatches);
    return is_there ? std::optional(version) : std::nullopt;
  };
  for (std::size_t tie = 0; tie < options_.ties.size(); ++tie) {
    const TiedStages& tied = options_.ties[tie];
    if (std::find(stages_.begin(), stages_.end(), tied.user) == stages_.end()) continue;
    const WeightVersion read = newest_read(tied_rules_[tie], tied.user, tied.owner, num_own);
    const auto version = version_after(read, tied.owner);
    if (version) receive_version(tied, *version, instructions);
  }
  if (!exchanges_shards_ || !stashes_) return;
  const auto version = version_after(newest_pulled(num_minibatches), stages_.front());
  if (version) receive_pulls(*version, instructions);
}

std::size_t Transfers::num_added_max() const {
  // Around an UPDATE there are at most four transfers with every other owner. Before a FORWARD the replica
  // receives the versions that are new since its previous forward. num_new_max() bounds their number.
  const std::int64_t num_per_replica =
      std::max<std::int64_t>(4, 1 + rule_.num_new_max(rounds().num_replicas));
  std::int64_t num_added = 4 + num_per_replica * (num_owners_ - 1);
  for (std::size_t tie = 0; tie < options_.ties.size(); ++tie) {
    const TiedStages& tied = options_.ties[tie];
    const VersionRule& rule = tied_rules_[tie];
    const std::int64_t num_users = rounds_at(tied.user).num_replicas;
    num_added += 2 + 2 * num_users + rule.num_new_max(num_users) * rounds_at(tied.owner).num_replicas;
  }
  return static_cast<std::size_t>(num_added);
}

std::vector<Instruction> make_program(const ScheduleOptions& options, Rank rank,
                                      std::int64_t num_minibatches) {
  return add_transfers(options, rank, make_compute_program(options, rank, num_minibatches), num_minibatches);
}

std::vector<std::vector<Instruction>> make_services(const ScheduleOptions& options,
                                                    std::int64_t num_minibatches) {
  std::vector<std::vector<Instruction>> services;
  for (const Edge& push : options.asynchronous ? edges_of(options) : std::vector<Edge>()) {
    if (push.kind != EdgeKind::kPush) continue;
    const Rounds rounds = rounds_of(options, push.from.stage);
    const Edge pull{EdgeKind::kPull, push.to, push.from};
    std::vector<Instruction>& service = services.emplace_back();
    const std::int64_t end = rounds.num_begun(push.from.replica, num_minibatches);
    for (std::int64_t round = rounds.first_version().value(); round < end; ++round) {
      service.push_back(receive(push, rounds.first_of(push.from.replica, round)));
      service.push_back(send(pull, rounds.begin_of(round)));
    }
  }
  return services;
}

std::vector<Instruction> add_transfers(const ScheduleOptions& options, Rank rank,
                                       const std::vector<Instruction>& computed,
                                       std::int64_t num_minibatches) {
  Transfers transfers(options, rank);
  transfers.set_num_minibatches(num_minibatches);
  std::vector<Instruction> instructions;
  for (const Instruction& instruction : computed) {
    transfers.add_before(instruction, instructions);
    instructions.push_back(instruction);
    transfers.add_after(instruction, instructions);
  }
  std::size_t num_before = 0;
  for (std::int64_t index = 0; index == 0 || instructions.size() > num_before; ++index) {
    num_before = instructions.size();
    transfers.add_final(index, num_minibatches, instructions);
  }
  return instructions;
}

}  // namespace pipedream
