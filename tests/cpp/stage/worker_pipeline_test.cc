// Tests whole pipelines: every schedule over every transport, with all workers in one process. pipeline.h
// says what they compute and how it is checked.
#include <gtest/gtest.h>

#include <string>
#include <tuple>
#include <vector>

#include "stage/pipeline.h"
#include "transport/recorder.h"

namespace pipedream {
namespace {

using Case = std::tuple<std::string, bool, std::string, std::int64_t>;  // transport, staged, schedule, stages

bool is_allowed(const std::string& schedule, std::int64_t num_stages, std::int64_t num_microbatches) {
  return schedule != "2bw" || num_microbatches >= num_stages;
}

// Lets every second stage recompute, so that stages that do are neighbours of stages that do not.
void recompute_every_second_stage(ScheduleOptions& schedule, std::int64_t first) {
  schedule.recompute.assign(schedule.in_flight.size(), false);
  for (auto stage = static_cast<std::size_t>(first); stage < schedule.recompute.size(); stage += 2) {
    schedule.recompute[stage] = true;
  }
}

class Pipeline : public testing::TestWithParam<Case> {
 protected:
  void SetUp() override {
    if (!make_transport(std::get<0>(GetParam())))
      GTEST_SKIP() << std::get<0>(GetParam()) << " is not available";
  }
  [[nodiscard]] static PipelineOptions options(std::int64_t num_microbatches) {
    const auto& [transport, staged, schedule, num_stages] = GetParam();
    PipelineOptions options;
    options.transport = transport;
    options.staged = staged;
    options.schedule = make_straight(schedule, num_stages, num_microbatches);
    options.seed = static_cast<std::uint32_t>(num_microbatches);
    return options;
  }
};

TEST_P(Pipeline, EveryStageReadsTheVersionsOfTheFormulaAndGetsItsOwnGradients) {
  const auto& [transport, staged, schedule, num_stages] = GetParam();
  for (const std::int64_t num_microbatches : {1, 3, 4}) {
    if (!is_allowed(schedule, num_stages, num_microbatches)) continue;
    SCOPED_TRACE("microbatches " + std::to_string(num_microbatches));
    PipelineOptions pipeline = options(num_microbatches);
    recompute_every_second_stage(pipeline.schedule, num_microbatches % 2);
    pipeline.num_minibatches = 120 / (1 + num_microbatches);
    expect_complete(run_pipeline(pipeline), pipeline);
  }
}

TEST_P(Pipeline, EndReachesEveryStageHoweverFewMinibatchesThereAre) {
  const auto& [transport, staged, schedule, num_stages] = GetParam();
  PipelineOptions pipeline = options(schedule == "2bw" ? num_stages : 2);
  for (std::int64_t num_minibatches = 0; num_minibatches <= num_stages + 1; ++num_minibatches) {
    SCOPED_TRACE("minibatches " + std::to_string(num_minibatches));
    pipeline.num_minibatches = num_minibatches;
    expect_complete(run_pipeline(pipeline), pipeline);
  }
}

std::string case_name(const testing::TestParamInfo<Case>& parameter) {
  const auto& [transport, staged, schedule, num_stages] = parameter.param;
  return transport + (staged ? "_staged_" : "_direct_") + schedule + '_' + std::to_string(num_stages);
}

INSTANTIATE_TEST_SUITE_P(Schedules, Pipeline,
                         testing::Combine(testing::Values("inproc", "zmq"), testing::Values(false),
                                          testing::ValuesIn(pipeline_schedules()),
                                          testing::Values<std::int64_t>(1, 2, 3, 4)),
                         case_name);
// Staging does not depend on the schedule, so two schedules are enough.
INSTANTIATE_TEST_SUITE_P(Staged, Pipeline,
                         testing::Combine(testing::Values("inproc", "zmq"), testing::Values(true),
                                          testing::Values("pipedream", "interleaved"),
                                          testing::Values<std::int64_t>(1, 2, 3, 4)),
                         case_name);

// ---- Plans that are not straight ----

class Transports : public testing::TestWithParam<std::string> {
 protected:
  void SetUp() override {
    if (!make_transport(GetParam())) GTEST_SKIP() << GetParam() << " is not available";
  }
};

TEST_P(Transports, MoreInFlightThanAStraightLineNeedsIsMoreDelay) {
  for (const char* schedule : {"pipedream", "vertical_sync", "naive", "flush"}) {
    for (const std::int64_t num_microbatches : {1, 2}) {
      SCOPED_TRACE(std::string(schedule) + ", microbatches " + std::to_string(num_microbatches));
      PipelineOptions pipeline;
      pipeline.transport = GetParam();
      pipeline.schedule = make_options(schedule, {5, 4, 2}, num_microbatches);
      pipeline.num_minibatches = 30;
      expect_complete(run_pipeline(pipeline), pipeline);
    }
  }
}

// The end of the data comes on the channels of every stage, but a worker learns of it from its first stage. A
// caller may wait for the ends of the other stages. If it does not, it disturbs no other worker.
TEST_P(Transports, WorkersWithSeveralStagesGetTheEndOnEveryChannel) {
  const std::vector<std::pair<std::int64_t, std::int64_t>> shapes = {{2, 2}, {2, 3}, {3, 2}};
  for (const auto& [num_workers, num_chunks] : shapes) {
    for (const std::int64_t num_microbatches : {1, 2, 3, 5}) {
      for (const bool takes_every_end : {true, false}) {
        SCOPED_TRACE(std::to_string(num_workers) + " workers of " + std::to_string(num_chunks) +
                     " stages, microbatches " + std::to_string(num_microbatches));
        PipelineOptions pipeline;
        pipeline.transport = GetParam();
        pipeline.schedule = make_interleaved(num_workers, num_chunks, num_microbatches);
        recompute_every_second_stage(pipeline.schedule, 1);
        pipeline.num_minibatches = 8;
        pipeline.takes_every_end = takes_every_end;
        expect_complete(run_pipeline(pipeline), pipeline);
      }
    }
  }
}

// ---- One host ----

// The parameter is whether tensors go through staging buffers.
class OneHost : public testing::TestWithParam<bool> {
 protected:
  void SetUp() override {
    if (!make_transport("zmq")) GTEST_SKIP() << "zmq is not available";
    pipeline_.transport = "zmq";
    pipeline_.staged = GetParam();
    pipeline_.padding_bytes_max = 40'000;
    pipeline_.num_minibatches = 60;
  }
  PipelineOptions pipeline_;
};

TEST_P(OneHost, TensorsArePlacedInTheNeighboursMemory) {
  for (const char* schedule : {"pipedream", "interleaved", "2bw"}) {
    SCOPED_TRACE(schedule);
    pipeline_.schedule = make_straight(schedule, 4, 4);
    const auto reports = run_pipeline(pipeline_);
    expect_complete(reports, pipeline_);
    for (const WorkerReport& report : reports) {
      EXPECT_FALSE(report.channels.empty());
      for (const auto& [name, transport] : report.transports) {
        EXPECT_EQ(transport, "shared memory") << name;
        const ChannelStats& stats = report.channels.at(name);
        EXPECT_GT(stats.tensor_bytes, 0) << name;
        EXPECT_EQ(stats.placed_bytes, stats.tensor_bytes) << name;
      }
    }
  }
}

TEST_P(OneHost, ItsWorkersUseTheWireWhenTheyMayNotShare) {
  pipeline_.schedule = make_straight("pipedream", 3, 1);
  pipeline_.shares_memory = false;
  const auto reports = run_pipeline(pipeline_);
  expect_complete(reports, pipeline_);
  for (const WorkerReport& report : reports) {
    for (const auto& [name, transport] : report.transports) {
      EXPECT_EQ(transport, "zmq/tcp") << name;
      const ChannelStats& stats = report.channels.at(name);
      EXPECT_EQ(stats.placed_bytes, 0U) << name;
      EXPECT_GT(stats.tensor_bytes, 0U) << name;
      EXPECT_GT(stats.link.bytes_sent + stats.link.bytes_received, stats.tensor_bytes) << name;
    }
  }
}

// The parameter is true for CUDA's devices, false for the tests' own.
class DevicesOfOneHost : public testing::TestWithParam<bool> {};

TEST_P(DevicesOfOneHost, EveryTensorIsPlacedInTheNeighboursDevice) {
  if (!make_transport("zmq")) GTEST_SKIP() << "zmq is not available";
  PipelineOptions pipeline;
  pipeline.transport = "zmq";
  pipeline.on_device = true;
  pipeline.on_cuda = GetParam();
  pipeline.places_on_device = true;
  pipeline.padding_bytes_max = 40'000;
  pipeline.num_minibatches = 10;
  for (const std::string& schedule : pipeline_schedules()) {
    SCOPED_TRACE(schedule);
    pipeline.schedule = make_straight(schedule, 4, 4);
    const auto reports = run_pipeline(pipeline);
    expect_complete(reports, pipeline);
    for (const WorkerReport& report : reports) {
      EXPECT_FALSE(report.channels.empty());
      for (const auto& [name, transport] : report.transports) {
        EXPECT_EQ(transport, "cuda ipc") << name;
        const ChannelStats& stats = report.channels.at(name);
        EXPECT_EQ(stats.placed_bytes, stats.tensor_bytes) << name;
      }
    }
  }
}

// A tensor that the sender does not place in the receiver's device goes through staging buffers.
TEST_P(DevicesOfOneHost, EveryTensorIsStagedWhereItIsNotPlaced) {
  PipelineOptions pipeline;
  pipeline.on_device = true;
  pipeline.on_cuda = GetParam();
  pipeline.padding_bytes_max = 40'000;
  pipeline.num_minibatches = 10;
  for (const char* transport : {"inproc", "zmq"}) {
    if (!make_transport(transport)) continue;
    pipeline.transport = transport;
    for (const char* schedule : {"pipedream", "interleaved", "2bw"}) {
      SCOPED_TRACE(std::string(transport) + ", " + schedule);
      pipeline.schedule = make_straight(schedule, 4, 4);
      expect_complete(run_pipeline(pipeline), pipeline);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Plans, DevicesOfOneHost,
                         testing::ValuesIn(cuda_available() ? std::vector<bool>{false, true}
                                                            : std::vector<bool>{false}),
                         [](const testing::TestParamInfo<bool>& parameter) {
                           return std::string(parameter.param ? "cuda" : "hostile");
                         });

INSTANTIATE_TEST_SUITE_P(Plans, OneHost, testing::Bool(), [](const testing::TestParamInfo<bool>& parameter) {
  return std::string(parameter.param ? "staged" : "direct");
});

INSTANTIATE_TEST_SUITE_P(Plans, Transports, testing::Values("inproc", "zmq"),
                         [](const testing::TestParamInfo<std::string>& parameter) {
                           return parameter.param;
                         });

}  // namespace
}  // namespace pipedream
