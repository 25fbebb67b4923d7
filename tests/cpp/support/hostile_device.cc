#include "support/hostile_device.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <mutex>
#include <random>
#include <thread>
#include <utility>

#include "base/check.h"
#include "base/failure.h"
#include "base/handed_over.h"
#include "base/ring_buffer.h"
#include "device/host/host_memory.h"

namespace pipedream {
namespace {

constexpr std::size_t kNumStreamsMax = 256;  // streams of a process that exist at once
constexpr std::byte kPoison{0xFF};

// For each stream, how many of its operations come before a given operation.
using Seen = std::array<std::uint64_t, kNumStreamsMax>;

void join(Seen& seen, const Seen& other) {
  for (std::size_t stream = 0; stream < seen.size(); ++stream) {
    seen[stream] = std::max(seen[stream], other[stream]);
  }
}

// Bytes that an operation reads or writes. If one memory is mapped twice, its bytes have the same range.
struct Range {
  std::uint64_t memory = 0;  // 0: the host's
  std::uint64_t offset = 0;  // offset in that memory; for the host the address itself
  std::size_t num_bytes = 0;
  std::byte* mapped = nullptr;   // address at which a stream's thread finds them
  std::uint64_t allocation = 0;  // 0 if the device knows no allocation there
};

bool overlap(const Range& one, const Range& other) {
  return one.memory == other.memory && one.offset < other.offset + other.num_bytes &&
         other.offset < one.offset + one.num_bytes;
}

// Guarded by the driver's mutex.
struct EventState {
  std::uint64_t num_records = 0;
  std::uint64_t last_complete = 0;
  Seen seen{};  // the operations that come before the last record
};

enum class Kind { kCopy, kRecord, kWait, kCall, kKernel };

struct Operation {
  Kind kind = Kind::kKernel;
  std::uint64_t index = 0;  // position in its stream, counted from 1
  Range from;               // kCopy
  Range to;
  std::shared_ptr<EventState> event;  // used by kRecord and kWait
  std::uint64_t record = 0;
  std::function<void()> function;  // used by kCall and kKernel
};

// An allocation of device memory, which the driver finds by its address.
struct Allocation {
  std::uint64_t id = 0;
  Range range;
  bool is_freed = false;
};

// State that all devices of the process share.
struct Driver {
  std::mutex mutex;                 // guards all state of this file except the bytes of memory
  std::condition_variable changed;  // notified when operations are done or a context has ended
  // By the first byte. Freed allocations stay, because their addresses are never used again.
  std::map<std::uintptr_t, Allocation> allocations;
  std::uint64_t num_allocations = 0;
  std::uint64_t num_memories = 0;
  std::map<std::pair<dev_t, ino_t>, std::uint64_t> memories;  // by the file that holds the memory
  std::array<HostileQueue*, kNumStreamsMax> queues{};
  Seen num_operations{};  // by stream number, with operations of earlier streams of that number

