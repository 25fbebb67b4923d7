// Defines the streams and events of the host backend.
//
//   enqueuing threads --BoundedQueue--> stream thread: runs one operation after the other
//
// When a wait(event) is the next operation, the stream's thread blocks, as a CUDA stream would. A thread that
// enqueues an operation does not run it, with one exception: CallerStream has no thread, and runs each
// operation in its call.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <variant>

#include "base/bounded_queue.h"
#include "device/device.h"

namespace pipedream {

// The state of an event. The event shares it with the operations that use it, so the event may be destroyed
// before they run. Records are numbered from 1. Record k is complete when everything before it in its stream
// is done.
class HostEventState {
 public:
  // Begins a record, which is not complete yet. Returns its number.
  std::uint64_t begin_record();
  void complete(std::uint64_t record);
  [[nodiscard]] std::uint64_t last_record() const;
  [[nodiscard]] bool is_complete(std::uint64_t record) const;
  void wait_for(std::uint64_t record) const;

 private:
  mutable std::mutex mutex_;  // guards both counts
  mutable std::condition_variable completed_;
  std::uint64_t num_records_ = 0;
  std::uint64_t last_complete_ = 0;
};

class HostEvent final : public Event {
 public:
  [[nodiscard]] bool done() const override { return state_->is_complete(state_->last_record()); }
  void wait() const override { state_->wait_for(state_->last_record()); }
  [[nodiscard]] const std::shared_ptr<HostEventState>& state() const { return state_; }

 private:
  const std::shared_ptr<HostEventState> state_ = std::make_shared<HostEventState>();
};

// A HostStream has one thread, which ends when the stream is destroyed.
class HostStream final : public Stream {
 public:
  HostStream();
  ~HostStream() override;

  void copy(void* to, const void* from, std::size_t num_bytes) override;
  void record(Event& event) override;
  void wait(const Event& event) override;
  void call(std::function<void()> function) override;
  void synchronize() override;

 private:
  struct Copy {
    void* to;
    const void* from;
    std::size_t num_bytes;
  };
  struct CompleteRecord {
    std::shared_ptr<HostEventState> state;
    std::uint64_t record;
  };
  struct WaitForRecord {
    std::shared_ptr<HostEventState> state;
    std::uint64_t record;
  };
  using Call = std::function<void()>;
  using Operation = std::variant<Copy, CompleteRecord, WaitForRecord, Call>;

  void enqueue(Operation operation);
  [[nodiscard]] bool idle() const;
  void run_operations();

  BoundedQueue<Operation> operations_;
  // num_enqueued_ counts an operation before it is pushed, num_done_ after it has run. If both are equal, no
  // operation is pending.
  std::atomic<std::uint64_t> num_enqueued_ = 0;
  std::atomic<std::uint64_t> num_done_ = 0;
  std::thread thread_;  // declared last, because it uses the members above
};

// Makes the calling thread a stream: work is done when the call returns. Owns nothing.
class CallerStream final : public Stream {
 public:
  void copy(void* to, const void* from, std::size_t num_bytes) override;
  void record(Event& event) override;
  void wait(const Event& event) override;
  void call(std::function<void()> function) override;
  void synchronize() override {}
};

}  // namespace pipedream
