// The turns of those who drive, and how work reaches them. Threads as in transport_core.h.
#include "transport/transport_core.h"

#include <pthread.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <exception>
#include <limits>

#include "base/check.h"
#include "base/scope_exit.h"
#include "transport/link_core.h"

namespace pipedream {
namespace {

constexpr double kLingerMaxS = 24 * 3600;
constexpr double kPeerTimeoutMaxS = 1e6;
constexpr int kBeatPeriodsOfPulse = 2;  // how long a pulse is felt

// The transport that this thread drives; one at a time, so a handler drives no other.
thread_local const TransportCore* driven_here = nullptr;

class DrivingScope {
 public:
  explicit DrivingScope(const TransportCore& transport) { driven_here = &transport; }
  ~DrivingScope() { driven_here = nullptr; }
  DrivingScope(const DrivingScope&) = delete;
  DrivingScope& operator=(const DrivingScope&) = delete;
};

TransportOptions checked(TransportOptions options) {
  if (!(options.peer_timeout_s > 0 && options.peer_timeout_s <= kPeerTimeoutMaxS)) {
    throw UserError("peer_timeout_s is " + std::to_string(options.peer_timeout_s) +
                    "; it must be a positive number of seconds, 1e6 at most");
  }
  return options;
}

Clock::duration duration_of(double seconds) {
  return std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds));
}

Deadline seconds_from_now(double seconds) {
  return Clock::now() + duration_of(std::clamp(seconds, 0.0, kLingerMaxS));
}

// Rounded up: who wakes early would sleep again.
int milliseconds_until(Deadline deadline) {
  const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline - Clock::now()).count();
  return static_cast<int>(std::clamp<std::int64_t>(left, 0, std::numeric_limits<int>::max()));
}

}  // namespace

TransportCore::TransportCore(TransportOptions options)
    : options_(checked(std::move(options))),
      beat_period_(duration_of(options_.peer_timeout_s / kBeatsPerTimeout)) {
  tasks_.reserve(kNumTasksAtFirst);
  running_tasks_.reserve(kNumTasksAtFirst);
}

TransportCore::~TransportCore() {
  PD_CHECK(!thread_.joinable(), "a transport is destroyed while its thread runs");
}

void TransportCore::start() {
  // Signals are for the threads that know what to do with them.
  sigset_t all_signals;
  sigset_t signals_before;
  sigfillset(&all_signals);
  pthread_sigmask(SIG_SETMASK, &all_signals, &signals_before);
  thread_ = std::thread([this] { run(); });
  pthread_sigmask(SIG_SETMASK, &signals_before, nullptr);
  pthread_setname_np(thread_.native_handle(), "pd-transport");
}

void TransportCore::pulse(std::uint64_t num_work_items) {
  num_work_items_.store(num_work_items, std::memory_order_relaxed);
  pulse_ns_.store(now_ns(), std::memory_order_release);
}

void TransportCore::watch(int fd, std::uint64_t name) {
  waiter_watch_.add(fd, name);
  thread_watch_.add(fd, name);
}

void TransportCore::unwatch(int fd) {
  waiter_watch_.remove(fd);
  thread_watch_.remove(fd);
}

void TransportCore::add_rings(FrameRings& rings) {
  const std::lock_guard lock(mutex_);
  rings_.push_back(&rings);
}

void TransportCore::remove_rings(FrameRings& rings) {
  const std::lock_guard lock(mutex_);
  std::erase(rings_, &rings);
}

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

// Under the mutex. Who is to take a turn now; null when both are awake and will.
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
    if (stopped_) return;  // what is refused dies after the lock: its destructor is the user's
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

// ---- Who drives ----

bool TransportCore::is_driven_here() const { return driven_here == this; }

bool TransportCore::is_any_driven_here() { return driven_here != nullptr; }

// Not in a child of fork() either: the sockets are its parent's.
bool TransportCore::may_drive() const {
  return driven_here == nullptr && !PassiveScope::is_passive() && home_.is_this();
}

// Under the mutex, for all but the transport thread, which comes first where it is needed: it is awake then.
bool TransportCore::begin_driving() {
  if (driven_ || needs_thread_.load()) return false;
  driven_ = true;
  return true;
}

