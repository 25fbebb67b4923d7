// Measures the time to take and release memory. It replays the allocations of a 1F1B schedule with our pool,
// malloc, mimalloc (if libmimalloc.so.2 is installed) and a best-fit pool like those of caching device
// allocators. Nothing is written into the memory, so first writes to fresh pages of malloc do not count. The
// counter `pair` is the time of one lease and its release. The target for our pool is at most 50 ns, and less
// than every other allocator, at every size.
//
//   pd_pool_bench --benchmark_enable_random_interleaving=true --benchmark_repetitions=20
//       --benchmark_min_time=0.05 --benchmark_report_aggregates_only=false
//
// Random interleaving mixes the repetitions of all allocators, so that a change of the machine's speed
// affects all.
#include <benchmark/benchmark.h>
#include <dlfcn.h>

#include <array>
#include <cstdint>
#include <cstdlib>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "base/check.h"
#include "device/device.h"
#include "pool/pool.h"

namespace pipedream {
namespace {

// ---- The trace: stage 0 of 4 ----

enum class Buffer : std::uint8_t { kActivations, kGradients, kStaging, kLabels };
constexpr std::size_t kNumBuffers = 4;
constexpr std::int64_t kNumInFlight = 4;
constexpr std::int64_t kNumMinibatches = 64;

struct TraceStep {
  bool is_lease = false;
  Buffer buffer = Buffer::kActivations;
  std::size_t place = 0;  // where the replay keeps the lease
};

struct Trace {
  std::vector<TraceStep> steps;
  std::size_t num_places = 0;
  std::int64_t num_pairs = 0;
};

// Makes the list of leases and releases of a 1F1B schedule. A forward leases slots for the input and the
// labels, which the backward releases, and a staging buffer for the output, which is sent while the next
// forward or backward runs. A backward leases a slot for the gradient, and a staging buffer.
class TraceMaker {
 public:
  Trace make() {
    std::int64_t next_forward = 0;
    for (std::int64_t backward = 0; backward < kNumMinibatches; ++backward) {
      while (next_forward < kNumMinibatches && next_forward < backward + kNumInFlight)
        add_forward(next_forward++);
      add_backward(backward);
    }
    if (staged_) release(*staged_);
    return std::move(trace_);
  }

 private:
  void add_forward(std::int64_t minibatch) {
    held_[in_flight(minibatch)] = {lease(Buffer::kActivations), lease(Buffer::kLabels)};
    stage();
  }
  void add_backward(std::int64_t minibatch) {
    const std::size_t gradients = lease(Buffer::kGradients);
    stage();
    release(gradients);
    const auto [activations, labels] = held_[in_flight(minibatch)];
    release(activations);
    release(labels);
  }
  void stage() {
    const std::size_t staged = lease(Buffer::kStaging);
    if (staged_) release(*staged_);
    staged_ = staged;
  }
  std::size_t lease(Buffer buffer) {
    if (free_places_.empty()) free_places_.push_back(trace_.num_places++);
    const std::size_t place = free_places_.back();
    free_places_.pop_back();
    trace_.steps.push_back({true, buffer, place});
    ++trace_.num_pairs;
    return place;
  }
  void release(std::size_t place) {
    trace_.steps.push_back({false, Buffer::kActivations, place});
    free_places_.push_back(place);
  }
  static std::size_t in_flight(std::int64_t minibatch) {
    return static_cast<std::size_t>(minibatch % kNumInFlight);
  }

