// 1F1B with weight stashing, as a pure function of position. See program.h for the picture.
#include "schedule/program.h"

#include <algorithm>
#include <array>
#include <sstream>

#include "base/check.h"
#include "base/failure.h"

namespace pipedream {
namespace {

constexpr std::array<std::string_view, 9> kKnownSchedules = {
    "pipedream", "vertical_sync",  "2bw",           "flush",      "gpipe",
    "naive",     "model_parallel", "data_parallel", "interleaved"};
constexpr std::string_view kBuiltSchedule = "pipedream";

// Far above any cluster; keeps n_s r_s, at most twice the sum of the r_s, inside 64 bits.
constexpr std::int64_t kNumReplicasMax = std::int64_t{1} << 30;

void check_schedule(std::string_view schedule) {
  if (schedule == kBuiltSchedule) return;
  std::ostringstream message;
  if (std::find(kKnownSchedules.begin(), kKnownSchedules.end(), schedule) != kKnownSchedules.end()) {
    message << "schedule \"" << schedule << "\" is not built yet; use one that is: \"" << kBuiltSchedule
            << "\"";
    throw UserError(message.str());
  }
  message << "unknown schedule \"" << schedule << "\"; known are";
  for (const std::string_view known : kKnownSchedules) {
    message << (known == kKnownSchedules.front() ? " \"" : ", \"") << known << "\"";
  }
  throw UserError(message.str());
}

// Newest version at the forward of this minibatch in 1F1B: in_flight - 1 minibatches are still under way.
WeightVersion stashed_version(std::int64_t in_flight, MinibatchId minibatch) {
  return WeightVersion(std::max<std::int64_t>(0, minibatch.value() - in_flight + 1));
}

void check_minibatch(MinibatchId minibatch) {
  if (minibatch.value() >= 0) return;
  throw UserError("minibatch " + std::to_string(minibatch.value()) + " is negative; they are counted from 0");
}

}  // namespace

void check_program_options(const ProgramOptions& options) {
  check_schedule(options.schedule);
  if (options.in_flight < 1) {
    throw UserError("in_flight is " + std::to_string(options.in_flight) + " at stage " +
                    std::to_string(options.stage.value()) + "; it must be at least 1");
  }
  if (options.stage.value() < 0 || options.stage.value() >= options.num_stages) {
    throw UserError("stage " + std::to_string(options.stage.value()) + " is outside the plan of " +
                    std::to_string(options.num_stages) + " stages, which are counted from 0");
  }
}

std::int64_t num_versions_kept(const ProgramOptions& options) {
  check_program_options(options);
  return options.in_flight;
}

WeightVersion forward_version(const ProgramOptions& options, MinibatchId minibatch) {
  check_program_options(options);
  check_minibatch(minibatch);
  return stashed_version(options.in_flight, minibatch);
}

WeightVersion backward_version(const ProgramOptions& options, MinibatchId minibatch) {
  return forward_version(options, minibatch);  // stashing: the backward reads what its forward read
}

std::vector<std::int64_t> derive_in_flight(const std::vector<std::int64_t>& num_replicas) {
  if (num_replicas.empty()) throw UserError("num_replicas is empty; a plan has at least one stage");
  for (std::size_t stage = 0; stage < num_replicas.size(); ++stage) {
    if (num_replicas[stage] >= 1 && num_replicas[stage] <= kNumReplicasMax) continue;
    throw UserError("stage " + std::to_string(stage) + " has " + std::to_string(num_replicas[stage]) +
                    " replicas; it must have between 1 and " + std::to_string(kNumReplicasMax));
  }
  std::vector<std::int64_t> in_flight(num_replicas.size(), 1);
  for (std::size_t stage = num_replicas.size() - 1; stage-- > 0;) {
    const std::int64_t downstream = in_flight[stage + 1] * num_replicas[stage + 1];
    in_flight[stage] = 1 + (downstream + num_replicas[stage] - 1) / num_replicas[stage];
  }
  return in_flight;
}

const char* phase_name(Phase phase) {
  switch (phase) {
    case Phase::kWarmUp:
      return "warm-up";
    case Phase::kSteady:
      return "steady";
    case Phase::kCoolDown:
      return "cool-down";
  }
  PD_CHECK(false, "phase " << static_cast<int>(phase));
}

Phase phase_of(const ProgramOptions& options, const Instruction& instruction,
               std::optional<std::int64_t> num_minibatches) {
  const std::int64_t minibatch = instruction.minibatch.value();
  if (instruction.opcode == Opcode::kForward) {
    return minibatch < options.in_flight - 1 ? Phase::kWarmUp : Phase::kSteady;
  }
  // The body pairs this backward with the forward of the minibatch that takes its place, if there is one.
  const bool is_paired = !num_minibatches || minibatch < *num_minibatches - (options.in_flight - 1);
  return is_paired ? Phase::kSteady : Phase::kCoolDown;
}

ProgramCursor::ProgramCursor(ProgramOptions options) : options_(std::move(options)) {
  check_program_options(options_);
}

std::optional<Instruction> ProgramCursor::current() const {
  const MinibatchId oldest(num_updated_);
  if (backward_done_)
    return Instruction{Opcode::kUpdate, oldest, MicrobatchIndex(0), WeightVersion(num_updated_ + 1)};

  const bool has_room = num_forwarded_ - num_updated_ < options_.in_flight;
  const bool has_more = !num_minibatches_ || num_forwarded_ < *num_minibatches_;
  if (has_room && has_more) {
    const MinibatchId newest(num_forwarded_);
    return Instruction{Opcode::kForward, newest, MicrobatchIndex(0),
                       stashed_version(options_.in_flight, newest)};
  }
  if (num_updated_ < num_forwarded_) {
    return Instruction{Opcode::kBackward, oldest, MicrobatchIndex(0),
                       stashed_version(options_.in_flight, oldest)};
  }
  return std::nullopt;
}

void ProgramCursor::advance() {
  const std::optional<Instruction> instruction = current();
  PD_CHECK(instruction.has_value(), "stage " << options_.stage.value()
                                             << ": the program is over after minibatch " << num_updated_ - 1);
  switch (instruction->opcode) {
    case Opcode::kForward:
      ++num_forwarded_;
      break;
    case Opcode::kBackward:
      backward_done_ = true;
      break;
    case Opcode::kUpdate:
      backward_done_ = false;
      ++num_updated_;
      break;
  }
}

void ProgramCursor::set_num_minibatches(std::int64_t num_minibatches) {
  PD_CHECK(!num_minibatches_.has_value(), "stage " << options_.stage.value()
                                                   << ": num_minibatches was already set to "
                                                   << *num_minibatches_ << ", now " << num_minibatches);
  PD_CHECK(num_minibatches >= num_forwarded_, "stage " << options_.stage.value() << ": num_minibatches "
                                                       << num_minibatches << " is below the "
                                                       << num_forwarded_ << " already forwarded");
  num_minibatches_ = num_minibatches;
}

std::vector<Instruction> make_program(const ProgramOptions& options, std::int64_t num_minibatches) {
  if (num_minibatches < 0) {
    throw UserError("num_minibatches is " + std::to_string(num_minibatches) + "; it must be 0 or more");
  }
  ProgramCursor cursor(options);
  cursor.set_num_minibatches(num_minibatches);
  std::vector<Instruction> instructions;
  for (auto instruction = cursor.current(); instruction; instruction = cursor.current()) {
    instructions.push_back(*instruction);
    cursor.advance();
  }
  return instructions;
}

}  // namespace pipedream
