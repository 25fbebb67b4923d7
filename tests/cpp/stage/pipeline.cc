// Runs whole pipelines (pipeline.h). A stage's computation is 64-bit arithmetic on the contents of weight
// slots, and depends on the order of its inputs. So the result is wrong if a version is wrong, if a slot is
// overwritten too early, or if a tensor belongs to another microbatch.
#include "stage/pipeline.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <condition_variable>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <thread>
#include <tuple>
#include <utility>

#include "transport/recorder.h"

#if defined(PD_CUDA_STUB)
#include "cuda_stub/cuda_stub.h"
#endif

namespace pipedream {

Deadline patience() { return Clock::now() + kPatience; }

ScheduleOptions make_straight(const std::string& schedule, std::int64_t num_stages,
                              std::int64_t num_microbatches) {
  if (schedule == "interleaved" && num_stages == 4) return make_interleaved(2, 2, num_microbatches);
  return make_options(schedule, straight(num_stages), num_microbatches);
}

std::vector<StageChannelNames> parts_of(const ScheduleOptions& schedule, Rank worker) {
  const StageIndex last_stage(num_stages(schedule) - 1);
  std::vector<StageChannelNames> parts;
  for (const StageIndex stage : placement_of(schedule).stages_at(worker)) {
    StageChannelNames& part = parts.emplace_back();
    part.stage = stage;
    if (stage.value() > 0) {
      part.activations_in = activations_name(stage.value() - 1);
      part.gradients_out = gradients_name(stage.value());
    }
    if (stage != last_stage) {
      part.activations_out = activations_name(stage.value());
      part.gradients_in = gradients_name(stage.value() + 1);
    }
  }
  return parts;
}

std::vector<EdgeChannelName> channels_at(const ScheduleOptions& schedule, Rank rank) {
  const Placement placement = placement_of(schedule);
  std::vector<EdgeChannelName> channels;
  for (const Edge& edge : edges_of(schedule)) {
    const std::int64_t from = edge.from.stage.value();
    if (placement.rank_of(edge.from.stage) != rank && placement.rank_of(edge.to.stage) != rank) continue;
    channels.push_back(
        {edge, edge.kind == EdgeKind::kActivation ? activations_name(from) : gradients_name(from)});
  }
  return channels;
}

void add_channels(Worker& worker, const ScheduleOptions& schedule, Rank worker_index, const ItemSpec& item,
                  std::size_t chunk_bytes, bool places_on_device) {
  const auto spec = [&](const std::string& name, StageIndex peer, std::int64_t channel_id,
                        std::int64_t num_items) {
    const std::string rank = std::to_string(placement_of(schedule).rank_of(peer).value());
    ChannelSpec channel;
    channel.name = name;
    channel.peer = "stage " + std::to_string(peer.value()) + " (rank " + rank + ")";
    channel.channel_id = static_cast<std::uint32_t>(channel_id);
    channel.item = item;
    channel.num_items_max = static_cast<std::size_t>(num_items);
    channel.num_microbatches = schedule.num_microbatches;
    channel.chunk_bytes = chunk_bytes;
    channel.places_on_device = places_on_device;
    return channel;
  };
  for (const StageChannelNames& part : parts_of(schedule, worker_index)) {
    const std::int64_t stage = part.stage.value();
    const std::int64_t in_flight = num_microbatches_in_flight(schedule, part.stage);
    if (!part.activations_in.empty()) {
      const StageIndex upstream(stage - 1);
      const std::int64_t in_flight_upstream = num_microbatches_in_flight(schedule, upstream);
      // Each microbatch in flight holds a slot until its backward. One more microbatch may arrive meanwhile.
      worker.add_receive_channel(spec(part.activations_in, upstream, 2 * stage, in_flight + 1));
      worker.add_send_channel(spec(part.gradients_out, upstream, 2 * stage + 1, in_flight_upstream));
    }
    if (!part.activations_out.empty()) {
      const StageIndex downstream(stage + 1);
      // The channel has as many items as the schedule has microbatches in flight. The channel itself adds
      // room for an item that is released late.
      worker.add_send_channel(spec(part.activations_out, downstream, 2 * stage + 2, in_flight));
      worker.add_receive_channel(spec(part.gradients_in, downstream, 2 * stage + 3, 2));
    }
  }
}

namespace {

constexpr std::uint64_t kPoison = ~std::uint64_t{0};
constexpr std::size_t kNumWeights = 64;
constexpr std::size_t kNumNumbers = 3;  // the minibatch, the microbatch and the value
constexpr std::size_t kChunkBytes = 1024;

// ---- What is computed ----

std::uint64_t mix(std::uint64_t a, std::uint64_t b) {
  std::uint64_t mixed = a * 0x9E3779B97F4A7C15U + b;
  mixed = (mixed ^ (mixed >> 31U)) * 0xBF58476D1CE4E5B9U;
  return mixed ^ (mixed >> 29U);
}

std::uint64_t first_weight(std::int64_t stage) { return mix(11, static_cast<std::uint64_t>(stage)); }
std::uint64_t input_of(std::int64_t minibatch, std::int64_t microbatch) {
  return mix(static_cast<std::uint64_t>(minibatch), static_cast<std::uint64_t>(microbatch));
}
std::uint64_t output_of(std::uint64_t input, std::uint64_t weight) { return mix(input, weight); }
std::uint64_t loss_gradient_of(std::uint64_t output) { return mix(output, 1); }
std::uint64_t weight_gradient_of(std::uint64_t output_gradient, std::uint64_t output) {
  return mix(output_gradient, output);
}
std::uint64_t input_gradient_of(std::uint64_t output_gradient, std::uint64_t weight) {
  return mix(output_gradient, weight + 1);
}
std::uint64_t next_weight_of(std::uint64_t weight, std::uint64_t weight_gradient) {
  return mix(weight, weight_gradient);
}

// Computes the same results without a pipeline, one minibatch after the other. It reads the versions that
// docs/schedules.md names, keeps all versions and has no slots.
class Replay {
 public:
  Replay(const ScheduleOptions& schedule, std::int64_t num_minibatches)
      : schedule_(schedule),
        num_stages_(static_cast<std::int64_t>(schedule.in_flight.size())),
        num_minibatches_(num_minibatches) {
    for (std::int64_t stage = 0; stage < num_stages_; ++stage) weights_.push_back({first_weight(stage)});
    for (std::int64_t minibatch = 0; minibatch < num_minibatches; ++minibatch) train(minibatch);
  }