  std::mutex host_functions_mutex;  // held while a host function runs
};

Driver& driver() {
  static auto* const instance =
      new Driver;  // NOLINT(cppcoreguidelines-owning-memory): threads may outlive it
  return *instance;
}

thread_local bool in_host_function = false;

std::uint64_t process_seed() {
  static const std::uint64_t seed = [] {
    const char* const text = std::getenv("PIPEDREAM_HOSTILE_SEED");
    const std::uint64_t chosen = text != nullptr ? std::strtoull(text, nullptr, 10) : std::random_device{}();
    std::fprintf(stderr, "hostile devices: PIPEDREAM_HOSTILE_SEED=%llu repeats these delays\n",
                 static_cast<unsigned long long>(chosen));
    return chosen;
  }();
  return seed;
}

std::uint64_t next_device_seed() {
  static std::atomic<std::uint64_t> num_devices{0};
  return process_seed() * 1000 + num_devices.fetch_add(1);
}

// Finds the range of these bytes. Returns nothing for freed memory, or if the bytes go beyond their memory.
// The caller holds the driver's mutex.
std::optional<Range> resolve(const void* data, std::size_t num_bytes) {
  const auto address = reinterpret_cast<std::uintptr_t>(data);
  Range range;
  range.offset = address;
  range.num_bytes = num_bytes;
  range.mapped =
      // NOLINT(*-const-cast): written only as a copy's target.
      static_cast<std::byte*>(const_cast<void*>(data));
  const auto& allocations = driver().allocations;
  auto after = allocations.upper_bound(address);
  if (after == allocations.begin()) return range;
  const auto& [begin, allocation] = *std::prev(after);
  if (address >= begin + allocation.range.num_bytes) return range;
  const std::size_t skipped = address - begin;
  if (allocation.is_freed || skipped + num_bytes > allocation.range.num_bytes) return std::nullopt;
  range.memory = allocation.range.memory;
  range.offset = allocation.range.offset + skipped;
  range.mapped = allocation.range.mapped + skipped;
  range.allocation = allocation.id;
  return range;
}

}  // namespace

// ---- Streams ----

// The operations of a stream, and the thread that runs them.
class HostileQueue {
 public:
  HostileQueue(HostileDevice& device, std::uint64_t seed) : device_(device), random_(seed) {
    const std::lock_guard lock(driver().mutex);
    auto& queues = driver().queues;
    const auto place = std::find(queues.begin(), queues.end(), nullptr);
    PD_CHECK(place != queues.end(), "more than " << kNumStreamsMax << " streams");
    *place = this;
    stream_ = static_cast<std::size_t>(place - queues.begin());
    num_enqueued_ = num_done_ = driver().num_operations[stream_];
    device_.queues_.push_back(this);
    thread_ = std::thread([this] { run(); });
    (void)::pthread_setname_np(thread_.native_handle(), "pd-hostile");
  }
  // Finishes what is enqueued.
  ~HostileQueue() {
    {
      const std::lock_guard lock(driver().mutex);
      is_closing_ = true;
      wake_.notify_all();
    }
    thread_.join();
    const std::lock_guard lock(driver().mutex);
    driver().queues[stream_] = nullptr;
    std::erase(device_.queues_, this);
  }
  HostileQueue(const HostileQueue&) = delete;
  HostileQueue& operator=(const HostileQueue&) = delete;

  void copy(void* to, const void* from, std::size_t num_bytes) {
    std::unique_lock lock(driver().mutex);
    device_.enter(lock, "copy");
    if (num_bytes == 0) return;
    const std::optional<Range> source = resolve(from, num_bytes);
    const std::optional<Range> target = resolve(to, num_bytes);
    if (!source || !target) device_.throw_failed("copy", "invalid argument");
    Operation operation;
    operation.kind = Kind::kCopy;
    operation.from = *source;
    operation.to = *target;
    enqueue(lock, "copy", std::move(operation));
  }
  void record(const std::shared_ptr<EventState>& event) {
    std::unique_lock lock(driver().mutex);
    device_.enter(lock, "record");
    Operation operation;
    operation.kind = Kind::kRecord;
    operation.event = event;
    operation.record = ++event->num_records;
    enqueue(lock, "record", std::move(operation));
    event->seen = seen_;
  }
  void wait(const std::shared_ptr<EventState>& event) {
    std::unique_lock lock(driver().mutex);
    device_.enter(lock, "wait");
    join(seen_, event->seen);
    Operation operation;
    operation.kind = Kind::kWait;
    operation.event = event;
    operation.record = event->num_records;
    enqueue(lock, "wait", std::move(operation));
  }
  void call(const char* name, Kind kind, std::function<void()> function) {
    std::unique_lock lock(driver().mutex);
    device_.enter(lock, name);
    Operation operation;
    operation.kind = kind;
    operation.function = std::move(function);
    enqueue(lock, name, std::move(operation));
  }
  void synchronize() {
    std::unique_lock lock(driver().mutex);
    device_.enter(lock, "synchronize");
    const std::uint64_t num_operations = num_enqueued_;
    driver().changed.wait(lock, [&] { return num_done_ >= num_operations || device_.ended_; });
    if (device_.ended_) device_.throw_failed("synchronize", *device_.ended_);
  }
  // Ends the device's context because of an error in a kernel.
  void end_context(const std::string& why) {
    std::unique_lock lock(driver().mutex);
    device_.end_context(lock, why);
  }

