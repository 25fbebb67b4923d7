// What every transport shares: the transport thread, its task queue, and the life of its links. zmq/ and
// inproc/ add how bytes are carried.
//
//   any thread       send, close, post, listen ---> task queue ---> transport thread
//   transport thread loop: 1 run tasks  2 close or time out links, say BEAT  3 wait for traffic, deliver it
//
// Ownership: owns its thread and its links. Bound of the queue: what channels have credits for. Tasks lie in
// the queue itself, which keeps the room it has once had: in the steady state nothing is allocated.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "base/inline_function.h"
#include "transport/transport.h"

namespace pipedream {

class LinkCore;

// Room for the largest: a frame with its encoded header.
inline constexpr std::size_t kTaskBytesMax = 448;
using Task = InlineFunction<kTaskBytesMax>;

class TransportCore : public Transport {
 public:
  // Throws UserError when peer_timeout_s is not positive.
  explicit TransportCore(TransportOptions options);
  ~TransportCore() override;

  void pulse(std::uint64_t num_work_items) final;
  void post(std::function<void()> function) final;
  void shutdown(double linger_s) final;

  // Ends without a farewell, as a killed process does. For tests.
  void abandon();

  // Runs `function` on the transport thread, or destroys it, here, when the thread has ended. May be
  // move-only. Any thread.
  template <class Function>
  void enqueue(Function function) {
    // What is refused dies here, outside the lock: its destructor may run the user's on_sent.
    Task task(std::move(function));
    static_cast<void>(try_enqueue(task));
  }
  // False when the thread has ended: the task was not taken.
  [[nodiscard]] bool try_enqueue(Task& task);

  [[nodiscard]] bool on_transport_thread() const;

  [[nodiscard]] const TransportOptions& transport_options() const { return options_; }

 protected:
  // A subclass calls start() at the end of its constructor and shutdown(0) at the start of its destructor:
  // between them the thread may call what is virtual.
  void start();

  // Takes the link over and starts it. Throws UserError after shutdown.
  Link& add(std::unique_ptr<LinkCore> link);

  // Transport thread: waits for wake_fd() or traffic, timeout_ms at most (-1: no bound), and delivers the
  // traffic. True when it left some for the next round.
  [[nodiscard]] virtual bool poll(int timeout_ms) = 0;
  // Transport thread, last of all: every link has ended.
  virtual void teardown() = 0;

  [[nodiscard]] int wake_fd() const { return wake_fd_; }  // readable when there are tasks
  void clear_wake();
  // Transport thread. Links that have started and not ended; changes only between calls of poll().
  [[nodiscard]] const std::vector<LinkCore*>& active_links() const { return active_links_; }

 private:
  static constexpr std::size_t kNumTasksAtFirst = 64;  // room for more is made when it is needed
  static constexpr std::int64_t kNoPulse = -1;

  struct Stop {
    bool requested = false;
    bool farewell = true;
    Deadline deadline;
  };

  void request_stop(Stop stop);
  void run();
  Stop run_tasks();
  void close_links();
  void say_beats(Deadline now);
  [[nodiscard]] bool may_sleep();
  [[nodiscard]] int timeout_ms(const Stop& stop);
  void finish();

  const TransportOptions options_;
  const Clock::duration beat_period_;
  const int wake_fd_;
  std::mutex join_mutex_;  // guards thread_'s join
  std::thread thread_;

  std::mutex mutex_;  // guards the members below
  std::vector<Task> tasks_;
  std::vector<std::unique_ptr<LinkCore>> links_;
  Stop stop_;
  bool sleeping_ = false;  // a task must wake the thread
  bool stopped_ = false;   // no more tasks

  std::atomic<std::int64_t> pulse_ns_{kNoPulse};  // when it was last felt
  std::atomic<std::uint64_t> num_work_items_{0};

  // Transport thread.
  std::vector<LinkCore*> active_links_;
  std::vector<Task> running_tasks_;
  Deadline next_beat_;
  bool traffic_left_ = false;
};

}  // namespace pipedream