  [[nodiscard]] std::int64_t num_minibatches() const { return num_minibatches_; }
  [[nodiscard]] std::int64_t num_microbatches() const { return schedule_.num_microbatches; }
  [[nodiscard]] std::int64_t forward_version(std::int64_t stage, std::int64_t minibatch,
                                             std::int64_t microbatch) const {
    const std::string& name = schedule_.schedule;
    const std::int64_t m = schedule_.num_microbatches;
    std::int64_t delay = 0;  // microbatches
    if (name == "pipedream" || name == "naive") delay = in_flight(stage) - 1;
    if (name == "vertical_sync") delay = in_flight(0) - 1;
    if (name == "2bw") delay = m;
    return std::max<std::int64_t>(0, minibatch * m + microbatch - delay) / m;
  }
  [[nodiscard]] std::int64_t backward_version(std::int64_t stage, std::int64_t minibatch,
                                              std::int64_t microbatch) const {
    return schedule_.schedule == "naive" ? minibatch : forward_version(stage, minibatch, microbatch);
  }
  [[nodiscard]] bool recomputes(std::int64_t stage) const {
    return !schedule_.recompute.empty() && schedule_.recompute.at(static_cast<std::size_t>(stage));
  }
  [[nodiscard]] std::uint64_t weight(std::int64_t stage, std::int64_t version) const {
    return weights_.at(static_cast<std::size_t>(stage)).at(static_cast<std::size_t>(version));
  }
  // input() is the input of the stage's forward, and gradient() the output of its backward.
  [[nodiscard]] std::uint64_t input(std::int64_t stage, std::int64_t minibatch,
                                    std::int64_t microbatch) const {
    return inputs_.at({stage, minibatch, microbatch});
  }
  [[nodiscard]] std::uint64_t gradient(std::int64_t stage, std::int64_t minibatch,
                                       std::int64_t microbatch) const {
    return gradients_.at({stage, minibatch, microbatch});
  }

