// A ListedProgram is a schedule that a user has written, as one list of instructions per worker. A list has a
// body, which repeats, and may have a warm-up, which runs once. Immutable; any thread.
//
// clang-format off
//   worker 0                                                    # of 2; two forwards, then two backwards
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

// A worker may have a "warm-up" above its body. When the body repeats, its minibatches get higher numbers, by
// the number of minibatches in the body. Its versions get higher by the number of the stage's updates in the
// body. A run repeats the body until all its minibatches are updated, and skips instructions of minibatches
// that it does not have. So the lists fit a run of any length.

// Stages are placed as in program.h: each worker has one stage, or one replica of a stage, in the order of
// the stages. If there are W workers and more stages, stage s is at worker s mod W. The number of a stage's
// updates in the body decides how long its rounds are: either the shortest that the stage allows, or rounds
// common to all stages. Transfers and recomputing are added as for named schedules.

// All stages that share a parameter read the same version of it for a microbatch. It is the older of two
// versions: the one that the input stage's forward reads, and the one that the owner's forward reads. Named
// schedules have the same rule (tied_version()), except 2bw with unequal numbers of replicas.
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
#include "schedule/listed_reads.h"
#include "schedule/placement.h"
#include "schedule/program.h"
#include "schedule/rounds.h"

namespace pipedream {

struct ReplayReport;

class ListedProgram {
 public:
  // A worker's list.
  struct List {
    std::vector<Instruction> instructions;  // those of the warm-up, then those of the body
    std::size_t num_warm_up = 0;
    // Each instruction's line in the text; empty if the list comes from no text.
    std::vector<std::int64_t> lines{};

    [[nodiscard]] std::span<const Instruction> body() const {
      return std::span(instructions).subspan(num_warm_up);
    }
    [[nodiscard]] std::int64_t body_length() const { return static_cast<std::int64_t>(body().size()); }
    // Returns the number of instructions in the warm-up and num_bodies bodies.
    [[nodiscard]] std::int64_t length(std::int64_t num_bodies) const {
      return static_cast<std::int64_t>(num_warm_up) + num_bodies * body_length();
    }

    friend bool operator==(const List& one, const List& other) {
      return one.num_warm_up == other.num_warm_up && one.instructions == other.instructions;
    }
  };

  // Throws UserError, one line, if the lists break a rule above or lack instructions, if they or their
  // numbers are too large, or if the validator (validator.h) does not accept them.
  ListedProgram(std::vector<List> workers, std::int64_t minibatches_per_body);
  // Reads a text such as to_text() returns. '#' starts a comment, and empty lines are skipped. Throws a
  // UserError for a wrong text, or an error of the constructor. An error about one line names the line.
  [[nodiscard]] static ListedProgram parse(std::string_view text);
  // Lists a named schedule, or returns the options' program. Throws UserError for options that
  // check_schedule_options() refuses, that have spares, asynchronous shards or a staleness, or that make more
  // than a program may have (kListedNumberMax in listed_words.h).
  [[nodiscard]] static ListedProgram of(const ScheduleOptions& options);

  // Returns the text of the lists. Its comments say how many versions a stage keeps, which backward is the
  // first that does not read its forward's version, and what the cool-down is.
  [[nodiscard]] std::string to_text() const;
  // Returns a note for the user if a backward reads another version than its forward. The note names the line
  // of the first such backward, and says what to write instead. Empty if there is none.
  [[nodiscard]] std::string note_on_unstashed() const;

  [[nodiscard]] const Placement& placement() const { return placement_; }
  [[nodiscard]] std::int64_t num_stages() const { return placement_.num_stages(); }
  [[nodiscard]] std::int64_t num_microbatches() const { return num_microbatches_; }
  [[nodiscard]] std::int64_t minibatches_per_body() const { return minibatches_per_body_; }
  [[nodiscard]] std::int64_t minibatches_per_round(StageIndex stage) const {
    return rounds_of_stage(stage).minibatches_per_round;
  }
  // Returns whether all stages have the same rounds, and each finishes a round before it forwards the next
  // one.
  [[nodiscard]] bool drains() const { return drains_; }

  // Returns the number of minibatches that the lists name. The minibatches after these repeat those of the
  // body.
  [[nodiscard]] std::int64_t num_minibatches_listed() const;

  // Returns the instruction at this position of a worker's list, in which the body repeats without end.
  [[nodiscard]] Instruction at(Rank rank, std::int64_t position) const;
  // Returns the same phase as phase_of() in program.h, for a run that starts with minibatch 0.
  [[nodiscard]] Phase phase_of(const Instruction& instruction,
                               std::optional<std::int64_t> num_minibatches) const;

  // Facts of a stage. num_in_flight() is the most microbatches that a replica has forwarded and not yet
  // backwarded. stashes() says whether every backward reads the version that its forward has read.
  [[nodiscard]] std::int64_t num_in_flight(StageIndex stage) const { return facts_of(stage).num_in_flight; }
  [[nodiscard]] std::int64_t num_versions_kept(StageIndex stage) const {
    return facts_of(stage).forwards.num_versions_kept;
  }
  [[nodiscard]] std::vector<std::int64_t> in_flight() const;
  [[nodiscard]] std::vector<std::int64_t> versions_kept() const;
  [[nodiscard]] bool stashes(StageIndex stage) const { return !facts_of(stage).first_unstashed; }
  [[nodiscard]] const ListedReads& forward_reads(StageIndex stage) const { return facts_of(stage).forwards; }
  [[nodiscard]] const ListedReads& backward_reads(StageIndex stage) const {
    return facts_of(stage).backwards;
  }
  // Returns the versions that the owner and its users read of the parameters that they share.
  [[nodiscard]] const ListedReads& tied_reads(StageIndex owner) const { return facts_of(owner).tied; }