  // Callers hold the driver's mutex from here on.
  void wake() { wake_.notify_all(); }
  [[nodiscard]] bool copies() const { return copies_; }
  [[nodiscard]] bool uses(std::uint64_t allocation) {
    for (std::size_t index = 0; index < operations_.size(); ++index) {
      const Operation& pending = operations_[index];
      if (pending.from.allocation == allocation || pending.to.allocation == allocation) return true;
    }
    return false;
  }

 private:
  void enqueue(std::unique_lock<std::mutex>& lock, const char* name, Operation operation) {
    driver().changed.wait(lock, [&] { return !operations_.full() || device_.ended_; });
    if (device_.ended_) device_.throw_failed(name, *device_.ended_);
    operation.index = ++num_enqueued_;
    if (operation.kind == Kind::kCopy) check_order(operation);
    seen_[stream_] = operation.index;
    driver().num_operations[stream_] = operation.index;
    operations_.push_back(std::move(operation));
    wake_.notify_one();
  }
  // Checks that the copy is ordered after all pending operations of other streams that use the same bytes.
  void check_order(const Operation& copy) {
    for (HostileQueue* other : driver().queues) {
      if (other == nullptr || other == this) continue;
      for (std::size_t index = 0; index < other->operations_.size(); ++index) {
        const Operation& pending = other->operations_[index];
        if (pending.kind != Kind::kCopy || pending.index <= seen_[other->stream_]) continue;
        if (overlap(copy.to, pending.from)) device_.note_violation("a copy writes what another stream reads");
        if (overlap(copy.from, pending.to)) device_.note_violation("a copy reads what another stream writes");
        if (overlap(copy.to, pending.to)) device_.note_violation("a copy writes what another stream writes");
      }
    }
  }

  void run() {
    std::unique_lock lock(driver().mutex);
    for (;;) {
      wake_.wait(lock, [&] { return !operations_.empty() || is_closing_; });
      if (device_.is_ending_) drop_all(lock);
      if (operations_.empty()) {
        if (is_closing_) return;
        continue;
      }
      run(lock, operations_.front());
      if (device_.is_ending_) continue;
      Operation done = operations_.take_front();
      lock.unlock();
      done = {};  // destroys what the function holds before the operation counts as done
      lock.lock();
      ++num_done_;
      driver().changed.notify_all();
    }
  }
  void run(std::unique_lock<std::mutex>& lock, Operation& operation) {
    switch (operation.kind) {
      case Kind::kCopy:
        copies_ = true;
        lock.unlock();
        copy_late(operation);
        lock.lock();
        copies_ = false;
        driver().changed.notify_all();
        return;
      case Kind::kRecord:
        operation.event->last_complete = std::max(operation.event->last_complete, operation.record);
        driver().changed.notify_all();
        return;
      case Kind::kWait:
        driver().changed.wait(
            lock, [&] { return operation.event->last_complete >= operation.record || device_.ended_; });
        return;
      case Kind::kCall: {
        lock.unlock();
        {
          const std::lock_guard one_at_a_time(driver().host_functions_mutex);
          in_host_function = true;
          operation.function();
          in_host_function = false;
        }
        lock.lock();
        return;
      }
      case Kind::kKernel:
        lock.unlock();
        operation.function();
        lock.lock();
        return;
    }
  }
  void copy_late(const Operation& copy) {
    std::memset(copy.to.mapped, std::to_integer<int>(kPoison), copy.to.num_bytes);
    dawdle();
    std::memcpy(copy.to.mapped, copy.from.mapped, copy.to.num_bytes);
  }
  // Delays an operation at random. Most operations are not delayed, and a few are delayed for long.
  void dawdle() {
    const std::uint64_t chance = random_() % 64;
    if (chance == 0) std::this_thread::sleep_for(std::chrono::microseconds(random_() % 500));
    if (chance < 4) std::this_thread::yield();
  }
  // Drops all operations. Their host functions do not run.
  void drop_all(std::unique_lock<std::mutex>& lock) {
    while (!operations_.empty()) {
      Operation dropped = operations_.take_front();
      lock.unlock();
      dropped = {};
      lock.lock();
    }
    driver().changed.notify_all();
  }

