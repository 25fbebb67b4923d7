// A schedule that somebody has written: a list for every worker, of which a part goes through once and the
// rest repeats. Immutable; any thread.
//
// clang-format off
//   worker 0                                                    # of 2; forwards and backwards by pairs
//   body every 2 minibatches
//   FORWARD stage 0 minibatch 0 microbatch 0 reads version 0
//   FORWARD stage 0 minibatch 1 microbatch 0 reads version 0
//   BACKWARD stage 0 minibatch 0 microbatch 0 reads version 0
//   UPDATE stage 0 minibatch 0 writes version 1
//   BACKWARD stage 0 minibatch 1 microbatch 0 reads version 0
//   UPDATE stage 0 minibatch 1 writes version 2
//   worker 1
//   ...
// clang-format on
//
// A worker may have a "warm-up" above its body. Each time the body repeats, its minibatches and versions are
// larger by the body's minibatches. A run skips the instructions of minibatches that it does not have, and
// repeats the body until all others are updated: so the lists fit a run of any length. A text may also show
// the cool-down, which is what a run does after the first body where it ends with that body's last minibatch.
//
// One stage at each worker, one update a minibatch, as in program.h without replicas. Transfers and
// recomputing are added as to the schedules that have names.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/ids.h"
#include "schedule/instruction.h"
#include "schedule/program.h"
#include "schedule/rounds.h"

namespace pipedream {

class ListedProgram {
 public:
  // A worker's list.
  struct List {
    std::vector<Instruction> instructions;  // the warm-up's, then the body's
    std::size_t num_warm_up = 0;
    std::vector<std::int64_t> lines{};  // of a text, where they come from one

    [[nodiscard]] std::span<const Instruction> body() const {
      return std::span(instructions).subspan(num_warm_up);
    }
    [[nodiscard]] std::int64_t body_length() const { return static_cast<std::int64_t>(body().size()); }
    // With so many bodies behind the warm-up.
    [[nodiscard]] std::int64_t length(std::int64_t num_bodies) const {
      return static_cast<std::int64_t>(num_warm_up) + num_bodies * body_length();
    }

    friend bool operator==(const List& one, const List& other) {
      return one.num_warm_up == other.num_warm_up && one.instructions == other.instructions;
    }
  };

  // Throws UserError, one line, for a list that is not in order or not whole, and for one that the validator
  // (validator.h) does not accept.
  ListedProgram(std::vector<List> workers, std::int64_t minibatches_per_body);
  // Throws UserError naming the line, or as above. '#' starts a comment, empty lines are skipped.
  [[nodiscard]] static ListedProgram parse(std::string_view text);
  // The lists of a schedule. Throws UserError for options with replicas, several stages at a worker, or ties.
  [[nodiscard]] static ListedProgram of(const ScheduleOptions& options);

  // With comments that say what follows from the lists: versions kept, and the cool-down.
  [[nodiscard]] std::string to_text() const;

  [[nodiscard]] std::int64_t num_stages() const { return static_cast<std::int64_t>(workers_.size()); }
  [[nodiscard]] std::int64_t num_microbatches() const { return num_microbatches_; }
  [[nodiscard]] std::int64_t minibatches_per_body() const { return minibatches_per_body_; }

  // The minibatches that the lists name, of which later ones repeat the last.
  [[nodiscard]] std::int64_t num_minibatches_listed() const;

  // A place in a worker's list, which has no end.
  [[nodiscard]] Instruction at(Rank rank, std::int64_t position) const;
  // As phase_of() has it (program.h), in a run from minibatch 0 on.
  [[nodiscard]] Phase phase_of(const Instruction& instruction,
                               std::optional<std::int64_t> num_minibatches) const;

  // By stage: the most microbatches that are forwarded and not yet backwarded, the versions that are kept,
  // and whether every backward reads what its forward has read.
  [[nodiscard]] std::int64_t num_in_flight(StageIndex stage) const { return facts_of(stage).num_in_flight; }
  [[nodiscard]] std::int64_t num_versions_kept(StageIndex stage) const {
    return facts_of(stage).num_versions_kept;
  }
  // Those of every stage.
  [[nodiscard]] std::vector<std::int64_t> in_flight() const { return of_stages(&Facts::num_in_flight); }
  [[nodiscard]] std::vector<std::int64_t> versions_kept() const {
    return of_stages(&Facts::num_versions_kept);
  }
  [[nodiscard]] bool stashes(StageIndex stage) const { return facts_of(stage).stashes; }
  [[nodiscard]] const ListedReads& forward_reads(StageIndex stage) const { return facts_of(stage).forwards; }
  [[nodiscard]] const ListedReads& backward_reads(StageIndex stage) const {
    return facts_of(stage).backwards;
  }

  friend bool operator==(const ListedProgram& one, const ListedProgram& other) {
    return one.minibatches_per_body_ == other.minibatches_per_body_ && one.workers_ == other.workers_;
  }

 private:
  struct Facts {
    std::int64_t num_in_flight = 1;
    std::int64_t num_versions_kept = 1;
    bool stashes = true;
    ListedReads forwards;
    ListedReads backwards;
  };

  [[nodiscard]] std::vector<std::int64_t> of_stages(std::int64_t Facts::*fact) const;
  // 0 in the warm-up.
  [[nodiscard]] std::int64_t num_bodies_before(Rank rank, std::int64_t position) const;
  void check_lists() const;
  void check_order(Rank rank) const;
  void check_run() const;
  [[noreturn]] void refuse(Rank rank, std::int64_t position, const std::string& why) const;
  [[noreturn]] void refuse_run(const std::string& error) const;
  [[nodiscard]] Facts count_facts(Rank rank) const;
  [[nodiscard]] ListedReads reads_by(Rank rank, Opcode opcode) const;
  // In the run that ends with the last minibatch of the worker's first body.
  [[nodiscard]] std::int64_t minibatches_of_one_body(Rank rank) const;
  [[nodiscard]] std::vector<Instruction> cool_down(Rank rank) const;
  [[nodiscard]] const Facts& facts_of(StageIndex stage) const {
    return facts_[static_cast<std::size_t>(stage.value())];
  }
  [[nodiscard]] const List& list_of(Rank rank) const {
    return workers_[static_cast<std::size_t>(rank.value())];
  }

  std::vector<List> workers_;
  std::int64_t minibatches_per_body_;
  std::int64_t num_microbatches_ = 1;
  std::vector<Facts> facts_;  // by stage, which is its worker
};

}  // namespace pipedream