  Trace trace_;
  std::array<std::pair<std::size_t, std::size_t>, kNumInFlight> held_{};
  std::optional<std::size_t> staged_;
  std::vector<std::size_t> free_places_;
};

using Sizes = std::array<std::size_t, kNumBuffers>;

Sizes sizes_of(std::size_t activation_bytes) {
  return {activation_bytes, activation_bytes, activation_bytes, activation_bytes / 64};
}

// ---- The allocators: lease(buffer) returns a Held, whose release() gives the memory back ----

class PoolSide {
 public:
  using Held = Lease;
  explicit PoolSide(const Sizes& sizes) {
    for (std::size_t buffer = 0; buffer < kNumBuffers; ++buffer) {
      groups_[buffer] = &pool_.add(
          {"buffer " + std::to_string(buffer), sizes[buffer], kNumInFlight + 1, MemoryKind::kDevice});
    }
    pool_.seal();
  }
  Held lease(Buffer buffer) { return groups_[static_cast<std::size_t>(buffer)]->lease(); }
  static const void* data(const Held& held) { return held.data(); }
  void release(Held& held) { held.release(); }

 private:
  std::unique_ptr<Device> device_ = make_host_device();
  Pool pool_{*device_, /*poison=*/false};
  std::array<SlotGroup*, kNumBuffers> groups_{};
};

class MallocSide {
 public:
  using Held = void*;
  explicit MallocSide(const Sizes& sizes) : sizes_(sizes) {}
  Held lease(Buffer buffer) { return std::malloc(sizes_[static_cast<std::size_t>(buffer)]); }
  static const void* data(const Held& held) { return held; }
  void release(Held& held) { std::free(held); }

 private:
  const Sizes sizes_;
};

class MimallocSide {
 public:
  using Held = void*;
  explicit MimallocSide(const Sizes& sizes) : sizes_(sizes) {}

  [[nodiscard]] static bool available() { return functions().malloc != nullptr; }
  Held lease(Buffer buffer) { return malloc_(sizes_[static_cast<std::size_t>(buffer)]); }
  static const void* data(const Held& held) { return held; }
  void release(Held& held) { free_(held); }

 private:
  struct Functions {
    void* (*malloc)(std::size_t num_bytes) = nullptr;
    void (*free)(void* data) = nullptr;
  };
  static const Functions& functions() {
    static const Functions loaded = [] {
      Functions functions;
      void* library = ::dlopen("libmimalloc.so.2", RTLD_NOW | RTLD_LOCAL);
      if (library == nullptr) library = ::dlopen("libmimalloc.so", RTLD_NOW | RTLD_LOCAL);
      if (library == nullptr) return functions;
      functions.malloc = reinterpret_cast<void* (*)(std::size_t)>(::dlsym(library, "mi_malloc"));
      functions.free = reinterpret_cast<void (*)(void*)>(::dlsym(library, "mi_free"));
      return functions;
    }();
    return loaded;
  }

  const Sizes sizes_;
  void* (*const malloc_)(std::size_t num_bytes) = functions().malloc;
  void (*const free_)(void* data) = functions().free;
};

// A best-fit allocator, which may be used by several threads. It cuts the smallest free block that is large
// enough, and joins free neighbours.
class BestFitSide {
 public:
  struct Block {
    std::size_t offset = 0;
    std::size_t num_bytes = 0;
    bool is_free = false;
    Block* before = nullptr;
    Block* after = nullptr;
  };
  using Held = Block*;

  explicit BestFitSide(const Sizes& sizes) : sizes_(sizes) {
    std::size_t arena_bytes = 0;
    for (const std::size_t num_bytes : sizes)
      arena_bytes += (num_bytes + kSlotAlignment) * (kNumInFlight + 1);
    memory_ = device_->allocate(arena_bytes, MemoryKind::kDevice);
    Block* const all = take_block();
    *all = {0, arena_bytes, true, nullptr, nullptr};
    free_.insert(all);
  }
  Held lease(Buffer buffer) {
    const std::size_t asked_bytes = sizes_[static_cast<std::size_t>(buffer)];
    const std::size_t num_bytes = (asked_bytes + kSlotAlignment - 1) / kSlotAlignment * kSlotAlignment;
    const std::lock_guard lock(mutex_);
    Block wanted;
    wanted.num_bytes = num_bytes;
    const auto best = free_.lower_bound(&wanted);
    PD_CHECK(best != free_.end(), "no block of " << num_bytes << " bytes is left");
    Block* const block = *best;
    free_.erase(best);
    if (block->num_bytes > num_bytes) split(*block, num_bytes);
    block->is_free = false;
    return block;
  }
  const void* data(const Held& held) const { return memory_->data() + held->offset; }
  void release(Held& held) {
    const std::lock_guard lock(mutex_);
    Block* block = held;
    if (block->after != nullptr && block->after->is_free) {
      free_.erase(block->after);
      join(*block);
    }
    if (block->before != nullptr && block->before->is_free) {
      block = block->before;
      free_.erase(block);
      join(*block);
    }
    block->is_free = true;
    free_.insert(block);
  }

