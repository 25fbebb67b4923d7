// The core of every transport: it decides which thread drives, queues tasks, and manages the links. zmq/ and
// inproc/ add the way in which bytes travel.
//
//   any thread   send, close, post, listen ---> task queue ---> the thread that drives
//   poster       post_and_drive(): 1 run tasks  2 deliver quick frames; wake the thread for other traffic.
//                post_for_later() leaves both steps to drive_posted(), or to a thread that drives earlier
//   waiter       drive_until():    sleep, 1 run tasks  2 deliver, until done() is true
//   thread       loop: 1 run tasks  2 deliver  3 close or time out links, say BEAT  4 sleep
//
// The thread that drives has set driven_, under the mutex. No thread waits to drive. A thread that has work
// for the driving thread queues it under the same mutex. The driving thread looks at the queue once more when
// it stops driving. If no thread drives, a sleeper is woken for a queued task: the waiter if it sleeps,
// otherwise the transport thread. So no task is lost.
//
// driving.cc implements the poster and the waiter; transport_core.cc implements the transport thread and the
// life of the links.
//
// Ownership: a transport owns its thread and its links. Bound: the channels' credits bound the queue. Tasks
// are stored in the queue itself, and the queue never shrinks, so nothing is allocated in the steady state.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "base/inline_function.h"
#include "base/process.h"
#include "transport/peer_life.h"
#include "transport/ring_board.h"
#include "transport/transport.h"
#include "transport/watch.h"

namespace pipedream {

class LinkCore;

inline constexpr int kBeatsPerTimeout = 8;  // more than one, because a few beats may be late

// The size of the largest task: a frame with its encoded header.
inline constexpr std::size_t kTaskBytesMax = 496;
using Task = InlineFunction<kTaskBytesMax>;

// Why a thread drives. The reason limits what it does.
enum class Driver {
  kPoster,  // it has posted a function and must get back to its work, so it does nothing slow
  kWaiter,  // it waits for a handler's result, so it does everything until the result is there
  kThread,  // it is the transport thread, which does everything
};

class TransportCore : public Transport {
 public:
  // Throws UserError unless peer_timeout_s is above 0 and at most 1e6.
  explicit TransportCore(TransportOptions options);
  ~TransportCore() override;

  void pulse(std::uint64_t num_work_items) final;
  void post(std::function<void()> function) final;
  void post_and_drive(std::function<void()> function) final;
  void post_for_later(std::function<void()> function) final;
  void drive_posted() final;
  [[nodiscard]] bool drive_until(Deadline deadline, const std::function<bool()>& done) final;
  void interrupt() final;
  void want_all(bool wants) final;
  void shutdown(double linger_s) final;

  // Ends the transport without BYE, like a killed process. For tests.
  void abandon();
  // Runs the posted functions when start() was not called, so that tests need no thread. For tests.
  void drive_without_thread();

  // Runs `function` on the thread that drives the transport. If the transport has ended, destroys the
  // function on this thread. The function may be move-only. Any thread.
  template <class Function>
  void enqueue(Function function) {
    // A refused task is destroyed here, outside the lock, because its destructor may run the user's on_sent.
    Task task(std::move(function));
    static_cast<void>(try_enqueue(task));
  }
  // False when the transport has ended: the task was not taken.
  [[nodiscard]] bool try_enqueue(Task& task);

  // Whether the calling thread drives this transport. is_any_driven_here(): whether it drives any transport.
  [[nodiscard]] bool is_driven_here() const;
  [[nodiscard]] static bool is_any_driven_here();

  // Makes the transport thread take a turn soon, for deadlines and for work that other threads have no time
  // for. No other thread begins to drive before this turn. Called on the thread that drives the transport, or
  // under the mutex.
  void need_thread() { needs_thread_.store(true); }
  // await_hello() is called when a link begins to wait for its HELLO, note_ended() when a link has ended.
  // Both call need_thread().
  void await_hello(LinkCore& link);
  void note_ended();
  // From now on note_ready(name) is called when fd becomes readable; see watch.h. Called on the thread that
  // drives the transport, or before any thread drives.
  void watch(int fd, std::uint64_t name);
  void unwatch(int fd);

  // The PeerLife that all links with this LinkOptions::peer share.
  [[nodiscard]] PeerLife& peer_named(const std::string& name);

  [[nodiscard]] const TransportOptions& transport_options() const { return options_; }

 protected:
  // A subclass calls start() at the end of its constructor and shutdown(0) at the start of its destructor.
  // Between the two calls the thread may call virtual functions.
  void start();

  // Sets the board of the rings, before start(). deliver() reads the rings that are marked on it, and
  // sleepers are woken for them.
  void listen_to(RingBoard& board) { board_ = &board; }

  // Takes the link over and starts it. Throws UserError after shutdown.
  Link& add(std::unique_ptr<LinkCore> link);

