// Whole pipelines: a Worker for each stage, each on its own thread, over every transport. What they compute
// is integers that say which minibatch and which weight versions they were computed from, read from real
// weight slots, so that a wrong version, a slot overwritten too early or a gradient of another minibatch
// shows.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#include "stage/worker.h"
#include "transport/recorder.h"

namespace pipedream {
namespace {

constexpr std::int64_t kPoison = -1;
constexpr std::int64_t kNumWeights = 64;
constexpr std::size_t kNumSpansMax = 50;

Deadline patience() { return Clock::now() + kPatience; }

std::string activations_name(std::int64_t stage) {
  return "activations of stage " + std::to_string(stage) + " to stage " + std::to_string(stage + 1);
}
std::string gradients_name(std::int64_t stage) {
  return "gradients of stage " + std::to_string(stage) + " to stage " + std::to_string(stage - 1);
}

// Endpoints, as the c10d store publishes them.
class Board {
 public:
  void publish(const std::map<std::string, std::string>& endpoints) {
    {
      const std::lock_guard lock(mutex_);
      endpoints_.insert(endpoints.begin(), endpoints.end());
    }
    changed_.notify_all();
  }
  [[nodiscard]] std::map<std::string, std::string> wait_for(const std::vector<std::string>& names) {
    std::unique_lock lock(mutex_);
    changed_.wait_until(lock, patience(), [&] {
      return std::all_of(names.begin(), names.end(),
                         [&](const auto& name) { return endpoints_.contains(name); });
    });
    return endpoints_;
  }

 private:
  std::mutex mutex_;  // guards endpoints_
  std::condition_variable changed_;
  std::map<std::string, std::string> endpoints_;
};

enum class Fault { kNone, kAbort, kDestroyed, kClosed };

struct PipelineOptions {
  std::string transport = "inproc";
  bool staged = false;
  std::int64_t num_stages = 1;
  std::int64_t num_minibatches = 0;
  std::uint32_t seed = 1;
  Fault fault = Fault::kNone;  // of faulty_stage, instead of completing the forward of faulty_minibatch
  std::int64_t faulty_stage = 0;
  std::int64_t faulty_minibatch = 0;
};

constexpr const char* kAbortText = "stage 1 stops: the loss is nan at minibatch 5";

struct StageReport {
  std::optional<Failure> failure;
  bool faulted = false;
  std::int64_t num_minibatches = -1;  // of DONE
  std::vector<VersionsRead> versions;
  EngineTotals totals;
  std::vector<Span> spans;
};

// What crosses a boundary: the minibatch and a version for each stage, then padding of a size that varies.
struct Message {
  std::vector<std::int64_t> numbers;
  std::vector<std::byte> padding;

  [[nodiscard]] std::vector<TensorView> views() {
    TensorView first;
    first.dtype = DType::kInt64;
    first.num_dims = 1;
    first.shape[0] = static_cast<std::int64_t>(numbers.size());
    first.data = reinterpret_cast<std::byte*>(numbers.data());
    TensorView second;
    second.dtype = DType::kUInt8;
    second.num_dims = 2;
    second.shape[0] = static_cast<std::int64_t>(padding.size());
    second.shape[1] = 1;
    second.data = padding.data();
    return {first, second};
  }
};

constexpr std::int64_t kPaddingMax = 3000;

// One stage: its worker, its weights, and its part of the check.
class Stage {
 public:
  Stage(const PipelineOptions& pipeline, std::int64_t stage, Board& board)
      : pipeline_(pipeline),
        stage_(stage),
        in_flight_(pipeline.num_stages - stage),
        board_(board),
        random_(pipeline.seed * 31 + static_cast<std::uint32_t>(stage)) {
    WorkerOptions options;
    options.transport = pipeline.transport;
    options.force_staging = pipeline.staged;
    worker_ = std::make_unique<Worker>(options);
  }

  StageReport run() {
    while ((started_ || open()) && work_once()) {
    }
    if (started_) {
      report_.versions = worker_->engine().versions();
      report_.totals = worker_->engine().totals();
      report_.spans = worker_->engine().spans();
    }
    if (worker_) {
      inputs_.clear();
      // As a launcher does: what ended this worker is passed on. One that vanished has said nothing.
      if (report_.failure && pipeline_.fault == Fault::kAbort) worker_->abort(report_.failure->message);
      worker_->close(report_.failure ? 1 : 60);
    }
    return report_;
  }