  HostileDevice& device_;
  std::size_t stream_ = 0;
  std::mt19937_64 random_;  // used by the thread alone
  std::condition_variable wake_;
  RingBuffer<Operation> operations_{kStreamDepth};  // operations that are not done, with the one that runs
  Seen seen_{};                                     // the operations that the next operation comes after
  std::uint64_t num_enqueued_ = 0;
  std::uint64_t num_done_ = 0;
  bool copies_ = false;  // whether a copy runs now
  bool is_closing_ = false;
  std::thread thread_;
};

class HostileEvent final : public Event {
 public:
  explicit HostileEvent(HostileDevice& device) : device_(device) {}
  ~HostileEvent() override {
    const std::lock_guard lock(driver().mutex);
    if (in_host_function) device_.note_violation("an event dies in a host function");
  }
  HostileEvent(const HostileEvent&) = delete;
  HostileEvent& operator=(const HostileEvent&) = delete;

  [[nodiscard]] bool done() const override {
    std::unique_lock lock(driver().mutex);
    device_.enter(lock, "done");
    return state_->last_complete >= state_->num_records;
  }
  void wait() const override {
    std::unique_lock lock(driver().mutex);
    device_.enter(lock, "event wait");
    const std::uint64_t record = state_->num_records;
    driver().changed.wait(lock, [&] { return state_->last_complete >= record || device_.ended_; });
    if (state_->last_complete < record) device_.throw_failed("event wait", *device_.ended_);
  }
  [[nodiscard]] const std::shared_ptr<EventState>& state() const { return state_; }

 private:
  HostileDevice& device_;
  const std::shared_ptr<EventState> state_ = std::make_shared<EventState>();
};

namespace {

const std::shared_ptr<EventState>& state_of(const Event& event) {
  const auto* const hostile = dynamic_cast<const HostileEvent*>(&event);
  PD_CHECK(hostile != nullptr, "an event of another device on a hostile stream");
  return hostile->state();
}

}  // namespace

class HostileStream final : public Stream {
 public:
  explicit HostileStream(std::unique_ptr<HostileQueue> queue) : owned_(std::move(queue)), queue_(*owned_) {}
  explicit HostileStream(HostileQueue& wrapped) : queue_(wrapped) {}

  void copy(void* to, const void* from, std::size_t num_bytes) override { queue_.copy(to, from, num_bytes); }
  void record(Event& event) override { queue_.record(state_of(event)); }
  void wait(const Event& event) override { queue_.wait(state_of(event)); }
  void call(std::function<void()> function) override {
    queue_.call("call", Kind::kCall, std::move(function));
  }
  void synchronize() override { queue_.synchronize(); }
  [[nodiscard]] HostileQueue& queue() { return queue_; }

