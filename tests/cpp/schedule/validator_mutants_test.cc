// Tests the validator on random programs and on mutants of these programs. An accepted mutant is checked
// against facts that hold for every correct list. These checks use none of the validator's rules.
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <random>
#include <set>
#include <utility>

#include "schedule/programs.h"
#include "schedule/validator.h"

namespace pipedream {
namespace {

class Draws {
 public:
  explicit Draws(unsigned seed) : random_(seed) {}

  // 0 to count - 1
  std::int64_t below(std::int64_t count) {
    return static_cast<std::int64_t>(random_() % static_cast<std::uint64_t>(count));
  }
  bool one_in(std::int64_t count) { return below(count) == 0; }
  template <class Value>
  const Value& from(const std::vector<Value>& values) {
    return values[static_cast<std::size_t>(below(static_cast<std::int64_t>(values.size())))];
  }

 private:
  std::mt19937 random_;
};

ScheduleOptions draw_options(Draws& draws) {
  for (;;) {
    if (draws.one_in(8)) {
      return make_interleaved(2, 1 + draws.below(2), 1 + draws.below(4));
    }
    const std::int64_t num_stages = 1 + draws.below(3);
    Counts num_replicas;
    Counts num_spares;
    for (std::int64_t stage = 0; stage < num_stages; ++stage) {
      num_replicas.push_back(1 + draws.below(3));
      num_spares.push_back(num_replicas.back() > 1 && draws.one_in(6) ? 1 : 0);
    }
    ScheduleOptions options =
        make_replicated(draws.from(kStraightSchedules), num_replicas, 1 + draws.below(4));
    options.placement = Placement::in_order(num_replicas, num_spares);
    if (num_stages > 1 && draws.one_in(4)) options.ties = {{StageIndex(0), StageIndex(num_stages - 1)}};
    options.exchanges_norms = draws.one_in(4);
    options.uses_allreduce = draws.one_in(3);
    options.asynchronous = draws.one_in(6);
    if (options.schedule == "pipedream") options.staleness = draws.below(3);
    for (std::int64_t stage = 0; stage < num_stages; ++stage) options.recompute.push_back(draws.one_in(3));
    if (error_of(options).empty()) return options;
  }
}

// Changes one number of an instruction.
void change_number(Instruction& instruction, Draws& draws) {
  const std::int64_t by = draws.from(Counts{-2, -1, 1, 2});
  switch (draws.below(5)) {
    case 0:
      instruction.stage = StageIndex(instruction.stage.value() + by);
      return;
    case 1:
      instruction.replica = ReplicaIndex(instruction.replica.value() + by);
      return;
    case 2:
      instruction.microbatch = MicrobatchIndex(instruction.microbatch.value() + by);
      return;
    case 3:
      instruction.version = WeightVersion(instruction.version.value() + by);
      return;
    default:
      instruction.minibatch = MinibatchId(instruction.minibatch.value() + by);
  }
}

void mutate(Programs& programs, Draws& draws) {
  Instructions& program = programs[static_cast<std::size_t>(draws.below(std::ssize(programs)))];
  if (program.empty()) return;
  auto position = program.begin() + draws.below(std::ssize(program));
  // Updates are few, but most rules are about them. So updates are chosen more often.
  if (draws.one_in(3)) {
    position = std::find_if(position, program.end() - 1, [](const Instruction& instruction) {
      return instruction.opcode == Opcode::kUpdate;
    });
  }
  const auto other = program.begin() + draws.below(std::ssize(program));
  switch (draws.below(6)) {
    case 0:
      program.erase(position);
      return;
    case 1:
      program.insert(other, Instruction(*position));
      return;
    case 2:  // moves the instruction, and those between move up
      std::rotate(std::min(position, other), std::min(position, other) + 1, std::max(position, other) + 1);
      return;
    case 3:
      if (position + 1 != program.end()) std::swap(*position, *(position + 1));
      return;
    default:
      change_number(*position, draws);
  }
}

std::multiset<std::string> texts_of(const Instructions& program) {
  std::multiset<std::string> texts;
  for (const Instruction& instruction : program) texts.insert(to_string(instruction));
  return texts;
}

// The order in which one stage of one worker reads and writes versions and adds up gradients.
class StageFacts {
 public:
  explicit StageFacts(const Instructions& program, StageIndex stage) {
    for (const Instruction& instruction : program) {
      if (instruction.stage != stage || travels(instruction.opcode)) continue;
      instructions_.push_back(instruction);
      if (instruction.opcode == Opcode::kUpdate) updates_.insert(instruction.minibatch.value());
    }
  }