 private:
  [[nodiscard]] bool is_first() const { return stage_ == 0; }
  [[nodiscard]] bool is_last() const { return stage_ == pipeline_.num_stages - 1; }

  ChannelSpec spec(const std::string& name, std::int64_t peer, std::uint32_t channel_id,
                   std::int64_t num_items) {
    const auto numbers_max = static_cast<std::size_t>(8 * (1 + pipeline_.num_stages));
    return {name,       "stage " + std::to_string(peer) + " (rank " + std::to_string(peer) + ")",
            channel_id, ItemSpec({{DType::kInt64, 1, numbers_max}, {DType::kUInt8, 2, kPaddingMax}}),
            num_items,  1024,
            true};
  }

  // False when another worker has ended the run already.
  bool open() {
    std::vector<std::string> outgoing;
    if (!is_first()) {
      worker_->add_receive_channel(spec(activations_name(stage_ - 1), stage_ - 1,
                                        static_cast<std::uint32_t>(2 * stage_), in_flight_ + 1));
      worker_->add_send_channel(spec(gradients_name(stage_), stage_ - 1,
                                     static_cast<std::uint32_t>(2 * stage_ + 1), in_flight_ + 1));
      outgoing.push_back(gradients_name(stage_));
    }
    if (!is_last()) {
      worker_->add_receive_channel(
          spec(gradients_name(stage_ + 1), stage_ + 1, static_cast<std::uint32_t>(2 * stage_ + 3), 2));
      // As many as the schedule has in flight, no more: what is released late needs the spare places.
      worker_->add_send_channel(
          spec(activations_name(stage_), stage_ + 1, static_cast<std::uint32_t>(2 * stage_ + 2), in_flight_));
      outgoing.push_back(activations_name(stage_));
    }
    worker_->add_term({"weight versions", kNumWeights * 8, in_flight_, MemoryKind::kDevice});
    worker_->seal();
    board_.publish(worker_->listen());
    worker_->connect(board_.wait_for(outgoing));
    const Result<bool> open = worker_->wait_open(patience());
    if (!open.ok()) {
      report_.failure = open.failure();
      return false;
    }
    EXPECT_TRUE(open.value()) << worker_->channels_not_open().front();
    for (std::int64_t slot = 0; slot < in_flight_; ++slot) {
      held_.push_back(worker_->hold_slot("weight versions"));
      fill(SlotIndex(slot), slot == 0 ? 0 : kPoison);
    }
    worker_->start({"pipedream", StageIndex(stage_), pipeline_.num_stages, in_flight_},
                   is_first() ? "" : activations_name(stage_ - 1), is_last() ? "" : activations_name(stage_),
                   is_last() ? "" : gradients_name(stage_ + 1), is_first() ? "" : gradients_name(stage_),
                   kNumSpansMax);
    started_ = true;
    return true;
  }

  // False when the stage has ended.
  bool work_once() {
    auto result = worker_->next_work(patience());
    if (!result.ok()) {
      report_.failure = result.failure();
      return false;
    }
    if (!result.value()) {
      ADD_FAILURE() << "no work: " << worker_->engine().position();
      return false;
    }
    WorkItem work = std::move(*result.value());
    switch (work.kind) {
      case WorkKind::kForward:
        return forward(std::move(work));
      case WorkKind::kBackward:
        backward(work);
        return true;
      case WorkKind::kUpdate:
        update(work);
        return true;
      case WorkKind::kDone:
        report_.num_minibatches = work.num_minibatches;
        return false;
    }
    return false;
  }

