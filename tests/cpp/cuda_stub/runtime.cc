// Implements the functions of cuda_runtime_api.h. One mutex guards all state except the bytes that operations
// work on. Operations run without the mutex; each stream has a thread, which runs its operations in order.
#include <cuda.h>
#include <cuda_runtime_api.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <set>
#include <thread>
#include <utility>
#include <vector>

#include "cuda_stub/block.h"
#include "cuda_stub/cuda_stub.h"

namespace cuda_stub {
namespace {

constexpr std::size_t kDeviceBytes = std::size_t{80} << 30;
constexpr std::size_t kPoisonedBytesMax = std::size_t{16} << 20;
constexpr int kCapability = 90;
constexpr int kPoison = 0xA5;
constexpr std::size_t kPageBytes = 4096;
constexpr unsigned kDelayedOneIn = 4;

struct Operation {
  std::function<void()> run;
  // Addresses that the operation may use; for a kernel, all its arguments.
  std::vector<std::uintptr_t> touches;
};

}  // namespace
}  // namespace cuda_stub

// The driver's mutex guards all fields.
struct CUstream_st {
  int device = 0;
  std::deque<cuda_stub::Operation> queue;
  std::vector<std::uintptr_t> running_touches;
  std::uint64_t num_enqueued = 0;
  std::uint64_t num_done = 0;
  bool is_closing = false;
  bool is_capturing = false;
  int num_captured = 0;
  std::condition_variable has_work;
};

// A wait for an event waits for the event's last record before the wait. Before that record is done, the
// event may be recorded again on another stream, or be destroyed.
struct CUevent_st {
  struct Record {
    bool is_done = true;  // an event that was never recorded counts as done
  };
  int device = 0;
  unsigned flags = 0;
  bool is_captured = false;
  std::shared_ptr<Record> last = std::make_shared<Record>();
};

