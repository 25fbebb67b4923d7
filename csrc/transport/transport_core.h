// The core of every transport: who drives it, its task queue, and the life of its links. zmq/ and inproc/ add
// how bytes are carried.
//
//   any thread   send, close, post, listen ---> task queue ---> whoever drives
//   poster       post_and_drive(): 1 run tasks  2 deliver what is quick; wake the thread for what is left.
//                post_for_later() leaves that to its drive_posted(), or to whoever drives before
//   waiter       drive_until():    sleep, 1 run tasks  2 deliver, until it has what it waits for
//   thread       loop: 1 run tasks  2 deliver  3 close or time out links, say BEAT  4 sleep
//
// Who drives has set driven_, under the mutex. Nobody waits for that; what one has for another driver lies
// under the same mutex, where the one who drives looks once more as it stops driving. Nothing is lost:
//
//   a task      is queued. Where nobody drives a sleeper is woken, the waiter before the thread
//   traffic     is told of once, to one sleeper (watch.h), which drives or queues it for the one who does. A
//               link that was read or written is read until it is empty, or it stays marked and the thread is
//               woken for it: reading and writing may both use up what would tell of more traffic
//   a frame     in rings (ring_board.h) rings the bell, which is traffic, only for a sleeper who wants that;
//               who goes to sleep, or stops driving, says for what and then looks once more
//   a deadline  is the thread's. Whoever makes a new one, or ends a link, calls need_thread(): from then on
//               nobody else begins to drive until the thread has had its turn
//
// driving.cc has the poster's and the waiter's turns, transport_core.cc the thread's and the life of the
// links.
//
// Ownership: owns its thread and its links. Bound of the queue: what channels have credits for. Tasks lie in
// the queue itself, which keeps the room it has once had: in the steady state nothing is allocated.
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

inline constexpr int kBeatsPerTimeout = 8;  // so that a few may be late

// Room for the largest: a frame with its encoded header.
inline constexpr std::size_t kTaskBytesMax = 496;
using Task = InlineFunction<kTaskBytesMax>;

// Why a thread drives, and so what it has time for.
enum class Driver {
  kPoster,  // it has posted something and goes back to its work: nothing that takes long
  kWaiter,  // it waits for what a handler does: everything until that has come
  kThread,  // the transport thread: everything
};

class TransportCore : public Transport {
 public:
  // Throws UserError when peer_timeout_s is not positive.
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

  // Ends without a farewell, as a killed process does. For tests.
  void abandon();
  // Runs what was posted where start() was not called, so that no thread comes that is needed. For tests.
  void drive_without_thread();

  // Runs `function` on the thread that drives, or destroys it, here, when the transport has ended. May be
  // move-only. Any thread.
  template <class Function>
  void enqueue(Function function) {
    // A refused task dies here, outside the lock: its destructor may run the user's on_sent.
    Task task(std::move(function));
    static_cast<void>(try_enqueue(task));
  }
  // False when the transport has ended: the task was not taken.
  [[nodiscard]] bool try_enqueue(Task& task);

  // This thread drives this transport; any transport.
  [[nodiscard]] bool is_driven_here() const;
  [[nodiscard]] static bool is_any_driven_here();

  // Who drives. The transport thread takes a turn soon: there is something that it alone does, or has time
  // for.
  void need_thread() { needs_thread_.store(true); }
  // The same. A link awaits its peer's HELLO until a deadline, or has ended.
  void await_hello(LinkCore& link);
  void note_ended();
  // Who drives, or nobody yet. `name` comes with note_ready() when it becomes readable; see watch.h.
  void watch(int fd, std::uint64_t name);
  void unwatch(int fd);

  // The one that all links with this LinkOptions::peer share.
  [[nodiscard]] PeerLife& peer_named(const std::string& name);

  [[nodiscard]] const TransportOptions& transport_options() const { return options_; }

 protected:
  // A subclass calls start() at the end of its constructor and shutdown(0) at the start of its destructor:
  // between them the thread may call what is virtual.
  void start();

  // Before start(): deliver() reads the rings that are marked there; who sleeps is woken for them.
  void listen_to(RingBoard& board) { board_ = &board; }

  // Takes the link over and starts it. Throws UserError after shutdown.
  Link& add(std::unique_ptr<LinkCore> link);

  // The rest: who drives. What has this name is readable.
  virtual void note_ready(std::uint64_t name) = 0;
  // A bounded turn for each link that may have traffic.
  virtual void deliver(Driver driver) = 0;
  [[nodiscard]] virtual bool has_traffic() const = 0;  // left by deliver(), or noted since
  // Transport thread, last of all: every link has ended.
  virtual void teardown() = 0;

 private:
  static constexpr std::size_t kNumTasksAtFirst = 64;  // room for more is made when it is needed
  // Posts of others and arrivals may keep a thread that has other things to do for no more rounds than this.
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
  const HomeProcess home_;  // of the sockets
  Watch waiter_watch_;      // descriptors are added here first: who waits is woken before the thread
  Watch thread_watch_;
  std::mutex join_mutex_;  // guards thread_'s join
  std::thread thread_;

  std::mutex mutex_;  // guards the members below
  std::vector<Task> tasks_;
  std::vector<std::uint64_t> told_;        // names of what became readable, for who drives
  std::map<std::string, PeerLife> peers_;  // by name; outlive the links
  std::vector<std::unique_ptr<LinkCore>> links_;
  Stop stop_;
  bool driven_ = false;                    // and after the end: nobody drives then
  bool thread_sleeps_ = false;             // and nobody has woken it
  bool waiter_sleeps_ = false;             // likewise
  std::optional<std::thread::id> waiter_;  // in drive_until()
  bool interrupted_ = false;               // since it last slept
  bool stopped_ = false;                   // no more tasks
  int num_wanting_all_ = 0;
  RingBoard* board_ = nullptr;  // its wish; null: there are no rings

  std::atomic<bool> needs_thread_{false};
  std::atomic<std::int64_t> pulse_ns_{kNoPulse};  // when it was last felt
  std::atomic<std::uint64_t> num_work_items_{0};

  // Who drives.
  std::vector<LinkCore*> active_links_;   // started and not ended, but for some that ended in this turn
  bool some_ended_ = false;               // of these, since the thread's last turn
  std::vector<LinkCore*> greeted_links_;  // those that await HELLO, and some that no longer do
  std::vector<PeerLife*> active_peers_;   // theirs, and some whose links have all ended
  Deadline last_check_;                   // of these
  Deadline next_check_;  // the first of them may be silent by then; not when there are no beats
  std::vector<Task> running_tasks_;
  std::vector<std::uint64_t> noted_;
  Deadline next_beat_;
};

}  // namespace pipedream