 private:
  using Key = std::tuple<std::int64_t, std::int64_t, std::int64_t>;  // stage, minibatch, microbatch

  [[nodiscard]] std::int64_t in_flight(std::int64_t stage) const {
    return schedule_.in_flight.at(static_cast<std::size_t>(stage));
  }
  void train(std::int64_t minibatch) {
    std::vector<std::uint64_t> weight_gradients(static_cast<std::size_t>(num_stages_), 0);
    for (std::int64_t microbatch = 0; microbatch < schedule_.num_microbatches; ++microbatch) {
      train_microbatch(minibatch, microbatch, weight_gradients);
    }
    for (std::size_t stage = 0; stage < weights_.size(); ++stage) {
      weights_[stage].push_back(next_weight_of(weights_[stage].back(), weight_gradients[stage]));
    }
  }
  void train_microbatch(std::int64_t minibatch, std::int64_t microbatch,
                        std::vector<std::uint64_t>& weight_gradients) {
    std::vector<std::uint64_t> outputs;  // the outputs that the backward uses
    std::uint64_t value = input_of(minibatch, microbatch);
    for (std::int64_t stage = 0; stage < num_stages_; ++stage) {
      inputs_[{stage, minibatch, microbatch}] = value;
      const std::int64_t again = recomputes(stage) ? backward_version(stage, minibatch, microbatch)
                                                   : forward_version(stage, minibatch, microbatch);
      outputs.push_back(output_of(value, weight(stage, again)));
      value = output_of(value, weight(stage, forward_version(stage, minibatch, microbatch)));
    }
    std::uint64_t gradient = loss_gradient_of(outputs.back());
    for (std::int64_t stage = num_stages_ - 1; stage >= 0; --stage) {
      const auto index = static_cast<std::size_t>(stage);
      weight_gradients[index] += weight_gradient_of(gradient, outputs[index]);
      gradient = input_gradient_of(gradient, weight(stage, backward_version(stage, minibatch, microbatch)));
      gradients_[{stage, minibatch, microbatch}] = gradient;
    }
  }

  const ScheduleOptions schedule_;
  const std::int64_t num_stages_;
  const std::int64_t num_minibatches_;
  std::vector<std::vector<std::uint64_t>> weights_;  // indexed by stage and version
  std::map<Key, std::uint64_t> inputs_;
  std::map<Key, std::uint64_t> gradients_;
};

// ---- A message between stages: three numbers, then padding, whose size varies and may be 0 ----

struct Message {
  std::vector<std::uint64_t> numbers;
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

ItemSpec message_spec(std::int64_t padding_bytes_max) {
  return ItemSpec(
      {{DType::kInt64, 1, kNumNumbers * 8}, {DType::kUInt8, 2, static_cast<std::size_t>(padding_bytes_max)}});
}
std::uint64_t number_of(const WorkItem& work) {
  return static_cast<std::uint64_t>(work.minibatch.value() * 100 + work.microbatch.value());
}
std::vector<std::byte> padding_of(const WorkItem& work, std::int64_t padding_bytes_max) {
  const std::int64_t num_bytes =
      (work.minibatch.value() * 797 + work.microbatch.value() * 411) % (padding_bytes_max + 1);
  return patterned_bytes(static_cast<std::size_t>(num_bytes), static_cast<std::uint32_t>(number_of(work)));
}

// The memory of a worker's tensors: the host's or a device's. Only the compute thread uses it.
class Place {
 public:
  Place() = default;
  explicit Place(std::shared_ptr<Device> device)
      : device_(std::move(device)), stream_(device_->wrap_stream(0)) {}

