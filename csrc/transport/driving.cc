// Implements the task queue, and how threads that post and threads that wait drive the transport. Threads as
// in transport_core.h.
#include <algorithm>
#include <iterator>
#include <utility>
#include <vector>

#include "base/scope_exit.h"
#include "transport/driving_scope.h"
#include "transport/transport_core.h"

namespace pipedream {

// ---- Posting: any thread ----

void TransportCore::post(std::function<void()> function) { enqueue(std::move(function)); }

bool TransportCore::try_enqueue(Task& task) {
  Watch* sleeper = nullptr;
  {
    const std::lock_guard lock(mutex_);
    if (stopped_) return false;
    tasks_.push_back(std::move(task));
    if (!driven_) sleeper = take_sleeper();
  }
  if (sleeper != nullptr) sleeper->wake();
  return true;
}

// The sleeping thread to wake for new work: the waiter if it sleeps, otherwise the transport thread; null
// when both are awake. Called under the mutex.
Watch* TransportCore::take_sleeper() {
  if (std::exchange(waiter_sleeps_, false)) return &waiter_watch_;
  if (std::exchange(thread_sleeps_, false)) return &thread_watch_;
  return nullptr;
}

void TransportCore::post_and_drive(std::function<void()> function) {
  if (!may_drive()) return post(std::move(function));
  Task task(std::move(function));
  {
    const std::lock_guard lock(mutex_);
    if (stopped_) return;  // a refused task is destroyed after the lock, because it may run user code
    tasks_.push_back(std::move(task));
    if (!begin_driving()) return;
  }
  drive_as_poster();
}

void TransportCore::post_for_later(std::function<void()> function) {
  Task task(std::move(function));
  const std::lock_guard lock(mutex_);
  if (!stopped_) tasks_.push_back(std::move(task));
}

void TransportCore::drive_posted() {
  if (!may_drive()) return;
  {
    const std::lock_guard lock(mutex_);
    if (tasks_.empty() || !begin_driving()) return;
  }
  drive_as_poster();
}

void TransportCore::drive_without_thread() {
  needs_thread_.store(false);
  drive_posted();
}

// ---- Beginning and ending to drive ----

bool TransportCore::is_driven_here() const { return DrivingScope::here() == this; }

bool TransportCore::is_any_driven_here() { return DrivingScope::here() != nullptr; }

// Whether the calling thread may drive this transport. It may not in a child of fork(), whose parent owns the
// sockets.
bool TransportCore::may_drive() const {
  return DrivingScope::here() == nullptr && !PassiveScope::is_passive() && home_.is_this();
}

// Begins to drive if no thread drives and the transport thread is not needed. A needed transport thread is
// awake and drives first. Called under the mutex, by all threads but the transport thread.
bool TransportCore::begin_driving() {
  if (driven_ || needs_thread_.load()) return false;
  driven_ = true;
  return true;
}

// Tells the board of rings (ring_board.h) which frames must ring the bell for the threads that sleep now.
// Returns true if such a frame is there already. Called under the mutex whenever a thread goes to sleep or
// wakes, and by want_all().
bool TransportCore::listen_for_bells() {
  if (board_ == nullptr) return false;
  const bool somebody_sleeps = !driven_ && (waiter_sleeps_ || thread_sleeps_);
  if (!somebody_sleeps) {
    board_->wish(std::nullopt);
    return false;
  }
  const Patience patience = waiter_sleeps_ ? Patience::kUntilOneWaits : Patience::kNone;
  board_->wish(num_wanting_all_ == 0 ? patience : Patience::kUntilOneDrives);
  std::atomic_thread_fence(std::memory_order_seq_cst);  // step b in the drawing of ring_board.h
  return board_->has_wished();
}

// Stops driving and returns true if no work is left. Otherwise this thread still drives, and the result is
// false. hands_over: stops in any case, and wakes a sleeping thread for the work that is left.
bool TransportCore::stop_driving(bool hands_over) {
  Watch* sleeper = nullptr;
  {
    const std::lock_guard lock(mutex_);
    driven_ = false;
    const bool has_frames = listen_for_bells();
    const bool has_work = has_frames || !tasks_.empty() || !told_.empty();
    if (has_work && !hands_over) {
      driven_ = true;
      return false;
    }
    if (needs_thread_.load()) {
      if (std::exchange(thread_sleeps_, false)) sleeper = &thread_watch_;
    } else if (has_work) {
      sleeper = take_sleeper();
    }
  }
  if (sleeper != nullptr) sleeper->wake();
  return true;
}

// Stops driving after an exception of a task or a handler, such as a DeviceError. The exception reaches the
// thread that drives the transport, and the transport thread goes on.
void TransportCore::drop_drive() {
  need_thread();
  static_cast<void>(stop_driving(/*hands_over=*/true));
}

void TransportCore::drive_as_poster() try {
  const DrivingScope driving(*this);
  for (int round = 1;; ++round) {
    static_cast<void>(run_tasks());
    deliver(Driver::kPoster);
    if (has_traffic()) need_thread();
    if (stop_driving(/*hands_over=*/round >= kNumPosterRoundsMax)) return;
  }
} catch (...) {
  drop_drive();
  throw;
}

// ---- A thread that waits ----

bool TransportCore::drive_until(Deadline deadline, const std::function<bool()>& done) {
  if (!may_drive()) return false;
  {
    const std::lock_guard lock(mutex_);
    if (waiter_) return false;
    waiter_ = std::this_thread::get_id();
    interrupted_ = false;  // done() is called below, as interrupt() asks
  }
  const ScopeExit no_longer_waits([this] { stop_waiting(); });
  if (done()) return true;
  // Runs at least once, because frames may lie in a ring where no thread has looked.
  while (!sleep_and_drive(milliseconds_until(deadline), done) && Clock::now() < deadline) {
  }
  return true;
}

void TransportCore::want_all(bool wants) {
  if (!home_.is_this()) return;  // in a child of fork() the rings are the parent's
  Watch* sleeper = nullptr;
  {
    const std::lock_guard lock(mutex_);
    num_wanting_all_ += wants ? 1 : -1;
    if (listen_for_bells()) sleeper = take_sleeper();
  }
  if (sleeper != nullptr) sleeper->wake();
}

void TransportCore::stop_waiting() {
  Watch* sleeper = nullptr;
  {
    const std::lock_guard lock(mutex_);
    waiter_.reset();
    if (listen_for_bells()) sleeper = take_sleeper();
  }
  if (sleeper != nullptr) sleeper->wake();
}

void TransportCore::interrupt() {
  const std::lock_guard lock(mutex_);
  if (!waiter_ || *waiter_ == std::this_thread::get_id()) return;
  interrupted_ = true;
  if (std::exchange(waiter_sleeps_, false)) waiter_watch_.wake();
}

// A readable descriptor may be reported to this thread alone. So this thread fetches all reports before it
// returns.
bool TransportCore::sleep_and_drive(int timeout_ms, const std::function<bool()>& done) {
  bool is_done = false;
  std::span<const std::uint64_t> names;
  do {
    const bool sleeps = names.empty() && may_waiter_sleep();
    names = waiter_watch_.sleep(sleeps ? timeout_ms : 0);
    const auto asked = [&] { return is_done || done(); };
    is_done = wake_waiter(names) ? drive_as_waiter(std::ref(asked)) : asked();
  } while (names.size() + 1 >= Watch::kNumNamesMax);
  return is_done;
}

bool TransportCore::may_waiter_sleep() {
  const std::lock_guard lock(mutex_);
  if (std::exchange(interrupted_, false)) return false;
  waiter_sleeps_ = driven_ || needs_thread_.load() || (tasks_.empty() && told_.empty());
  // If the transport thread is needed, it delivers the frames, and no other thread begins to drive.
  if (waiter_sleeps_ && listen_for_bells() && !needs_thread_.load()) waiter_sleeps_ = false;
  return waiter_sleeps_;
}

// Queues the names of readable descriptors and tries to drive. False: another thread drives, and reads those
// descriptors.
bool TransportCore::wake_waiter(std::span<const std::uint64_t> names) {
  const std::lock_guard lock(mutex_);
  waiter_sleeps_ = false;
  interrupted_ = false;  // done() is called after this, as interrupt() asks
  if (!stopped_) told_.insert(told_.end(), names.begin(), names.end());
  const bool drives = begin_driving();
  static_cast<void>(listen_for_bells());
  return drives;
}

bool TransportCore::drive_as_waiter(const std::function<bool()>& done) try {
  const DrivingScope driving(*this);
  bool is_done = false;
  for (int round = 1;; ++round) {
    static_cast<void>(run_tasks());
    deliver(Driver::kWaiter);
    is_done = is_done || done();
    const bool has_time = round < kNumWaiterRoundsMax;
    if (has_traffic() && !is_done && has_time) continue;
    if (has_traffic()) need_thread();
    if (stop_driving(/*hands_over=*/!has_time)) return is_done;
  }
} catch (...) {
  drop_drive();
  throw;
}

// ---- The tasks of a turn: on the thread that drives the transport ----

// Notes the descriptors that are readable, and runs all queued tasks. Returns the stop that was requested
// before the tasks were taken.
TransportCore::Stop TransportCore::run_tasks() {
  Stop stop;
  {
    const std::lock_guard lock(mutex_);
    running_tasks_.swap(tasks_);
    noted_.swap(told_);
    stop = stop_;
  }
  for (const std::uint64_t name : noted_) note_ready(name);
  noted_.clear();
  auto next = running_tasks_.begin();
  try {
    while (next != running_tasks_.end()) {
      Task& task = *next++;
      task();
      task.reset();
    }
  } catch (...) {
    put_back(next);
    throw;
  }
  running_tasks_.clear();
  return stop;
}

// Puts the tasks from `next` on back to the front of the queue when the task before them has thrown. Those
// tasks may belong to other links.
void TransportCore::put_back(std::vector<Task>::iterator next) {
  {
    const std::lock_guard lock(mutex_);
    tasks_.insert(tasks_.begin(), std::make_move_iterator(next),
                  std::make_move_iterator(running_tasks_.end()));
  }
  running_tasks_.clear();
}

}  // namespace pipedream
