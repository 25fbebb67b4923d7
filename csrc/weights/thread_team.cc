// Seats for a job are offered under the mutex; whoever takes one claims tasks until none is left. See
// thread_team.h. A forked child has no helpers: its caller then finds every task unclaimed and runs it.
#include "weights/thread_team.h"

#include <unistd.h>

#include <algorithm>
#include <system_error>

namespace pipedream {

ThreadTeam& ThreadTeam::of_process() {
  static ThreadTeam team;
  return team;
}

ThreadTeam::~ThreadTeam() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  seats_offered_.notify_all();
  const bool helpers_are_ours = started_by_ == getpid();  // false in a forked child, which has none
  for (std::thread& helper : helpers_) {
    if (helpers_are_ours) {
      helper.join();
    } else {
      helper.detach();
    }
  }
}

int ThreadTeam::num_helpers() const {
  const std::lock_guard lock(mutex_);
  return static_cast<int>(helpers_.size());
}

void ThreadTeam::run_tasks(int num_threads, std::int64_t num_tasks, Task task, const void* context) {
  const std::int64_t num_useful = std::min<std::int64_t>(num_threads, num_tasks) - 1;
  const int num_seats = static_cast<int>(std::min<std::int64_t>(num_useful, kNumHelpersMax));
  if (num_seats < 1 || in_use_.exchange(true, std::memory_order_acquire)) {
    for (std::int64_t task_index = 0; task_index < num_tasks; ++task_index) task(context, task_index);
    return;
  }
  const Job job{task, context, num_tasks};
  {
    const std::lock_guard lock(mutex_);
    start_helpers(num_seats);
    next_task_.store(0, std::memory_order_relaxed);
    job_ = job;
    num_seats_ = num_seats;
  }
  for (int seat = 0; seat < num_seats; ++seat) seats_offered_.notify_one();
  claim_tasks(job);
  {
    // Who has not joined by now is not waited for.
    std::unique_lock lock(mutex_);
    num_seats_ = 0;
    helpers_left_.wait(lock, [this] { return num_inside_ == 0; });
  }
  in_use_.store(false, std::memory_order_release);
}

void ThreadTeam::start_helpers(int num_helpers) {
  while (static_cast<int>(helpers_.size()) < num_helpers) {
    try {
      if (helpers_.empty()) started_by_ = getpid();
      helpers_.emplace_back([this] { help(); });
    } catch (const std::system_error&) {
      return;  // the system gives no more threads: those there are do the work
    }
  }
}

void ThreadTeam::help() {
  std::unique_lock lock(mutex_);
  for (;;) {
    seats_offered_.wait(lock, [this] { return stopping_ || num_seats_ > 0; });
    if (stopping_) return;
    --num_seats_;
    ++num_inside_;
    const Job job = job_;
    lock.unlock();
    claim_tasks(job);
    lock.lock();
    if (--num_inside_ == 0) helpers_left_.notify_one();
  }
}

void ThreadTeam::claim_tasks(const Job& job) {
  for (;;) {
    const std::int64_t task_index = next_task_.fetch_add(1, std::memory_order_relaxed);
    if (task_index >= job.num_tasks) return;
    job.task(job.context, task_index);
  }
}

}  // namespace pipedream