  // Null for the host's memory.
  [[nodiscard]] const std::shared_ptr<Device>& device() const { return device_; }

  // Copies bytes to host memory, after all work that was enqueued before.
  void read(void* to, const std::byte* data, std::size_t num_bytes) const {
    if (!device_) {
      if (num_bytes > 0) std::memcpy(to, data, num_bytes);
      return;
    }
    stream_->copy(to, data, num_bytes);
    stream_->synchronize();
  }
  void write(std::byte* data, const void* from, std::size_t num_bytes) const {
    if (!device_) {
      std::memcpy(data, from, num_bytes);
      return;
    }
    stream_->copy(data, from, num_bytes);
    stream_->synchronize();
  }
  // Returns the message as an item to send. On a device the copy to the device may still be running.
  [[nodiscard]] Outgoing outgoing(const std::shared_ptr<Message>& message) const {
    Outgoing outgoing;
    outgoing.tensors = message->views();
    outgoing.keep_alive = message;
    if (!device_) return outgoing;
    std::vector<std::byte> bytes;
    for (const TensorView& tensor : outgoing.tensors) {
      bytes.insert(bytes.end(), tensor.data, tensor.data + tensor.size_bytes());
    }
    const std::shared_ptr<Memory> memory = upload(*device_, *stream_, std::move(bytes));
    std::byte* data = memory->data();
    for (TensorView& tensor : outgoing.tensors) {
      tensor.data = data;
      data += tensor.size_bytes();
    }
    outgoing.keep_alive = memory;
    return outgoing;
  }

 private:
  std::shared_ptr<Device> device_;
  std::shared_ptr<Stream> stream_;  // the stream on which the worker computes
};

// Returns the value in an item. Checks that everything else in the item was sent for this work item.
std::uint64_t value_of(const Place& place, const ReceivedItem& item, const WorkItem& work,
                       std::int64_t padding_bytes_max) {
  EXPECT_EQ(item.fields.data_fingerprint, number_of(work));
  std::vector<std::uint64_t> numbers(kNumNumbers, kPoison);
  EXPECT_EQ(item.tensors.at(0).size_bytes(), kNumNumbers * 8);
  place.read(numbers.data(), item.tensors.at(0).data, kNumNumbers * 8);
  EXPECT_EQ(numbers[0], static_cast<std::uint64_t>(work.minibatch.value()));
  EXPECT_EQ(numbers[1], static_cast<std::uint64_t>(work.microbatch.value()));
  std::vector<std::byte> padding(item.tensors.at(1).size_bytes());
  place.read(padding.data(), item.tensors.at(1).data, padding.size());
  EXPECT_EQ(padding.size(), padding_of(work, padding_bytes_max).size());
  EXPECT_TRUE(padding == padding_of(work, padding_bytes_max));
  return numbers[2];
}

// Passes endpoints between the workers, as the c10d store does in a run.
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

// ---- One worker: its stages, their weights, and the checks of its values ----

class PipelineWorker {
 public:
  PipelineWorker(const PipelineOptions& pipeline, std::int64_t worker_index, const Replay& replay,
                 Board& board)
      : pipeline_(pipeline),
        worker_index_(worker_index),
        parts_(parts_of(pipeline.schedule, worker_index_)),
        replay_(replay),
        board_(board),
        random_(pipeline.seed * 31 + static_cast<std::uint32_t>(worker_index)) {
    WorkerOptions options;
    options.transport = pipeline.transport;
    options.force_staging = pipeline.staged;
    options.shares_memory = pipeline.shares_memory;
    if (pipeline.on_device) place_ = Place(make_device(pipeline.on_cuda));
    worker_ = pipeline.on_device ? std::make_unique<Worker>(options, place_.device())
                                 : std::make_unique<Worker>(options);
    for (const StageChannelNames& part : parts_) report_.stages.push_back(part.stage);
  }