  friend bool operator==(const ListedProgram& one, const ListedProgram& other) {
    return one.minibatches_per_body_ == other.minibatches_per_body_ && one.workers_ == other.workers_;
  }

 private:
  struct Facts {
    std::int64_t num_in_flight = 1;
    // The number of the first microbatch whose forward and backward read different versions.
    std::optional<std::int64_t> first_unstashed;
    ListedReads forwards;
    ListedReads backwards;
    ListedReads tied;
  };

  // The positions of a microbatch's forward and backward in the list of their worker.
  struct Passes {
    Rank rank;
    std::int64_t forward = 0;
    std::int64_t backward = 0;
  };

  // Steps of the constructor, in order. Each relies on the steps before it. check_whole_body() is a step
  // between check_order() and count_facts().
  void place_workers();
  void count_rounds();
  void check_order(Rank rank) const;
  void count_facts();
  void check_run() const;

  [[nodiscard]] std::string reason_to_move(Rank rank, Rank due) const;
  void check_whole_body(const Place& place, std::int64_t num_updates) const;
  [[noreturn]] void refuse(Rank rank, std::int64_t position, const std::string& why) const;
  [[noreturn]] void refuse_run(const ReplayReport& report,
                               const std::vector<std::vector<Instruction>>& programs) const;
  [[nodiscard]] std::optional<std::int64_t> find_position(Rank rank, const Instruction& instruction) const;
  [[nodiscard]] std::string describe_wait(Rank rank, std::span<const Instruction> rest) const;
  [[nodiscard]] std::string hint_on_backward(Rank rank, std::int64_t position) const;
  [[nodiscard]] std::string name_of_next(const Place& place, const OpcodeTraits& traits) const;
  [[nodiscard]] std::string name_of_item(const Place& place, const OpcodeTraits& traits,
                                         std::int64_t index) const;
  [[nodiscard]] std::int64_t number_of_item(const Place& place, const OpcodeTraits& traits,
                                            std::int64_t index) const;
  [[nodiscard]] Passes passes_of(StageIndex stage, std::int64_t number) const;
  [[nodiscard]] std::string place_of(Rank rank, std::int64_t position) const;
  [[nodiscard]] std::string describe_unstashed(StageIndex stage, bool names_lines) const;
  [[nodiscard]] std::string how_to_stash(const Passes& passes) const;
  [[nodiscard]] std::int64_t last_to_warm_up(StageIndex stage, std::int64_t number) const;
  [[nodiscard]] std::int64_t count_in_body(const Place& place, const OpcodeTraits& traits) const;
  [[nodiscard]] ListedReads reads_of(StageIndex stage, Stash stash) const;
  [[nodiscard]] ListedReads tied_reads_of(StageIndex owner) const;
  [[nodiscard]] std::int64_t count_tied_versions(StageIndex owner, const ListedReads& tied) const;
  void count_at(const Place& place, Facts& facts) const;
  [[nodiscard]] bool drains_at(Rank rank) const;

  // Returns how often the body has run before the position. It is 0 in the warm-up and in the first body.
  [[nodiscard]] std::int64_t num_bodies_before(Rank rank, std::int64_t position) const;
  [[nodiscard]] Instruction later_by(Instruction instruction, std::int64_t bodies) const;
  // Returns the number of minibatches of a run that ends with the last minibatch of the worker's first body.
  [[nodiscard]] std::int64_t minibatches_of_one_body(Rank rank) const;
  [[nodiscard]] std::vector<Instruction> cool_down(Rank rank) const;
  [[nodiscard]] std::string comment_on(Rank rank) const;
  [[nodiscard]] const Rounds& rounds_of_stage(StageIndex stage) const {
    return rounds_[static_cast<std::size_t>(stage.value())];
  }
  [[nodiscard]] std::int64_t versions_per_body(StageIndex stage) const {
    return minibatches_per_body_ / minibatches_per_round(stage);
  }
  [[nodiscard]] const Facts& facts_of(StageIndex stage) const {
    return facts_[static_cast<std::size_t>(stage.value())];
  }
  [[nodiscard]] const List& list_of(Rank rank) const {
    return workers_[static_cast<std::size_t>(rank.value())];
  }

  std::vector<List> workers_;
  std::int64_t minibatches_per_body_;
  std::int64_t num_microbatches_ = 1;
  Placement placement_;
  std::vector<Rounds> rounds_;  // one entry per stage
  std::vector<Facts> facts_;    // one entry per stage
  bool drains_ = false;
};

// Returns the options of a run of the program. They point to the program, which must outlive them.
[[nodiscard]] ScheduleOptions options_of_run(const ListedProgram& program);

}  // namespace pipedream
