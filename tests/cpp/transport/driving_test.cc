// Tests, for every transport, which thread drives it, and that nothing is lost when another thread takes
// over. The thread that drives runs posted functions, moves bytes and calls the handlers (transport.h). Some
// tests need a function to run on a certain thread. They repeat until no other thread drives.
#include <gtest/gtest.h>
#include <sys/time.h>

#include <atomic>
#include <csignal>
#include <latch>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "recorder.h"

namespace pipedream {
namespace {

// When a peer timeout is due, the transport thread would deliver a lost frame, and hide the loss. So the
// timeout is longer than the test's patience.
constexpr double kNoDeadlineS = 1e4;

Deadline in_patience() { return Clock::now() + kPatience; }

// Sends this process a signal with a handler, up to 20,000 times a second, while it exists.
class Interruptions {
 public:
  Interruptions() {
    struct sigaction action {};
    action.sa_handler = [](int) { ++num_signals_; };
    num_signals_ = 0;
    EXPECT_EQ(::sigaction(SIGALRM, &action, &before_), 0);
    set_timer(50);
  }
  ~Interruptions() {
    set_timer(0);
    ::sigaction(SIGALRM, &before_, nullptr);
  }
  Interruptions(const Interruptions&) = delete;
  Interruptions& operator=(const Interruptions&) = delete;

  [[nodiscard]] int num_signals() const { return num_signals_.load(); }

 private:
  static void set_timer(suseconds_t period_us) {
    itimerval timer{};
    timer.it_interval.tv_usec = period_us;
    timer.it_value.tv_usec = period_us;
    EXPECT_EQ(::setitimer(ITIMER_REAL, &timer, nullptr), 0);
  }

  static inline std::atomic<int> num_signals_{0};
  struct sigaction before_ {};
};

class Driving : public testing::TestWithParam<std::string> {
 protected:
  void SetUp() override { make_transports(kNoDeadlineS); }

  void make_transports(double peer_timeout_s, bool beats = false) {
    TransportOptions options;
    options.peer_timeout_s = peer_timeout_s;
    options.beats = beats;
    listening_ = make_transport(GetParam(), options);
    if (!listening_) GTEST_SKIP() << GetParam() << " is not available";
    connecting_ = make_transport(GetParam(), options);
  }
  void open_link() {
    // Another thread may deliver the frame for which a thread waits. So each frame wakes the waiting thread.
    at_listener_.after_frame = [this] { listening_->interrupt(); };
    at_connector_.after_frame = [this] { connecting_->interrupt(); };
    listener_ = &listening_->listen(link_options("stage 0 (rank 0)"), at_listener_);
    connector_ = &connecting_->connect(link_options(), listener_->endpoint(), at_connector_);
    ASSERT_TRUE(at_listener_.wait_open());
    ASSERT_TRUE(at_connector_.wait_open());
  }

  // Posts `function` again and again until it has run on this thread. Returns false if it never did.
  template <class Function>
  [[nodiscard]] static bool runs_here(Transport& transport, Function function) {
    return wait_until([&] {
      const auto thread = std::make_shared<std::atomic<std::thread::id>>();
      transport.post_and_drive([thread, function] {
        thread->store(std::this_thread::get_id());
        function();
      });
      return thread->load() == std::this_thread::get_id();
    });
  }