  WorkerReport run() {
    try {
      while ((started_ || open()) && work_once()) {
      }
    } catch (const DeviceError& error) {  // ends this worker, as an error of user code does in Python
      const std::string where = started_ ? worker_->engine().position() + ": " : "";
      report_.failure = Failure{FailureKind::kDeviceError, where + error.what()};
    }
    if (started_) {
      for (const StageIndex stage : report_.stages)
        report_.versions.push_back(worker_->engine().versions(stage));
      report_.totals = worker_->engine().totals();
      report_.spans = worker_->engine().spans();
      report_.transports = worker_->channel_transports();
    }
    if (worker_) {
      stages_.clear();
      // Tells the other workers why this worker has ended, as a launcher does. A worker that vanishes tells
      // no reason.
      const bool tells = pipeline_.fault == Fault::kAbort || pipeline_.fault == Fault::kDevice;
      if (report_.failure && tells) worker_->abort(report_.failure->message);
      worker_->close(report_.failure ? 1 : 60);
      if (started_) report_.channels = worker_->channel_stats();  // all items have left by now
    }
    return report_;
  }

 private:
  // On the tests' CUDA the workers use two devices alternately. On a GPU all use device 0.
  [[nodiscard]] std::shared_ptr<Device> make_device(bool on_cuda) const {
    if (!on_cuda) return std::make_shared<HostileDevice>();
#if defined(PD_CUDA_STUB)
    return make_cuda_device(static_cast<int>(worker_index_.value() % cuda_stub::kNumDevices));
#else
    return make_cuda_device(0);
#endif
  }

  struct Stash {
    std::optional<ReceivedItem> received;  // kept until its backward, as autograd keeps it
    std::optional<std::uint64_t> output;   // absent if the backward recomputes it
  };
  struct Stage {
    std::vector<Worker::HeldSlot> slots;
    std::map<std::pair<std::int64_t, std::int64_t>, Stash> stashes;  // indexed by minibatch and microbatch
    std::uint64_t weight_gradient = 0;
    std::int64_t num_backwards = 0;  // backwards of the current minibatch
  };

  // Returns false if another worker has ended the run already.
  bool open() {
    add_channels(*worker_, pipeline_.schedule, worker_index_, message_spec(pipeline_.padding_bytes_max),
                 kChunkBytes, pipeline_.places_on_device);
    std::vector<std::string> outgoing;
    for (const StageChannelNames& part : parts_) {
      if (!part.activations_out.empty()) outgoing.push_back(part.activations_out);
      if (!part.gradients_out.empty()) outgoing.push_back(part.gradients_out);
      worker_->add_term({term_of(part.stage), kNumWeights * 8,
                         num_versions_kept(pipeline_.schedule, part.stage), MemoryKind::kDevice});
    }
    worker_->seal();
    board_.publish(worker_->listen());
    worker_->connect(board_.wait_for(outgoing));
    const Result<bool> open = worker_->wait_open(patience());
    if (!open.ok()) {
      report_.failure = open.failure();
      return false;
    }
    EXPECT_TRUE(open.value()) << worker_->channels_not_open().front();
    for (const StageChannelNames& part : parts_) {
      Stage& stage = stages_[part.stage];
      for (std::int64_t slot = 0; slot < num_versions_kept(pipeline_.schedule, part.stage); ++slot) {
        stage.slots.push_back(worker_->hold_slot(term_of(part.stage)));
        fill(stage, SlotIndex(slot), slot == 0 ? first_weight(part.stage.value()) : kPoison);
      }
    }
    worker_->start(pipeline_.schedule, worker_index_, channels_at(pipeline_.schedule, worker_index_),
                   kNumSpansMax);
    started_ = true;
    return true;
  }

  // Does one work item. Returns false if the worker has ended.
  bool work_once() {
    worker_->engine().collect_released();
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
    if (!work.opcode) {
      report_.num_minibatches = work.num_minibatches;
      if (pipeline_.takes_every_end) take_later_ends();
      return false;
    }
    switch (*work.opcode) {
      case Opcode::kForward:
        return forward(std::move(work));
      case Opcode::kRecompute:
        recompute(work);
        return true;
      case Opcode::kBackward:
        backward(std::move(work));
        return true;
      case Opcode::kUpdate:
        update(work);
        return true;
      case Opcode::kEvaluate:
      case Opcode::kSend:
      case Opcode::kRecv:
        ADD_FAILURE() << "nothing is tied or evaluated: " << worker_->engine().position();
        return false;
    }
    return false;
  }