  // The functions below run on the thread that drives the transport.
  //
  // note_ready() says that the descriptor with this name is readable. This is reported once, to one sleeper
  // (watch.h). Both reading and writing may consume the report of further traffic. So a link that was read or
  // written is read until it is empty, or it stays marked and the transport thread is woken for it.
  virtual void note_ready(std::uint64_t name) = 0;
  // Reads from each link that may have traffic, up to a bounded number of frames. A poster reads only from
  // the links of quick handlers.
  virtual void deliver(Driver driver) = 0;
  // Whether deliver() left traffic, or traffic has come since.
  [[nodiscard]] virtual bool has_traffic() const = 0;
  // Called last, on the transport thread, after every link has ended.
  virtual void teardown() = 0;

 private:
  static constexpr std::size_t kNumTasksAtFirst = 64;  // the queue grows when needed
  // The largest number of rounds for which other threads' posts and arriving frames may keep a poster or a
  // waiter driving.
  static constexpr int kNumPosterRoundsMax = 4;
  static constexpr int kNumWaiterRoundsMax = 64;
  static constexpr std::int64_t kNoPulse = -1;

  struct Stop {
    bool requested = false;
    bool farewell = true;
    Deadline deadline;
  };

  void request_stop(Stop stop);
  [[nodiscard]] bool may_drive() const;
  [[nodiscard]] Watch* take_sleeper();
  [[nodiscard]] bool begin_driving();
  [[nodiscard]] bool listen_for_bells();
  void stop_waiting();
  [[nodiscard]] bool stop_driving(bool hands_over);
  void drive_as_poster();
  void drop_drive();
  void fail_links(const Failure& failure);
  [[nodiscard]] bool sleep_and_drive(int timeout_ms, const std::function<bool()>& done);
  [[nodiscard]] bool may_waiter_sleep();
  [[nodiscard]] bool wake_waiter(std::span<const std::uint64_t> names);
  [[nodiscard]] bool drive_as_waiter(const std::function<bool()>& done);
  void run();
  Stop take_turn(bool& closing);
  Stop run_tasks();
  void put_back(std::vector<Task>::iterator next);
  void close_links();
  void say_beats(Deadline now);
  void check_hellos(Deadline now);
  void check_peers(Deadline now);
  void check_silent_peer(PeerLife& peer, Deadline now);
  [[nodiscard]] std::vector<LinkCore*> links_that_await(const PeerLife& peer) const;
  [[nodiscard]] std::optional<Deadline> next_deadline(const Stop& stop) const;
  void wait_for_traffic(std::optional<Deadline> deadline);
  [[nodiscard]] bool may_thread_sleep();
  [[nodiscard]] bool wake_thread(std::span<const std::uint64_t> names);
  void finish();

  const TransportOptions options_;
  const Clock::duration beat_period_;
  const HomeProcess home_;  // the process that owns the sockets
  Watch waiter_watch_;      // descriptors are added here first, so that the waiter is woken first
  Watch thread_watch_;
  std::mutex join_mutex_;  // guards thread_'s join
  std::thread thread_;

  std::mutex mutex_;  // guards the members below
  std::vector<Task> tasks_;
  std::vector<std::uint64_t> told_;        // names of readable descriptors, for the thread that drives
  std::map<std::string, PeerLife> peers_;  // by name; they outlive the links
  std::vector<std::unique_ptr<LinkCore>> links_;
  Stop stop_;
  // Whether a thread drives. It stays true after the end, so that no thread drives then.
  bool driven_ = false;
  bool thread_sleeps_ = false;             // the transport thread sleeps and has not been woken
  bool waiter_sleeps_ = false;             // the waiter sleeps and has not been woken
  std::optional<std::thread::id> waiter_;  // the thread in drive_until()
  bool interrupted_ = false;               // interrupt() was called since the waiter last slept
  bool stopped_ = false;                   // no more tasks are taken
  int num_wanting_all_ = 0;
  RingBoard* board_ = nullptr;  // null without rings; the mutex guards the board's wish, not the pointer

  std::atomic<bool> needs_thread_{false};
  std::atomic<std::int64_t> pulse_ns_{kNoPulse};  // time of the last pulse()
  std::atomic<std::uint64_t> num_work_items_{0};

  // Used by the thread that drives the transport.
  std::vector<LinkCore*> active_links_;
  bool some_ended_ = false;               // an active link ended since the transport thread's last turn
  std::vector<LinkCore*> greeted_links_;  // links that wait for HELLO, and some that no longer do
  std::vector<PeerLife*> active_peers_;   // peers of the active links, and some whose links have all ended
  Deadline last_check_;                   // when active_peers_ were last checked
  Deadline next_check_;  // when a peer may count as silent at the earliest; unused without beats
  std::vector<Task> running_tasks_;
  std::vector<std::uint64_t> noted_;
  Deadline next_beat_;
};

}  // namespace pipedream