namespace cuda_stub {
namespace {

using Lock = std::unique_lock<std::mutex>;

struct Allocation {
  std::size_t num_bytes = 0;
  std::size_t mapped_bytes = 0;
  int device = 0;
  int file = -1;
  std::byte* alias = nullptr;  // a second mapping of the same memory, for copies
  bool is_imported = false;
};

struct Fault {
  cudaError_t error = cudaSuccess;
  int num_calls_before = 0;
  bool ends_context = false;
};

struct Driver {
  std::mutex mutex;
  std::condition_variable has_changed;
  std::mutex kernels;         // held while a block runs
  std::mutex host_functions;  // held while a host function runs, because a driver may run them one at a time
  cudaError_t context_error = cudaSuccess;
  std::map<std::uintptr_t, Allocation> allocations;  // device memory by address
  std::map<std::uintptr_t, std::size_t> registered;  // pinned pages by address
  std::map<cudaStream_t, std::shared_ptr<CUstream_st>> streams;
  std::map<int, cudaStream_t> default_streams;
  std::set<cudaEvent_t> events;
  std::set<int> contexts;  // devices
  std::map<std::string, std::uint64_t> num_calls;
  std::map<std::string, Fault> faults;
  std::set<std::pair<int, const void*>> loaded;  // kernels and the devices on which they are loaded
  std::uint64_t num_late_loads = 0;
  std::uint64_t num_spins = 0;
  std::uint64_t num_kernels_on_host_memory = 0;
  std::map<int, int> capabilities;  // only of devices that differ from kCapability
  int driver_version = CUDART_VERSION;
  int num_captures = 0;
  bool is_capture_intact = true;
  bool runs_kernel = false;
  std::atomic<unsigned> delay_us_max{60};
  std::uint64_t seed = 0;
  std::mt19937_64 random;
};

void trap_host(int /*signal*/, siginfo_t* info, void* context);

Driver& driver() {
  static Driver* const made = [] {
    auto* const created = new Driver;  // never destroyed, because the streams' threads use it
    const char* const given = std::getenv("PIPEDREAM_CUDA_STUB_SEED");
    created->seed = given != nullptr ? std::strtoull(given, nullptr, 10) : std::random_device{}();
    created->random.seed(created->seed);
    struct sigaction trap {};
    trap.sa_sigaction = &trap_host;
    trap.sa_flags = SA_SIGINFO | SA_RESETHAND | SA_ONSTACK;
    ::sigaction(SIGSEGV, &trap, nullptr);
    return created;
  }();
  return *made;
}

thread_local int own_device = 0;
thread_local cudaError_t own_error = cudaSuccess;
thread_local cudaStreamCaptureMode own_capture_mode = cudaStreamCaptureModeGlobal;
thread_local const char* own_call = "";
thread_local bool in_host_function = false;

[[noreturn]] void give_up(const char* call, const char* why) {
  std::fprintf(stderr, "cuda_stub: %s: %s (PIPEDREAM_CUDA_STUB_SEED=%llu)\n", call, why,
               static_cast<unsigned long long>(driver().seed));
  std::abort();
}

void say_trap(const char* why) { (void)!::write(STDERR_FILENO, why, std::strlen(why)); }

// Ends the test with a message when a host thread touches device memory. On a real device the program would
// crash.
void trap_host(int /*signal*/, siginfo_t* info, void* /*context*/) {
  const auto address = reinterpret_cast<std::uintptr_t>(info->si_addr);
  for (const auto& [first, allocation] : driver().allocations) {
    if (address >= first && address < first + allocation.mapped_bytes)
      say_trap("cuda_stub: the host has touched device memory\n");
  }
}

cudaError_t failed(cudaError_t error) {
  if (error != cudaSuccess) own_error = error;
  return error;
}

void drop_all(Driver& all) {
  for (const auto& [handle, stream] : all.streams) {
    stream->num_done += stream->queue.size();
    stream->queue.clear();
  }
  all.has_changed.notify_all();
}

void be_late(Lock& lock) {
  Driver& all = driver();
  const unsigned delay_us_max = all.delay_us_max;
  if (delay_us_max == 0 || all.random() % kDelayedOneIn != 0) return;
  const auto delay = std::chrono::microseconds(all.random() % delay_us_max);
  lock.unlock();
  std::this_thread::sleep_for(delay);
  lock.lock();
}

// Begins every call of the runtime. Returns the error with which the call must fail, if any.
cudaError_t enter(Lock& lock, const char* call, bool ends_captures = false) {
  Driver& all = driver();
  own_call = call;
  if (in_host_function) give_up(call, "is called inside a host function");
  ++all.num_calls[call];
  be_late(lock);
  if (all.context_error != cudaSuccess) return failed(all.context_error);
  if (ends_captures && all.num_captures > 0 && own_capture_mode != cudaStreamCaptureModeRelaxed) {
    all.is_capture_intact = false;
    return failed(cudaErrorStreamCaptureUnsupported);
  }
  auto found = all.faults.find(call);
  if (found == all.faults.end()) found = all.faults.find("");
  if (found == all.faults.end() || found->second.num_calls_before-- > 0) return cudaSuccess;
  const Fault fault = found->second;
  all.faults.erase(found);
  if (fault.ends_context) {
    all.context_error = fault.error;
    drop_all(all);
  }
  return failed(fault.error);
}

// Begins a call that frees something. After an error of the context the call still frees it, because a
// process must be able to end, and returns the error.
#define PD_ENTER_TO_GIVE_BACK(...)                                              \
  Driver& all = driver();                                                       \
  Lock lock(all.mutex);                                                         \
  const cudaError_t entered = enter(lock, __func__ __VA_OPT__(, ) __VA_ARGS__); \
  if (entered != cudaSuccess && all.context_error == cudaSuccess) return entered

#define PD_ENTER(...)                                                                                       \
  Driver& all = driver();                                                                                   \
  Lock lock(all.mutex);                                                                                     \
  if (const cudaError_t entered = enter(lock, __func__ __VA_OPT__(, ) __VA_ARGS__); entered != cudaSuccess) \
  return entered

constexpr bool kEndsCaptures = true;

void serve(const std::shared_ptr<CUstream_st>& stream) {
  Driver& all = driver();
  Lock lock(all.mutex);
  for (;;) {
    stream->has_work.wait(lock, [&] { return stream->is_closing || !stream->queue.empty(); });
    if (stream->queue.empty()) {
      all.streams.erase(stream.get());
      return;
    }
    be_late(lock);
    if (stream->queue.empty()) continue;  // the queue was emptied, because the context has ended
    Operation operation = std::move(stream->queue.front());
    stream->queue.pop_front();
    stream->running_touches = operation.touches;
    lock.unlock();
    operation.run();
    operation = {};
    lock.lock();
    stream->running_touches.clear();
    ++stream->num_done;
    all.has_changed.notify_all();
  }
}

void start(const std::shared_ptr<CUstream_st>& stream) { std::thread(serve, stream).detach(); }

CUstream_st& stream_of(cudaStream_t handle) {
  Driver& all = driver();
  if (handle == nullptr) {
    cudaStream_t& made = all.default_streams[own_device];
    if (made == nullptr) {
      auto stream = std::make_shared<CUstream_st>();
      stream->device = own_device;
      made = stream.get();
      all.streams[made] = stream;
      start(stream);
    }
    handle = made;
  }
  const auto found = all.streams.find(handle);
  if (found == all.streams.end() || found->second->is_closing) give_up(own_call, "there is no such stream");
  return *found->second;
}

CUevent_st& event_of(cudaEvent_t handle) {
  if (!driver().events.contains(handle)) give_up(own_call, "there is no such event");
  return *handle;
}

void enqueue(CUstream_st& stream, std::function<void()> run, std::vector<std::uintptr_t> touches = {}) {
  if (stream.is_capturing) {
    ++stream.num_captured;
    return;
  }
  stream.queue.push_back({std::move(run), std::move(touches)});
  ++stream.num_enqueued;
  stream.has_work.notify_one();
}

cudaError_t wait_until_done(Lock& lock, const std::shared_ptr<CUstream_st>& stream) {
  Driver& all = driver();
  const std::uint64_t target = stream->num_enqueued;
  all.has_changed.wait(lock, [&] { return stream->num_done >= target; });
  return failed(all.context_error);
}

template <class Entry>
auto find_range(std::map<std::uintptr_t, Entry>& ranges, std::uintptr_t address) {
  auto after = ranges.upper_bound(address);
  return after == ranges.begin() ? ranges.end() : std::prev(after);
}

// Returns the address at which a copy finds the bytes. Sets *is_pageable if they are in host memory that is
// not registered.
std::byte* place_of(const void* data, std::size_t num_bytes, bool* is_pageable) {
  Driver& all = driver();
  const auto address = reinterpret_cast<std::uintptr_t>(data);
  if (const auto found = find_range(all.allocations, address); found != all.allocations.end()) {
    const auto& [first, allocation] = *found;
    if (address < first + allocation.num_bytes) {
      if (address + num_bytes > first + allocation.num_bytes) give_up(own_call, "ends beyond an allocation");
      return allocation.alias + (address - first);
    }
  }
  const auto found = find_range(all.registered, address);
  if (found == all.registered.end() || address + num_bytes > found->first + found->second)
    *is_pageable = true;
  return static_cast<std::byte*>(const_cast<void*>(data));
}

// Aborts if a stream still uses the range.
void check_unused(std::uintptr_t first, std::size_t num_bytes) {
  const auto inside = [&](std::uintptr_t address) { return address >= first && address < first + num_bytes; };
  const auto any_inside = [&](const std::vector<std::uintptr_t>& touches) {
    return std::any_of(touches.begin(), touches.end(), inside);
  };
  for (const auto& [handle, stream] : driver().streams) {
    const auto& queue = stream->queue;
    if (any_inside(stream->running_touches) ||
        std::any_of(queue.begin(), queue.end(),
                    [&](const Operation& one) { return any_inside(one.touches); }))
      give_up(own_call, "a stream still uses the memory");
  }
}

void protect(const std::pair<const std::uintptr_t, Allocation>& entry, bool is_open) {
  // NOLINTNEXTLINE(performance-no-int-to-ptr): the key is an address
  if (::mprotect(reinterpret_cast<void*>(entry.first), entry.second.mapped_bytes,
                 is_open ? PROT_READ | PROT_WRITE : PROT_NONE) != 0)
    give_up(own_call, "mprotect");
}

void set_open(bool is_open) {
  Driver& all = driver();
  const Lock lock(all.mutex);
  all.runs_kernel = is_open;
  for (const auto& entry : all.allocations) protect(entry, is_open);
}

// Maps the file twice. Kernels use one mapping, and copies use the other.
cudaError_t map_device_memory(int file, std::size_t num_bytes, bool is_imported, void** data) {
  Driver& all = driver();
  const std::size_t mapped_bytes = (num_bytes + kPageBytes - 1) / kPageBytes * kPageBytes;
  void* const memory = ::mmap(nullptr, mapped_bytes, PROT_NONE, MAP_SHARED, file, 0);
  void* const alias = ::mmap(nullptr, mapped_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  if (memory == MAP_FAILED || alias == MAP_FAILED) give_up(own_call, "mmap");
  const auto [entry, is_new] = all.allocations.emplace(
      reinterpret_cast<std::uintptr_t>(memory),
      Allocation{num_bytes, mapped_bytes, own_device, file, static_cast<std::byte*>(alias), is_imported});
  if (!is_new) give_up(own_call, "memory is there already");
  if (all.runs_kernel) protect(*entry, true);
  if (!is_imported) std::memset(alias, kPoison, std::min(num_bytes, kPoisonedBytesMax));
  *data = memory;
  return cudaSuccess;
}

cudaError_t unmap_device_memory(void* data, bool is_imported) {
  Driver& all = driver();
  const auto found = all.allocations.find(reinterpret_cast<std::uintptr_t>(data));
  if (found == all.allocations.end() || found->second.is_imported != is_imported)
    give_up(own_call, "there is no such memory");
  check_unused(found->first, found->second.num_bytes);
  ::munmap(data, found->second.mapped_bytes);
  ::munmap(found->second.alias, found->second.mapped_bytes);
  ::close(found->second.file);
  all.allocations.erase(found);
  return cudaSuccess;
}

bool is_device(int device) { return device >= 0 && device < kNumDevices; }

}  // namespace

void fail(const std::string& call, cudaError_t error, int num_calls_before, bool ends_context) {
  Driver& all = driver();
  const Lock lock(all.mutex);
  all.faults[call] = {error, num_calls_before, ends_context};
}

void end_context(cudaError_t error) {
  Driver& all = driver();
  const Lock lock(all.mutex);
  all.context_error = error;
  drop_all(all);
}

void reset() {
  Driver& all = driver();
  const Lock lock(all.mutex);
  all.context_error = cudaSuccess;
  all.faults.clear();
  all.capabilities.clear();
  all.loaded.clear();
  all.driver_version = CUDART_VERSION;
  own_error = cudaSuccess;
}

std::uintptr_t make_stream(int device) {
  return make_held_stream(device, [] {});
}

void begin_stream_capture(std::uintptr_t stream) {
  Driver& all = driver();
  const Lock lock(all.mutex);
  // NOLINTNEXTLINE(performance-no-int-to-ptr): frameworks hand a stream over as a number
  stream_of(reinterpret_cast<cudaStream_t>(stream)).is_capturing = true;
}

int end_stream_capture(std::uintptr_t stream) {
  Driver& all = driver();
  const Lock lock(all.mutex);
  // NOLINTNEXTLINE(performance-no-int-to-ptr): see begin_stream_capture()
  CUstream_st& given = stream_of(reinterpret_cast<cudaStream_t>(stream));
  given.is_capturing = false;
  return std::exchange(given.num_captured, 0);
}

std::uintptr_t make_held_stream(int device, std::function<void()> wait) {
  Driver& all = driver();
  const Lock lock(all.mutex);
  auto made = std::make_shared<CUstream_st>();
  made->device = device;
  all.streams[made.get()] = made;
  enqueue(*made, std::move(wait));
  start(made);
  return reinterpret_cast<std::uintptr_t>(made.get());
}

void set_capability(int device, int capability) {
  Driver& all = driver();
  const Lock lock(all.mutex);
  all.capabilities[device] = capability;
}

void set_driver_version(int version) {
  Driver& all = driver();
  const Lock lock(all.mutex);
  all.driver_version = version;
}

void begin_capture() {
  Driver& all = driver();
  const Lock lock(all.mutex);
  ++all.num_captures;
  all.is_capture_intact = true;
}

bool end_capture_intact() {
  Driver& all = driver();
  const Lock lock(all.mutex);
  --all.num_captures;
  return all.is_capture_intact;
}

std::uint64_t num_calls(const std::string& call) {
  Driver& all = driver();
  const Lock lock(all.mutex);
  return all.num_calls[call];
}

std::uint64_t num_late_loads() {
  Driver& all = driver();
  const Lock lock(all.mutex);
  return all.num_late_loads;
}

std::uint64_t num_spins() {
  Driver& all = driver();
  const Lock lock(all.mutex);
  return all.num_spins;
}

std::uint64_t num_kernels_on_host_memory() {
  Driver& all = driver();
  const Lock lock(all.mutex);
  return all.num_kernels_on_host_memory;
}

void set_delay_us_max(unsigned delay_us_max) { driver().delay_us_max = delay_us_max; }

void launch_grid(const void* function, const dim3& grid, unsigned block_threads, cudaStream_t stream,
                 const std::vector<std::uint64_t>& arguments, std::function<void()> kernel) {
  Driver& all = driver();
  Lock lock(all.mutex);
  // The caller reads the error by cudaGetLastError().
  if (enter(lock, "cudaLaunchKernel") != cudaSuccess) return;
  CUstream_st& given = stream_of(stream);
  if (given.device != own_device) {
    (void)failed(cudaErrorInvalidResourceHandle);
    return;
  }
  if (grid.x == 0 || grid.y == 0 || block_threads == 0 || block_threads > 1024) {
    (void)failed(cudaErrorInvalidValue);
    return;
  }
  if (all.loaded.insert({own_device, function}).second) ++all.num_late_loads;
  const auto is_on_host = [&](std::uint64_t argument) {
    const auto found = find_range(all.registered, argument);
    return found != all.registered.end() && argument < found->first + found->second;
  };
  if (std::any_of(arguments.begin(), arguments.end(), is_on_host)) ++all.num_kernels_on_host_memory;
  enqueue(given,
          [grid, block_threads, kernel = std::move(kernel)] {
            const std::lock_guard one(driver().kernels);
            set_open(true);
            run_grid(grid, block_threads, kernel);
            set_open(false);
          },
          {arguments.begin(), arguments.end()});
}

}  // namespace cuda_stub

// NOLINTBEGIN(readability-inconsistent-declaration-parameter-name)
using namespace cuda_stub;  // NOLINT(google-build-using-namespace): these are C's functions

extern "C" {

cudaError_t cudaDriverGetVersion(int* version) {
  PD_ENTER();
  *version = all.driver_version;
  return cudaSuccess;
}

cudaError_t cudaGetDeviceCount(int* count) {
  PD_ENTER();
  if (all.driver_version / 1000 < CUDART_VERSION / 1000) return failed(cudaErrorInsufficientDriver);
  *count = kNumDevices;
  return cudaSuccess;
}

cudaError_t cudaGetDevice(int* device) {
  PD_ENTER();
  *device = own_device;
  return cudaSuccess;
}

cudaError_t cudaSetDevice(int device) {
  PD_ENTER();
  if (!is_device(device)) return failed(cudaErrorInvalidDevice);
  own_device = device;
  all.contexts.insert(device);
  return cudaSuccess;
}

cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int device) {
  PD_ENTER();
  if (!is_device(device)) return failed(cudaErrorInvalidDevice);
  *properties = {};
  std::strcpy(properties->name, "stub");
  properties->uuid.bytes[0] = static_cast<char>(device + 1);
  return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device) {
  PD_ENTER();
  if (!is_device(device)) return failed(cudaErrorInvalidDevice);
  const auto given = all.capabilities.find(device);
  const int capability = given == all.capabilities.end() ? kCapability : given->second;
  switch (attribute) {
    case cudaDevAttrComputeCapabilityMajor:
      *value = capability / 10;
      break;
    case cudaDevAttrComputeCapabilityMinor:
      *value = capability % 10;
      break;
    default:
      *value = 1;
  }
  return cudaSuccess;
}

cudaError_t cudaDeviceCanAccessPeer(int* can_access, int device, int peer) {
  PD_ENTER();
  if (!is_device(device) || !is_device(peer)) return failed(cudaErrorInvalidDevice);
  *can_access = 1;
  return cudaSuccess;
}

cudaError_t cudaMemGetInfo(std::size_t* free_bytes, std::size_t* total_bytes) {
  PD_ENTER();
  *free_bytes = *total_bytes = kDeviceBytes;
  for (const auto& [address, allocation] : all.allocations) *free_bytes -= allocation.num_bytes;
  return cudaSuccess;
}

cudaError_t cudaMalloc(void** data, std::size_t num_bytes) {
  PD_ENTER(kEndsCaptures);
  if (num_bytes > kDeviceBytes) return failed(cudaErrorMemoryAllocation);
  all.contexts.insert(own_device);
  const int file = ::memfd_create("cuda_stub", MFD_CLOEXEC);
  if (file < 0 || ::ftruncate(file, static_cast<off_t>(num_bytes)) != 0) give_up(own_call, "memfd_create");
  return map_device_memory(file, num_bytes, false, data);
}

cudaError_t cudaFree(void* data) {
  PD_ENTER_TO_GIVE_BACK(kEndsCaptures);
  (void)unmap_device_memory(data, false);
  return entered;
}

cudaError_t cudaHostRegister(void* data, std::size_t num_bytes, unsigned /*flags*/) {
  PD_ENTER(kEndsCaptures);
  const auto address = reinterpret_cast<std::uintptr_t>(data);
  const std::uintptr_t first = address / kPageBytes * kPageBytes;
  const std::uintptr_t end = (address + num_bytes + kPageBytes - 1) / kPageBytes * kPageBytes;
  for (const auto& [other, other_bytes] : all.registered) {
    const std::uintptr_t other_first = other / kPageBytes * kPageBytes;
    const std::uintptr_t other_end = (other + other_bytes + kPageBytes - 1) / kPageBytes * kPageBytes;
    if (first < other_end && other_first < end) return failed(cudaErrorHostMemoryAlreadyRegistered);
  }
  all.registered[address] = num_bytes;
  return cudaSuccess;
}

cudaError_t cudaHostUnregister(void* data) {
  PD_ENTER_TO_GIVE_BACK(kEndsCaptures);
  const auto found = all.registered.find(reinterpret_cast<std::uintptr_t>(data));
  if (found == all.registered.end()) return failed(cudaErrorHostMemoryNotRegistered);
  check_unused(found->first, found->second);
  all.registered.erase(found);
  return entered;
}

cudaError_t cudaIpcGetMemHandle(cudaIpcMemHandle_t* handle, void* data) {
  PD_ENTER(kEndsCaptures);
  const auto found = all.allocations.find(reinterpret_cast<std::uintptr_t>(data));
  if (found == all.allocations.end()) return failed(cudaErrorInvalidValue);
  *handle = {};
  std::snprintf(static_cast<char*>(handle->reserved), sizeof handle->reserved, "/proc/%d/fd/%d", ::getpid(),
                found->second.file);
  return cudaSuccess;
}

cudaError_t cudaIpcOpenMemHandle(void** data, cudaIpcMemHandle_t handle, unsigned /*flags*/) {
  PD_ENTER(kEndsCaptures);
  const std::string own = "/proc/" + std::to_string(::getpid()) + "/";
  const std::string path(static_cast<const char*>(handle.reserved));
  // A process may not open its own memory.
  if (path.starts_with(own)) return failed(cudaErrorInvalidResourceHandle);
  const int file = ::open(path.c_str(), O_RDWR | O_CLOEXEC);
  if (file < 0) return failed(cudaErrorInvalidResourceHandle);
  return map_device_memory(file, static_cast<std::size_t>(::lseek(file, 0, SEEK_END)), true, data);
}

cudaError_t cudaIpcCloseMemHandle(void* data) {
  PD_ENTER_TO_GIVE_BACK(kEndsCaptures);
  (void)unmap_device_memory(data, true);
  return entered;
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned /*flags*/) {
  PD_ENTER();
  auto made = std::make_shared<CUstream_st>();
  made->device = own_device;
  *stream = made.get();
  all.streams[*stream] = made;
  all.contexts.insert(own_device);
  start(made);
  return cudaSuccess;
}

cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  PD_ENTER_TO_GIVE_BACK();
  CUstream_st& given = stream_of(stream);
  given.is_closing = true;  // closes after all enqueued work
  given.has_work.notify_one();
  return entered;
}

cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status) {
  PD_ENTER();
  *status = stream_of(stream).is_capturing ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
  return cudaSuccess;
}

cudaError_t cudaDeviceSynchronize() {
  PD_ENTER(kEndsCaptures);
  std::vector<std::pair<std::shared_ptr<CUstream_st>, std::uint64_t>> targets;
  for (const auto& [handle, stream] : all.streams) {
    if (stream->device == own_device) targets.emplace_back(stream, stream->num_enqueued);
  }
  for (const auto& [stream, target] : targets)
    all.has_changed.wait(lock, [&, done = target] { return stream->num_done >= done; });
  return failed(all.context_error);
}

cudaError_t cudaStreamQuery(cudaStream_t stream) {
  PD_ENTER(kEndsCaptures);
  const CUstream_st& given = stream_of(stream);
  return given.num_done >= given.num_enqueued ? cudaSuccess : failed(cudaErrorNotReady);
}

cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  PD_ENTER(kEndsCaptures);
  return wait_until_done(lock, all.streams.at(&stream_of(stream)));
}

cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned /*flags*/) {
  PD_ENTER();
  CUstream_st& given = stream_of(stream);
  if (event_of(event).is_captured) return failed(cudaErrorCapturedEvent);
  enqueue(given, [record = event_of(event).last] {
    Lock waiting(driver().mutex);
    driver().has_changed.wait(waiting,
                              [&] { return record->is_done || driver().context_error != cudaSuccess; });
  });
  return cudaSuccess;
}