  bool forward(WorkItem work) {
    if (is_faulty(work) && pipeline_.fault == Fault::kDevice) {
      if (!std::exchange(report_.faulted, true)) {
        dynamic_cast<HostileDevice&>(*place_.device()).fail(pipeline_.device_fault);
      }
    } else if (is_faulty(work)) {
      work.received.reset();
      fail();
      return false;
    }
    const bool is_first = work.stage.value() == 0;
    if (is_first && work.minibatch.value() == pipeline_.num_minibatches) {
      worker_->engine().end_of_data(work.minibatch.value());
      return true;
    }
    const std::int64_t began_ns = now_ns();
    Stage& stage = stages_.at(work.stage);
    EXPECT_EQ(work.received.has_value(), !is_first);
    const std::uint64_t input = input_value(work, work.received);
    jitter();
    const std::uint64_t output = output_of(input, read(stage, work));
    Stash& stash = stage.stashes[key_of(work)];
    stash.received = std::move(work.received);
    if (!replay_.recomputes(work.stage.value())) stash.output = output;
    const bool is_last = work.stage.value() + 1 == num_stages(pipeline_.schedule);
    worker_->engine().complete(Opcode::kForward, is_last ? Outgoing{} : outgoing(output, work),
                               now_ns() - began_ns);
    return true;
  }

  void recompute(const WorkItem& work) {
    const std::int64_t began_ns = now_ns();
    Stage& stage = stages_.at(work.stage);
    EXPECT_FALSE(work.received.has_value());
    Stash& stash = stage.stashes.at(key_of(work));
    EXPECT_FALSE(stash.output.has_value());
    stash.output = output_of(input_value(work, stash.received), read(stage, work));
    worker_->engine().complete(Opcode::kRecompute, {}, now_ns() - began_ns);
  }

  void backward(WorkItem work) {
    const std::int64_t began_ns = now_ns();
    Stage& stage = stages_.at(work.stage);
    const bool is_last = work.stage.value() + 1 == num_stages(pipeline_.schedule);
    EXPECT_EQ(work.received.has_value(), !is_last);
    Stash stash = std::move(stage.stashes.at(key_of(work)));
    stage.stashes.erase(key_of(work));
    // Checks that the input has not changed since the forward.
    static_cast<void>(input_value(work, stash.received));
    const std::uint64_t output = stash.output.value();
    const std::uint64_t gradient = work.received ? value_in(*work.received, work) : loss_gradient_of(output);
    jitter();
    const std::uint64_t input_gradient = input_gradient_of(gradient, read(stage, work));
    EXPECT_EQ(input_gradient,
              replay_.gradient(work.stage.value(), work.minibatch.value(), work.microbatch.value()));
    stage.weight_gradient += weight_gradient_of(gradient, output);
    ++stage.num_backwards;
    stash.received.reset();
    const bool is_first = work.stage.value() == 0;
    const auto freed = worker_->engine().complete(
        Opcode::kBackward, is_first ? Outgoing{} : outgoing(input_gradient, work), now_ns() - began_ns);
    if (freed) fill(stage, *freed, kPoison);
  }

  void update(const WorkItem& work) {
    const std::int64_t began_ns = now_ns();
    Stage& stage = stages_.at(work.stage);
    EXPECT_EQ(work.read_version.value(), work.minibatch.value());
    EXPECT_EQ(work.write_version, work.read_version.next());
    EXPECT_EQ(stage.num_backwards, pipeline_.schedule.num_microbatches);
    const std::uint64_t weight = next_weight_of(read(stage, work), stage.weight_gradient);
    EXPECT_EQ(weight, replay_.weight(work.stage.value(), work.write_version.value()));
    fill(stage, work.write_slot, kPoison);
    jitter();
    fill(stage, work.write_slot, weight);
    stage.weight_gradient = 0;
    stage.num_backwards = 0;
    worker_->engine().complete(Opcode::kUpdate, {}, now_ns() - began_ns);
  }

