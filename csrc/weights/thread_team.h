// A ThreadTeam is a few threads that share the tasks of one loop with the calling thread, for kernels over
// large memory. A process has one team. Its threads start when they are first needed, and are joined at exit.
//
// A second team of threads harms a process whose OpenMP pool spins between its regions, as torch's does. The
// two compete for the same cores. Even much later an OpenMP region was seen to take 8 ms instead of 0.1 ms.
// So share_openmp() makes the team run on that pool and start no threads of its own.

// Once the threads run, a call allocates nothing. Each thread has the same share of the tasks at every call
// with as many tasks, so that its core's caches stay warm. A thread that has done its share takes tasks from
// other shares, so a late thread delays the end by at most one task. While one thread uses the team, any
// other caller runs its tasks alone.
#pragma once

#include <array>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <type_traits>
#include <vector>

#include "base/process.h"

namespace pipedream {

inline constexpr int kTeamThreadsMax = 256;  // the caller included

class ThreadTeam {
 public:
  ThreadTeam() = default;
  ThreadTeam(const ThreadTeam&) = delete;
  ThreadTeam& operator=(const ThreadTeam&) = delete;
  ~ThreadTeam();

  static ThreadTeam& of_process();

  // Makes run() use the OpenMP pool with which this loaded library was linked. If it was linked with no such
  // pool, returns false and changes nothing. Any thread.
  bool share_openmp(const std::string& library_path);

  // Calls body(task_index) once for every index in [0, num_tasks), on num_threads threads at most, the
  // caller included; returns when all are done. body must not throw. Any thread.
  template <class Body>
  void run(int num_threads, std::int64_t num_tasks, const Body& body) {
    static_assert(std::is_invocable_v<const Body&, std::int64_t>);
    run_tasks(
        num_threads, num_tasks,
        [](const void* context, std::int64_t task_index) noexcept {
          (*static_cast<const Body*>(context))(task_index);
        },
        &body);
  }

  [[nodiscard]] int num_helpers() const;  // threads started so far
  // Returns whether the team's helpers, if it has started any, are threads of this process. False in a child
  // that was forked after they started. It would otherwise wait for threads that it does not have.
  [[nodiscard]] bool has_its_helpers() const {
    return !is_helped_.load(std::memory_order_acquire) || home_->is_this();
  }

 private:
  using Task = void (*)(const void* context, std::int64_t task_index) noexcept;
  struct Job {
    Task task = nullptr;
    const void* context = nullptr;
    std::int64_t num_tasks = 0;
    int num_shares = 0;  // one share per thread
  };
  struct alignas(64) Share {
    std::atomic<std::int64_t> next_task{0};
  };
  // GOMP_parallel and omp_get_thread_num, which every OpenMP runtime for gcc or clang exports.
  using OpenMpParallel = void (*)(void (*body)(void*), void* data, unsigned num_threads, unsigned flags);
  using OpenMpThreadIndex = int (*)();

  void run_tasks(int num_threads, std::int64_t num_tasks, Task task, const void* context);
  void run_on_openmp(OpenMpParallel parallel);
  void run_on_helpers();
  void start_helpers(int num_helpers);
  void help(int share_index);
  void claim_tasks(int first_share);
  void claim_share(int share_index);
  [[nodiscard]] std::int64_t share_begin(int share_index) const;

  std::atomic<bool> in_use_{false};     // whether a thread is in run()
  std::atomic<bool> is_helped_{false};  // whether home_ has a value
  std::atomic<OpenMpParallel> openmp_parallel_{nullptr};
  std::atomic<OpenMpThreadIndex> openmp_thread_index_{nullptr};
  // The caller of run() writes the job before any thread joins it. Threads read it after they have joined.
  Job job_;
  std::array<Share, kTeamThreadsMax> shares_;

  mutable std::mutex mutex_;  // guards all members below
  std::condition_variable job_offered_;
  std::condition_variable helpers_left_;
  int num_offered_ = 0;  // shares of the job that is on offer; helpers may join while this is not 0
  std::uint64_t job_number_ = 0;
  int num_inside_ = 0;  // helpers at work on the job
  bool stopping_ = false;
  std::vector<std::thread> helpers_;
  std::optional<HomeProcess> home_;  // the process that has the helpers, once there are any
};

}  // namespace pipedream