cudaError_t cudaMemcpyAsync(void* to, const void* from, std::size_t num_bytes, cudaMemcpyKind /*kind*/,
                            cudaStream_t stream) {
  PD_ENTER();
  CUstream_st& given = stream_of(stream);
  bool is_pageable = false;
  std::byte* const target = place_of(to, num_bytes, &is_pageable);
  const std::byte* const source = place_of(from, num_bytes, &is_pageable);
  enqueue(given, [=] { std::memcpy(target, source, num_bytes); },
          {reinterpret_cast<std::uintptr_t>(to), reinterpret_cast<std::uintptr_t>(from)});
  return is_pageable ? wait_until_done(lock, all.streams.at(&given)) : cudaSuccess;
}

cudaError_t cudaMemsetAsync(void* to, int value, std::size_t num_bytes, cudaStream_t stream) {
  PD_ENTER();
  CUstream_st& given = stream_of(stream);
  bool is_pageable = false;
  std::byte* const target = place_of(to, num_bytes, &is_pageable);
  if (is_pageable) give_up(own_call, "the memory is not the device's");
  enqueue(given, [=] { std::memset(target, value, num_bytes); }, {reinterpret_cast<std::uintptr_t>(to)});
  return cudaSuccess;
}

cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void* data) {
  PD_ENTER();
  enqueue(stream_of(stream), [function, data] {
    const std::lock_guard one(driver().host_functions);
    in_host_function = true;
    function(data);
    in_host_function = false;
  });
  return cudaSuccess;
}

cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
  PD_ENTER();
  std::swap(*mode, own_capture_mode);
  return cudaSuccess;
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned flags) {
  PD_ENTER();
  auto made = std::make_unique<CUevent_st>();
  made->device = own_device;
  made->flags = flags;
  *event = made.release();
  all.events.insert(*event);
  return cudaSuccess;
}

cudaError_t cudaEventDestroy(cudaEvent_t event) {
  PD_ENTER_TO_GIVE_BACK();
  const std::unique_ptr<CUevent_st> given(&event_of(event));
  all.events.erase(event);
  return entered;
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  PD_ENTER();
  CUstream_st& given = stream_of(stream);
  CUevent_st& recorded = event_of(event);
  recorded.is_captured = given.is_capturing;
  if (recorded.device != given.device) return failed(cudaErrorInvalidResourceHandle);
  if (given.is_capturing) {
    ++given.num_captured;
    return cudaSuccess;
  }
  recorded.last = std::make_shared<CUevent_st::Record>(CUevent_st::Record{false});
  enqueue(given, [record = recorded.last] {
    const Lock noting(driver().mutex);
    record->is_done = true;
    driver().has_changed.notify_all();
  });
  return cudaSuccess;
}

cudaError_t cudaEventQuery(cudaEvent_t event) {
  PD_ENTER(kEndsCaptures);
  if (event_of(event).is_captured) return failed(cudaErrorCapturedEvent);
  return event_of(event).last->is_done ? cudaSuccess : failed(cudaErrorNotReady);
}

cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  PD_ENTER(kEndsCaptures);
  const auto record = event_of(event).last;
  if ((event_of(event).flags & cudaEventBlockingSync) == 0) ++all.num_spins;
  all.has_changed.wait(lock, [&] { return record->is_done || all.context_error != cudaSuccess; });
  return failed(all.context_error);
}

cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void* kernel) {
  PD_ENTER();
  *attributes = {};
  all.contexts.insert(own_device);
  all.loaded.insert({own_device, kernel});
  return cudaSuccess;
}

cudaError_t cudaGetLastError() {
  Driver& all = driver();
  const Lock lock(all.mutex);
  if (in_host_function) give_up("cudaGetLastError", "is called inside a host function");
  const cudaError_t error = all.context_error != cudaSuccess ? all.context_error : own_error;
  own_error = cudaSuccess;
  return error;
}

const char* cudaGetErrorString(cudaError_t error) {
  switch (error) {
    case cudaSuccess:
      return "no error";
    case cudaErrorMemoryAllocation:
      return "out of memory";
    case cudaErrorIllegalAddress:
      return "an illegal memory access was encountered";
    case cudaErrorNotReady:
      return "device not ready";
    case cudaErrorAssert:
      return "device-side assert triggered";
    default:
      return "an error of the stand-in";
  }
}

