// Tests workers with neighbours, over every transport: how a run ends, items outside the schedule, and the
// calls that a worker refuses. worker_pipeline_test.cc tests whole runs.
#include "stage/worker.h"

#include <gtest/gtest.h>

#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#include "schedule/programs.h"
#include "stage/pipeline.h"
#include "transport/endpoint.h"
#include "transport/recorder.h"

namespace pipedream {
namespace {

// ---- Faults ----

class Faults : public testing::TestWithParam<std::string> {
 protected:
  void SetUp() override {
    if (!make_transport(GetParam())) GTEST_SKIP() << GetParam() << " is not available";
  }
  [[nodiscard]] static PipelineOptions options(Fault fault, std::int64_t stage, std::int64_t minibatch) {
    PipelineOptions options;
    options.transport = GetParam();
    options.schedule = make_straight("pipedream", 4, 1);
    options.num_minibatches = 1000;
    options.fault = fault;
    options.faulty_stage = stage;
    options.faulty_minibatch = minibatch;
    return options;
  }
  // The workers of stages 0 and 1 in one thread: a sends activations to b, and b sends gradients and other
  // items to a.
  void make_pair(std::size_t num_items = 2) {
    WorkerOptions worker;
    worker.transport = GetParam();
    a_ = std::make_unique<Worker>(worker);
    b_ = std::make_unique<Worker>(worker);
    const auto spec = [num_items](const std::string& name, const std::string& peer,
                                  std::uint32_t channel_id) {
      ChannelSpec channel;
      channel.name = name;
      channel.peer = peer;
      channel.channel_id = channel_id;
      channel.item = ItemSpec({{DType::kUInt8, 1, 1000}});
      channel.num_items_max = num_items;
      channel.chunk_bytes = 300;
      return channel;
    };
    a_->add_send_channel(spec(activations_name(0), "stage 1 (rank 1)", 1));
    b_->add_receive_channel(spec(activations_name(0), "stage 0 (rank 0)", 1));
    b_->add_send_channel(spec(gradients_name(1), "stage 0 (rank 0)", 2));
    a_->add_receive_channel(spec(gradients_name(1), "stage 1 (rank 1)", 2));
    a_->seal();
    b_->seal();
    const auto endpoints_of_a = a_->listen();
    a_->connect(b_->listen());
    b_->connect(endpoints_of_a);
    for (Worker* worker_here : {a_.get(), b_.get()}) {
      const Result<bool> open = worker_here->wait_open(patience());
      ASSERT_TRUE(open.ok() && open.value());
    }
  }
  void start_pair() {
    const ScheduleOptions schedule = make_straight("pipedream", 2, 1);
    a_->start(schedule, Rank(0), channels_at(schedule, Rank(0)), 10);
    b_->start(schedule, Rank(1), channels_at(schedule, Rank(1)), 10);
  }
  static WorkItem next(Worker& worker) {
    auto work = worker.next_work(patience());
    EXPECT_TRUE(work.ok()) << work.failure().message;
    return work.ok() && work.value() ? std::move(*work.value()) : WorkItem();
  }
  static Failure next_failure(Worker& worker) {
    const auto work = worker.next_work(patience());
    if (work.ok()) return {FailureKind::kClosed, "there was no failure"};
    return work.failure();
  }
  Outgoing outgoing(std::uint32_t seed) {
    auto bytes = std::make_shared<std::vector<std::byte>>(patterned_bytes(1000, seed));
    Outgoing outgoing;
    outgoing.tensors = {view(*bytes)};
    outgoing.keep_alive = bytes;
    return outgoing;
  }
  static TensorView view(std::vector<std::byte>& bytes) {
    TensorView tensor;
    tensor.dtype = DType::kUInt8;
    tensor.num_dims = 1;
    tensor.shape[0] = static_cast<std::int64_t>(bytes.size());
    tensor.data = bytes.data();
    return tensor;
  }
  static bool send_item(Worker& worker, const std::string& channel, std::uint32_t seed, Deadline deadline) {
    auto bytes = std::make_shared<std::vector<std::byte>>(patterned_bytes(1000, seed));
    const Result<bool> sent =
        worker.send_item(channel, {.data_fingerprint = seed}, {view(*bytes)}, bytes, deadline);
    return sent.ok() && sent.value();
  }

