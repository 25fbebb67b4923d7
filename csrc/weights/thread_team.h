// A few threads that share the tasks of one loop with the calling thread, for kernels over large memory.
// One team per process, started when first needed and joined at exit.
//
// Nothing is allocated per call. Tasks are claimed one at a time, so a helper that wakes late, or a core that
// is busy, delays the end by one task at most. While one thread uses the team another runs its tasks alone.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>
#include <type_traits>
#include <vector>

namespace pipedream {

inline constexpr int kNumHelpersMax = 255;

class ThreadTeam {
 public:
  ThreadTeam() = default;
  ThreadTeam(const ThreadTeam&) = delete;
  ThreadTeam& operator=(const ThreadTeam&) = delete;
  ~ThreadTeam();

  static ThreadTeam& of_process();

  // Calls body(task_index) for every index in [0, num_tasks), on num_threads threads at most, the caller
  // included; returns when all are done. body must not throw. Any thread.
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

 private:
  using Task = void (*)(const void* context, std::int64_t task_index) noexcept;
  struct Job {
    Task task = nullptr;
    const void* context = nullptr;
    std::int64_t num_tasks = 0;
  };

  void run_tasks(int num_threads, std::int64_t num_tasks, Task task, const void* context);
  void start_helpers(int num_helpers);
  void help();
  void claim_tasks(const Job& job);

  std::atomic<bool> in_use_{false};         // by a caller of run()
  std::atomic<std::int64_t> next_task_{0};  // of job_

  mutable std::mutex mutex_;  // guards all below
  std::condition_variable seats_offered_;
  std::condition_variable helpers_left_;
  Job job_;
  int num_seats_ = 0;   // helpers that may still join the job
  int num_inside_ = 0;  // helpers at work on it
  bool stopping_ = false;
  std::int64_t started_by_ = 0;  // process id
  std::vector<std::thread> helpers_;
};

}  // namespace pipedream
