// Runs the CUDA threads of a block. A kernel without barriers runs as a loop on one fiber; only a thread that
// waits keeps a fiber of its own. A thread that waits switches directly to the next thread that can run,
// without a scheduler. Each time the threads begin, or go on after a barrier, they run in a new order:
// upwards or downwards from some thread. With a single order a kernel that lacks a barrier could still give
// the right bytes. The orders are the same in each run of a test.
#include "cuda_stub/block.h"

#include <array>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <vector>

#include "cuda_stub/fiber.h"

namespace cuda_stub {
namespace {

constexpr unsigned kWarpThreads = 32;

[[noreturn]] void give_up(const char* why) {
  std::fprintf(stderr, "cuda_stub: block (%u, %u): %s\n", current.block.x, current.block.y, why);
  std::abort();
}

// An order in which a block's threads run.
class Order {
 public:
  Order() = default;
  Order(unsigned num_threads, unsigned drawn)
      : num_threads_(num_threads), next_(drawn / 2 % num_threads), falls_(drawn % 2 == 1) {}
  unsigned take() {
    const unsigned taken = next_;
    if (falls_) {
      next_ = taken == 0 ? num_threads_ - 1 : taken - 1;
    } else {
      next_ = taken + 1 == num_threads_ ? 0 : taken + 1;
    }
    return taken;
  }

 private:
  unsigned num_threads_ = 1;
  unsigned next_ = 0;
  bool falls_ = false;
};

// The values that the lanes of a warp have shown each other.
struct Shown {
  std::array<std::uint32_t, kWarpThreads> values{};
  std::uint32_t nonzero_lanes = 0;
};

class Block {
 public:
  void run(unsigned num_threads, const std::function<void()>& kernel) {
    kernel_ = &kernel;
    num_threads_ = num_threads;
    begins_ = order_of(num_threads);
    num_begun_ = num_done_ = num_at_block_ = 0;
    warps_.assign((num_threads + kWarpThreads - 1) / kWarpThreads, {});
    waiting_.resize(num_threads);
    shows_second_.assign(num_threads, false);
    while (num_done_ < num_threads_) {
      Worker* const worker = next_worker();
      if (worker == nullptr) {
        give_up(num_done_ > 0 ? "a thread has returned before a barrier at which others wait"
                              : "threads wait for each other at different barriers");
      }
      scheduler_.switch_to(worker->fiber);
    }
  }

  // The running CUDA thread calls it.
  void wait_for_block() {
    ++num_at_block_;
    if (num_at_block_ == num_threads_) {
      num_at_block_ = 0;
      release(0, num_threads_);
    }
    wait();
  }

  // Shows the thread's value to its warp, and returns the values of all lanes.
  const Shown& exchange(std::uint32_t value) {
    const unsigned thread = current.thread.x;
    const unsigned first = thread / kWarpThreads * kWarpThreads;
    Warp& warp = warps_[thread / kWarpThreads];
    shows_second_[thread] = !shows_second_[thread];  // a slower lane may still read the other place
    Shown& shown = warp.shown[shows_second_[thread] ? 1 : 0];
    if (warp.num_waiting == 0) shown.nonzero_lanes = 0;
    shown.values[thread - first] = value;
    shown.nonzero_lanes |= (value != 0 ? 1U : 0U) << (thread - first);
    if (++warp.num_waiting == kWarpThreads) {
      warp.num_waiting = 0;
      release(first, first + kWarpThreads);
    }
    wait();
    return shown;
  }

 private:
  struct Worker {
    explicit Worker(Block* of) : block(of), fiber(&Worker::body, this) {}
    static void body(void* worker) { static_cast<Worker*>(worker)->work(); }
    void work() {
      for (;;) {
        while (block->num_begun_ < block->num_threads_) {
          thread = block->begins_.take();
          ++block->num_begun_;
          current.thread = {thread, 0, 0};
          (*block->kernel_)();
          ++block->num_done_;
        }
        block->free_.push_back(this);
        Worker* const following = block->released_.empty() ? nullptr : block->next_worker();
        fiber.switch_to(following == nullptr ? block->scheduler_ : following->fiber);
      }
    }
    Block* const block;
    unsigned thread = 0;
    Fiber fiber;
  };
  struct Warp {
    unsigned num_waiting = 0;
    std::array<Shown, 2> shown{};
  };

  Order order_of(unsigned num_threads) {
    drawn_ = drawn_ * 1664525 + 1013904223;  // Numerical Recipes, section 7.1
    return {num_threads, drawn_ >> 16};
  }

  void release(unsigned first, unsigned end) {
    Order order = order_of(end - first);
    for (unsigned count = end - first; count > 0; --count) released_.push_back(first + order.take());
  }

  void wait() {
    const unsigned thread = current.thread.x;
    Worker* const own = running_of(thread);
    waiting_[thread] = own;
    Worker* const following = next_worker();
    if (following == own) return;
    own->fiber.switch_to(following == nullptr ? scheduler_ : following->fiber);
  }

  Worker* running_of(unsigned thread) {
    if (running_ != nullptr && running_->thread == thread) return running_;
    give_up("a thread waits that does not run");
  }

  // Returns the thread to run next: one whose barrier is complete, or one that has not begun. Returns null if
  // all threads wait or are done.
  Worker* next_worker() {
    if (!released_.empty()) {
      const unsigned thread = released_.back();
      released_.pop_back();
      current.thread = {thread, 0, 0};
      return running_ = waiting_[thread];
    }
    if (num_begun_ == num_threads_) return nullptr;
    if (free_.empty()) {
      workers_.push_back(std::make_unique<Worker>(this));
      return running_ = workers_.back().get();
    }
    running_ = free_.back();
    free_.pop_back();
    return running_;
  }

  const std::function<void()>* kernel_ = nullptr;
  unsigned num_threads_ = 0;
  std::uint32_t drawn_ = 20191027;
  Order begins_;
  unsigned num_begun_ = 0;
  unsigned num_done_ = 0;
  unsigned num_at_block_ = 0;
  std::vector<Warp> warps_;
  std::vector<Worker*> waiting_;    // indexed by thread
  std::vector<unsigned> released_;  // released threads; the last one goes on first
  std::vector<bool> shows_second_;  // indexed by thread: which of two places has its last value for the warp
  Worker* running_ = nullptr;
  Fiber scheduler_;
  std::vector<std::unique_ptr<Worker>> workers_;
  std::vector<Worker*> free_;
};

Block& block_of_process() {
  static auto* const block = new Block;  // never destroyed, because its fibers end only with the process
  return *block;
}

}  // namespace

void wait_for_block() { block_of_process().wait_for_block(); }

std::uint32_t value_of_lane(std::uint32_t value, unsigned from) {
  return block_of_process().exchange(value).values[from];
}

std::uint32_t ballot(bool yes) { return block_of_process().exchange(yes ? 1 : 0).nonzero_lanes; }

void run_grid(const dim3& grid, unsigned block_threads, const std::function<void()>& kernel) {
  current.grid_size = grid;
  current.block_size = {block_threads, 1, 1};
  for (unsigned y = 0; y < grid.y; ++y) {
    for (unsigned x = 0; x < grid.x; ++x) {
      current.block = {x, y, 0};
      block_of_process().run(block_threads, kernel);
    }
  }
}

}  // namespace cuda_stub
