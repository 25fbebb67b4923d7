// A schedule that somebody has written: what every worker computes, as a list that goes through once and a
// list that repeats. Immutable; any thread.
//
//   worker 0                                                             of 2; forwards and backwards by
//   pairs warm-up FORWARD stage 0 minibatch 0 microbatch 0 reads version 0 FORWARD stage 0 minibatch 1
//   microbatch 0 reads version 0 body every 2 minibatches BACKWARD stage 0 minibatch 0 microbatch 0 reads
//   version 0 UPDATE stage 0 minibatch 0 writes version 1
//   ...
//   FORWARD stage 0 minibatch 2 microbatch 0 reads version 2
//   FORWARD stage 0 minibatch 3 microbatch 0 reads version 2
//   worker 1
//   ...
//
// Numbers are those of a run in which the body goes through once; each time more adds the body's minibatches
// to all numbers of minibatches and versions. What a run does not have is left out, and the body repeats
// until all minibatches are updated: so a run of any length has a program, and what is left of the body when
// the data are over is the cool-down. A text may show that part, as a run of one body has it.
//
// One stage at each worker, one update a minibatch, as in program.h without replicas. What travels, and
// recomputing, is added as to the schedules that have names.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/ids.h"
#include "schedule/instruction.h"
#include "schedule/rounds.h"

namespace pipedream {

struct ScheduleOptions;

class ListedProgram {
 public:
  struct Lists {
    std::vector<Instruction> warm_up;
    std::vector<Instruction> body;

    friend bool operator==(const Lists&, const Lists&) = default;
  };

  // Throws UserError, one line, for what the validator (validator.h) does not accept of runs of every length,
  // and for a body that is not whole: as many FORWARDs, BACKWARDs and UPDATEs of each stage as its
  // minibatches need.
  ListedProgram(std::vector<Lists> workers, std::int64_t minibatches_per_body);
  // Throws UserError naming the line, or as above. '#' starts a comment, empty lines are skipped. Of a
  // cool-down the text must have all or nothing.
  [[nodiscard]] static ListedProgram parse(std::string_view text);
  // What a schedule computes. Throws UserError for options with replicas, several stages at a worker, or
  // ties.
  [[nodiscard]] static ListedProgram of(const ScheduleOptions& options);

  [[nodiscard]] std::string to_text() const;  // with its cool-down

  [[nodiscard]] std::int64_t num_stages() const { return static_cast<std::int64_t>(workers_.size()); }
  [[nodiscard]] std::int64_t num_microbatches() const { return num_microbatches_; }
  [[nodiscard]] std::int64_t minibatches_per_body() const { return minibatches_per_body_; }

  // Of a worker's list without an end.
  [[nodiscard]] Instruction at(Rank rank, std::int64_t position) const;
  // Where it has the instruction, in a run of so many minibatches; as if without an end where that is
  // unknown.
  enum class Section { kWarmUp, kBody, kCoolDown };
  [[nodiscard]] Section section_of(const Instruction& instruction,
                                   std::optional<std::int64_t> num_minibatches) const;

  // Of a stage: the most microbatches that are forwarded and not yet backwarded, the versions that are kept,
  // and whether every backward reads what its forward has read.
  [[nodiscard]] std::int64_t num_in_flight(StageIndex stage) const { return facts_of(stage).num_in_flight; }
  [[nodiscard]] std::int64_t num_versions_kept(StageIndex stage) const {
    return facts_of(stage).num_versions_kept;
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

  void check_lists() const;
  void check_runs() const;
  [[nodiscard]] Facts count_facts(Rank rank) const;
  [[nodiscard]] ListedReads reads_by(Rank rank, Opcode opcode) const;
  [[nodiscard]] std::int64_t count_in_flight(Rank rank) const;
  [[nodiscard]] std::int64_t count_versions_kept(Rank rank) const;
  // Of the run in which the worker's body goes through once.
  [[nodiscard]] std::int64_t minibatches_of_one_body(Rank rank) const;
  [[nodiscard]] std::vector<Instruction> cool_down(Rank rank) const;
  [[nodiscard]] const Facts& facts_of(StageIndex stage) const {
    return facts_[static_cast<std::size_t>(stage.value())];
  }
  [[nodiscard]] const Lists& lists_of(Rank rank) const {
    return workers_[static_cast<std::size_t>(rank.value())];
  }

  std::vector<Lists> workers_;
  std::int64_t minibatches_per_body_;
  std::int64_t num_microbatches_ = 1;
  std::vector<Facts> facts_;  // by stage, which is its worker
};

}  // namespace pipedream