 private:
  struct SmallestFirst {
    bool operator()(const Block* a, const Block* b) const {
      return std::pair(a->num_bytes, a->offset) < std::pair(b->num_bytes, b->offset);
    }
  };

  Block* take_block() {
    if (unused_.empty()) return &blocks_.emplace_back();
    Block* const block = unused_.back();
    unused_.pop_back();
    return block;
  }
  void split(Block& block, std::size_t num_bytes) {
    Block* const rest = take_block();
    *rest = {block.offset + num_bytes, block.num_bytes - num_bytes, true, &block, block.after};
    if (rest->after != nullptr) rest->after->before = rest;
    block.after = rest;
    block.num_bytes = num_bytes;
    free_.insert(rest);
  }
  void join(Block& block) {  // joins the block with the next one
    Block* const absorbed = block.after;
    block.num_bytes += absorbed->num_bytes;
    block.after = absorbed->after;
    if (block.after != nullptr) block.after->before = &block;
    unused_.push_back(absorbed);
  }

  const Sizes sizes_;
  std::unique_ptr<Device> device_ = make_host_device();
  std::unique_ptr<Memory> memory_;
  std::mutex mutex_;  // guards the members below
  std::deque<Block> blocks_;
  std::vector<Block*> unused_;
  std::set<Block*, SmallestFirst> free_;
};

// ---- The replay ----

template <class Side>
void replay(benchmark::State& state) {
  const Trace trace = TraceMaker().make();
  Side side(sizes_of(static_cast<std::size_t>(state.range(0))));
  std::vector<typename Side::Held> held(trace.num_places);
  for ([[maybe_unused]] auto iteration : state) {
    for (const TraceStep& step : trace.steps) {
      auto& place = held[step.place];
      if (step.is_lease) {
        place = side.lease(step.buffer);
        benchmark::DoNotOptimize(side.data(place));
      } else {
        side.release(place);
      }
    }
  }
  state.counters["pair"] =
      benchmark::Counter(static_cast<double>(trace.num_pairs),
                         benchmark::Counter::kIsIterationInvariantRate | benchmark::Counter::kInvert);
}

void BM_PoolTrace(benchmark::State& state) { replay<PoolSide>(state); }
void BM_MallocTrace(benchmark::State& state) { replay<MallocSide>(state); }
void BM_BestFitTrace(benchmark::State& state) { replay<BestFitSide>(state); }
void BM_MimallocTrace(benchmark::State& state) {
  if (!MimallocSide::available()) {
    state.SkipWithError("libmimalloc.so.2 is not installed (Debian: libmimalloc2.0)");
    return;
  }
  replay<MimallocSide>(state);
}

void activation_sizes(benchmark::internal::Benchmark* benchmark) {
  benchmark->Arg(16 << 10)->Arg(1 << 20)->Arg(16 << 20);
}

BENCHMARK(BM_PoolTrace)->Apply(activation_sizes);
BENCHMARK(BM_MallocTrace)->Apply(activation_sizes);
BENCHMARK(BM_MimallocTrace)->Apply(activation_sizes);
BENCHMARK(BM_BestFitTrace)->Apply(activation_sizes);

}  // namespace
}  // namespace pipedream
