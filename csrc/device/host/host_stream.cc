// Implements the streams of the host backend, each with a thread. See the header.
#include "device/host/host_stream.h"

#include <pthread.h>

#include <cstring>
#include <optional>
#include <utility>

#include "base/check.h"

namespace pipedream {
namespace {

const std::shared_ptr<HostEventState>& state_of(const Event& event) {
  const auto* const host_event = dynamic_cast<const HostEvent*>(&event);
  PD_CHECK(host_event != nullptr, "an event of another device on a host stream");
  return host_event->state();
}

void copy_bytes(void* to, const void* from, std::size_t num_bytes) {
  if (num_bytes > 0) std::memcpy(to, from, num_bytes);  // memcpy() accepts no null pointer, even for 0 bytes
}

template <class... Functions>
struct Overloaded : Functions... {
  using Functions::operator()...;
};
template <class... Functions>
Overloaded(Functions...) -> Overloaded<Functions...>;

}  // namespace

std::uint64_t HostEventState::begin_record() {
  const std::lock_guard lock(mutex_);
  return ++num_records_;
}

void HostEventState::complete(std::uint64_t record) {
  const std::lock_guard lock(mutex_);
  // A later record, on another stream, may have completed first.
  if (record > last_complete_) last_complete_ = record;
  completed_.notify_all();
}

std::uint64_t HostEventState::last_record() const {
  const std::lock_guard lock(mutex_);
  return num_records_;
}

bool HostEventState::is_complete(std::uint64_t record) const {
  const std::lock_guard lock(mutex_);
  return last_complete_ >= record;
}

void HostEventState::wait_for(std::uint64_t record) const {
  std::unique_lock lock(mutex_);
  completed_.wait(lock, [&] { return last_complete_ >= record; });
}

HostStream::HostStream() : operations_(kStreamDepth), thread_([this] { run_operations(); }) {}

HostStream::~HostStream() {
  operations_.close();  // enqueued operations still run
  thread_.join();
}

void HostStream::copy(void* to, const void* from, std::size_t num_bytes) {
  enqueue(Copy{to, from, num_bytes});
}

void HostStream::record(Event& event) {
  const std::shared_ptr<HostEventState>& state = state_of(event);
  const std::uint64_t record = state->begin_record();
  // If nothing is pending, everything before this record is done, and the stream's thread need not be woken.
  if (idle()) {
    state->complete(record);
  } else {
    enqueue(CompleteRecord{state, record});
  }
}

void HostStream::wait(const Event& event) {
  const std::shared_ptr<HostEventState>& state = state_of(event);
  const std::uint64_t record = state->last_record();
  if (!state->is_complete(record)) enqueue(WaitForRecord{state, record});
}

void HostStream::call(std::function<void()> function) { enqueue(std::move(function)); }

void HostStream::synchronize() {
  HostEvent event;
  record(event);
  event.wait();
}

void HostStream::enqueue(Operation operation) {
  num_enqueued_.fetch_add(1, std::memory_order_relaxed);
  const bool taken = operations_.push(std::move(operation));
  PD_CHECK(taken, "work enqueued on a stream that is being destroyed");
}

bool HostStream::idle() const {
  // The two counts are read in this order, so that work enqueued between the reads can only make the answer
  // false.
  const std::uint64_t num_enqueued = num_enqueued_.load(std::memory_order_relaxed);
  return num_done_.load(std::memory_order_acquire) >= num_enqueued;
}

void HostStream::run_operations() {
  (void)::pthread_setname_np(::pthread_self(), "pd-stream");
  while (std::optional<Operation> operation = operations_.pop()) {
    std::visit(Overloaded{
                   [](const Copy& copy) { copy_bytes(copy.to, copy.from, copy.num_bytes); },
                   [](const CompleteRecord& complete) { complete.state->complete(complete.record); },
                   [](const WaitForRecord& wait) { wait.state->wait_for(wait.record); },
                   [](const Call& function) { function(); },
               },
               *operation);
    // The objects that the operation owns, such as a lease or a buffer, are destroyed before anyone can see
    // that it is done.
    operation.reset();
    num_done_.fetch_add(1, std::memory_order_release);
  }
}

void CallerStream::copy(void* to, const void* from, std::size_t num_bytes) {
  copy_bytes(to, from, num_bytes);
}

void CallerStream::record(Event& event) {
  const std::shared_ptr<HostEventState>& state = state_of(event);
  state->complete(state->begin_record());
}

void CallerStream::wait(const Event& event) { event.wait(); }

void CallerStream::call(std::function<void()> function) { function(); }

}  // namespace pipedream
