// Tests that in the steady state a pipeline allocates nothing on any thread: the engines, channels,
// transports and copy streams of two workers. The vectors in which a caller describes its tensors do not
// count.
#include <gtest/gtest.h>

#include <atomic>
#include <barrier>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#include "stage/pipeline.h"
#include "support/allocation_counter.h"
#include "transport/recorder.h"

namespace pipedream {
namespace {

constexpr std::int64_t kNumWarmupMinibatches = 50;
constexpr std::int64_t kNumMinibatches = 500;  // measured
constexpr std::size_t kItemBytes = 5000;
constexpr std::size_t kChunkBytes = 1024;

// A barrier at which both compute threads wait while the main thread reads the counter.
using Gate = std::barrier<>;

class SteadyWorker {
 public:
  SteadyWorker(const std::string& transport, bool staged, const ScheduleOptions& schedule, std::int64_t index)
      : schedule_(schedule), index_(index), parts_(parts_of(schedule, index_)) {
    WorkerOptions options;
    options.transport = transport;
    options.force_staging = staged;
    worker_ = std::make_unique<Worker>(options);
    const ItemSpec item({{DType::kUInt8, 1, kItemBytes}, {DType::kFloat32, 1, 64}});
    add_channels(*worker_, schedule, index_, item, kChunkBytes);
    worker_->seal();
    for (const TensorSpec& tensor : item.tensors()) {
      TensorView view{tensor.dtype, tensor.num_dims, {}, bytes_->data()};
      view.shape[0] = static_cast<std::int64_t>(tensor.bytes_max / dtype_bytes(tensor.dtype));
      views_.push_back(view);
    }
    for (const StageChannelNames& part : parts_) {
      stashes_[part.stage].resize(static_cast<std::size_t>(num_microbatches_in_flight(schedule, part.stage)) +
                                  1);
    }
  }

  [[nodiscard]] Worker& worker() { return *worker_; }
  // Call this only while the threads wait at the gate.
  [[nodiscard]] std::uint64_t num_vectors() const { return num_vectors_; }

  void run(Gate& gate) {
    train(gate);
    gate.arrive_and_drop();  // a thread that has failed must not keep the other waiting
  }

 private:
  void train(Gate& gate) {
    const Result<bool> open = worker_->wait_open(patience());
    ASSERT_TRUE(open.ok() && open.value());
    worker_->start(schedule_, index_, channels_at(schedule_, index_), 100);
    for (;;) {
      worker_->engine().collect_released();
      auto work = worker_->next_work(patience());
      ASSERT_TRUE(work.ok()) << work.failure().message;
      ASSERT_TRUE(work.value().has_value()) << worker_->engine().position();
      WorkItem& item = *work.value();
      if (!item.opcode) return;
      do_work(item);
      const bool ends_minibatch = item.opcode == Opcode::kUpdate && item.stage == parts_.back().stage;
      const std::int64_t num_done = item.minibatch.value() + 1;
      if (ends_minibatch && (num_done == kNumWarmupMinibatches || is_last(num_done))) {
        gate.arrive_and_wait();  // the main thread makes the counter, or reads it
        gate.arrive_and_wait();
      }
    }
  }
  static bool is_last(std::int64_t num_minibatches) {
    return num_minibatches == kNumWarmupMinibatches + kNumMinibatches;
  }
  void do_work(WorkItem& work) {
    StageEngine& engine = worker_->engine();
    Outgoing made;
    switch (*work.opcode) {
      case Opcode::kForward:
        if (work.stage.value() == 0 && is_last(work.minibatch.value()))
          return engine.end_of_data(work.minibatch.value());
        stash_of(work) = std::move(work.received);
        made = outgoing(work.stage.value() + 1 < num_stages_);
        break;
      case Opcode::kBackward:
        stash_of(work).reset();
        made = outgoing(work.stage.value() > 0);
        break;
      default:
        break;
    }
    engine.complete(*work.opcode, std::move(made), 0);
  }
  // The backwards of a stage come in the order of its forwards, so the stashes can be a ring.
  std::optional<ReceivedItem>& stash_of(const WorkItem& work) {
    std::vector<std::optional<ReceivedItem>>& stashes = stashes_.at(work.stage);
    const std::int64_t position =
        work.minibatch.value() * schedule_.num_microbatches + work.microbatch.value();
    return stashes[static_cast<std::size_t>(position) % stashes.size()];
  }
  Outgoing outgoing(bool has_neighbour) {
    Outgoing outgoing;
    if (!has_neighbour) return outgoing;
    outgoing.tensors = views_;
    ++num_vectors_;
    outgoing.ready = worker_->record_compute();
    outgoing.keep_alive = bytes_;
    return outgoing;
  }

