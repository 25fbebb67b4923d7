// The loop of the transport thread, and how work reaches it. Threads as in transport_core.h.
#include "transport/transport_core.h"

#include <pthread.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstring>
#include <limits>

#include "base/check.h"
#include "transport/link_core.h"

namespace pipedream {
namespace {

constexpr double kLingerMaxS = 24 * 3600;
constexpr double kPeerTimeoutMaxS = 1e6;
constexpr int kBeatsPerTimeout = 8;     // so that a few may be late
constexpr int kBeatPeriodsOfPulse = 2;  // how long a pulse is felt

// The transport whose thread this is. Thread ids are no substitute: they are used again.
thread_local const TransportCore* transport_of_this_thread = nullptr;

int make_wake_fd() {
  const int fd = ::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  if (fd < 0) throw UserError(std::string("cannot create an eventfd: ") + std::strerror(errno));
  return fd;
}

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

}  // namespace

TransportCore::TransportCore(TransportOptions options)
    : options_(checked(std::move(options))),
      beat_period_(duration_of(options_.peer_timeout_s / kBeatsPerTimeout)),
      wake_fd_(make_wake_fd()) {
  tasks_.reserve(kNumTasksAtFirst);
  running_tasks_.reserve(kNumTasksAtFirst);
}

TransportCore::~TransportCore() {
  PD_CHECK(!thread_.joinable(), "a transport is destroyed while its thread runs");
  ::close(wake_fd_);
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

void TransportCore::post(std::function<void()> function) { enqueue(std::move(function)); }

bool TransportCore::on_transport_thread() const { return transport_of_this_thread == this; }

bool TransportCore::try_enqueue(Task& task) {
  bool wake = false;
  {
    const std::lock_guard lock(mutex_);
    if (stopped_) return false;
    tasks_.push_back(std::move(task));
    wake = std::exchange(sleeping_, false);
  }
  if (wake) {
    const std::uint64_t one = 1;
    // Fails only when the counter is full, and then the thread wakes anyway.
    [[maybe_unused]] const ssize_t written = ::write(wake_fd_, &one, sizeof(one));
  }
  return true;
}

void TransportCore::clear_wake() {
  std::uint64_t count = 0;
  [[maybe_unused]] const ssize_t num_read = ::read(wake_fd_, &count, sizeof(count));
}

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
  PD_CHECK(!on_transport_thread(), "shutdown() on the transport thread would wait for itself");
  const std::lock_guard join_lock(join_mutex_);
  if (!thread_.joinable()) return;
  {
    const std::lock_guard lock(mutex_);
    stop_ = stop;
  }
  enqueue([] {});  // wakes the thread
  thread_.join();
}

void TransportCore::run() {
  transport_of_this_thread = this;
  bool closing = false;
  for (;;) {
    const Stop stop = run_tasks();
    if (stop.requested && !closing) {
      closing = true;
      if (stop.farewell) close_links();
    }
    const Deadline now = Clock::now();
    say_beats(now);
    for (LinkCore* link : active_links_) link->check_deadline(now);
    std::erase_if(active_links_, [](const LinkCore* link) { return link->ended(); });
    if (closing && (active_links_.empty() || now >= stop.deadline)) break;
    traffic_left_ = poll(timeout_ms(stop));
  }
  finish();
}

// The stop that was requested before the last of the tasks that ran.
TransportCore::Stop TransportCore::run_tasks() {
  Stop stop;
  {
    const std::lock_guard lock(mutex_);
    sleeping_ = false;
    running_tasks_.swap(tasks_);
    stop = stop_;
  }
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
  if (felt_ns == kNoPulse || now_ns() - felt_ns > felt_for.count()) return;
  const std::uint64_t num_work_items = num_work_items_.load(std::memory_order_relaxed);
  for (LinkCore* link : active_links_) link->say_beat(num_work_items);
}

bool TransportCore::may_sleep() {
  const std::lock_guard lock(mutex_);
  sleeping_ = tasks_.empty();
  return sleeping_;
}

int TransportCore::timeout_ms(const Stop& stop) {
  if (traffic_left_) return 0;
  std::optional<Deadline> earliest;
  const auto wake_at = [&](Deadline deadline) {
    if (!earliest || deadline < *earliest) earliest = deadline;
  };
  if (stop.requested) wake_at(stop.deadline);
  if (options_.beats && !active_links_.empty()) wake_at(next_beat_);
  for (const LinkCore* link : active_links_) {
    if (const std::optional<Deadline> deadline = link->deadline()) wake_at(*deadline);
  }
  if (!may_sleep()) return 0;
  if (!earliest) return -1;
  const auto left = std::chrono::ceil<std::chrono::milliseconds>(*earliest - Clock::now()).count();
  return static_cast<int>(std::clamp<std::int64_t>(left, 0, std::numeric_limits<int>::max()));
}

void TransportCore::finish() {
  {
    const std::lock_guard lock(mutex_);
    stopped_ = true;
    running_tasks_.swap(tasks_);
  }
  for (const std::unique_ptr<LinkCore>& link : links_) link->end();  // links_ no longer changes
  active_links_.clear();
  running_tasks_.clear();
  teardown();
}

}  // namespace pipedream