  // Returns the first fact that does not hold, or "".
  [[nodiscard]] std::string broken(std::int64_t first_version, std::int64_t num_kept) const {
    std::int64_t newest = first_version;
    std::set<std::pair<std::int64_t, std::int64_t>> forwarded;
    std::multiset<std::int64_t> to_backward;
    for (const Instruction& instruction : instructions_) {
      if (instruction.opcode == Opcode::kForward) to_backward.insert(instruction.minibatch.value());
    }
    for (const Instruction& instruction : instructions_) {
      const std::string text = to_string(instruction);
      if (instruction.opcode == Opcode::kUpdate) {
        if (instruction.version.value() != ++newest) return text + " skips a version";
        // An update needs the backwards of its own minibatches and of all earlier ones.
        const auto next = updates_.upper_bound(instruction.minibatch.value());
        const bool is_early =
            !to_backward.empty() && (next == updates_.end() || *to_backward.begin() < *next);
        if (is_early) return text + " comes before a backward of its round";
        continue;
      }
      const std::int64_t version = instruction.version.value();
      if (version > newest || version <= newest - num_kept) return text + " reads what is not there";
      const std::pair item(instruction.minibatch.value(), instruction.microbatch.value());
      if (instruction.opcode == Opcode::kForward) forwarded.insert(item);
      if (instruction.opcode != Opcode::kForward && !forwarded.contains(item)) {
        return text + " comes before its forward";
      }
      if (instruction.opcode == Opcode::kBackward) to_backward.erase(to_backward.find(item.first));
    }
    return {};
  }

 private:
  Instructions instructions_;
  std::set<std::int64_t> updates_;
};

// Returns "" if the accepted mutant has the same instructions as the programs, in an order that trains
// correctly. Otherwise returns the fault.
std::string find_fault(const ScheduleOptions& options, const Programs& programs, const Programs& mutant) {
  for (std::size_t worker = 0; worker < programs.size(); ++worker) {
    if (texts_of(programs[worker]) != texts_of(mutant[worker])) {
      return "worker " + std::to_string(worker) + " does something else";
    }
    for (StageIndex stage; stage.value() < num_stages(options); stage = stage.next()) {
      const std::string broken =
          StageFacts(mutant[worker], stage).broken(0, num_versions_kept(options, stage));
      if (!broken.empty()) return "worker " + std::to_string(worker) + ": " + broken;
    }
  }
  return {};
}

TEST(ValidatorMutants, WhatIsAcceptedDoesTheSameInAnOrderThatTrains) {
  constexpr int kNumPrograms = 500;
  constexpr int kNumMutants = 60;
  int num_accepted = 0;
  for (unsigned seed = 0; seed < kNumPrograms; ++seed) {
    Draws draws(seed);
    const ScheduleOptions options = draw_options(draws);
    const std::int64_t num_minibatches = draws.below(9);
    const Programs programs = make_programs(options, num_minibatches);
    ASSERT_EQ(replay(options, programs, num_minibatches).error, "") << "seed " << seed;
    for (int index = 0; index < kNumMutants; ++index) {
      Programs mutant = programs;
      for (std::int64_t left = draws.one_in(3) ? 2 : 1; left > 0; --left) mutate(mutant, draws);
      if (mutant == programs || !replay(options, mutant, num_minibatches).ok) continue;
      ++num_accepted;
      ASSERT_EQ(find_fault(options, programs, mutant), "")
          << "seed " << seed << ", mutant " << index << ", " << options.schedule << ", " << num_minibatches
          << " minibatches\n"
          << print_programs(mutant);
    }
  }
  EXPECT_GT(num_accepted, 300);  // with fewer the facts would hardly be checked
}

}  // namespace
}  // namespace pipedream