  bool forward(WorkItem work) {
    const std::int64_t minibatch = work.minibatch.value();
    if (pipeline_.fault != Fault::kNone && stage_ == pipeline_.faulty_stage &&
        minibatch == pipeline_.faulty_minibatch) {
      work.received.reset();
      fail();
      return false;
    }
    if (is_first() && minibatch == pipeline_.num_minibatches) {
      worker_->engine().end_of_data();
      return true;
    }
    const std::int64_t began_ns = now_ns();
    Message message;
    if (work.received) {
      message.numbers = numbers_of(*work.received);
      check_padding(*work.received, minibatch);
      inputs_[minibatch] = std::move(work.received);  // until its backward, as autograd keeps it
    } else {
      message.numbers = {minibatch};
    }
    // Minibatch, then the version that each stage before this read.
    EXPECT_EQ(message.numbers.size(), static_cast<std::size_t>(1 + stage_));
    message.numbers.resize(static_cast<std::size_t>(1 + stage_));
    EXPECT_EQ(message.numbers[0], minibatch);
    for (std::int64_t stage = 0; stage < stage_; ++stage) {
      EXPECT_EQ(message.numbers[static_cast<std::size_t>(1 + stage)], formula(stage, minibatch))
          << "stage " << stage;
    }
    jitter();
    message.numbers.push_back(read(work.read_slot, work.read_version));
    worker_->engine().complete_forward(outgoing(std::move(message), minibatch, is_last()),
                                       now_ns() - began_ns);
    return true;
  }

  void backward(const WorkItem& work) {
    const std::int64_t began_ns = now_ns();
    const std::int64_t minibatch = work.minibatch.value();
    Message message;
    message.numbers = work.received ? numbers_of(*work.received) : std::vector<std::int64_t>{minibatch};
    if (work.received) check_padding(*work.received, minibatch);
    // Minibatch, then the version that each stage after this read in its backward, the last stage first.
    EXPECT_EQ(message.numbers.size(), static_cast<std::size_t>(pipeline_.num_stages - stage_));
    EXPECT_EQ(message.numbers.front(), minibatch);
    for (std::size_t index = 1; index < message.numbers.size(); ++index) {
      const std::int64_t stage = pipeline_.num_stages - static_cast<std::int64_t>(index);
      EXPECT_EQ(message.numbers[index], formula(stage, minibatch)) << "stage " << stage;
    }
    if (!is_first()) {
      EXPECT_EQ(numbers_of(*inputs_.at(minibatch)).front(), minibatch);  // the input is still what it was
      inputs_.erase(minibatch);
    }
    jitter();
    message.numbers.push_back(read(work.read_slot, work.read_version));
    worker_->engine().complete_backward(outgoing(std::move(message), minibatch, is_first()),
                                        now_ns() - began_ns);
  }

  void update(const WorkItem& work) {
    const std::int64_t began_ns = now_ns();
    EXPECT_EQ(work.write_version.value(), work.minibatch.value() + 1);
    EXPECT_EQ(read(work.read_slot, work.read_version), work.minibatch.value());
    fill(work.write_slot, kPoison);
    jitter();
    fill(work.write_slot, work.write_version.value());
    worker_->engine().complete_update(now_ns() - began_ns);
  }

  void fail() {
    report_.faulted = true;
    inputs_.clear();
    if (pipeline_.fault == Fault::kAbort) worker_->abort(kAbortText);
    if (pipeline_.fault != Fault::kDestroyed) worker_->close(60);
    held_.clear();
    started_ = false;
    worker_.reset();
  }

  [[nodiscard]] std::int64_t formula(std::int64_t stage, std::int64_t minibatch) const {
    return std::max<std::int64_t>(0, minibatch - (pipeline_.num_stages - stage) + 1);
  }

  static std::vector<std::int64_t> numbers_of(const ReceivedItem& item) {
    const TensorView& tensor = item.tensors.at(0);
    std::vector<std::int64_t> numbers(static_cast<std::size_t>(tensor.shape[0]));
    std::memcpy(numbers.data(), tensor.data, tensor.size_bytes());
    return numbers;
  }
  static std::size_t padding_bytes(std::int64_t minibatch) {
    return static_cast<std::size_t>(minibatch * 797 % (kPaddingMax + 1));
  }
  static void check_padding(const ReceivedItem& item, std::int64_t minibatch) {
    EXPECT_EQ(item.tag, static_cast<std::uint64_t>(minibatch * 3));
    const TensorView& tensor = item.tensors.at(1);
    const std::vector<std::byte> expected =
        patterned_bytes(padding_bytes(minibatch), static_cast<std::uint32_t>(minibatch));
    ASSERT_EQ(tensor.size_bytes(), expected.size());
    EXPECT_TRUE(std::equal(expected.begin(), expected.end(), tensor.data));
  }
  Outgoing outgoing(Message numbers, std::int64_t minibatch, bool to_nobody) {
    if (to_nobody) return {};
    auto message = std::make_shared<Message>(std::move(numbers));
    message->padding = patterned_bytes(padding_bytes(minibatch), static_cast<std::uint32_t>(minibatch));
    Outgoing outgoing;
    outgoing.tag = static_cast<std::uint64_t>(minibatch * 3);
    outgoing.tensors = message->views();
    outgoing.ready = worker_->record_compute();
    outgoing.keep_alive = message;
    return outgoing;
  }