  // Receives the end of the data on the channels of every stage of the worker but its first. The worker's
  // instructions do not need these ends.
  void take_later_ends() {
    for (const StageChannelNames& part : parts_) {
      if (part.stage == parts_.front().stage) continue;
      const auto item = worker_->receive_item(part.activations_in, patience());
      if (!item.ok() || !item.value()) {
        ADD_FAILURE() << part.activations_in << ": no end";
        continue;
      }
      EXPECT_TRUE(item.value()->is_end) << part.activations_in;
      EXPECT_EQ(item.value()->num_minibatches, pipeline_.num_minibatches) << part.activations_in;
    }
  }

  [[nodiscard]] bool is_faulty(const WorkItem& work) const {
    return pipeline_.fault != Fault::kNone && work.stage.value() == pipeline_.faulty_stage &&
           work.minibatch.value() == pipeline_.faulty_minibatch;
  }
  void fail() {
    report_.faulted = true;
    if (pipeline_.fault == Fault::kAbort) worker_->abort(kAbortText);
    for (auto& [index, stage] : stages_) stage.stashes.clear();
    if (pipeline_.fault != Fault::kDestroyed) worker_->close(60);
    stages_.clear();
    started_ = false;
    worker_.reset();
  }

  static std::string term_of(StageIndex stage) {
    return "weight versions, stage " + std::to_string(stage.value());
  }
  static std::pair<std::int64_t, std::int64_t> key_of(const WorkItem& work) {
    return {work.minibatch.value(), work.microbatch.value()};
  }
  [[nodiscard]] std::uint64_t value_in(const ReceivedItem& item, const WorkItem& work) const {
    return value_of(place_, item, work, pipeline_.padding_bytes_max);
  }
  // Returns the value from which the stage's forward starts.
  [[nodiscard]] std::uint64_t input_value(const WorkItem& work,
                                          const std::optional<ReceivedItem>& received) const {
    const std::uint64_t input =
        received ? value_in(*received, work) : input_of(work.minibatch.value(), work.microbatch.value());
    EXPECT_EQ(input, replay_.input(work.stage.value(), work.minibatch.value(), work.microbatch.value()));
    return input;
  }
  Outgoing outgoing(std::uint64_t value, const WorkItem& work) {
    auto message = std::make_shared<Message>();
    message->numbers = {static_cast<std::uint64_t>(work.minibatch.value()),
                        static_cast<std::uint64_t>(work.microbatch.value()), value};
    message->padding = padding_of(work, pipeline_.padding_bytes_max);
    Outgoing outgoing = place_.outgoing(message);
    outgoing.fields.data_fingerprint = number_of(work);
    outgoing.ready = worker_->record_compute();
    return outgoing;
  }

  void fill(const Stage& stage, SlotIndex slot, std::uint64_t weight) const {
    const std::vector<std::uint64_t> weights(kNumWeights, weight);
    place_.write(stage.slots.at(static_cast<std::size_t>(slot.value())).lease.data(), weights.data(),
                 kNumWeights * 8);
  }
  // Returns the weight in the slot that the work item reads. Checks that the whole slot has the version that
  // the item names.
  [[nodiscard]] std::uint64_t read(const Stage& stage, const WorkItem& work) const {
    std::vector<std::uint64_t> weights(kNumWeights);
    place_.read(weights.data(), stage.slots.at(static_cast<std::size_t>(work.read_slot.value())).lease.data(),
                kNumWeights * 8);
    const std::uint64_t expected = replay_.weight(work.stage.value(), work.read_version.value());
    EXPECT_EQ(weights, std::vector<std::uint64_t>(kNumWeights, expected))
        << worker_->engine().position() << ", version " << work.read_version.value();
    return weights.front();
  }
  // Waits for up to 40 us, so that the workers' steps come in many orders.
  void jitter() {
    const Deadline end = Clock::now() + std::chrono::microseconds(random_() % 40);
    while (Clock::now() < end) std::this_thread::yield();
  }