  std::unique_ptr<Worker> a_;
  std::unique_ptr<Worker> b_;
};

TEST_P(Faults, AbortEndsEveryOtherWorkerWithItsText) {
  for (std::int64_t stage = 0; stage < 4; ++stage) {
    for (const std::int64_t minibatch : {0, 1, 25}) {
      SCOPED_TRACE("stage " + std::to_string(stage) + ", minibatch " + std::to_string(minibatch));
      const auto reports = run_pipeline(options(Fault::kAbort, stage, minibatch));
      for (std::int64_t other = 0; other < 4; ++other) {
        SCOPED_TRACE("at stage " + std::to_string(other));
        const WorkerReport& report = reports[static_cast<std::size_t>(other)];
        EXPECT_EQ(report.faulted, other == stage);
        if (other == stage) continue;
        ASSERT_TRUE(report.failure.has_value());
        EXPECT_EQ(report.failure->kind, FailureKind::kAborted) << report.failure->message;
        EXPECT_EQ(report.failure->message, kAbortText);
      }
    }
  }
}

TEST_P(Faults, WorkerThatVanishesEndsTheOthersWithWhereTheyWere) {
  for (const Fault fault : {Fault::kDestroyed, Fault::kClosed}) {
    for (std::int64_t stage = 0; stage < 4; ++stage) {
      SCOPED_TRACE("stage " + std::to_string(stage));
      const auto reports = run_pipeline(options(fault, stage, 7));
      for (std::int64_t other = 0; other < 4; ++other) {
        SCOPED_TRACE("at stage " + std::to_string(other));
        const WorkerReport& report = reports[static_cast<std::size_t>(other)];
        EXPECT_EQ(report.faulted, other == stage);
        if (other == stage) continue;
        ASSERT_TRUE(report.failure.has_value());
        EXPECT_EQ(report.failure->kind, FailureKind::kPeerLost) << report.failure->message;
        const std::string where = "stage " + std::to_string(other) + " at minibatch ";
        EXPECT_EQ(report.failure->message.find(where), 0U) << report.failure->message;
        EXPECT_EQ(report.failure->message.find('\n'), std::string::npos) << report.failure->message;
      }
    }
  }
}

// If two workers have two stages each, each worker is both upstream and downstream of the other.
TEST_P(Faults, WorkersWithSeveralStagesEndAsTheOthersDo) {
  for (const Fault fault : {Fault::kAbort, Fault::kDestroyed, Fault::kClosed}) {
    for (std::int64_t stage = 0; stage < 4; ++stage) {
      SCOPED_TRACE("stage " + std::to_string(stage));
      PipelineOptions pipeline = options(fault, stage, 7);
      pipeline.schedule = make_straight("interleaved", 4, 3);
      const auto reports = run_pipeline(pipeline);
      const auto faulty = static_cast<std::size_t>(stage % 2);
      EXPECT_TRUE(reports[faulty].faulted);
      const WorkerReport& other = reports[1 - faulty];
      EXPECT_FALSE(other.faulted);
      ASSERT_TRUE(other.failure.has_value());
      if (fault == Fault::kAbort) {
        EXPECT_EQ(other.failure->kind, FailureKind::kAborted) << other.failure->message;
        EXPECT_EQ(other.failure->message, kAbortText);
      } else {
        EXPECT_EQ(other.failure->kind, FailureKind::kPeerLost) << other.failure->message;
        EXPECT_EQ(other.failure->message.find("stage "), 0U) << other.failure->message;
      }
    }
  }
}

TEST_P(Faults, DeadlineReturnsNothingAndTheNextAskGetsTheWork) {
  make_pair();
  start_pair();
  const std::int64_t asked_ns = now_ns();
  for (int attempt = 0; attempt < 3; ++attempt) {
    const auto nothing = b_->next_work(Clock::now() + std::chrono::milliseconds(2));
    ASSERT_TRUE(nothing.ok()) << nothing.failure().message;
    EXPECT_FALSE(nothing.value().has_value());
  }
  b_->engine().add_wait(1'000'000'000);  // the caller did something else between two calls of next_work()
  EXPECT_EQ(next(*a_).opcode, Opcode::kForward);
  a_->engine().complete(Opcode::kForward, outgoing(1), 0);
  {
    const WorkItem work = next(*b_);
    EXPECT_EQ(work.opcode, Opcode::kForward);
    EXPECT_EQ(work.minibatch, MinibatchId(0));
    ASSERT_TRUE(work.received.has_value());
    EXPECT_EQ(std::memcmp(work.received->tensors[0].data, patterned_bytes(1000, 1).data(), 1000), 0);
  }
  b_->engine().complete(Opcode::kForward, {}, 0);
  const Span span = b_->engine().spans().at(0);
  const std::int64_t wait_ns = span.wait_ns - 1'000'000'000;
  EXPECT_GE(wait_ns, 6'000'000);  // the waits of all three attempts count
  EXPECT_GE(span.asked_ns, asked_ns);
  EXPECT_LE(wait_ns, span.ready_ns - span.asked_ns);
}

TEST_P(Faults, EndOnAGradientChannelIsRefused) {
  make_pair();
  start_pair();
  for (std::uint32_t minibatch = 0; minibatch < 2; ++minibatch) {
    EXPECT_EQ(next(*a_).opcode, Opcode::kForward);
    a_->engine().complete(Opcode::kForward, outgoing(minibatch), 0);
  }
  b_->send_end(gradients_name(1));
  const Failure failure = next_failure(*a_);
  EXPECT_EQ(failure.kind, FailureKind::kCorruptFrame);
  EXPECT_EQ(failure.message,
            "stage 0 at minibatch 0 (BACKWARD): gradients of stage 1 to stage 0: ended with items still due");
}

// The tensors come from the user. If they are too large for the plan, complete() refuses them before it
// changes anything.
TEST_P(Faults, CompletionThatDoesNotFitThePlanCanBeRepeated) {
  make_pair();
  start_pair();
  const auto too_large = [bytes = std::make_shared<std::vector<std::byte>>(1001)] {
    Outgoing outgoing;
    outgoing.tensors = {view(*bytes)};
    return outgoing;
  };
  EXPECT_EQ(next(*a_).opcode, Opcode::kForward);
  EXPECT_THROW(a_->engine().complete(Opcode::kForward, too_large(), 0), UserError);
  a_->engine().complete(Opcode::kForward, outgoing(3), 0);
  EXPECT_EQ(next(*b_).minibatch, MinibatchId(0));
  b_->engine().complete(Opcode::kForward, {}, 0);
  EXPECT_EQ(next(*b_).opcode, Opcode::kBackward);
  EXPECT_THROW(static_cast<void>(b_->engine().complete(Opcode::kBackward, too_large(), 0)), UserError);
  static_cast<void>(b_->engine().complete(Opcode::kBackward, outgoing(4), 0));
  EXPECT_EQ(next(*b_).opcode, Opcode::kUpdate);
}

// ---- Items outside the schedule ----

TEST_P(Faults, CloseWaitsForItemsThatHaveNoCreditYet) {
  make_pair(4);
  for (std::uint32_t index = 0; index < 4; ++index) {
    ASSERT_TRUE(send_item(*a_, activations_name(0), index, patience()));
  }
  std::vector<ReceivedItem> held;  // holds all slots, so later items get no credit
  for (std::uint32_t index = 0; index < 4; ++index) {
    auto item = b_->receive_item(activations_name(0), patience());
    ASSERT_TRUE(item.ok() && item.value());
    held.push_back(std::move(*item.value()));
  }
  for (std::uint32_t index = 4; index < 7; ++index) {
    ASSERT_TRUE(send_item(*a_, activations_name(0), index, patience()));
  }
  a_->send_end(activations_name(0));
  std::thread closer([&] { a_->close(60); });
  for (std::uint32_t index = 4; index < 7; ++index) {
    held.erase(held.begin());
    auto item = b_->receive_item(activations_name(0), patience());
    ASSERT_TRUE(item.ok()) << item.failure().message;
    ASSERT_TRUE(item.value().has_value());
    EXPECT_EQ(item.value()->fields.data_fingerprint, index);
    EXPECT_EQ(std::memcmp(item.value()->tensors[0].data, patterned_bytes(1000, index).data(), 1000), 0);
    held.push_back(std::move(*item.value()));
  }
  auto end = b_->receive_item(activations_name(0), patience());
  ASSERT_TRUE(end.ok() && end.value());
  EXPECT_TRUE(end.value()->is_end);
  EXPECT_EQ(end.value()->num_minibatches, 7);
  b_->close(60);
  closer.join();
}

TEST_P(Faults, SendItemWaitsForRoomUntilTheDeadlineAndFailsWithTheRun) {
  make_pair(1);
  ASSERT_TRUE(send_item(*a_, activations_name(0), 0, patience()));
  auto held = b_->receive_item(activations_name(0), patience());
  ASSERT_TRUE(held.ok() && held.value());
  ASSERT_TRUE(send_item(*a_, activations_name(0), 1, patience()));
  EXPECT_FALSE(send_item(*a_, activations_name(0), 2, Clock::now() + std::chrono::milliseconds(20)));
  held.value().reset();
  ASSERT_TRUE(send_item(*a_, activations_name(0), 2, patience()));
  b_->abort(kAbortText);
  std::optional<Failure> failure;
  for (std::uint32_t index = 3; !failure; ++index) {  // from now on there is room, and soon the failure
    std::vector<std::byte> bytes(10);
    const Result<bool> sent = a_->send_item(activations_name(0), {}, {view(bytes)}, nullptr, patience());
    if (!sent.ok()) failure = sent.failure();
    ASSERT_LT(index, 100'000'000U);
  }
  EXPECT_EQ(failure->kind, FailureKind::kAborted);
  EXPECT_EQ(failure->message, kAbortText);
}

TEST_P(Faults, AThreadServesWhateverComesWhileTheComputeThreadWorksAndUntilItIsStopped) {
  make_pair(4);
  start_pair();
  const std::vector<std::string> asked = {activations_name(0)};
  std::uint32_t num_served = 0;
  std::thread server([&] {
    for (;;) {
      auto found = b_->receive_any(asked, patience());
      ASSERT_TRUE(found.ok()) << found.failure().message;
      if (!found.value()) return;
      EXPECT_EQ(found.value()->channel_index, 0U);
      EXPECT_EQ(found.value()->item.fields.data_fingerprint, num_served);
      ASSERT_TRUE(send_item(*b_, gradients_name(1), num_served++, patience()));
    }
  });
  for (std::uint32_t index = 0; index < 50; ++index) {
    ASSERT_TRUE(send_item(*a_, activations_name(0), index, patience()));
    static_cast<void>(b_->channel_stats());
    auto answer = a_->receive_item(gradients_name(1), patience());
    ASSERT_TRUE(answer.ok() && answer.value());
    EXPECT_EQ(answer.value()->fields.data_fingerprint, index);
  }
  b_->stop_serving();
  server.join();
  EXPECT_EQ(num_served, 50U);
  const auto nothing = b_->receive_any(asked, patience());
  ASSERT_TRUE(nothing.ok());
  EXPECT_FALSE(nothing.value().has_value());
}

TEST_P(Faults, AThreadThatServesLearnsWhyTheRunHasEnded) {
  make_pair();
  std::optional<Failure> failure;
  std::thread server([&] {
    const auto found = b_->receive_any({activations_name(0)}, patience());
    if (!found.ok()) failure = found.failure();
  });
  a_->abort(kAbortText);
  server.join();
  ASSERT_TRUE(failure.has_value());
  EXPECT_EQ(failure->message, kAbortText);
}

TEST_P(Faults, AThreadThatServesSaysThatThePeerHasClosedItsChannel) {
  make_pair();
  a_->close(60);
  const auto found = b_->receive_any({activations_name(0)}, patience());
  ASSERT_FALSE(found.ok());
  EXPECT_EQ(found.failure().message, activations_name(0) + ": closed by the peer before it was complete");
}

TEST_P(Faults, WhatAnotherThreadCannotGoOnWithEndsTheComputeThreadsWait) {
  make_pair();
  std::thread other([&] { b_->fail("the step of replica 0 failed"); });
  const auto item = b_->receive_item(activations_name(0), patience());
  other.join();
  ASSERT_FALSE(item.ok());
  EXPECT_EQ(item.failure().kind, FailureKind::kAborted);
  EXPECT_EQ(item.failure().message, "the step of replica 0 failed");
}

TEST_P(Faults, ReceiveItemSaysThatThePeerHasClosedItsChannel) {
  make_pair();
  const auto nothing = b_->receive_item(activations_name(0), Clock::now() + std::chrono::milliseconds(2));
  ASSERT_TRUE(nothing.ok());
  EXPECT_FALSE(nothing.value().has_value());
  a_->close(60);
  const auto item = b_->receive_item(activations_name(0), patience());
  ASSERT_FALSE(item.ok());
  EXPECT_EQ(item.failure().kind, FailureKind::kPeerLost);
  EXPECT_EQ(item.failure().message, activations_name(0) + ": closed by the peer before it was complete");
}

TEST_P(Faults, AbortTextIsNeverCutInsideACharacter) {
  make_pair();
  std::string text = "x";
  // Each character has two bytes, so the limit falls inside a character.
  while (text.size() < 2000) text += "\xC3\xA9";
  a_->abort(text);
  const auto item = b_->receive_item(activations_name(0), patience());
  ASSERT_FALSE(item.ok());
  EXPECT_EQ(item.failure().kind, FailureKind::kAborted);
  EXPECT_EQ(item.failure().message, text.substr(0, 1023));
}

TEST_P(Faults, ItemsMayOutliveTheWorkerWhileTheyHoldItsPool) {
  make_pair();
  ASSERT_TRUE(send_item(*a_, activations_name(0), 5, patience()));
  const std::shared_ptr<Pool> pool = b_->pool();
  auto item = b_->receive_item(activations_name(0), patience());
  ASSERT_TRUE(item.ok() && item.value());
  b_.reset();
  a_.reset();
  EXPECT_EQ(std::memcmp(item.value()->tensors[0].data, patterned_bytes(1000, 5).data(), 1000), 0);
  std::thread([received = std::move(*item.value())] {
    EXPECT_EQ(received.fields.data_fingerprint, 5U);
  }).join();
}

// pulse() may be called before there is an engine, and after the engine has ended.
TEST_P(Faults, PulseMayComeFromAnyThreadAtAnyTime) {
  make_pair();
  std::atomic<bool> done{false};
  std::thread other([&] {
    while (!done.load()) a_->pulse();
  });
  start_pair();
  for (std::uint32_t minibatch = 0; minibatch < 2; ++minibatch) {
    EXPECT_EQ(next(*a_).opcode, Opcode::kForward);
    EXPECT_EQ(a_->engine().num_completed(), minibatch);
    a_->engine().complete(Opcode::kForward, outgoing(minibatch), 0);
  }
  EXPECT_EQ(a_->engine().num_completed(), 2U);
  a_->close(0);
  done.store(true);
  other.join();
}

TEST_P(Faults, AbortMayComeFromAnyThreadAtAnyTime) {
  make_pair();
  start_pair();
  std::thread other([&] { b_->abort(kAbortText); });
  const Failure failure = [&] {
    for (std::uint32_t minibatch = 0; minibatch < 2; ++minibatch) {
      auto work = a_->next_work(patience());
      if (!work.ok()) return work.failure();
      a_->engine().complete(Opcode::kForward, outgoing(minibatch), 0);
    }
    return next_failure(*a_);
  }();
  EXPECT_EQ(failure.kind, FailureKind::kAborted);
  EXPECT_EQ(failure.message, kAbortText);
  other.join();
}

std::string transport_of(const testing::TestParamInfo<std::string>& parameter) { return parameter.param; }

INSTANTIATE_TEST_SUITE_P(Transports, Faults, testing::Values("inproc", "zmq"), transport_of);

// ---- Errors of the device ----

// Any call of the device may fail, on any thread. The worker then reports its position and the device's
// message. The other workers receive this report.
class DeviceFaults : public testing::TestWithParam<std::tuple<std::string, bool>> {};

TEST_P(DeviceFaults, AreToldByEveryWorkerWithStageMinibatchAndTheDevicesWords) {
  const auto& [transport, places_on_device] = GetParam();
  if (!make_transport(transport)) GTEST_SKIP() << transport << " is not available";
  for (std::uint64_t num_calls_before = 0; num_calls_before < 64; num_calls_before += 2) {
    PipelineOptions options;
    options.transport = transport;
    options.on_device = true;
    options.places_on_device = places_on_device;
    options.schedule = make_straight("pipedream", 2, 1);
    options.num_minibatches = 1000;
    options.fault = Fault::kDevice;
    options.faulty_stage = static_cast<std::int64_t>(num_calls_before / 2 % 2);
    options.faulty_minibatch = 3;
    options.device_fault.num_calls_before = num_calls_before;
    SCOPED_TRACE("stage " + std::to_string(options.faulty_stage) + ", call " +
                 std::to_string(num_calls_before));
    const auto reports = run_pipeline(options);
    const WorkerReport& failed = reports.at(static_cast<std::size_t>(options.faulty_stage));
    const WorkerReport& other = reports.at(static_cast<std::size_t>(1 - options.faulty_stage));
    ASSERT_TRUE(failed.failure && other.failure);
    const std::string& text = failed.failure->message;
    EXPECT_EQ(failed.failure->kind, FailureKind::kDeviceError) << text;
    EXPECT_EQ(text.find("stage " + std::to_string(options.faulty_stage) + " at minibatch "), 0U) << text;
    EXPECT_NE(text.find("hostile:0: "), std::string::npos) << text;
    EXPECT_NE(text.find(options.device_fault.why), std::string::npos) << text;
    EXPECT_EQ(other.failure->kind, FailureKind::kAborted) << other.failure->message;
    EXPECT_EQ(other.failure->message, text);
  }
}

INSTANTIATE_TEST_SUITE_P(DataPaths, DeviceFaults,
                         testing::Values(std::tuple("inproc", false), std::tuple("zmq", false),
                                         std::tuple("zmq", true)),
                         [](const auto& parameter) {
                           return std::get<0>(parameter.param) +
                                  (std::get<1>(parameter.param) ? "Placed" : "Staged");
                         });

// ---- How tensors travel ----

// Two workers with one channel of floats from a to b.
class OneChannel : public testing::Test {
 protected:
  static constexpr std::size_t kNumElements = 20'000;

  void SetUp() override {
    if (!make_transport("zmq")) GTEST_SKIP() << "zmq is not available";
  }
  static ChannelSpec spec(const std::string& codec = "none") {
    ChannelSpec spec;
    spec.name = "activations";
    spec.peer = "the other";
    spec.item = ItemSpec({{DType::kFloat32, 1, 4 * kNumElements}});
    spec.codec = codec_from_name(codec);
    return spec;
  }
  void make_workers(const ChannelSpec& sent, const ChannelSpec& received, bool a_shares = true,
                    bool b_shares = true) {
    WorkerOptions options;
    options.shares_memory = a_shares;
    a_ = std::make_unique<Worker>(options);
    options.shares_memory = b_shares;
    b_ = std::make_unique<Worker>(options);
    a_->add_send_channel(sent);
    b_->add_receive_channel(received);
    a_->seal();
    b_->seal();
  }
  void open() {
    for (Worker* worker : {a_.get(), b_.get()}) {
      const Result<bool> open = worker->wait_open(patience());
      ASSERT_TRUE(open.ok() && open.value());
    }
  }
  void send(std::vector<float> values) {
    auto owned = std::make_shared<std::vector<float>>(std::move(values));
    TensorView tensor;
    tensor.num_dims = 1;
    tensor.shape[0] = static_cast<std::int64_t>(owned->size());
    tensor.data = reinterpret_cast<std::byte*>(owned->data());
    const Result<bool> sent = a_->send_item("activations", {}, {tensor}, owned, patience());
    ASSERT_TRUE(sent.ok() && sent.value());
  }
  std::vector<float> receive() {
    auto item = b_->receive_item("activations", patience());
    EXPECT_TRUE(item.ok()) << item.failure().message;
    const TensorView& tensor = item.value()->tensors.at(0);
    std::vector<float> values(tensor.size_bytes() / sizeof(float));
    std::memcpy(values.data(), tensor.data, tensor.size_bytes());
    return values;
  }
  void expect_transports(const std::string& expected) {
    EXPECT_EQ(a_->channel_transports().at("activations"), expected);
    EXPECT_EQ(b_->channel_transports().at("activations"), expected);
  }

  const std::vector<float> values_ = std::vector<float>(kNumElements, 1.5F);
  std::unique_ptr<Worker> a_;
  std::unique_ptr<Worker> b_;
};

TEST_F(OneChannel, BothEndsSayThatItIsSharedMemory) {
  make_workers(spec(), spec());
  const auto endpoints = b_->listen();
  EXPECT_NE(endpoints.at("activations").find(" memory="), std::string::npos);
  a_->connect(endpoints);
  open();
  expect_transports("shared memory");
  send(values_);
  EXPECT_EQ(receive(), values_);
  EXPECT_EQ(b_->channel_stats().at("activations").placed_bytes, 4 * kNumElements);
  EXPECT_GT(b_->channel_stats().at("activations").wait_ns, 0);
}

TEST_F(OneChannel, TransfersAreKeptWhereTheChannelSaysSo) {
  ChannelSpec keeping = spec("bf16");
  keeping.num_transfers_kept = 2;
  make_workers(keeping, keeping);
  a_->connect(b_->listen());
  open();
  for (int minibatch = 0; minibatch < 3; ++minibatch) {
    send(values_);
    EXPECT_EQ(receive(), values_);
  }
  EXPECT_TRUE(a_->wait_for_transfers(patience()));
  const Worker::Transfers sent = a_->transfers().at("activations");
  const Worker::Transfers received = b_->transfers().at("activations");
  ASSERT_EQ(sent.sent.size(), 2U);
  ASSERT_EQ(received.received.size(), 2U);
  EXPECT_TRUE(sent.received.empty() && received.sent.empty());
  EXPECT_EQ(sent.sent.back().minibatch, MinibatchId(2));
  EXPECT_EQ(sent.sent.back().wire_bytes, 2 * kNumElements);  // an element has 16 bits on the wire
  EXPECT_EQ(received.received.back().wire_bytes, 2 * kNumElements);

  make_workers(spec(), spec());
  EXPECT_TRUE(a_->transfers().empty() && b_->transfers().empty());
}

TEST_F(OneChannel, WaitForTransfersEndsAtItsDeadlineWhileAnItemHasNoRoom) {
  ChannelSpec keeping = spec();
  keeping.num_transfers_kept = 2;
  make_workers(keeping, keeping);
  a_->connect(b_->listen());
  open();
  for (std::size_t item = 0; item <= keeping.num_items_max; ++item) send(values_);
  EXPECT_FALSE(a_->wait_for_transfers(Clock::now() + std::chrono::milliseconds(30)));
  EXPECT_EQ(receive(), values_);
  EXPECT_TRUE(a_->wait_for_transfers(patience()));
}

TEST_F(OneChannel, MemoryThatCannotBeOpenedLeavesTheWire) {
  make_workers(spec(), spec());
  auto endpoints = b_->listen();
  endpoints.at("activations").back() =
      endpoints.at("activations").back() == '0' ? '1' : '0';  // changes the last digit of the memory's secret
  a_->connect(endpoints);
  open();
  expect_transports("zmq/tcp");
  send(values_);
  EXPECT_EQ(receive(), values_);
  EXPECT_EQ(b_->channel_stats().at("activations").placed_bytes, 0U);
}

// Whoever can write to the rendezvous store can exchange the offers of two memories.
TEST_F(OneChannel, ExchangedMemoriesLeaveTheWire) {
  const ChannelSpec one = spec();
  ChannelSpec two = spec();
  two.name = "more activations";
  two.channel_id = one.channel_id + 1;
  a_ = std::make_unique<Worker>(WorkerOptions{});
  b_ = std::make_unique<Worker>(WorkerOptions{});
  for (const ChannelSpec& channel : {one, two}) {
    a_->add_send_channel(channel);
    b_->add_receive_channel(channel);
  }
  a_->seal();
  b_->seal();
  auto endpoints = b_->listen();
  Endpoint first = parse_endpoint(endpoints.at(one.name));
  Endpoint second = parse_endpoint(endpoints.at(two.name));
  ASSERT_FALSE(first.memory.empty() || second.memory.empty());
  std::swap(first.memory, second.memory);
  endpoints = {{one.name, to_string(first)}, {two.name, to_string(second)}};
  a_->connect(endpoints);
  open();
  expect_transports("zmq/tcp");
  EXPECT_EQ(a_->channel_transports().at(two.name), "zmq/tcp");
  send(values_);
  EXPECT_EQ(receive(), values_);
}

TEST_F(OneChannel, EitherEndMayRefuseToShare) {
  for (const bool a_shares : {true, false}) {
    make_workers(spec(), spec(), a_shares, !a_shares);
    a_->connect(b_->listen());
    open();
    expect_transports("zmq/tcp");
    send(values_);
    EXPECT_EQ(receive(), values_);
    a_->close(0);
    b_->close(0);
  }
}

TEST_F(OneChannel, EncodedTensorsArriveDecodedOnBothRoads) {
  for (const bool shares : {true, false}) {
    make_workers(spec("bf16"), spec("bf16"), shares, shares);
    a_->connect(b_->listen());
    open();
    expect_transports(shares ? "shared memory" : "zmq/tcp");
    send(values_);
    EXPECT_EQ(receive(), values_);  // 1.5 is exact with 16 bits
    const ChannelStats stats = b_->channel_stats().at("activations");
    EXPECT_EQ(stats.tensor_bytes, 4 * kNumElements);
    EXPECT_EQ(stats.placed_bytes, shares ? 2 * kNumElements : 0);
    EXPECT_LT(stats.link.bytes_received, 3 * kNumElements);
    a_->close(0);
    b_->close(0);
  }
}

TEST_F(OneChannel, WhatTopKLeavesOutComesLater) {
  make_workers(spec("topk:0.5"), spec("topk:0.5"));
  a_->connect(b_->listen());
  open();
  std::vector<float> first(kNumElements, 1.0F);
  std::fill(first.begin(), first.begin() + kNumElements / 2, 2.0F);
  send(first);
  std::fill(first.begin() + kNumElements / 2, first.end(), 0.0F);
  EXPECT_EQ(receive(), first);
  // Sends the 1s of the second half, which were left out before.
  send(std::vector<float>(kNumElements, 0.0F));
  std::vector<float> second(kNumElements, 0.0F);
  std::fill(second.begin() + kNumElements / 2, second.end(), 1.0F);
  EXPECT_EQ(receive(), second);
}

TEST_F(OneChannel, TermsOfACodecAreNamed) {
  make_workers(spec("topk:0.01"), spec("topk:0.01"));
  const auto bytes_of = [](Worker& worker, const std::string& name) {
    for (const TermReport& term : worker.pool()->report()) {
      if (term.name == name) return term.slot_bytes;
    }
    return std::size_t{0};
  };
  EXPECT_EQ(bytes_of(*a_, "residual, activations"), 4 * kNumElements);
  EXPECT_EQ(bytes_of(*a_, "staging, activations"), 8 * kNumElements / 100);
  EXPECT_EQ(bytes_of(*b_, "staging, activations"), 8 * kNumElements / 100);
  EXPECT_EQ(bytes_of(*b_, "residual, activations"), 0U);
}

TEST_F(OneChannel, EndsWithDifferentCodecsEndTheRun) {
  make_workers(spec("bf16"), spec("fp16"));
  a_->connect(b_->listen());
  open();
  send(values_);
  auto item = b_->receive_item("activations", patience());
  ASSERT_FALSE(item.ok());
  EXPECT_EQ(item.failure().kind, FailureKind::kCorruptFrame);
  EXPECT_NE(item.failure().message.find("tensor 0 has codec bf16, planned fp16"), std::string::npos)
      << item.failure().message;
}

TEST(ChannelCodec, IsRefusedForItemsInHostMemory) {
  WorkerOptions options;
  options.transport = "inproc";
  Worker worker(options);
  ChannelSpec spec;
  spec.name = "weights";
  spec.item = ItemSpec({{DType::kFloat32, 1, 400}});
  spec.on_device = false;
  spec.codec = codec_from_name("int8");
  EXPECT_THROW(worker.add_send_channel(spec), UserError);
  EXPECT_THROW(worker.add_receive_channel(spec), UserError);
}

// ---- The user's mistakes ----

TEST(WorkerOptions, WhatIsUnknownIsRefusedByName) {
  const auto text_of = [](const WorkerOptions& options) {
    try {
      const Worker worker(options);
      return std::string("nothing was thrown");
    } catch (const UserError& error) {
      return std::string(error.what());
    }
  };
  WorkerOptions options;
  options.transport = "carrier pigeon";
  EXPECT_EQ(text_of(options), "transport 'carrier pigeon' is unknown: use 'zmq' or 'inproc'");
  options.transport = "inproc";
  for (const char* device : {"tpu", "cuda", "cuda:", "cuda:x", "cuda:0x", "cuda:-1"}) {
    options.device = device;
    EXPECT_EQ(text_of(options), "device '" + std::string(device) + "' is unknown: use 'host' or 'cuda:N'");
  }
}

TEST(WorkerOptions, ChannelThatNoFrameOrNoItemHasRoomForIsRefused) {
  WorkerOptions options;
  options.transport = "inproc";
  Worker worker(options);
  const auto refusal_of = [&](const ChannelSpec& spec, auto add) {
    try {
      (worker.*add)(spec);
      return std::string("nothing was thrown");
    } catch (const UserError& error) {
      return std::string(error.what());
    }
  };
  ChannelSpec spec;
  spec.name = "weights";
  spec.peer = "stage 1 (rank 1)";
  spec.channel_id = 1;
  spec.item = ItemSpec({{DType::kUInt8, 1, 10}});
  for (const auto add : {&Worker::add_send_channel, &Worker::add_receive_channel}) {
    spec.chunk_bytes = (std::size_t{64} << 20) + 1;
    EXPECT_EQ(refusal_of(spec, add),
              "channel 'weights' has chunk_bytes 67108865; a frame has at most 67108864");
    spec.chunk_bytes = 0;
    spec.num_items_max = 0;
    EXPECT_EQ(refusal_of(spec, add), "channel 'weights' has num_items 0; it must be 1 or more");
    spec.num_items_max = 1;
  }
}

TEST(WorkerOptions, ChannelNamesAreUniqueAndEveryEndpointIsNeeded) {
  WorkerOptions options;
  options.transport = "inproc";
  Worker worker(options);
  ChannelSpec spec;
  spec.name = "weights";
  spec.peer = "stage 1 (rank 1)";
  spec.channel_id = 1;
  spec.item = ItemSpec({{DType::kUInt8, 1, 10}});
  worker.add_send_channel(spec);
  EXPECT_THROW(worker.add_send_channel(spec), UserError);
  EXPECT_THROW(worker.add_receive_channel(spec), UserError);
  worker.seal();
  EXPECT_TRUE(worker.listen().empty());
  EXPECT_THROW(worker.connect({{"others", "inproc://1"}}), UserError);
  EXPECT_EQ(worker.channels_not_open(), std::vector<std::string>{"weights"});
  worker.close(0);
  worker.close(60);  // idempotent
}

}  // namespace
}  // namespace pipedream