  // The recorders are declared first, so that they outlive the transports.
  Recorder at_listener_;
  Recorder at_connector_;
  std::unique_ptr<Transport> listening_;
  std::unique_ptr<Transport> connecting_;
  Link* listener_ = nullptr;
  Link* connector_ = nullptr;
};

// ---- Posting ----

TEST_P(Driving, PosterRunsWhatItPostsWhereNobodyDrives) {
  EXPECT_TRUE(runs_here(*connecting_, [] {}));
}

TEST_P(Driving, FrameOfAPosterHasLeftWhenItReturns) {
  open_link();
  ASSERT_TRUE(runs_here(*connecting_, [&] {
    const std::uint64_t num_sent = connector_->counters().frames_sent;
    connector_->send(credit_frame(1));
    EXPECT_EQ(connector_->counters().frames_sent, num_sent + 1);
  }));
  EXPECT_TRUE(at_listener_.wait_frames(1));
}

TEST_P(Driving, WhatIsPostedForLaterRunsWhereThePosterDrives) {
  EXPECT_TRUE(wait_until([&] {
    const auto thread = std::make_shared<std::atomic<std::thread::id>>();
    connecting_->post_for_later([thread] { thread->store(std::this_thread::get_id()); });
    connecting_->drive_posted();
    return thread->load() == std::this_thread::get_id();
  }));
}

TEST_P(Driving, WhatIsPostedForLaterRunsBeforeThePosterWaits) {
  std::atomic<bool> ran{false};
  connecting_->post_for_later([&] {
    ran = true;
    connecting_->interrupt();  // the function may run on another thread
  });
  EXPECT_TRUE(connecting_->drive_until(in_patience(), [&] { return ran.load(); }));
  EXPECT_TRUE(ran.load());
}

TEST_P(Driving, WhatIsPostedForLaterIsDroppedAfterShutdown) {
  connecting_->shutdown(0);
  connecting_->post_for_later([] { ADD_FAILURE() << "dropped after shutdown"; });
  connecting_->drive_posted();
}

TEST_P(Driving, WhatIsPostedWhileAnotherThreadDrivesIsRunByThatOne) {
  std::latch driving(1);
  std::latch posted(1);
  std::latch ran(1);
  std::thread::id busy_thread;
  std::thread::id thread;
  connecting_->post([&] {
    busy_thread = std::this_thread::get_id();
    driving.count_down();
    posted.wait();
  });
  driving.wait();
  connecting_->post_and_drive([&] {
    thread = std::this_thread::get_id();
    ran.count_down();
  });
  EXPECT_FALSE(ran.try_wait());  // this post did not wait for the other thread
  posted.count_down();
  ran.wait();
  EXPECT_EQ(thread, busy_thread);
}

TEST_P(Driving, ErrorOfATaskReachesWhoDrivesAndTheThreadGoesOn) {
  const std::thread::id here = std::this_thread::get_id();
  const auto throws_here = [&] {
    if (std::this_thread::get_id() == here) throw std::runtime_error("the device refuses");
  };
  const auto has_thrown = [&] {
    try {
      connecting_->post_and_drive(throws_here);
      return false;
    } catch (const std::runtime_error&) {
      return true;
    }
  };
  for (int round = 0; round < 10; ++round) {
    ASSERT_TRUE(wait_until(has_thrown));
    std::latch ran(1);
    connecting_->post([&] { ran.count_down(); });
    ran.wait();
  }
}

TEST_P(Driving, ErrorOfATaskLeavesWhatWasPostedBesideItInItsOrder) {
  const std::thread::id here = std::this_thread::get_id();
  const auto has_thrown_here = [&] {
    const auto num_run = std::make_shared<std::atomic<int>>(0);
    const auto post = [&](int index) {
      connecting_->post_for_later([num_run, index] { EXPECT_EQ(num_run->fetch_add(1), index); });
    };
    bool has_thrown = false;
    try {
      post(0);
      connecting_->post_for_later([here] {
        if (std::this_thread::get_id() == here) throw std::runtime_error("the device refuses");
      });
      for (int index = 1; index < 4; ++index) post(index);
      connecting_->drive_posted();
    } catch (const std::runtime_error&) {
      has_thrown = true;
    }
    EXPECT_TRUE(wait_until([&] { return num_run->load() == 4; }));
    return has_thrown;
  };
  EXPECT_TRUE(wait_until(has_thrown_here));
}

// post() does not drive the transport, so the transport thread runs the task.
TEST_P(Driving, ErrorOnTheTransportThreadIsTheFailureOfItsLinks) {
  open_link();
  connecting_->post([] { throw std::runtime_error("out of memory"); });
  const Failure failure = at_connector_.wait_failure();
  EXPECT_EQ(failure.kind, FailureKind::kUncaught);
  EXPECT_EQ(failure.message, "out of memory");
  EXPECT_EQ(at_listener_.wait_failure().kind, FailureKind::kPeerLost);
  std::latch ran(1);
  connecting_->post([&] { ran.count_down(); });  // the transport thread still works
  ran.wait();
}

TEST_P(Driving, ErrorOfATaskEndsAWaitAndTheNextOneMayWait) {
  const std::thread::id here = std::this_thread::get_id();
  std::atomic<bool> has_thrown{false};
  const auto throws_here = [&] {
    if (std::this_thread::get_id() == here && !has_thrown.exchange(true)) throw std::runtime_error("refused");
  };
  const auto wait_for_error = [&] {
    connecting_->post(throws_here);
    return has_thrown.load();
  };
  try {
    // The transport thread may run the task. In that case this thread tries again.
    while (!has_thrown.load()) {
      EXPECT_TRUE(connecting_->drive_until(Clock::now() + std::chrono::milliseconds(1), wait_for_error));
    }
  } catch (const std::runtime_error&) {
  }
  EXPECT_TRUE(has_thrown.load());
  EXPECT_TRUE(connecting_->drive_until(in_patience(), [] { return true; }));
}

TEST_P(Driving, SignalsOnTheThreadThatDrivesLoseNothing) {
  open_link();
  const Interruptions interruptions;
  constexpr int kNumSignals = 2000;
  std::size_t num_frames = 0;
  for (; interruptions.num_signals() < kNumSignals; ++num_frames) {
    connecting_->post_and_drive([&] { connector_->send(credit_frame(0)); });
    listening_->post_and_drive([&] { listener_->send(credit_frame(0)); });
  }
  EXPECT_TRUE(at_listener_.wait_frames(num_frames));
  EXPECT_TRUE(at_connector_.wait_frames(num_frames));
}

TEST_P(Driving, WhatADriverPostsComesAfterWhatItIsIn) {
  bool inner_ran = false;
  EXPECT_TRUE(runs_here(*connecting_, [&] {
    inner_ran = false;
    connecting_->post_and_drive([&] { inner_ran = true; });
    EXPECT_FALSE(inner_ran);
  }));
  EXPECT_TRUE(inner_ran);
}

TEST_P(Driving, HandlerDrivesNoOtherTransport) {
  const auto ran =
      std::make_shared<std::atomic<bool>>(false);  // shared, because a task may run after the test
  const std::thread::id here = std::this_thread::get_id();
  EXPECT_TRUE(runs_here(*connecting_, [&] {
    listening_->post_and_drive([ran, here] {
      EXPECT_NE(std::this_thread::get_id(), here);
      *ran = true;
    });
    EXPECT_FALSE(listening_->drive_until(in_patience(), [] { return false; }));
  }));
  EXPECT_TRUE(wait_until([&] { return ran->load(); }));
}

TEST_P(Driving, PassiveThreadOnlyPosts) {
  std::latch ran(1);
  std::thread::id thread;
  {
    const PassiveScope passive;
    connecting_->post_and_drive([&] {
      thread = std::this_thread::get_id();
      ran.count_down();
    });
    EXPECT_FALSE(connecting_->drive_until(in_patience(), [] { return false; }));
  }
  ran.wait();
  EXPECT_NE(thread, std::this_thread::get_id());
  EXPECT_TRUE(runs_here(*connecting_, [] {}));
}

TEST_P(Driving, EveryTaskRunsOnceAndAloneHoweverItIsPosted) {
  constexpr int kNumThreads = 4;
  constexpr int kNumTasks = 5000;
  int num_run = 0;  // not atomic, because only one thread drives at a time
  std::vector<std::thread> threads;
  for (int thread_index = 0; thread_index < kNumThreads; ++thread_index) {
    threads.emplace_back([&, thread_index] {
      for (int task = 0; task < kNumTasks; ++task) {
        if ((task + thread_index) % 3 == 0) {
          connecting_->post([&] { ++num_run; });
        } else {
          connecting_->post_and_drive([&] { ++num_run; });
        }
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  // Nothing more is posted, so a thread must already be running the tasks that are left.
  EXPECT_TRUE(wait_until([&] {
    int num_seen = 0;
    std::latch looked(1);
    connecting_->post([&] {
      num_seen = num_run;
      looked.count_down();
    });
    looked.wait();
    return num_seen == kNumThreads * kNumTasks;
  }));
}

// No later post would run the task, so it must run without one.
TEST_P(Driving, TaskPostedAsADriverStopsIsRun) {
  constexpr int kNumRounds = 3000;
  for (int round = 0; round < kNumRounds; ++round) {
    std::latch both_ran(2);
    std::thread other([&] { connecting_->post_and_drive([&] { both_ran.count_down(); }); });
    connecting_->post([&] { both_ran.count_down(); });
    other.join();
    ASSERT_TRUE(wait_until([&] { return both_ran.try_wait(); })) << "round " << round;
  }
}

// ---- Waiting ----

TEST_P(Driving, WaiterDeliversWhatItWaitsFor) {
  std::atomic<std::thread::id> thread;
  at_listener_.when_frame = [&](Link&, const FrameHeader&) {
    thread = std::this_thread::get_id();
    return std::nullopt;
  };
  open_link();
  EXPECT_TRUE(wait_until([&] {
    const std::size_t num_frames = at_listener_.frames().size() + 1;
    connector_->send(credit_frame(num_frames));
    EXPECT_TRUE(
        listening_->drive_until(in_patience(), [&] { return at_listener_.frames().size() >= num_frames; }));
    EXPECT_EQ(at_listener_.frames().size(), num_frames);
    return thread.load() == std::this_thread::get_id();
  }));
}

TEST_P(Driving, DoneIsNotAskedAgainOnceItWasTrue) {
  open_link();
  for (std::size_t num_frames = 1; num_frames < 300; ++num_frames) {
    connector_->send(credit_frame(num_frames));
    int num_true = 0;
    EXPECT_TRUE(listening_->drive_until(in_patience(), [&] {
      const bool is_there = at_listener_.frames().size() >= num_frames;
      num_true += is_there ? 1 : 0;
      return is_there;
    }));
    ASSERT_EQ(num_true, 1);
  }
}

TEST_P(Driving, InterruptIsNotLost) {
  constexpr int kNumRounds = 5000;
  std::atomic<int> round{0};
  std::thread waiter([&] {
    for (int awaited = 1; awaited <= kNumRounds; ++awaited) {
      EXPECT_TRUE(connecting_->drive_until(in_patience(), [&] { return round.load() >= awaited; }));
      ASSERT_GE(round.load(), awaited) << "an interrupt was lost";
    }
  });
  std::thread poster([&] {  // makes other threads drive in between
    while (round.load() < kNumRounds) connecting_->post_and_drive([] {});
  });
  for (int index = 0; index < kNumRounds; ++index) {
    ++round;
    connecting_->interrupt();
  }
  waiter.join();
  poster.join();
}

TEST_P(Driving, OneThreadWaitsAtATime) {
  std::latch waiting(1);
  std::atomic<bool> is_over{false};
  std::thread waiter([&] {
    EXPECT_TRUE(connecting_->drive_until(in_patience(), [&] {
      if (!waiting.try_wait()) waiting.count_down();
      return is_over.load();
    }));
  });
  waiting.wait();
  EXPECT_FALSE(connecting_->drive_until(in_patience(), [] { return false; }));
  is_over = true;
  connecting_->interrupt();
  waiter.join();
  EXPECT_TRUE(connecting_->drive_until(in_patience(), [] { return true; }));
}

TEST_P(Driving, WaitEndsAtItsDeadline) {
  const Deadline deadline = Clock::now() + std::chrono::milliseconds(20);
  EXPECT_TRUE(connecting_->drive_until(deadline, [] { return false; }));
  EXPECT_GE(Clock::now(), deadline);
}

TEST_P(Driving, WhatIsPostedToASleepingWaiterIsRun) {
  std::atomic<bool> is_over{false};
  std::thread waiter(
      [&] { EXPECT_TRUE(connecting_->drive_until(in_patience(), [&] { return is_over.load(); })); });
  for (int index = 0; index < 2000; ++index) {
    std::latch ran(1);
    connecting_->post([&] { ran.count_down(); });
    ran.wait();
  }
  is_over = true;
  connecting_->interrupt();
  waiter.join();
}

// ---- Traffic ----

// libzmq reports only once that a frame has arrived. A send at the same moment may consume this report.
class DrivingWithTraffic : public Driving {
 protected:
  void send_both_ways(bool is_quick, bool waits) {
    constexpr std::uint64_t kNumRounds = 3000;
    at_connector_.quick = is_quick;
    open_link();
    std::atomic<std::uint64_t> round{0};
    std::thread other([&] {
      for (std::uint64_t seen = 0; seen < kNumRounds; ++seen) {
        while (round.load() == seen) std::this_thread::yield();
        listening_->post_and_drive([&, seen] { listener_->send(credit_frame(seen)); });
      }
    });
    for (std::uint64_t index = 0; index < kNumRounds; ++index) {
      ++round;
      connecting_->post_and_drive([&, index] { connector_->send(credit_frame(index)); });
      if (waits) {
        EXPECT_TRUE(
            connecting_->drive_until(in_patience(), [&] { return at_connector_.frames().size() > index; }));
      }
      ASSERT_TRUE(at_connector_.wait_frames(index + 1)) << "traffic was lost in round " << index;
      ASSERT_TRUE(at_listener_.wait_frames(index + 1)) << "traffic was lost in round " << index;
    }
    other.join();
  }
};

TEST_P(DrivingWithTraffic, WhatArrivesDuringAPostersSendIsDeliveredWithoutAnotherEvent) {
  send_both_ways(/*is_quick=*/false, /*waits=*/false);
}

TEST_P(DrivingWithTraffic, WhatArrivesForAQuickHandlerDuringAPostersSendIsDelivered) {
  send_both_ways(/*is_quick=*/true, /*waits=*/false);
}

TEST_P(DrivingWithTraffic, WhatArrivesBetweenAPostersSendAndItsWaitIsDelivered) {
  send_both_ways(/*is_quick=*/false, /*waits=*/true);
}

TEST_P(DrivingWithTraffic, FramesOfManyThreadsKeepTheOrderOfEach) {
  constexpr std::uint64_t kNumThreads = 3;
  constexpr std::uint64_t kNumFrames = 2000;
  open_link();
  std::vector<std::thread> threads;
  for (std::uint64_t thread_index = 0; thread_index < kNumThreads; ++thread_index) {
    threads.emplace_back([&, thread_index] {
      for (std::uint64_t frame = 0; frame < kNumFrames; ++frame) {
        const auto send = [&, number = (thread_index << 32) + frame] {
          connector_->send(credit_frame(number));
        };
        if (frame % 2 == thread_index % 2) {
          connecting_->post_and_drive(send);
        } else {
          send();
        }
      }
    });
  }
  constexpr std::size_t kNumAll = kNumThreads * kNumFrames;
  EXPECT_TRUE(
      listening_->drive_until(in_patience(), [&] { return at_listener_.frames().size() >= kNumAll; }));
  for (std::thread& thread : threads) thread.join();
  std::vector<std::uint64_t> next(kNumThreads, 0);
  const std::vector<Recorder::Frame> frames = at_listener_.frames();
  ASSERT_EQ(frames.size(), kNumAll);
  for (const Recorder::Frame& frame : frames) {
    ASSERT_EQ(number_of(frame.header) & 0xFFFFFFFFU, next.at(number_of(frame.header) >> 32)++);
  }
}

// ---- Deadlines and ends ----

TEST_P(Driving, DeadlinesAreKeptWhileOthersDriveAllTheTime) {
  make_transports(0.4, /*beats=*/true);
  open_link();
  std::atomic<bool> is_over{false};
  const auto keep_driving = [&](Transport& transport) {
    while (!is_over.load()) transport.post_and_drive([] {});
  };
  std::thread one([&] { keep_driving(*connecting_); });
  std::thread other([&] {
    while (!is_over.load()) {
      EXPECT_TRUE(listening_->drive_until(Clock::now() + std::chrono::milliseconds(5), [] { return false; }));
    }
  });
  // Neither side sends beats, the frames that say that a side is alive. So each side finds the other one
  // silent.
  EXPECT_EQ(at_connector_.wait_failure().kind, FailureKind::kPeerLost);
  EXPECT_EQ(at_listener_.wait_failure().kind, FailureKind::kPeerLost);
  is_over = true;
  one.join();
  other.join();
}

TEST_P(Driving, NoHandlerCallBeginsAfterCloseHasReturnedWhileAnotherThreadDrives) {
  for (int round = 0; round < 25; ++round) {
    Recorder at_listener;
    Recorder at_connector;
    std::atomic<bool> has_closed{false};
    std::atomic<int> num_late{0};
    at_listener.when_frame = [&](Link&, const FrameHeader&) {
      if (has_closed.load()) ++num_late;
      return std::nullopt;
    };
    Link& listener = listening_->listen(link_options("stage 0 (rank 0)"), at_listener);
    Link& connector = connecting_->connect(link_options(), listener.endpoint(), at_connector);
    ASSERT_TRUE(at_connector.wait_open());
    ASSERT_TRUE(at_listener.wait_open());
    std::thread waiter(
        [&] { EXPECT_TRUE(listening_->drive_until(in_patience(), [&] { return has_closed.load(); })); });
    std::thread sender([&] {
      for (std::uint64_t index = 0; !has_closed.load(); ++index) connector.send(credit_frame(index));
    });
    ASSERT_TRUE(at_listener.wait_frames(5));
    listener.close();
    has_closed = true;
    listening_->interrupt();
    waiter.join();
    sender.join();
    ASSERT_EQ(num_late.load(), 0) << "round " << round;
    ASSERT_TRUE(at_connector.wait_closed());  // the recorders are destroyed before the transports
    connector.close();
    std::latch looked(2);
    listening_->post([&] { looked.count_down(); });
    connecting_->post([&] { looked.count_down(); });
    looked.wait();
  }
}

TEST_P(Driving, ShutdownWhileOthersPostSendAndWaitGivesBackEveryFrame) {
  for (int round = 0; round < 20; ++round) {
    SentCount sent;
    Recorder at_listener;
    Recorder at_connector;
    make_transports(kNoDeadlineS);
    Link& listener = listening_->listen(link_options("stage 0 (rank 0)"), at_listener);
    Link& connector = connecting_->connect(link_options(), listener.endpoint(), at_connector);
    ASSERT_TRUE(at_connector.wait_open());
    std::atomic<bool> is_over{false};
    std::atomic<int> num_sent{0};
    const auto send = [&] {
      ++num_sent;
      connector.send(credit_frame(0, sent.callback()));
    };
    const auto has_room = [&] { return num_sent.load() - sent.count() < 100; };
    // A channel bounds the number of posted tasks, and so does this test. A queue that grows faster than it
    // is run never becomes empty.
    std::atomic<bool> is_posted{false};
    std::thread poster([&] {
      while (!is_over.load()) {
        if (is_posted.exchange(true)) continue;
        connecting_->post_and_drive([&] {
          is_posted.store(false);
          if (has_room()) send();
        });
      }
    });
    std::thread sender([&] {
      while (!is_over.load()) {
        if (has_room()) send();
      }
    });
    std::thread waiter(
        [&] { EXPECT_TRUE(connecting_->drive_until(in_patience(), [&] { return is_over.load(); })); });
    ASSERT_TRUE(at_listener.wait_frames(20));
    connecting_->shutdown(round % 2 == 0 ? 0 : 0.01);
    const std::size_t num_calls = at_connector.num_calls();
    is_over = true;
    connecting_->interrupt();
    poster.join();
    sender.join();
    waiter.join();
    EXPECT_EQ(at_connector.num_calls(), num_calls);
    listening_->shutdown(0);
    EXPECT_EQ(sent.count(), num_sent.load());
  }
}

TEST_P(Driving, WaitGoesOnAfterShutdownUntilItIsOver) {
  connecting_->shutdown(0);
  std::atomic<bool> is_over{false};
  std::thread waiter([&] {
    EXPECT_TRUE(connecting_->drive_until(in_patience(), [&] { return is_over.load(); }));
    EXPECT_TRUE(is_over.load());
  });
  is_over = true;
  connecting_->interrupt();
  waiter.join();
  connecting_->post_and_drive([] { ADD_FAILURE() << "dropped after shutdown"; });
}

TEST_P(Driving, WaiterHasWhatNobodyWaitsForWithWhatWakesIt) {
  constexpr std::size_t kNumCredits = 100;
  open_link();
  std::latch is_patient(1);
  listening_->post([&] {
    listener_->let_wait(Patience::kUntilOneDrives);
    is_patient.count_down();
  });
  is_patient.wait();
  std::thread sending([&] {
    for (std::size_t index = 0; index < kNumCredits; ++index) {
      connecting_->post_and_drive([&, index] { connector_->send(credit_frame(index)); });
    }
    OutgoingFrame end;
    end.header.kind = FrameKind::kEnd;
    // The frame is copied, because the transport thread may send it after this thread has ended.
    connecting_->post_and_drive([this, end] { connector_->send(end); });
  });
  EXPECT_TRUE(
      listening_->drive_until(in_patience(), [&] { return at_listener_.frames().size() > kNumCredits; }));
  sending.join();
  ASSERT_EQ(at_listener_.frames().size(), kNumCredits + 1);
  EXPECT_EQ(at_listener_.frames().back().header.kind, FrameKind::kEnd);
}

TEST_P(Driving, WaiterWhoseTimeIsOverHasLookedAtWhatIsThere) {
  open_link();
  if (GetParam() == "zmq_rings") listening_->post([this] { listener_->let_wait(Patience::kUntilOneWaits); });
  connecting_->post_and_drive([this] { connector_->send(credit_frame(1)); });
  while (at_listener_.frames().empty()) {
    EXPECT_TRUE(listening_->drive_until(Clock::now(), [this] { return !at_listener_.frames().empty(); }));
  }
}

INSTANTIATE_TEST_SUITE_P(Transports, Driving, testing::Values("inproc", "zmq", "zmq_rings"),
                         [](const auto& parameter) { return parameter.param; });
INSTANTIATE_TEST_SUITE_P(Transports, DrivingWithTraffic, testing::Values("inproc", "zmq", "zmq_rings"),
                         [](const auto& parameter) { return parameter.param; });

}  // namespace
}  // namespace pipedream
