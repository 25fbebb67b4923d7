// Helpers of this folder's tests: options for a schedule's name, the programs of all workers, and programs as
// the short text that papers use.
#pragma once

#include <cstdint>
#include <numeric>
#include <optional>
#include <string>
#include <vector>

#include "base/failure.h"
#include "schedule/transfers.h"

namespace pipedream {

using Counts = std::vector<std::int64_t>;
using Instructions = std::vector<Instruction>;
using Programs = std::vector<Instructions>;

// Returns S, S - 1, ..., 1: the numbers of microbatches in flight that a pipeline of S stages without
// replicas needs.
inline Counts straight(std::int64_t num_stages) {
  return derive_in_flight(Counts(static_cast<std::size_t>(num_stages), 1));
}

inline ScheduleOptions make_options(const std::string& schedule, const Counts& in_flight,
                                    std::int64_t num_microbatches = 1) {
  ScheduleOptions options;
  options.schedule = schedule;
  options.in_flight = in_flight;
  options.num_microbatches = num_microbatches;
  return options;
}

// Returns the reason for which the options are refused, or "" if they are accepted.
inline std::string error_of(const ScheduleOptions& options) {
  try {
    check_schedule_options(options);
  } catch (const UserError& error) {
    return error.what();
  }
  return "";
}

inline ScheduleOptions make_interleaved(std::int64_t num_workers, std::int64_t num_chunks,
                                        std::int64_t num_microbatches) {
  ScheduleOptions options = make_options("interleaved", straight(num_workers * num_chunks), num_microbatches);
  Counts ranks;
  for (std::int64_t stage = 0; stage < num_workers * num_chunks; ++stage)
    ranks.push_back(stage % num_workers);
  options.placement = Placement::at_ranks(ranks);
  return options;
}

// Returns options for these numbers of replicas. The number of microbatches in flight is derived from them.
inline ScheduleOptions make_replicated(const std::string& schedule, const Counts& num_replicas,
                                       std::int64_t num_microbatches = 1, std::int64_t staleness = 0) {
  ScheduleOptions options = make_options(schedule, derive_in_flight(num_replicas), num_microbatches);
  options.placement = Placement::in_order(num_replicas);
  options.staleness = staleness;
  return options;
}

inline Programs make_programs(const ScheduleOptions& options, std::int64_t num_minibatches) {
  Programs programs;
  for (std::int64_t worker = 0; worker < num_workers(options); ++worker) {
    programs.push_back(make_program(options, Rank(worker), num_minibatches));
  }
  return programs;
}

// Makes the lists of computing instructions, without transfers. make_programs() adds the transfers.
inline Programs make_compute_programs(const ScheduleOptions& options, std::int64_t num_minibatches) {
  Programs programs;
  for (std::int64_t worker = 0; worker < num_workers(options); ++worker) {
    programs.push_back(make_compute_program(options, Rank(worker), num_minibatches));
  }
  return programs;
}
inline Programs with_transfers(const ScheduleOptions& options, const Programs& computed,
                               std::int64_t num_minibatches) {
  Programs programs;
  for (std::size_t worker = 0; worker < computed.size(); ++worker) {
    const Rank rank(static_cast<std::int64_t>(worker));
    programs.push_back(add_transfers(options, rank, computed[worker], num_minibatches));
  }
  return programs;
}

// All schedules that a plan of several stages can have, except interleaved.
inline const std::vector<std::string> kStraightSchedules = {
    "pipedream", "vertical_sync", "naive", "2bw", "flush", "gpipe", "model_parallel"};

inline std::vector<std::string> pipeline_schedules() {
  std::vector<std::string> names = kStraightSchedules;
  names.emplace_back("interleaved");
  return names;
}

// Returns the computing instructions as text: "F0 F1 | F2 B0 U0 | B1 U1". The numbers are minibatches, and
// the bars separate the phases. Microbatch 1 of minibatch 0 is "F0.1". If the worker has several stages, the
// stage comes first: "F4:0.1".
inline std::string on_paper(const ScheduleOptions& options, std::int64_t worker,
                            std::int64_t num_minibatches) {
  std::string text;
  std::optional<Phase> phase;
  for (const Instruction& instruction : make_compute_program(options, Rank(worker), num_minibatches)) {
    const Phase next = phase_of(options, instruction, num_minibatches);
    if (phase && *phase != next) text += " |";
    phase = next;
    if (!text.empty()) text += ' ';
    text += opcode_name(instruction.opcode)[0];
    if (num_workers(options) < num_stages(options)) text += std::to_string(instruction.stage.value()) + ':';
    text += std::to_string(instruction.minibatch.value());
    if (options.num_microbatches > 1 && instruction.opcode != Opcode::kUpdate) {
      text += '.' + std::to_string(instruction.microbatch.value());
    }
  }
  return text;
}

}  // namespace pipedream
