// Where a stage's compute thread sleeps until a channel has something for it, or the run has failed.
// One per worker, shared by its channels. The mutex guards every channel's inbox and the failure.
#pragma once

#include <condition_variable>
#include <mutex>
#include <optional>

#include "base/clock.h"
#include "base/failure.h"

namespace pipedream {

class Wakeup {
 public:
  // The first failure is the cause and stays; later ones are consequences.
  void fail(Failure failure) {
    {
      const std::lock_guard lock(mutex_);
      if (!failure_) failure_ = std::move(failure);
    }
    changed_.notify_all();
  }

  // Runs `change` under the lock, then wakes the waiters.
  template <class Change>
  void update(Change change) {
    {
      const std::lock_guard lock(mutex_);
      change();
    }
    changed_.notify_all();
  }

  // Runs `look` under the lock until it returns true, the run fails or the deadline passes. What `look`
  // accepts wins over a failure, so that what had arrived before it is still used.
  // True: accepted. False: deadline, or failure() is set.
  template <class Look>
  [[nodiscard]] bool wait_until(Deadline deadline, Look look) {
    std::unique_lock lock(mutex_);
    bool accepted = false;
    changed_.wait_until(lock, deadline, [&] {
      accepted = look();
      return accepted || failure_.has_value();
    });
    return accepted;
  }

  [[nodiscard]] std::optional<Failure> failure() const {
    const std::lock_guard lock(mutex_);
    return failure_;
  }

 private:
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::optional<Failure> failure_;
};

}  // namespace pipedream
