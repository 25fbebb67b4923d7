// Runs whole pipelines for the tests of this folder. It makes the channels of a worker, runs all workers of a
// schedule, each on its own thread, and checks everything that they compute.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "schedule/programs.h"
#include "stage/worker.h"
#include "support/hostile_device.h"

namespace pipedream {

inline std::string activations_name(std::int64_t stage) {
  return "activations of stage " + std::to_string(stage) + " to stage " + std::to_string(stage + 1);
}
inline std::string gradients_name(std::int64_t stage) {
  return "gradients of stage " + std::to_string(stage) + " to stage " + std::to_string(stage - 1);
}

// Returns options for num_stages stages without replicas, one stage per worker. The one exception is
// "interleaved" with 4 stages, where two workers have two stages each.
[[nodiscard]] ScheduleOptions make_straight(const std::string& schedule, std::int64_t num_stages,
                                            std::int64_t num_microbatches);

// One stage of a worker, and the names of the channels to and from its neighbours. A name is empty if there
// is no neighbour.
struct StageChannelNames {
  StageIndex stage;
  std::string activations_in;
  std::string activations_out;
  std::string gradients_in;
  std::string gradients_out;
};
[[nodiscard]] std::vector<StageChannelNames> parts_of(const ScheduleOptions& schedule, Rank worker);

// Returns the names of the channels at a rank, with their edges, as Worker::start takes them.
[[nodiscard]] std::vector<EdgeChannelName> channels_at(const ScheduleOptions& schedule, Rank rank);

// Adds the channels of the worker's stages in both directions. They have exactly as many slots as the
// schedule needs. `item` describes every item.
void add_channels(Worker& worker, const ScheduleOptions& schedule, Rank worker_index, const ItemSpec& item,
                  std::size_t chunk_bytes, bool places_on_device = false);

[[nodiscard]] Deadline patience();

enum class Fault { kNone, kAbort, kDestroyed, kClosed, kDevice };

struct PipelineOptions {
  std::string transport = "inproc";
  bool staged = false;
  std::int64_t padding_bytes_max = 3000;  // largest padding behind an item's three numbers
  bool shares_memory = true;
  bool on_device = false;  // each worker has a hostile device of its own, or one of CUDA's devices
  bool on_cuda = false;
  bool places_on_device = false;  // neighbours write into each other's device memory
  ScheduleOptions schedule;
  std::int64_t num_minibatches = 0;
  std::uint32_t seed = 1;
  // Whether the test receives the end of the data on every channel. An engine receives the end only for the
  // worker's first stage. The ends for its other stages arrive after the engine is done.
  bool takes_every_end = true;
  // Happens at faulty_stage, in place of completing the first forward of faulty_minibatch.
  Fault fault = Fault::kNone;
  std::int64_t faulty_stage = 0;
  std::int64_t faulty_minibatch = 0;
  HostileDevice::Fault device_fault;  // for kDevice: the fault of the faulty stage's device from then on
};

inline constexpr const char* kAbortText = "stage 1 stops: the loss is nan at minibatch 5";
inline constexpr std::size_t kNumSpansMax = 50;

struct WorkerReport {
  std::optional<Failure> failure;
  bool faulted = false;
  std::int64_t num_minibatches = -1;                // the number that DONE names
  std::vector<StageIndex> stages;                   // the stages of the worker
  std::vector<std::vector<VersionsRead>> versions;  // one entry per stage
  EngineTotals totals;
  std::vector<Span> spans;
  std::map<std::string, std::string> transports;  // by the name of the channel
  std::map<std::string, ChannelStats> channels;
};

// Runs all workers, and returns one report per worker. Checks every value that a worker computes against a
// run without a pipeline (Replay in pipeline.cc).
[[nodiscard]] std::vector<WorkerReport> run_pipeline(const PipelineOptions& options);

// Checks that the reports are those of a run that came to its end without a failure.
void expect_complete(const std::vector<WorkerReport>& reports, const PipelineOptions& options);

}  // namespace pipedream