// Under the mutex, whenever it changes who sleeps: what that one is to be woken for. True: some of it is
// there already.
bool TransportCore::listen_for_bells() {
  bool has_frames = false;
  for (FrameRings* rings : rings_) {
    const Patience patience = num_wanting_all_ == 0 ? rings->patience() : Patience::kNone;
    BellWish wished = BellWish::kNothing;
    if (!driven_ && waiter_sleeps_) {
      wished = patience == Patience::kUntilOneDrives ? BellWish::kUrgent : BellWish::kAll;
    } else if (!driven_ && thread_sleeps_) {
      wished = patience == Patience::kNone ? BellWish::kAll : BellWish::kUrgent;
    }
    rings->wish(wished);
    has_frames = rings->has(wished) || has_frames;
  }
  return has_frames;
}

// False when there is more to do, and this thread still drives. hands_over: unless another one can do it.
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

// After an error of a task or a handler, as a device's: it reaches who drives, and the thread goes on. What
// this turn had taken of the queue is dropped.
void TransportCore::drop_drive() {
  running_tasks_.clear();
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

// ---- Who waits ----

bool TransportCore::drive_until(Deadline deadline, const std::function<bool()>& done) {
  if (!may_drive()) return false;
  {
    const std::lock_guard lock(mutex_);
    if (waiter_) return false;
    waiter_ = std::this_thread::get_id();
    interrupted_ = false;  // done() is asked after this
  }
  const ScopeExit no_longer_waits([this] { stop_waiting(); });
  if (done()) return true;
  // At least once: what came may lie in a ring, where nobody has looked.
  while (!sleep_and_drive(milliseconds_until(deadline), done) && Clock::now() < deadline) {
  }
  return true;
}

void TransportCore::want_all(bool wants) {
  if (!home_.is_this()) return;  // the rings are the parent's
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

// What is readable is perhaps told to this thread alone, so it asks for all of it before it may leave.
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
  // Where the thread is needed it delivers what is there, and nobody else begins to.
  if (waiter_sleeps_ && listen_for_bells() && !needs_thread_.load()) waiter_sleeps_ = false;
  return waiter_sleeps_;
}

// True: it drives. Else another one does, and delivers what it was told of.
bool TransportCore::wake_waiter(std::span<const std::uint64_t> names) {
  const std::lock_guard lock(mutex_);
  waiter_sleeps_ = false;
  interrupted_ = false;  // done() is asked after this
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

// ---- Life ----

Link& TransportCore::add(std::unique_ptr<LinkCore> link) {
  LinkCore* const added = link.get();
  {
    const std::lock_guard lock(mutex_);
    if (stop_.requested) throw UserError("the transport has been shut down; make a new one");
    links_.push_back(std::move(link));
  }
  enqueue([this, added] {
    active_links_.push_back(added);
    added->start();
    need_thread();
  });
  return *added;
}

void TransportCore::shutdown(double linger_s) {
  request_stop({.requested = true, .farewell = true, .deadline = seconds_from_now(linger_s)});
}

void TransportCore::abandon() {
  request_stop({.requested = true, .farewell = false, .deadline = Clock::now()});
}

void TransportCore::request_stop(Stop stop) {
  PD_CHECK(!is_driven_here(), "shutdown() on the thread that drives would wait for itself");
  const std::lock_guard join_lock(join_mutex_);
  if (!thread_.joinable()) return;
  {
    const std::lock_guard lock(mutex_);
    stop_ = stop;
    need_thread();
    if (std::exchange(thread_sleeps_, false)) thread_watch_.wake();
  }
  thread_.join();
}

// ---- The transport thread ----

void TransportCore::run() {
  const bool drives = wake_thread({});
  if (!drives) wait_for_traffic(std::nullopt);
  const DrivingScope driving(*this);
  for (bool closing = false;;) {
    needs_thread_.store(false);  // before looking: whoever needs it from now on is heard anew
    Stop stop;
    try {
      stop = take_turn(closing);
    } catch (const std::exception& error) {
      fail_links({FailureKind::kUncaught, error.what()});
      needs_thread_.store(true);
    }
    std::erase_if(active_links_, [](const LinkCore* link) { return link->ended(); });
    if (closing && stop.requested && (active_links_.empty() || Clock::now() >= stop.deadline)) break;
    const std::optional<Deadline> deadline = next_deadline(stop);
    if (may_thread_sleep()) {
      wait_for_traffic(deadline);
    } else {
      for (const std::uint64_t name : thread_watch_.sleep(0)) note_ready(name);
    }
  }
  finish();
}

TransportCore::Stop TransportCore::take_turn(bool& closing) {
  const Stop stop = run_tasks();
  deliver(Driver::kThread);
  if (stop.requested && !closing) {
    closing = true;
    if (stop.farewell) close_links();
  }
  const Deadline now = Clock::now();
  say_beats(now);
  for (LinkCore* link : active_links_) link->check_deadline(now);
  return stop;
}

// After an error that nobody else is there to be thrown to. What this turn had taken of the queue is dropped.
void TransportCore::fail_links(const Failure& failure) {
  running_tasks_.clear();
  for (LinkCore* link : active_links_) {
    try {
      link->fail(failure);
    } catch (const std::exception& error) {
      std::fprintf(stderr, "pipedream: %s, and then: %s\n", failure.message.c_str(), error.what());
    }
  }
}

// True: this thread no longer drives.
bool TransportCore::may_thread_sleep() {
  if (has_traffic()) return false;
  const std::lock_guard lock(mutex_);
  if (!tasks_.empty() || !told_.empty() || needs_thread_.load()) return false;
  driven_ = false;
  thread_sleeps_ = true;
  if (!listen_for_bells()) return true;
  driven_ = true;
  thread_sleeps_ = false;
  return false;
}

// Until it drives again.
void TransportCore::wait_for_traffic(std::optional<Deadline> deadline) {
  driven_here = nullptr;
  std::span<const std::uint64_t> names;
  do {
    // Where another one drove at the deadline, that one wakes this thread.
    const bool is_due = deadline && Clock::now() >= *deadline && needs_thread_.load();
    names = thread_watch_.sleep(deadline && !is_due ? milliseconds_until(*deadline) : -1);
  } while (!wake_thread(names));
  driven_here = this;
}

// True: it drives. Else another one does, delivers what it was told of, and wakes it where it is needed.
bool TransportCore::wake_thread(std::span<const std::uint64_t> names) {
  const std::lock_guard lock(mutex_);
  told_.insert(told_.end(), names.begin(), names.end());
  if (driven_ && names.empty()) need_thread();
  thread_sleeps_ = driven_;
  const bool drives = !std::exchange(driven_, true);
  static_cast<void>(listen_for_bells());
  return drives;
}

// The stop that was requested before the last of the tasks that ran.
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
  for (Task& task : running_tasks_) {
    task();
    task.reset();
  }
  running_tasks_.clear();
  return stop;
}

void TransportCore::close_links() {
  for (LinkCore* link : active_links_) link->begin_close();
}

// A tick while there are links, whether or not there is a pulse: so pulse() need not wake this thread.
void TransportCore::say_beats(Deadline now) {
  if (!options_.beats || now < next_beat_) return;
  next_beat_ = now + beat_period_;
  const std::int64_t felt_ns = pulse_ns_.load(std::memory_order_acquire);
  const std::chrono::nanoseconds felt_for = kBeatPeriodsOfPulse * beat_period_;
  const bool has_pulse = felt_ns != kNoPulse && now_ns() - felt_ns <= felt_for.count();
  const std::uint64_t num_work_items = num_work_items_.load(std::memory_order_relaxed);
  for (LinkCore* link : active_links_) link->say_beat(num_work_items, has_pulse);
}

// Of those that the thread looks after; empty when there is none.
std::optional<Deadline> TransportCore::next_deadline(const Stop& stop) const {
  std::optional<Deadline> earliest;
  const auto wake_at = [&](Deadline deadline) {
    if (!earliest || deadline < *earliest) earliest = deadline;
  };
  if (stop.requested) wake_at(stop.deadline);
  if (options_.beats && !active_links_.empty()) wake_at(next_beat_);
  for (const LinkCore* link : active_links_) {
    if (const std::optional<Deadline> deadline = link->deadline()) wake_at(*deadline);
  }
  return earliest;
}

void TransportCore::finish() {
  {
    const std::lock_guard lock(mutex_);
    stopped_ = true;  // and driven_ stays
    running_tasks_.swap(tasks_);
  }
  for (const std::unique_ptr<LinkCore>& link : links_) link->end();  // links_ no longer changes
  active_links_.clear();
  running_tasks_.clear();
  teardown();
}

}  // namespace pipedream