  const PipelineOptions pipeline_;
  const Rank worker_index_;
  const std::vector<StageChannelNames> parts_;
  const Replay& replay_;
  Board& board_;
  std::mt19937 random_;
  bool started_ = false;  // set once the engine exists
  Place place_;
  std::unique_ptr<Worker> worker_;
  std::map<StageIndex, Stage> stages_;  // destroyed before the worker
  WorkerReport report_;
};

void expect_versions(const WorkerReport& report, const Replay& replay) {
  ASSERT_EQ(report.versions.size(), report.stages.size());
  for (std::size_t part = 0; part < report.stages.size(); ++part) {
    const std::int64_t stage = report.stages[part].value();
    const std::int64_t m = replay.num_microbatches();
    ASSERT_EQ(report.versions[part].size(), static_cast<std::size_t>(replay.num_minibatches() * m));
    for (std::int64_t number = 0; number < replay.num_minibatches() * m; ++number) {
      const VersionsRead& read = report.versions[part][static_cast<std::size_t>(number)];
      EXPECT_EQ(read.forward.value(), replay.forward_version(stage, number / m, number % m)) << number;
      EXPECT_EQ(read.backward.value(), replay.backward_version(stage, number / m, number % m)) << number;
    }
  }
}

void expect_times(const WorkerReport& report) {
  EXPECT_GE(report.totals.wait_ns, 0);
  EXPECT_LE(report.totals.wait_ns + report.totals.compute_ns, report.totals.elapsed_ns);
  for (const Span& span : report.spans) {
    EXPECT_LE(span.asked_ns, span.ready_ns);
    EXPECT_LE(span.wait_ns, span.ready_ns - span.asked_ns);
    EXPECT_LE(span.compute_ns, span.completed_ns - span.ready_ns);
  }
}

}  // namespace

std::vector<WorkerReport> run_pipeline(const PipelineOptions& options) {
  const Replay replay(options.schedule, options.num_minibatches);
  Board board;
  std::vector<WorkerReport> reports(static_cast<std::size_t>(num_workers(options.schedule)));
  std::vector<std::thread> threads;
  for (std::size_t worker = 0; worker < reports.size(); ++worker) {
    threads.emplace_back([&, worker] {
      reports[worker] = PipelineWorker(options, static_cast<std::int64_t>(worker), replay, board).run();
    });
  }
  for (std::thread& thread : threads) thread.join();
  return reports;
}

void expect_complete(const std::vector<WorkerReport>& reports, const PipelineOptions& options) {
  const Replay replay(options.schedule, options.num_minibatches);
  for (std::size_t worker = 0; worker < reports.size(); ++worker) {
    SCOPED_TRACE("worker " + std::to_string(worker));
    const WorkerReport& report = reports[worker];
    EXPECT_FALSE(report.failure.has_value()) << report.failure->message;
    EXPECT_EQ(report.num_minibatches, options.num_minibatches);
    expect_versions(report, replay);
    expect_times(report);
    const Instructions program = make_compute_program(
        options.schedule, Rank(static_cast<std::int64_t>(worker)), options.num_minibatches);
    EXPECT_EQ(report.totals.num_work_items, static_cast<std::int64_t>(program.size()));
    ASSERT_EQ(report.spans.size(), std::min(kNumSpansMax, program.size()));
    const auto first = program.end() - static_cast<std::ptrdiff_t>(report.spans.size());
    for (std::size_t index = 0; index < report.spans.size(); ++index) {
      const Instruction& expected = *(first + static_cast<std::ptrdiff_t>(index));
      const Span& span = report.spans[index];
      EXPECT_EQ(span.opcode, expected.opcode);
      EXPECT_EQ(span.stage, expected.stage);
      EXPECT_EQ(span.minibatch, expected.minibatch);
      EXPECT_EQ(span.microbatch, expected.microbatch);
    }
  }
}

}  // namespace pipedream
