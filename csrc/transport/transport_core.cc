// Implements the life of a transport and its links, and the transport thread. Threads as in transport_core.h.
#include "transport/transport_core.h"

#include <pthread.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <exception>
#include <iterator>

#include "base/check.h"
#include "transport/driving_scope.h"
#include "transport/link_core.h"

namespace pipedream {
namespace {

constexpr double kLingerMaxS = 24 * 3600;
constexpr double kPeerTimeoutMaxS = 1e6;
constexpr int kBeatPeriodsOfPulse = 2;  // a pulse counts for this many beat periods

TransportOptions checked(TransportOptions options) {
  if (!(options.peer_timeout_s > 0 && options.peer_timeout_s <= kPeerTimeoutMaxS)) {
    throw UserError("peer_timeout_s is " + std::to_string(options.peer_timeout_s) +
                    "; it must be a positive number of seconds, 1e6 at most");
  }
  return options;
}

Deadline seconds_from_now(double seconds) {
  return Clock::now() + duration_of(std::clamp(seconds, 0.0, kLingerMaxS));
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
  // Blocks all signals in the new thread, so that other threads handle them.
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

PeerLife& TransportCore::peer_named(const std::string& name) {
  const std::lock_guard lock(mutex_);
  return peers_.try_emplace(name, duration_of(options_.peer_timeout_s) / 2).first->second;
}

// ---- Life ----

void TransportCore::await_hello(LinkCore& link) {
  greeted_links_.push_back(&link);
  need_thread();
}

void TransportCore::note_ended() {
  some_ended_ = true;
  need_thread();
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
    PeerLife* const peer = &added->peer_life();
    if (std::ranges::find(active_peers_, peer) == active_peers_.end()) active_peers_.push_back(peer);
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
    needs_thread_.store(false);  // cleared before looking: later calls of need_thread() set it again
    Stop stop;
    try {
      stop = take_turn(closing);
    } catch (const std::exception& error) {
      fail_links({FailureKind::kUncaught, error.what()});
      needs_thread_.store(true);
    }
    if (std::exchange(some_ended_, false)) {
      std::erase_if(active_links_, [](const LinkCore* link) { return link->ended(); });
    }
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
  check_hellos(now);
  check_peers(now);
  return stop;
}

// Loops by index, because a check may end its link and so call a handler.
void TransportCore::check_hellos(Deadline now) {
  std::erase_if(greeted_links_, [](const LinkCore* link) { return !link->hello_deadline(); });
  for (std::size_t index = 0; index < greeted_links_.size(); ++index) greeted_links_[index]->check_hello(now);
}

// Fails all links after an exception that no caller can catch.
void TransportCore::fail_links(const Failure& failure) {
  for (LinkCore* link : active_links_) {
    try {
      link->fail(failure);
    } catch (const std::exception& error) {
      std::fprintf(stderr, "pipedream: %s, and then: %s\n", failure.message.c_str(), error.what());
    }
  }
}

// Stops driving if there is nothing to do. True: this thread no longer drives and may sleep.
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

// Sleeps until this thread drives again.
void TransportCore::wait_for_traffic(std::optional<Deadline> deadline) {
  DrivingScope::leave();
  std::span<const std::uint64_t> names;
  do {
    // After the deadline another thread may still drive. wake_thread() has then called need_thread(), so that
    // thread wakes this one when it stops driving, and no timeout is needed.
    const bool is_due = deadline && Clock::now() >= *deadline && needs_thread_.load();
    names = thread_watch_.sleep(deadline && !is_due ? milliseconds_until(*deadline) : -1);
  } while (!wake_thread(names));
  DrivingScope::enter(*this);
}

// Queues the names of readable descriptors and tries to drive. False: another thread drives. That thread
// reads those descriptors, and wakes this thread when needed.
bool TransportCore::wake_thread(std::span<const std::uint64_t> names) {
  const std::lock_guard lock(mutex_);
  told_.insert(told_.end(), names.begin(), names.end());
  if (driven_ && names.empty()) need_thread();
  thread_sleeps_ = driven_;
  const bool drives = !std::exchange(driven_, true);
  static_cast<void>(listen_for_bells());
  return drives;
}

void TransportCore::close_links() {
  for (LinkCore* link : active_links_) link->begin_close();
}

// Beats are sent as long as there are links, even if pulse() was not called. So pulse() need not wake this
// thread.
void TransportCore::say_beats(Deadline now) {
  if (!options_.beats || now < next_beat_) return;
  next_beat_ = now + beat_period_;
  const std::int64_t felt_ns = pulse_ns_.load(std::memory_order_acquire);
  const std::chrono::nanoseconds felt_for = kBeatPeriodsOfPulse * beat_period_;
  const bool has_pulse = felt_ns != kNoPulse && now_ns() - felt_ns <= felt_for.count();
  const std::uint64_t num_work_items = num_work_items_.load(std::memory_order_relaxed);
  for (LinkCore* link : active_links_) link->say_beat(num_work_items, has_pulse);
}

// Runs at least at every beat of this side.
void TransportCore::check_peers(Deadline now) {
  if (!options_.beats || now < next_check_) return;
  // If this check comes late, this process was held up, and perhaps the whole run, as by Ctrl-Z. Then the
  // peer's silence does not show that it is lost.
  const bool was_held_up = now - std::exchange(last_check_, now) > 2 * beat_period_;
  for (PeerLife* peer : active_peers_) {
    if (was_held_up) peer->hear_at(now);
    if (peer->is_silent(now)) check_silent_peer(*peer, now);
  }
  next_check_ = next_beat_;
  for (const PeerLife* peer : active_peers_) next_check_ = std::min(next_check_, peer->deadline());
}

// Checks a peer from which no whole frame has come. Bytes of a frame may have arrived, or whole frames may
// lie unread.
void TransportCore::check_silent_peer(PeerLife& peer, Deadline now) {
  const std::vector<LinkCore*> links = links_that_await(peer);
  if (links.empty()) return peer.hear_at(now);  // no link waits for this peer
  for (const LinkCore* link : links) {
    if (const std::optional<Deadline> arrival = link->last_arrival()) peer.hear_at(*arrival);
  }
  if (!peer.is_silent(now)) return;
  const bool must_look = peer.must_look();
  for (LinkCore* link : links) {
    if (must_look) {
      link->look_for_traffic();
    } else {
      link->peer_is_silent();
    }
  }
}

std::vector<LinkCore*> TransportCore::links_that_await(const PeerLife& peer) const {
  std::vector<LinkCore*> links;
  std::ranges::copy_if(active_links_, std::back_inserter(links), [&](const LinkCore* link) {
    return &link->peer_life() == &peer && link->awaits_frames();
  });
  return links;
}

// The next time at which the transport thread has something to do; empty if no timer runs.
std::optional<Deadline> TransportCore::next_deadline(const Stop& stop) const {
  std::optional<Deadline> earliest;
  const auto wake_at = [&](Deadline deadline) {
    if (!earliest || deadline < *earliest) earliest = deadline;
  };
  if (stop.requested) wake_at(stop.deadline);
  if (options_.beats && !active_links_.empty()) wake_at(std::min(next_beat_, next_check_));
  for (const LinkCore* link : greeted_links_) {
    if (const std::optional<Deadline> deadline = link->hello_deadline()) wake_at(*deadline);
  }
  return earliest;
}

void TransportCore::finish() {
  {
    const std::lock_guard lock(mutex_);
    stopped_ = true;  // driven_ stays true, so that no thread drives any more
    running_tasks_.swap(tasks_);
  }
  // Needs no lock, because links_ changes no more.
  for (const std::unique_ptr<LinkCore>& link : links_) link->end();
  active_links_.clear();
  running_tasks_.clear();
  teardown();
}

}  // namespace pipedream