  void fill(SlotIndex slot, std::int64_t version) {
    const std::vector<std::int64_t> weights(kNumWeights, version);
    std::memcpy(held_.at(static_cast<std::size_t>(slot.value())).lease.data(), weights.data(),
                kNumWeights * 8);
  }
  // The version that the slot's bytes say, all of them.
  std::int64_t read(SlotIndex slot, WeightVersion expected) {
    std::vector<std::int64_t> weights(kNumWeights);
    std::memcpy(weights.data(), held_.at(static_cast<std::size_t>(slot.value())).lease.data(),
                kNumWeights * 8);
    EXPECT_EQ(weights, std::vector<std::int64_t>(kNumWeights, expected.value()));
    return weights.front();
  }
  // Some time between nothing and a few dozen microseconds, so that the stages meet in many orders.
  void jitter() {
    const Deadline end = Clock::now() + std::chrono::microseconds(random_() % 60);
    while (Clock::now() < end) std::this_thread::yield();
  }

  const PipelineOptions pipeline_;
  const std::int64_t stage_;
  const std::int64_t in_flight_;
  Board& board_;
  std::mt19937 random_;
  bool started_ = false;  // the engine can be asked
  std::unique_ptr<Worker> worker_;
  std::vector<Worker::HeldSlot> held_;
  std::map<std::int64_t, std::optional<ReceivedItem>> inputs_;
  StageReport report_;
};

std::vector<StageReport> run_pipeline(const PipelineOptions& options) {
  Board board;
  std::vector<StageReport> reports(static_cast<std::size_t>(options.num_stages));
  std::vector<std::thread> threads;
  for (std::int64_t stage = 0; stage < options.num_stages; ++stage) {
    threads.emplace_back(
        [&, stage] { reports[static_cast<std::size_t>(stage)] = Stage(options, stage, board).run(); });
  }
  for (std::thread& thread : threads) thread.join();
  return reports;
}

void expect_complete(const std::vector<StageReport>& reports, std::int64_t num_minibatches) {
  const auto num_stages = static_cast<std::int64_t>(reports.size());
  for (std::int64_t stage = 0; stage < num_stages; ++stage) {
    SCOPED_TRACE("stage " + std::to_string(stage));
    const StageReport& report = reports[static_cast<std::size_t>(stage)];
    EXPECT_FALSE(report.failure.has_value()) << report.failure->message;
    EXPECT_EQ(report.num_minibatches, num_minibatches);
    ASSERT_EQ(report.versions.size(), static_cast<std::size_t>(num_minibatches));
    for (std::int64_t minibatch = 0; minibatch < num_minibatches; ++minibatch) {
      const std::int64_t expected = std::max<std::int64_t>(0, minibatch - (num_stages - stage) + 1);
      const VersionsRead& read = report.versions[static_cast<std::size_t>(minibatch)];
      EXPECT_EQ(read.forward.value(), expected) << "minibatch " << minibatch;
      EXPECT_EQ(read.backward.value(), expected) << "minibatch " << minibatch;
    }
    EXPECT_EQ(report.totals.num_work_items, 3 * num_minibatches);
    EXPECT_LE(report.totals.wait_ns + report.totals.compute_ns, report.totals.elapsed_ns);
    EXPECT_GE(report.totals.wait_ns, 0);
    ASSERT_EQ(report.spans.size(),
              std::min<std::size_t>(kNumSpansMax, static_cast<std::size_t>(3 * num_minibatches)));
    if (num_minibatches > 0) {
      EXPECT_EQ(report.spans.back().kind, WorkKind::kUpdate);
      EXPECT_EQ(report.spans.back().minibatch, MinibatchId(num_minibatches - 1));
    }
    for (const Span& span : report.spans) {
      EXPECT_LE(span.asked_ns, span.ready_ns);
      EXPECT_LE(span.wait_ns, span.ready_ns - span.asked_ns);
      EXPECT_LE(span.compute_ns, span.completed_ns - span.ready_ns);
    }
  }
}

bool is_available(const std::string& transport) { return make_transport(transport) != nullptr; }

// ---- Whole runs ----

class Pipeline : public testing::TestWithParam<std::tuple<std::string, bool, std::int64_t>> {
 protected:
  void SetUp() override {
    if (!is_available(std::get<0>(GetParam())))
      GTEST_SKIP() << std::get<0>(GetParam()) << " is not available";
  }
  [[nodiscard]] static PipelineOptions options() {
    PipelineOptions options;
    std::tie(options.transport, options.staged, options.num_stages) = GetParam();
    return options;
  }
};

TEST_P(Pipeline, EveryStageReadsTheVersionsOfTheFormulaAndGetsItsOwnGradients) {
  PipelineOptions pipeline = options();
  pipeline.num_minibatches = 120;
  expect_complete(run_pipeline(pipeline), pipeline.num_minibatches);
}

TEST_P(Pipeline, EndReachesEveryStageHoweverFewMinibatchesThereAre) {
  PipelineOptions pipeline = options();
  for (std::int64_t num_minibatches = 0; num_minibatches <= pipeline.num_stages + 1; ++num_minibatches) {
    SCOPED_TRACE(num_minibatches);
    pipeline.num_minibatches = num_minibatches;
    pipeline.seed = static_cast<std::uint32_t>(num_minibatches);
    expect_complete(run_pipeline(pipeline), num_minibatches);
  }
}

std::string pipeline_name(
    const testing::TestParamInfo<std::tuple<std::string, bool, std::int64_t>>& parameter) {
  return std::get<0>(parameter.param) + (std::get<1>(parameter.param) ? "Staged" : "Direct") +
         std::to_string(std::get<2>(parameter.param));
}

INSTANTIATE_TEST_SUITE_P(Transports, Pipeline,
                         testing::Combine(testing::Values("inproc", "zmq"), testing::Bool(),
                                          testing::Values<std::int64_t>(1, 2, 3, 4)),
                         pipeline_name);

// ---- Faults ----

class Faults : public testing::TestWithParam<std::string> {
 protected:
  void SetUp() override {
    if (!is_available(GetParam())) GTEST_SKIP() << GetParam() << " is not available";
  }
  [[nodiscard]] static PipelineOptions options(Fault fault, std::int64_t stage, std::int64_t minibatch) {
    PipelineOptions options;
    options.transport = GetParam();
    options.num_stages = 4;
    options.num_minibatches = 1000;
    options.fault = fault;
    options.faulty_stage = stage;
    options.faulty_minibatch = minibatch;
    return options;
  }
  // Stages 0 and 1 in one thread: a sends activations to b, b gradients to a; also items to a.
  void make_pair(std::int64_t num_items = 2) {
    WorkerOptions worker;
    worker.transport = GetParam();
    a_ = std::make_unique<Worker>(worker);
    b_ = std::make_unique<Worker>(worker);
    const auto spec = [num_items](const std::string& name, const std::string& peer,
                                  std::uint32_t channel_id) {
      return ChannelSpec{name, peer, channel_id, ItemSpec({{DType::kUInt8, 1, 1000}}), num_items, 300, true};
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
    a_->start({"pipedream", StageIndex(0), 2, 2}, "", activations_name(0), gradients_name(1), "", 10);
    b_->start({"pipedream", StageIndex(1), 2, 1}, activations_name(0), "", "", gradients_name(1), 10);
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
    const Result<bool> sent = worker.send_item(channel, seed, {view(*bytes)}, bytes, deadline);
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
        const StageReport& report = reports[static_cast<std::size_t>(other)];
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
        const StageReport& report = reports[static_cast<std::size_t>(other)];
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

TEST_P(Faults, DeadlineReturnsNothingAndTheNextAskGetsTheWork) {
  make_pair();
  start_pair();
  const std::int64_t asked_ns = now_ns();
  for (int attempt = 0; attempt < 3; ++attempt) {
    const auto nothing = b_->next_work(Clock::now() + std::chrono::milliseconds(2));
    ASSERT_TRUE(nothing.ok()) << nothing.failure().message;
    EXPECT_FALSE(nothing.value().has_value());
  }
  EXPECT_EQ(next(*a_).kind, WorkKind::kForward);
  a_->engine().complete_forward(outgoing(1), 0);
  {
    const WorkItem work = next(*b_);
    EXPECT_EQ(work.kind, WorkKind::kForward);
    EXPECT_EQ(work.minibatch, MinibatchId(0));
    ASSERT_TRUE(work.received.has_value());
    EXPECT_EQ(std::memcmp(work.received->tensors[0].data, patterned_bytes(1000, 1).data(), 1000), 0);
  }
  b_->engine().complete_forward({}, 0);
  const Span span = b_->engine().spans().at(0);
  EXPECT_GE(span.wait_ns, 6'000'000);  // all three attempts count
  EXPECT_GE(span.asked_ns, asked_ns);
  EXPECT_LE(span.wait_ns, span.ready_ns - span.asked_ns);
}

TEST_P(Faults, EndOnAGradientChannelIsRefused) {
  make_pair();
  start_pair();
  for (std::uint32_t minibatch = 0; minibatch < 2; ++minibatch) {
    EXPECT_EQ(next(*a_).kind, WorkKind::kForward);
    a_->engine().complete_forward(outgoing(minibatch), 0);
  }
  b_->send_end(gradients_name(1));
  const Failure failure = next_failure(*a_);
  EXPECT_EQ(failure.kind, FailureKind::kCorruptFrame);
  EXPECT_EQ(
      failure.message,
      "stage 0 at minibatch 0 (BACKWARD): gradients of stage 1 to stage 0: ended with gradients still due");
}

// The tensors are the user's: too large for the plan, they are refused before anything has changed.
TEST_P(Faults, CompletionThatDoesNotFitThePlanCanBeRepeated) {
  make_pair();
  start_pair();
  EXPECT_EQ(next(*a_).kind, WorkKind::kForward);
  std::vector<std::byte> large(1001);
  Outgoing too_large;
  too_large.tensors = {view(large)};
  EXPECT_THROW(a_->engine().complete_forward(std::move(too_large), 0), UserError);
  a_->engine().complete_forward(outgoing(3), 0);
  EXPECT_EQ(next(*b_).minibatch, MinibatchId(0));
}

// ---- Items outside the schedule ----

TEST_P(Faults, CloseWaitsForItemsThatHaveNoCreditYet) {
  make_pair(4);
  for (std::uint32_t index = 0; index < 4; ++index) {
    ASSERT_TRUE(send_item(*a_, activations_name(0), index, patience()));
  }
  std::vector<ReceivedItem> held;  // so many that the rest has no credit
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
    EXPECT_EQ(item.value()->tag, index);
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
  for (std::uint32_t index = 3; !failure; ++index) {  // room there is from now on, and soon an error instead
    std::vector<std::byte> bytes(10);
    const Result<bool> sent = a_->send_item(activations_name(0), 0, {view(bytes)}, nullptr, patience());
    if (!sent.ok()) failure = sent.failure();
    ASSERT_LT(index, 100'000'000U);
  }
  EXPECT_EQ(failure->kind, FailureKind::kAborted);
  EXPECT_EQ(failure->message, kAbortText);
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
  while (text.size() < 2000) text += "\xC3\xA9";  // two bytes each, so the limit falls between them
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
  std::thread([received = std::move(*item.value())] { EXPECT_EQ(received.tag, 5U); }).join();
}

TEST_P(Faults, AbortMayComeFromAnyThreadAtAnyTime) {
  make_pair();
  start_pair();
  std::thread other([&] { b_->abort(kAbortText); });
  const Failure failure = [&] {
    for (std::uint32_t minibatch = 0; minibatch < 2; ++minibatch) {
      auto work = a_->next_work(patience());
      if (!work.ok()) return work.failure();
      a_->engine().complete_forward(outgoing(minibatch), 0);
    }
    return next_failure(*a_);
  }();
  EXPECT_EQ(failure.kind, FailureKind::kAborted);
  EXPECT_EQ(failure.message, kAbortText);
  other.join();
}

std::string transport_of(const testing::TestParamInfo<std::string>& parameter) { return parameter.param; }

INSTANTIATE_TEST_SUITE_P(Transports, Faults, testing::Values("inproc", "zmq"), transport_of);

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

TEST(WorkerOptions, ChannelNamesAreUniqueAndEveryEndpointIsNeeded) {
  WorkerOptions options;
  options.transport = "inproc";
  Worker worker(options);
  const ChannelSpec spec{"weights", "stage 1 (rank 1)", 1, ItemSpec({{DType::kUInt8, 1, 10}})};
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