  const ScheduleOptions schedule_;
  const Rank index_;
  const std::vector<StageChannelNames> parts_;
  const std::int64_t num_stages_ = static_cast<std::int64_t>(schedule_.in_flight.size());
  const std::shared_ptr<std::vector<std::byte>> bytes_ =
      std::make_shared<std::vector<std::byte>>(patterned_bytes(kItemBytes, 1));
  std::vector<TensorView> views_;
  std::uint64_t num_vectors_ = 0;  // vectors that the caller made for the engine
  std::unique_ptr<Worker> worker_;
  std::map<StageIndex, std::vector<std::optional<ReceivedItem>>> stashes_;  // destroyed before the worker
};

struct Count {
  std::uint64_t num_allocations = 0;
  std::uint64_t num_of_callers = 0;
  std::string first;
};

Count measure(SteadyWorker& a, SteadyWorker& b) {
  const auto endpoints_of_a = a.worker().listen();
  a.worker().connect(b.worker().listen());
  b.worker().connect(endpoints_of_a);
  Gate gate(3);
  std::thread thread_of_a([&] { a.run(gate); });
  std::thread thread_of_b([&] { b.run(gate); });
  Count count;
  gate.arrive_and_wait();
  const std::uint64_t num_before = a.num_vectors() + b.num_vectors();
  {
    const AllocationCounter counter;
    gate.arrive_and_wait();  // the compute threads go on
    gate.arrive_and_wait();
    count.num_allocations = counter.num_in_all();
    count.num_of_callers = a.num_vectors() + b.num_vectors() - num_before;
    count.first = counter.first();
  }
  gate.arrive_and_wait();
  thread_of_a.join();
  thread_of_b.join();
  std::thread closing([&] { a.worker().close(60); });
  b.worker().close(60);
  closing.join();
  return count;
}

ScheduleOptions schedule_of(const std::string& name) {
  if (name == "interleaved") return make_interleaved(2, 2, 3);
  ScheduleOptions schedule = make_straight(name, 2, name == "model_parallel" ? 1 : 3);
  schedule.recompute = {true, false};
  return schedule;
}

using Case = std::tuple<bool, std::string>;  // staged, schedule

class PipelineSteadyState : public testing::TestWithParam<Case> {};

TEST_P(PipelineSteadyState, AllocatesNothingOfItsOwn) {
  if (!AllocationCounter::counts()) GTEST_SKIP() << "a sanitizer has the allocator";
  const auto& [staged, name] = GetParam();
  const ScheduleOptions schedule = schedule_of(name);
  SteadyWorker a("inproc", staged, schedule, 0);
  SteadyWorker b("inproc", staged, schedule, 1);
  const Count count = measure(a, b);
  // The callers make one vector of views per item. Each microbatch crosses every boundary in both directions.
  const auto num_items = static_cast<std::uint64_t>(kNumMinibatches * schedule.num_microbatches * 2 *
                                                    (num_stages(schedule) - 1));
  // Some items were already on their way when counting began.
  EXPECT_GE(count.num_of_callers, num_items - 100);
  EXPECT_EQ(count.num_allocations, count.num_of_callers) << count.first;
}

INSTANTIATE_TEST_SUITE_P(Schedules, PipelineSteadyState,
                         testing::Combine(testing::Bool(), testing::ValuesIn(pipeline_schedules())),
                         [](const testing::TestParamInfo<Case>& parameter) {
                           return std::string(std::get<0>(parameter.param) ? "staged_" : "direct_") +
                                  std::get<1>(parameter.param);
                         });

}  // namespace
}  // namespace pipedream