const char* cudaGetErrorName(cudaError_t error) {
  switch (error) {
    case cudaErrorMemoryAllocation:
      return "cudaErrorMemoryAllocation";
    case cudaErrorIllegalAddress:
      return "cudaErrorIllegalAddress";
    case cudaErrorLaunchFailure:
      return "cudaErrorLaunchFailure";
    default:
      return "cudaErrorOther";
  }
}

CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned* flags, int* active) {
  Driver& all = driver();
  const Lock lock(all.mutex);
  if (!is_device(device)) return CUDA_ERROR_INVALID_DEVICE;
  *flags = 0;
  *active = all.contexts.contains(device) ? 1 : 0;
  return CUDA_SUCCESS;
}

cudaError_t cudaGetDriverEntryPointByVersion(const char* symbol, void** function, unsigned /*version*/,
                                             unsigned long long /*flags*/,
                                             cudaDriverEntryPointQueryResult* /*result*/) {
  PD_ENTER();
  const bool is_known = std::strcmp(symbol, "cuDevicePrimaryCtxGetState") == 0;
  *function = is_known ? reinterpret_cast<void*>(&cuDevicePrimaryCtxGetState) : nullptr;
  return is_known ? cudaSuccess : failed(cudaErrorInvalidValue);
}

}  // extern "C"
// NOLINTEND(readability-inconsistent-declaration-parameter-name)
