#include "schedule/transfers.h"

#include <algorithm>
#include <utility>

#include "base/check.h"

namespace pipedream {
namespace {

Edge edge_between(EdgeKind kind, StageIndex from, StageIndex to) { return {kind, {from, {}}, {to, {}}}; }

StageIndex last_stage(const ScheduleOptions& options) {
  return StageIndex(static_cast<std::int64_t>(options.in_flight.size()) - 1);
}

StageIndex upstream_of(StageIndex stage) { return StageIndex(stage.value() - 1); }

Instruction send(const Edge& edge, MinibatchId minibatch, MicrobatchIndex microbatch = {}) {
  return {Opcode::kSend, edge.from.stage, minibatch, microbatch, {}, edge};
}

Instruction receive(const Edge& edge, MinibatchId minibatch, MicrobatchIndex microbatch = {}) {
  return {Opcode::kRecv, edge.to.stage, minibatch, microbatch, {}, edge};
}

StageIndex first_stage_at(const Placement& placement, std::int64_t rank) {
  return placement.stages_at(Rank(rank)).front();
}

}  // namespace

std::vector<Edge> edges_of(const ScheduleOptions& options) {
  const Placement placement = placement_of(options);
  std::vector<Edge> edges;
  for (StageIndex stage; stage < last_stage(options); stage = stage.next()) {
    edges.push_back(edge_between(EdgeKind::kActivation, stage, stage.next()));
    edges.push_back(edge_between(EdgeKind::kGradient, stage.next(), stage));
  }
  for (const auto& [owner, user] : options.ties) {
    edges.push_back(edge_between(EdgeKind::kTiedGradient, user, owner));
    edges.push_back(edge_between(EdgeKind::kTiedVersion, owner, user));
  }
  for (std::int64_t rank = 0; options.exchanges_norms && rank + 1 < placement.num_ranks(); ++rank) {
    const StageIndex upstream = first_stage_at(placement, rank);
    const StageIndex downstream = first_stage_at(placement, rank + 1);
    edges.push_back(edge_between(EdgeKind::kNorm, upstream, downstream));
    edges.push_back(edge_between(EdgeKind::kNorm, downstream, upstream));
  }
  std::sort(edges.begin(), edges.end());
  return edges;
}

bool is_local(const Placement& placement, const Edge& edge) {
  return placement.rank_of(edge.from.stage, edge.from.replica) ==
         placement.rank_of(edge.to.stage, edge.to.replica);
}

Transfers::Transfers(ScheduleOptions options, Rank rank) : options_(std::move(options)) {
  const Placement placement = placement_of(options_);
  stages_ = placement.stages_at(rank);
  PD_CHECK(!stages_.empty(), "nothing is at rank " << rank.value());
  if (!options_.exchanges_norms) return;
  if (rank.value() > 0) upstream_ = first_stage_at(placement, rank.value() - 1);
  if (rank.value() + 1 < placement.num_ranks()) downstream_ = first_stage_at(placement, rank.value() + 1);
}

void Transfers::add_before(const Instruction& computed, std::vector<Instruction>& instructions) const {
  const StageIndex stage = computed.stage;
  const MinibatchId minibatch = computed.minibatch;
  switch (computed.opcode) {
    case Opcode::kForward: {
      if (stage.value() > 0) {
        const Edge edge = edge_between(EdgeKind::kActivation, upstream_of(stage), stage);
        instructions.push_back(receive(edge, minibatch, computed.microbatch));
      }
      if (options_.ties.empty() || computed.microbatch.value() > 0) return;
      if (minibatch == options_.first_minibatch) return;
      const WeightVersion read = tied_version(options_, minibatch);
      const bool is_new = read > tied_version(options_, MinibatchId(minibatch.value() - 1));
      if (is_new) add_version(stage, read, instructions);
      return;
    }
    case Opcode::kBackward:
      if (stage == last_stage(options_)) return;
      instructions.push_back(
          receive(edge_between(EdgeKind::kGradient, stage.next(), stage), minibatch, computed.microbatch));
      return;
    case Opcode::kUpdate: {
      // What is measured is complete: of all the worker's stages.
      const bool is_first = stage == stages_.front();
      for (const auto& [owner, user] : options_.ties) {
        const bool is_here = std::find(stages_.begin(), stages_.end(), owner) != stages_.end();
        if (options_.exchanges_norms ? is_here && is_first : owner == stage) {
          instructions.push_back(receive(edge_between(EdgeKind::kTiedGradient, user, owner), minibatch));
        }
      }
      if (is_first) add_norms(minibatch, instructions);
      return;
    }
    case Opcode::kRecompute:
    case Opcode::kSend:
    case Opcode::kRecv:
      return;
  }
}

void Transfers::add_after(const Instruction& computed, std::vector<Instruction>& instructions) const {
  const StageIndex stage = computed.stage;
  const MinibatchId minibatch = computed.minibatch;
  switch (computed.opcode) {
    case Opcode::kForward:
      if (stage == last_stage(options_)) return;
      instructions.push_back(
          send(edge_between(EdgeKind::kActivation, stage, stage.next()), minibatch, computed.microbatch));
      return;
    case Opcode::kBackward:
      if (stage.value() > 0) {
        const Edge edge = edge_between(EdgeKind::kGradient, stage, upstream_of(stage));
        instructions.push_back(send(edge, minibatch, computed.microbatch));
      }
      if (!is_last_microbatch(computed)) return;
      for (const auto& [owner, user] : options_.ties) {
        if (user != stage) continue;
        instructions.push_back(send(edge_between(EdgeKind::kTiedGradient, user, owner), minibatch));
      }
      return;
    case Opcode::kUpdate:
      for (const auto& [owner, user] : options_.ties) {
        if (owner != stage) continue;
        instructions.push_back(send(edge_between(EdgeKind::kTiedVersion, owner, user), minibatch));
      }
      return;
    case Opcode::kRecompute:
    case Opcode::kSend:
    case Opcode::kRecv:
      return;
  }
}

// Version v is what the update of minibatch v - 1 wrote. What the run starts from is everywhere.
void Transfers::add_version(StageIndex user, WeightVersion version,
                            std::vector<Instruction>& instructions) const {
  if (version.value() <= options_.first_minibatch.value()) return;
  for (const TiedStages& tied : options_.ties) {
    if (tied.user != user) continue;
    const Edge edge = edge_between(EdgeKind::kTiedVersion, tied.owner, user);
    instructions.push_back(receive(edge, MinibatchId(version.value() - 1)));
  }
}

void Transfers::add_norms(MinibatchId minibatch, std::vector<Instruction>& instructions) const {
  const StageIndex own = stages_.front();
  if (downstream_) {
    instructions.push_back(receive(edge_between(EdgeKind::kNorm, *downstream_, own), minibatch));
  }
  if (upstream_) {
    instructions.push_back(send(edge_between(EdgeKind::kNorm, own, *upstream_), minibatch));
    instructions.push_back(receive(edge_between(EdgeKind::kNorm, *upstream_, own), minibatch));
  }
  if (downstream_) {
    instructions.push_back(send(edge_between(EdgeKind::kNorm, own, *downstream_), minibatch));
  }
}

void Transfers::add_final(WeightVersion version, std::vector<Instruction>& instructions) const {
  for (const StageIndex stage : stages_) add_version(stage, version, instructions);
}

WeightVersion Transfers::first_final(std::int64_t num_minibatches) const {
  const WeightVersion given(options_.first_minibatch.value());
  if (num_minibatches == given.value()) return given.next();
  return std::max(given, tied_version(options_, MinibatchId(num_minibatches - 1))).next();
}

bool Transfers::is_last_microbatch(const Instruction& computed) const {
  return computed.microbatch.value() + 1 == options_.num_microbatches;
}

std::size_t Transfers::num_added_max() const { return 4 + 2 * options_.ties.size(); }

ProgramCursor::ProgramCursor(const ScheduleOptions& options, Rank rank)
    : compute_(options, rank), transfers_(options, rank) {
  instructions_.reserve(1 + transfers_.num_added_max());
  refill();
}

std::optional<Instruction> ProgramCursor::current() const {
  if (position_ == instructions_.size()) return std::nullopt;
  return instructions_[position_];
}

std::optional<Instruction> ProgramCursor::following() const {
  if (position_ + 1 >= instructions_.size()) return std::nullopt;
  return instructions_[position_ + 1];
}

void ProgramCursor::advance() {
  PD_CHECK(position_ < instructions_.size(), "rank " << rank().value() << ": the program is over");
  if (++position_ < instructions_.size()) return;
  if (computed_) compute_.advance();
  refill();
}

void ProgramCursor::set_num_minibatches(std::int64_t num_minibatches) {
  compute_.set_num_minibatches(num_minibatches);
  if (compute_.current() != computed_) refill();
}

void ProgramCursor::refill() {
  instructions_.clear();
  position_ = 0;
  computed_ = compute_.current();
  if (!computed_) return refill_at_end();
  transfers_.add_before(*computed_, instructions_);
  instructions_.push_back(*computed_);
  transfers_.add_after(*computed_, instructions_);
}

void ProgramCursor::refill_at_end() {
  const std::int64_t num_minibatches = compute_.num_minibatches().value_or(0);
  final_ = final_ ? final_->next() : transfers_.first_final(num_minibatches);
  if (final_->value() <= num_minibatches) transfers_.add_final(*final_, instructions_);
}

std::vector<Instruction> make_program(const ScheduleOptions& options, Rank rank,
                                      std::int64_t num_minibatches) {
  return add_transfers(options, rank, make_compute_program(options, rank, num_minibatches), num_minibatches);
}

std::vector<Instruction> add_transfers(const ScheduleOptions& options, Rank rank,
                                       const std::vector<Instruction>& computed,
                                       std::int64_t num_minibatches) {
  const Transfers transfers(options, rank);
  std::vector<Instruction> instructions;
  for (const Instruction& instruction : computed) {
    transfers.add_before(instruction, instructions);
    instructions.push_back(instruction);
    transfers.add_after(instruction, instructions);
  }
  for (WeightVersion version = transfers.first_final(num_minibatches); version.value() <= num_minibatches;
       version = version.next()) {
    transfers.add_final(version, instructions);
  }
  return instructions;
}

}  // namespace pipedream
