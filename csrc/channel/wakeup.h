// The compute thread of a stage sleeps here until a channel has something for it or the run has failed. Each
// worker has one Wakeup, and all its channels share it. Its mutex guards every channel's inbox and the
// failure. A sleeping thread drives the transport if no other thread does, so that it can receive its item
// without the help of another thread.
#pragma once

#include <atomic>
#include <condition_variable>
#include <functional>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "base/failure.h"
#include "base/scope_exit.h"
#include "device/device.h"
#include "transport/transport.h"

namespace pipedream {

class Wakeup {
 public:
  // Called before the first wait. The transport outlives the last wait.
  void drive_while_waiting(Transport& transport) { transport_ = &transport; }

  // Only the first failure is kept, because it is the cause and later failures are its consequences.
  void fail(Failure failure) {
    update([&] {
      if (!failure_) failure_ = std::move(failure);
    });
  }

  // Runs a function that may call the device, on a thread where nobody catches exceptions. On a DeviceError
  // the run fails with the error's message, and the result is false.
  template <class Function>
  [[nodiscard]] bool try_on_device(const std::string& channel_name, Function function) {
    try {
      function();
      return true;
    } catch (const DeviceError& error) {
      fail_of_device(channel_name, error);
      return false;
    }
  }
  void fail_of_device(const std::string& channel_name, const DeviceError& error) {
    fail({FailureKind::kDeviceError, channel_name + ": " + error.what()});
  }

  // Runs `change` under the lock, then wakes the waiters.
  template <class Change>
  void update(Change change) {
    bool waiter_drives = false;
    {
      const std::lock_guard lock(mutex_);
      change();
      waiter_drives = waiter_drives_;
    }
    changed_.notify_all();
    if (waiter_drives) transport_->interrupt();
  }

  // Runs `look` under the lock until it returns true, the run fails or the deadline passes. If `look` returns
  // true, the result is true even if the run has failed, because items that arrived before the failure are
  // still used. The result is false if the deadline has passed or failure() is set.
  template <class Look>
  [[nodiscard]] bool wait_until(Deadline deadline, Look look) {
    std::unique_lock lock(mutex_);
    bool accepted = false;
    const auto done = [&] {
      accepted = look();
      return accepted || failure_.has_value();
    };
    if (done()) return accepted;
    if (transport_ != nullptr && !waiter_drives_) {
      waiter_drives_ = true;
      const auto done_under_lock = [&] {
        const std::lock_guard look_lock(mutex_);
        return done();
      };
      bool drove = false;
      {
        lock.unlock();
        const ScopeExit has_waited([&] {  // runs also when a device's error is thrown
          lock.lock();
          waiter_drives_ = false;
        });
        drove = transport_->drive_until(deadline, std::ref(done_under_lock));
      }
      if (drove) return accepted;
    }
    if (transport_ == nullptr) {
      changed_.wait_until(lock, deadline, done);
      return accepted;
    }
    // Another thread drives the transport, and delivers this thread's items.
    lock.unlock();
    transport_->want_all(true);
    const ScopeExit has_waited([&] { transport_->want_all(false); });
    lock.lock();
    changed_.wait_until(lock, deadline, done);
    lock.unlock();
    return accepted;
  }

  // The compute thread calls begin_item() and end_item() around each work item. Functions that it gives to
  // post_with_item() in between run at end_item(), together with the sends of the work item, unless another
  // thread that drives runs them earlier.
  void begin_item() { item_thread_.store(std::this_thread::get_id(), std::memory_order_relaxed); }
  void end_item() {
    item_thread_.store({}, std::memory_order_relaxed);
    if (Transport* const transport = std::exchange(posted_to_, nullptr)) transport->drive_posted();
  }
  // Posts the function. If this thread is within a work item, it does not drive the transport for the
  // function before end_item(). Otherwise the function runs as soon as possible. Any thread.
  void post_with_item(Transport& transport, std::function<void()> function) {
    if (item_thread_.load(std::memory_order_relaxed) != std::this_thread::get_id()) {
      transport.post_and_drive(std::move(function));
      return;
    }
    posted_to_ = &transport;
    transport.post_for_later(std::move(function));
  }

  // Keeps the function until run_deferred(), which the compute thread calls between its work items. Any
  // thread may defer.
  void defer(std::function<void()> function) {
    const std::lock_guard lock(mutex_);
    deferred_.push_back(std::move(function));
    has_deferred_.store(true);
  }
  void run_deferred() {
    if (!has_deferred_.load(std::memory_order_relaxed)) return;
    std::vector<std::function<void()>> deferred;
    {
      const std::lock_guard lock(mutex_);
      deferred.swap(deferred_);
      has_deferred_.store(false);
    }
    for (const std::function<void()>& function : deferred) function();
  }

  [[nodiscard]] std::optional<Failure> failure() const {
    const std::lock_guard lock(mutex_);
    return failure_;
  }

 private:
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::optional<Failure> failure_;
  std::vector<std::function<void()>> deferred_;
  bool waiter_drives_ = false;  // a thread is in drive_until()

  Transport* transport_ = nullptr;
  std::atomic<bool> has_deferred_{false};
  std::atomic<std::thread::id> item_thread_{};  // default id: no thread is within a work item
  Transport* posted_to_ = nullptr;              // where item_thread_ has posted within its work item, or null
};

}  // namespace pipedream
