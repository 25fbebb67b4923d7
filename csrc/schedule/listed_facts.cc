// Derives facts from the lists of a written program: the versions that each stage reads and keeps, and the
// microbatches that it has in flight. See listed_program.h.
#include <algorithm>
#include <utility>

#include "schedule/listed_program.h"

namespace pipedream {
namespace {

// Returns the number of bodies after which the counts in Facts no longer grow. By then the reads of all
// workers repeat, even of the worker with the longest warm-up.
std::int64_t num_bodies_until_steady(const ListedReads& reads) {
  return 2 + reads.end() / reads.numbers_per_body();
}

bool is_at(const Instruction& instruction, const Place& place) {
  return instruction.stage == place.stage && instruction.replica == place.replica;
}

}  // namespace

void ListedProgram::count_facts() {
  for (StageIndex stage; stage.value() < num_stages(); stage = stage.next()) {
    Facts& facts = facts_.emplace_back();
    facts.forwards = reads_of(stage, Stash::kKept);
    facts.backwards = reads_of(stage, Stash::kReleased);
    const std::int64_t end = std::max(facts.forwards.end(), facts.backwards.end());
    for (std::int64_t number = 0; number < end + facts.forwards.numbers_per_body() && !facts.first_unstashed;
         ++number) {
      if (facts.forwards.version_of(number) != facts.backwards.version_of(number)) {
        facts.first_unstashed = number;
      }
    }
    for (const Place& place : placement_.places()) {
      if (place.stage == stage) count_at(place, facts);
    }
    facts.backwards.num_versions_kept = facts.forwards.num_versions_kept;
  }
  for (StageIndex owner; owner.value() < num_stages(); owner = owner.next()) {
    Facts& facts = facts_[static_cast<std::size_t>(owner.value())];
    facts.tied = tied_reads_of(owner);
    facts.tied.num_versions_kept = count_tied_versions(owner, facts.tied);
  }
  drains_ = true;
  for (Rank rank; rank.value() < placement_.num_ranks(); rank = rank.next()) {
    drains_ = drains_ && drains_at(rank);
  }
}

// Returns the versions that the stage's microbatches read, by microbatch number, over all replicas. stash:
// chooses the opcode whose reads are returned, for instance kKept the forwards.
ListedReads ListedProgram::reads_of(StageIndex stage, Stash stash) const {
  const Rounds& rounds = rounds_of_stage(stage);
  const std::int64_t own_per_body = versions_per_body(stage) * rounds.own_per_round();
  std::vector<std::vector<std::int64_t>> by_replica;
  std::int64_t end = 0;
  for (ReplicaIndex replica; replica.value() < rounds.num_replicas; replica = replica.next()) {
    std::vector<std::int64_t>& versions = by_replica.emplace_back();
    for (const Instruction& instruction : list_of(placement_.rank_of(stage, replica)).instructions) {
      if (traits_of(instruction.opcode).stash == stash && instruction.stage == stage) {
        versions.push_back(instruction.version.value());
      }
    }
    end = std::max(end, rounds.own_number(replica, static_cast<std::int64_t>(versions.size()) - 1) + 1);
  }
  std::vector<std::int64_t> versions;
  for (std::int64_t number = 0; number < end; ++number) {
    const std::vector<std::int64_t>& own = by_replica[rounds.replica_of(number).value()];
    const std::int64_t index = rounds.own_index(number);
    const auto listed = static_cast<std::int64_t>(own.size());
    const std::int64_t bodies = index < listed ? 0 : (index - listed) / own_per_body + 1;
    versions.push_back(own[index - bodies * own_per_body] + bodies * versions_per_body(stage));
  }
  return {std::move(versions), minibatches_per_body_ * num_microbatches_, versions_per_body(stage)};
}

ListedReads ListedProgram::tied_reads_of(StageIndex owner) const {
  const ListedReads& of_input = forward_reads(StageIndex(0));
  const ListedReads& of_owner = forward_reads(owner);
  const std::int64_t per_input_version = rounds_of_stage(StageIndex(0)).microbatches_per_round();
  const std::int64_t per_version = rounds_of_stage(owner).microbatches_per_round();
  std::vector<std::int64_t> versions;
  for (std::int64_t number = 0; number < std::max(of_input.end(), of_owner.end()); ++number) {
    const std::int64_t seen_at_input = of_input.version_of(number) * per_input_version / per_version;
    versions.push_back(std::min(seen_at_input, of_owner.version_of(number)));
  }
  return {std::move(versions), of_input.numbers_per_body(), versions_per_body(owner)};
}

// Returns the largest number of versions of the owner's shared parameters that exist at one stage at the same
// time. The stage is the owner or a stage downstream of it.
std::int64_t ListedProgram::count_tied_versions(StageIndex owner, const ListedReads& tied) const {
  std::int64_t num_kept = 1;
  for (const Place& place : placement_.places()) {
    if (place.stage < owner) continue;
    const Rounds& rounds = rounds_of_stage(place.stage);
    const std::int64_t length = list_of(place.rank).length(num_bodies_until_steady(tied));
    std::int64_t num_backwarded = 0;
    for (std::int64_t position = 0; position < length; ++position) {
      const Instruction instruction = at(place.rank, position);
      if (!is_at(instruction, place)) continue;
      if (releases_stash(instruction.opcode)) ++num_backwarded;
      const std::int64_t oldest = tied.oldest_from(rounds.own_number(place.replica, num_backwarded));
      std::int64_t newest = 0;
      if (place.stage > owner) {  // a version arrives right before the first forward that reads it
        const std::int64_t number = rounds.number_of(instruction.minibatch, instruction.microbatch);
        if (keeps_stash(instruction.opcode)) newest = tied.newest_until(number);
      } else if (writes_version(instruction.opcode)) {
        newest = instruction.version.value();
      } else if (rounds.num_replicas > 1) {  // the version may have come from another replica
        newest = num_backwarded / rounds.own_per_round();
      }
      num_kept = std::max(num_kept, newest - oldest + 1);
    }
  }
  return num_kept;
}

// Raises the stage's counts of microbatches in flight and of kept versions to those of this replica, if these
// are higher.
void ListedProgram::count_at(const Place& place, Facts& facts) const {
  const Rounds& rounds = rounds_of_stage(place.stage);
  const std::int64_t num_bodies =
      std::max(num_bodies_until_steady(facts.forwards), num_bodies_until_steady(facts.backwards));
  std::int64_t num_forwarded = 0;
  std::int64_t num_backwarded = 0;
  for (std::int64_t position = 0; position < list_of(place.rank).length(num_bodies); ++position) {
    const Instruction instruction = at(place.rank, position);
    if (!is_at(instruction, place)) continue;
    if (keeps_stash(instruction.opcode)) ++num_forwarded;
    if (releases_stash(instruction.opcode)) ++num_backwarded;
    facts.num_in_flight = std::max(facts.num_in_flight, num_forwarded - num_backwarded);
    const std::int64_t oldest =
        std::min(facts.forwards.oldest_from(rounds.own_number(place.replica, num_forwarded)),
                 facts.backwards.oldest_from(rounds.own_number(place.replica, num_backwarded)));
    std::int64_t newest = 0;
    if (writes_version(instruction.opcode)) {
      newest = instruction.version.value();
    } else if (rounds.num_replicas > 1 && !facts.first_unstashed) {
      // Another replica may have written this version already.
      newest = num_backwarded / rounds.own_per_round();
    }
    std::int64_t& num_kept = facts.forwards.num_versions_kept;
    num_kept = std::max(num_kept, newest - oldest + 1);
  }
}

// Returns whether the worker's list drains and all stages of the program have the same rounds. In a list that
// drains, each forward comes after the update of the round before and reads the version of that update. The
// updates of a round come after all its backwards, in the order of the worker's stages.
bool ListedProgram::drains_at(Rank rank) const {
  const std::vector<StageIndex> stages = placement_.stages_at(rank);
  const Rounds& rounds = rounds_of_stage(stages.front());
  std::vector<std::int64_t> num_updated(stages.size(), 0);
  std::int64_t num_backwarded = 0;
  for (std::int64_t position = 0; position < list_of(rank).length(2); ++position) {
    const Instruction instruction = at(rank, position);
    const auto index =
        static_cast<std::size_t>(std::ranges::find(stages, instruction.stage) - stages.begin());
    const std::int64_t round = rounds.round_of(instruction.minibatch);
    const bool reads_newest = num_updated[index] >= round && instruction.version.value() == round;
    if (keeps_stash(instruction.opcode) && !reads_newest) return false;
    if (releases_stash(instruction.opcode)) ++num_backwarded;
    if (!writes_version(instruction.opcode)) continue;
    if (index > 0 && num_updated[index - 1] == num_updated[index]) return false;
    const auto num_stages = static_cast<std::int64_t>(stages.size());
    if (num_backwarded < (round + 1) * rounds.own_per_round() * num_stages) return false;
    ++num_updated[index];
  }
  return std::ranges::all_of(rounds_, [&](const Rounds& of_stage) {
    return of_stage.minibatches_per_round == rounds_.front().minibatches_per_round;
  });
}

}  // namespace pipedream