 private:
  const std::unique_ptr<HostileQueue> owned_;  // null for a wrapped stream
  HostileQueue& queue_;
};

// ---- Memory ----

// Device memory has two mappings: one for the streams' threads, and one of the same size that nobody may
// access.
class HostileMemory final : public ExportedMemory {
 public:
  // `fd` is a file of at least num_bytes.
  HostileMemory(HostileDevice& device, std::atomic<int>* count, int fd, std::size_t num_bytes)
      : device_(device),
        count_(count),
        fd_(fd),
        num_bytes_(num_bytes),
        handle_("/proc/" + std::to_string(::getpid()) + "/fd/" + std::to_string(fd)) {
    mapped_ = ::mmap(nullptr, num_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    addresses_ = ::mmap(nullptr, num_bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    PD_CHECK(mapped_ != MAP_FAILED && addresses_ != MAP_FAILED, std::strerror(errno));
    struct stat status {};
    PD_CHECK(::fstat(fd, &status) == 0, std::strerror(errno));
    const std::lock_guard lock(driver().mutex);
    auto [known, is_new] = driver().memories.try_emplace({status.st_dev, status.st_ino}, 0);
    if (is_new) known->second = ++driver().num_memories;
    Allocation& allocation = driver().allocations[reinterpret_cast<std::uintptr_t>(addresses_)];
    allocation.id = id_ = ++driver().num_allocations;
    allocation.range = {known->second, 0, num_bytes, static_cast<std::byte*>(mapped_), id_};
    if (count_ != nullptr) ++*count_;
  }
  // The addresses stay reserved, so that a later access to them is detected.
  ~HostileMemory() override {
    {
      std::unique_lock lock(driver().mutex);
      driver().allocations.at(reinterpret_cast<std::uintptr_t>(addresses_)).is_freed = true;
      const auto is_used = [&] {
        return std::any_of(driver().queues.begin(), driver().queues.end(),
                           [&](HostileQueue* queue) { return queue != nullptr && queue->uses(id_); });
      };
      if (is_used() && !device_.ended_) device_.note_violation("memory is freed while a copy uses it");
      driver().changed.wait(lock, [&] { return !is_used(); });
    }
    ::munmap(mapped_, num_bytes_);
    close_memory_file(fd_);
    if (count_ != nullptr) --*count_;
  }
  HostileMemory(const HostileMemory&) = delete;
  HostileMemory& operator=(const HostileMemory&) = delete;

  [[nodiscard]] std::byte* data() const override { return static_cast<std::byte*>(addresses_); }
  [[nodiscard]] std::size_t size_bytes() const override { return num_bytes_; }
  [[nodiscard]] const std::string& handle() const override { return handle_; }

 private:
  HostileDevice& device_;
  std::atomic<int>* const count_;
  const int fd_;
  const std::size_t num_bytes_;
  const std::string handle_;
  void* mapped_ = nullptr;
  void* addresses_ = nullptr;
  std::uint64_t id_ = 0;
};

namespace {

int make_file(std::size_t num_bytes) {
  const int fd = ::memfd_create("hostile", MFD_CLOEXEC);
  PD_CHECK(fd >= 0 && ::ftruncate(fd, static_cast<off_t>(num_bytes)) == 0, std::strerror(errno));
  return fd;
}

std::nullptr_t refuse(std::string* why, const std::string& reason) {
  if (why != nullptr) *why = reason;
  return nullptr;
}

}  // namespace

// ---- The device ----

HostileDevice::HostileDevice() : seed_(next_device_seed()) {}

HostileDevice::~HostileDevice() {
  wrapped_.clear();
  for (const std::string& violation : violations_) ADD_FAILURE() << name() << ": " << violation;
}

void HostileDevice::enter(Lock& lock, const char* call) {
  ++num_calls_;
  if (in_host_function) note_violation(std::string(call) + " is called in a host function");
  if (ended_) throw_failed(call, *ended_);
  if (!fault_ || (!fault_->call.empty() && fault_->call != call)) return;
  if (fault_->num_calls_before-- > 0) return;
  const Fault fault = *std::exchange(fault_, std::nullopt);
  if (fault.ends_context) end_context(lock, fault.why);
  throw_failed(call, fault.why);
}

void HostileDevice::end_context(Lock& lock, const std::string& why) {
  if (std::exchange(is_ending_, true)) return;
  driver().changed.wait(lock, [&] {
    return std::none_of(queues_.begin(), queues_.end(),
                        [](const HostileQueue* queue) { return queue->copies(); });
  });
  ended_ = why;
  for (HostileQueue* queue : queues_) queue->wake();
  driver().changed.notify_all();
}

void HostileDevice::note_violation(std::string what) { violations_.push_back(std::move(what)); }

void HostileDevice::throw_failed(const char* call, const std::string& why) const {
  throw DeviceError(name() + ": " + call + " failed: " + why);
}

void HostileDevice::fail(Fault fault) {
  const std::lock_guard lock(driver().mutex);
  fault_ = std::move(fault);
}

void HostileDevice::launch(Stream& stream, std::function<void()> kernel) {
  dynamic_cast<HostileStream&>(stream).queue().call("launch", Kind::kKernel, std::move(kernel));
}

void HostileDevice::launch_fault(Stream& stream, std::string why) {
  HostileQueue& queue = dynamic_cast<HostileStream&>(stream).queue();
  queue.call("launch", Kind::kKernel, [&queue, why = std::move(why)] { queue.end_context(why); });
}

std::uint64_t HostileDevice::num_calls() const {
  const std::lock_guard lock(driver().mutex);
  return num_calls_;
}

bool HostileDevice::is_broken() const {
  const std::lock_guard lock(driver().mutex);
  return ended_.has_value();
}

std::vector<std::string> HostileDevice::take_violations() {
  const std::lock_guard lock(driver().mutex);
  return std::exchange(violations_, {});
}

std::unique_ptr<Stream> HostileDevice::make_stream() {
  std::uint64_t seed = seed_;
  {
    std::unique_lock lock(driver().mutex);
    enter(lock, "make_stream");
    seed = seed * 1000 + num_streams_++;
  }
  return std::make_unique<HostileStream>(std::make_unique<HostileQueue>(*this, seed));
}

std::unique_ptr<Event> HostileDevice::make_event() {
  {
    std::unique_lock lock(driver().mutex);
    enter(lock, "make_event");
  }
  return std::make_unique<HostileEvent>(*this);
}

// Streams of the same handle share one queue.
std::unique_ptr<Stream> HostileDevice::wrap_stream(std::uintptr_t native_handle) {
  std::unique_ptr<HostileQueue>& queue = wrapped_[native_handle];
  if (!queue) queue = std::make_unique<HostileQueue>(*this, seed_ * 1000 + 999 - native_handle);
  return std::make_unique<HostileStream>(*queue);
}

std::unique_ptr<Memory> HostileDevice::allocate(std::size_t num_bytes, MemoryKind kind) {
  {
    std::unique_lock lock(driver().mutex);
    enter(lock, "allocate");
  }
  const std::string what =
      (kind == MemoryKind::kDevice ? "device memory on " : "staging memory of ") + name();
  if (kind == MemoryKind::kStaging) return std::make_unique<HostMemory>(num_bytes, what);
  if (num_bytes > host_memory_available_bytes()) throw_not_enough_memory(num_bytes, what, "there is less");
  return std::make_unique<HostileMemory>(*this, nullptr, make_file(num_bytes), num_bytes);
}

std::unique_ptr<HostRegistration> HostileDevice::register_host_memory(std::byte* /*data*/,
                                                                      std::size_t /*num_bytes*/) {
  std::unique_lock lock(driver().mutex);
  enter(lock, "register");
  ++num_registered_;
  return std::make_unique<HostRegistration>();
}

void HostileDevice::check() {
  std::unique_lock lock(driver().mutex);
  enter(lock, "check");
}

std::unique_ptr<ExportedMemory> HostileDevice::export_memory(std::size_t num_bytes, std::string* why) {
  if (!why_no_memory.empty()) throw UserError(why_no_memory);
  if (!why_not_exported.empty()) return refuse(why, why_not_exported);
  {
    std::unique_lock lock(driver().mutex);
    enter(lock, "export");
  }
  return std::make_unique<HostileMemory>(*this, &num_exported_, make_file(num_bytes), num_bytes);
}

std::unique_ptr<Memory> HostileDevice::import_memory(const std::string& handle, std::size_t num_bytes,
                                                     std::string* why) {
  if (!why_not_imported.empty()) return refuse(why, why_not_imported);
  if (maps_another_memory) return allocate(num_bytes, MemoryKind::kDevice);
  {
    std::unique_lock lock(driver().mutex);
    enter(lock, "import");
  }
  const int fd = ::open(handle.c_str(), O_RDWR | O_CLOEXEC);
  if (fd < 0) return refuse(why, handle + ": " + std::strerror(errno));
  return std::make_unique<HostileMemory>(*this, &num_imported_, fd, num_bytes);
}

std::shared_ptr<Memory> upload(Device& device, Stream& stream, std::vector<std::byte> bytes) {
  struct Upload {
    std::vector<std::byte> bytes;
    std::unique_ptr<Event> copied;
    std::unique_ptr<Memory> memory;
    ~Upload() {
      try {
        if (copied) copied->wait();
      } catch (const DeviceError&) {
        // The device has failed, so no copy reads the bytes any more.
      }
    }
  };
  auto upload = std::make_shared<Upload>();
  upload->bytes = std::move(bytes);
  upload->copied = device.make_event();
  upload->memory = device.allocate(std::max<std::size_t>(1, upload->bytes.size()), MemoryKind::kDevice);
  Memory* const memory = upload->memory.get();
  stream.copy(memory->data(), upload->bytes.data(), upload->bytes.size());
  stream.record(*upload->copied);
  return {std::move(upload), memory};
}

std::vector<std::byte> read_bytes(Stream& stream, const void* data, std::size_t num_bytes) {
  std::vector<std::byte> bytes(num_bytes);
  stream.copy(bytes.data(), data, num_bytes);
  stream.synchronize();
  return bytes;
}

}  // namespace pipedream
