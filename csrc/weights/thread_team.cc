// run() offers a job under the mutex. Helpers that wake in time join it, claim tasks until none is left, and
// leave. A child that was forked after the helpers started does not have them, so the caller of run() does
// every task there. See thread_team.h.
#include "weights/thread_team.h"

#include <dlfcn.h>

#include <algorithm>
#include <memory>
#include <system_error>

namespace pipedream {

namespace {

// Owns the team of the process. A child of fork() does not destroy a team whose helpers are the parent's. The
// team's condition variables would wait for threads that the child does not have.
struct TeamOfProcess {
  std::unique_ptr<ThreadTeam> team = std::make_unique<ThreadTeam>();
  ~TeamOfProcess() {
    if (!team->has_its_helpers()) static_cast<void>(team.release());
  }
};

}  // namespace

ThreadTeam& ThreadTeam::of_process() {
  static const TeamOfProcess of_process;
  return *of_process.team;
}

ThreadTeam::~ThreadTeam() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  job_offered_.notify_all();
  for (std::thread& helper : helpers_) helper.join();
}

int ThreadTeam::num_helpers() const {
  const std::lock_guard lock(mutex_);
  return static_cast<int>(helpers_.size());
}

bool ThreadTeam::share_openmp(const std::string& library_path) {
  void* const library = dlopen(library_path.c_str(), RTLD_NOLOAD | RTLD_LAZY);
  if (library == nullptr) return false;
  // dlsym() searches the library and the libraries with which it was linked. The handle stays open, so that
  // the functions stay loaded.
  void* const parallel = dlsym(library, "GOMP_parallel");
  void* const thread_index = dlsym(library, "omp_get_thread_num");
  if (parallel == nullptr || thread_index == nullptr) {
    dlclose(library);
    return false;
  }
  openmp_thread_index_.store(reinterpret_cast<OpenMpThreadIndex>(thread_index), std::memory_order_release);
  openmp_parallel_.store(reinterpret_cast<OpenMpParallel>(parallel), std::memory_order_release);
  return true;
}

void ThreadTeam::run_tasks(int num_threads, std::int64_t num_tasks, Task task, const void* context) {
  const auto num_shares = std::min<std::int64_t>({num_threads, num_tasks, kTeamThreadsMax});
  if (num_shares <= 1 || !has_its_helpers() || in_use_.exchange(true, std::memory_order_acquire)) {
    for (std::int64_t task_index = 0; task_index < num_tasks; ++task_index) task(context, task_index);
    return;
  }
  const OpenMpParallel parallel = openmp_parallel_.load(std::memory_order_acquire);
  // No helper is inside a job now, and helpers read job_ only after num_offered_ has been raised.
  job_ = {task, context, num_tasks, static_cast<int>(num_shares)};
  for (int share = 0; share < job_.num_shares; ++share)
    shares_[static_cast<std::size_t>(share)].next_task.store(share_begin(share), std::memory_order_relaxed);
  if (parallel != nullptr) {
    run_on_openmp(parallel);
  } else {
    run_on_helpers();
  }
  in_use_.store(false, std::memory_order_release);
}

void ThreadTeam::run_on_openmp(OpenMpParallel parallel) {
  parallel(
      [](void* team_pointer) {
        auto* const team = static_cast<ThreadTeam*>(team_pointer);
        team->claim_tasks(team->openmp_thread_index_.load(std::memory_order_relaxed)());
      },
      this, static_cast<unsigned>(job_.num_shares), 0);
}

void ThreadTeam::run_on_helpers() {
  {
    const std::lock_guard lock(mutex_);
    start_helpers(job_.num_shares - 1);
    num_offered_ = job_.num_shares;
    ++job_number_;
  }
  job_offered_.notify_all();
  claim_tasks(0);
  // The caller does not wait for helpers that have not joined by now.
  std::unique_lock lock(mutex_);
  num_offered_ = 0;
  helpers_left_.wait(lock, [this] { return num_inside_ == 0; });
}

void ThreadTeam::start_helpers(int num_helpers) {
  while (static_cast<int>(helpers_.size()) < num_helpers) {
    try {
      if (!home_) home_.emplace();
      is_helped_.store(true, std::memory_order_release);
      const int share_index = static_cast<int>(helpers_.size()) + 1;
      helpers_.emplace_back([this, share_index] { help(share_index); });
    } catch (const std::system_error&) {
      return;  // the system gives no more threads; the threads that exist do the work
    }
  }
}

void ThreadTeam::help(int share_index) {
  std::uint64_t last_job = 0;
  std::unique_lock lock(mutex_);
  for (;;) {
    job_offered_.wait(lock,
                      [&] { return stopping_ || (share_index < num_offered_ && job_number_ != last_job); });
    if (stopping_) return;
    last_job = job_number_;
    ++num_inside_;
    lock.unlock();
    claim_tasks(share_index);
    lock.lock();
    if (--num_inside_ == 0) helpers_left_.notify_one();
  }
}

// Claims the tasks of the thread's own share first, and then the remaining tasks of the other shares.
void ThreadTeam::claim_tasks(int first_share) {
  const int num_shares = job_.num_shares;
  for (int turn = 0; turn < num_shares; ++turn) claim_share((first_share + turn) % num_shares);
}

void ThreadTeam::claim_share(int share_index) {
  std::atomic<std::int64_t>& next_task = shares_[static_cast<std::size_t>(share_index)].next_task;
  const std::int64_t end = share_begin(share_index + 1);
  while (next_task.load(std::memory_order_relaxed) < end) {
    const std::int64_t task_index = next_task.fetch_add(1, std::memory_order_relaxed);
    if (task_index >= end) return;
    job_.task(job_.context, task_index);
  }
}

std::int64_t ThreadTeam::share_begin(int share_index) const {
  return job_.num_tasks * share_index / job_.num_shares;
}

}  // namespace pipedream
