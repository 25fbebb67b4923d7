// Implements the CUDA backend on the CUDA runtime API alone. There are no kernels here, so the host compiler
// builds it.
//
// The caller's framework sees no change of the current device, and its captures go on (cuda_calls.h). Streams
// are non-blocking, so nothing here waits for the legacy default stream unless the caller wraps that stream.
// The runtime is linked statically. All runtimes of a process, torch's too, share the driver's primary
// context. So they can use the same streams, events and pointers.
#include <cuda_runtime_api.h>

#include <array>
#include <atomic>
#include <condition_variable>
#include <mutex>
#include <utility>
#include <vector>

#include "base/bytes.h"
#include "base/check.h"
#include "base/failure.h"
#include "device/cuda/cuda_architectures.h"
#include "device/cuda/cuda_calls.h"
#include "device/cuda/cuda_ipc.h"
#include "device/device.h"
#include "device/host/host_memory.h"

namespace pipedream {
namespace {

// Keeps free CUDA events for reuse, because every work item needs an event. Any thread.
class FreeEvents {
 public:
  explicit FreeEvents(int device_index) : device_index_(device_index) {}
  FreeEvents(const FreeEvents&) = delete;
  FreeEvents& operator=(const FreeEvents&) = delete;
  ~FreeEvents() {
    const DeviceScope scope(device_index_, std::nothrow);
    for (const cudaEvent_t event : free_) PD_CUDA_LOG(cudaEventDestroy(event), device_index_);
  }

  [[nodiscard]] cudaEvent_t take() {
    {
      const std::lock_guard lock(mutex_);
      if (!free_.empty()) {
        const cudaEvent_t event = free_.back();
        free_.pop_back();
        return event;
      }
    }
    const DeviceScope scope(device_index_);
    cudaEvent_t event = nullptr;
    // With blocking synchronization a waiting thread sleeps, and takes no core from a thread that computes.
    PD_CUDA(cudaEventCreateWithFlags(&event, cudaEventDisableTiming | cudaEventBlockingSync), device_index_);
    return event;
  }
  void give_back(cudaEvent_t event) noexcept {
    const std::lock_guard lock(mutex_);
    free_.push_back(event);
  }

 private:
  const int device_index_;
  std::mutex mutex_;               // guards free_
  std::vector<cudaEvent_t> free_;  // at most as many as there were events at the same time
};

class CudaEvent final : public Event {
 public:
  CudaEvent(int device_index, std::shared_ptr<FreeEvents> events)
      : device_index_(device_index), events_(std::move(events)), event_(events_->take()) {}
  ~CudaEvent() override { events_->give_back(event_); }

  // Notes that the event is recorded. Until then, the CUDA event may still have a record of its previous
  // user.
  void note_record() { is_recorded_.store(true, std::memory_order_release); }
  [[nodiscard]] bool is_recorded() const { return is_recorded_.load(std::memory_order_acquire); }

  [[nodiscard]] bool done() const override {
    if (!is_recorded()) return true;
    const DeviceScope scope(device_index_);
    const cudaError_t status = cudaEventQuery(event_);
    if (status == cudaErrorNotReady) {
      (void)cudaGetLastError();  // this was an answer, not an error
      return false;
    }
    throw_if_failed(status, "cudaEventQuery", device_index_);
    return true;
  }
  void wait() const override {
    if (!is_recorded()) return;
    const DeviceScope scope(device_index_);
    PD_CUDA(cudaEventSynchronize(event_), device_index_);
  }
  [[nodiscard]] cudaEvent_t native() const { return event_; }

 private:
  const int device_index_;
  const std::shared_ptr<FreeEvents> events_;
  const cudaEvent_t event_;
  std::atomic<bool> is_recorded_{false};
};

template <class OurEvent, class AnyEvent>
OurEvent& on_cuda(AnyEvent& event) {
  auto* const cuda_event = dynamic_cast<OurEvent*>(&event);
  PD_CHECK(cuda_event != nullptr, "an event of another device on a CUDA stream");
  return *cuda_event;
}

// The host functions that are enqueued on one stream. After an error of the context the driver starts no more
// of them, and does not wait for the one that runs. end() waits for it, because the caller may free the
// function's memory once synchronize() has thrown.
class HostCalls : public std::enable_shared_from_this<HostCalls> {
 public:
  // The driver has the pointer until it calls run(), which frees the Call.
  struct Call {
    std::function<void()> function;
    std::shared_ptr<HostCalls> calls;
  };

  [[nodiscard]] Call* add(std::function<void()> function) {
    auto call = std::make_unique<Call>(std::move(function), shared_from_this());
    const std::lock_guard lock(mutex_);
    pending_.push_back(call.get());
    return call.release();
  }
  void forget(const Call* call) {
    const std::lock_guard lock(mutex_);
    std::erase(pending_, call);
  }

  static void CUDART_CB run(void* data) noexcept {
    const std::unique_ptr<Call> call(static_cast<Call*>(data));
    call->calls->run_one(*call);
  }

  void end() noexcept {
    std::unique_lock lock(mutex_);
    has_ended_ = true;
    changed_.wait(lock, [this] { return !is_running_; });
    if (pending_.empty()) return;
    // The driver may still have the addresses of pending calls, and does not say when it drops them. So these
    // calls are never freed.
    static auto* const dropped = new std::vector<std::shared_ptr<HostCalls>>;
    static std::mutex dropped_mutex;
    const std::lock_guard dropping(dropped_mutex);
    dropped->push_back(shared_from_this());
  }

 private:
  void run_one(const Call& call) {
    {
      const std::lock_guard lock(mutex_);
      std::erase(pending_, &call);
      if (has_ended_) return;
      is_running_ = true;
    }
    call.function();
    const std::lock_guard lock(mutex_);
    is_running_ = false;
    changed_.notify_all();
  }

  std::mutex mutex_;  // guards all members below
  std::condition_variable changed_;
  std::vector<const Call*> pending_;  // calls that the driver has not run yet; few
  bool is_running_ = false;
  bool has_ended_ = false;
};

// Owns a stream of the driver.
class NativeStream {
 public:
  explicit NativeStream(int device_index) : device_index_(device_index) {
    const DeviceScope scope(device_index_);
    PD_CUDA(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), device_index_);
  }
  NativeStream(const NativeStream&) = delete;
  NativeStream& operator=(const NativeStream&) = delete;
  ~NativeStream() {
    const DeviceScope scope(device_index_, std::nothrow);
    PD_CUDA_LOG(cudaStreamDestroy(stream_), device_index_);
  }

  [[nodiscard]] cudaStream_t get() const { return stream_; }

 private:
  const int device_index_;
  cudaStream_t stream_ = nullptr;
};

class CudaStream final : public Stream {
 public:
  CudaStream(int device_index, std::shared_ptr<const NativeStream> stream)
      : device_index_(device_index), owned_(std::move(stream)), stream_(owned_->get()) {}
  // Wraps a stream of the caller. This object neither finishes nor destroys it.
  CudaStream(int device_index, cudaStream_t stream) : device_index_(device_index), stream_(stream) {}
  ~CudaStream() override {
    if (owned_) PD_CUDA_LOG(finish(), device_index_);
  }

  void copy(void* to, const void* from, std::size_t num_bytes) override {
    if (num_bytes == 0) return;
    const DeviceScope scope(device_index_);
    PD_CUDA(cudaMemcpyAsync(to, from, num_bytes, cudaMemcpyDefault, stream_), device_index_);
  }
  void record(Event& event) override {
    const DeviceScope scope(device_index_);
    auto& recorded = on_cuda<CudaEvent>(event);
    PD_CUDA(cudaEventRecord(recorded.native(), stream_), device_index_);
    recorded.note_record();
  }
  void wait(const Event& event) override {
    const auto& awaited = on_cuda<const CudaEvent>(event);
    if (!awaited.is_recorded()) return;
    const DeviceScope scope(device_index_);
    PD_CUDA(cudaStreamWaitEvent(stream_, awaited.native(), 0), device_index_);
  }
  void call(std::function<void()> function) override {
    const DeviceScope scope(device_index_);
    HostCalls::Call* const call = calls_->add(std::move(function));
    const cudaError_t status = cudaLaunchHostFunc(stream_, HostCalls::run, call);
    if (status != cudaSuccess) {
      const std::unique_ptr<HostCalls::Call> refused(call);
      calls_->forget(call);
      throw_if_failed(status, "cudaLaunchHostFunc", device_index_);
    }
  }
  [[nodiscard]] bool is_capturing() const override {
    const DeviceScope scope(device_index_);
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    const cudaError_t asked = cudaStreamIsCapturing(stream_, &status);
    // The default stream answers so while another stream that waits for it is captured.
    if (asked == cudaErrorStreamCaptureImplicit) {
      (void)cudaGetLastError();
      return true;
    }
    throw_if_failed(asked, "cudaStreamIsCapturing", device_index_);
    return status != cudaStreamCaptureStatusNone;
  }
  void synchronize() override { throw_if_failed(finish(), "cudaStreamSynchronize", device_index_); }
  [[nodiscard]] std::uintptr_t native_handle() const override {
    return reinterpret_cast<std::uintptr_t>(stream_);
  }
  void check() const {
    const DeviceScope scope(device_index_);
    const cudaError_t status = cudaStreamQuery(stream_);
    if (status == cudaErrorNotReady) {
      (void)cudaGetLastError();
      return;
    }
    throw_if_failed(status, "cudaStreamQuery", device_index_);
  }

 private:
  // Waits for the stream. When it returns, even with an error, no function of call() runs any more.
  cudaError_t finish() noexcept {
    const DeviceScope scope(device_index_, std::nothrow);
    const cudaError_t status = cudaStreamSynchronize(stream_);
    if (status != cudaSuccess) calls_->end();
    return status;
  }

  const int device_index_;
  const std::shared_ptr<const NativeStream> owned_;  // null for a stream of the caller
  const std::shared_ptr<HostCalls> calls_ = std::make_shared<HostCalls>();
  const cudaStream_t stream_;
};

class CudaDeviceMemory final : public Memory {
 public:
  CudaDeviceMemory(int device_index, std::size_t num_bytes)
      : device_index_(device_index), size_bytes_(num_bytes) {
    PD_CHECK(num_bytes > 0, "0 bytes of device memory on " << device_label(device_index));
    const DeviceScope scope(device_index_);
    void* data = nullptr;
    const cudaError_t status = cudaMalloc(&data, num_bytes);
    if (status == cudaErrorMemoryAllocation) {
      (void)cudaGetLastError();
      std::size_t free_bytes = 0;
      std::size_t total_bytes = 0;
      PD_CUDA(cudaMemGetInfo(&free_bytes, &total_bytes), device_index_);
      throw_not_enough_memory(num_bytes, "device memory on " + device_label(device_index_),
                              format_bytes(free_bytes) + " of " + format_bytes(total_bytes) + " are free");
    }
    throw_if_failed(status, "cudaMalloc", device_index_);
    data_ = static_cast<std::byte*>(data);
    zero();
  }
  ~CudaDeviceMemory() override {
    const DeviceScope scope(device_index_, std::nothrow);
    PD_CUDA_LOG(cudaFree(data_), device_index_);
  }

  [[nodiscard]] std::byte* data() const override { return data_; }
  [[nodiscard]] std::size_t size_bytes() const override { return size_bytes_; }

 private:
  void zero() {
    cudaStream_t stream = nullptr;
    PD_CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), device_index_);
    const cudaError_t enqueued = cudaMemsetAsync(data_, 0, size_bytes_, stream);
    const cudaError_t finished = cudaStreamSynchronize(stream);
    PD_CUDA_LOG(cudaStreamDestroy(stream), device_index_);
    throw_if_failed(enqueued, "cudaMemsetAsync", device_index_);
    throw_if_failed(finished, "cudaStreamSynchronize", device_index_);
  }

  const int device_index_;
  const std::size_t size_bytes_;
  std::byte* data_ = nullptr;
};

// Pins host memory for all devices of the process. It also maps the memory for the device, because the
// codecs' kernels read and write it.
class CudaHostRegistration final : public HostRegistration {
 public:
  CudaHostRegistration(int device_index, std::byte* data, std::size_t num_bytes, const std::string& what)
      : device_index_(device_index), data_(data) {
    const DeviceScope scope(device_index_);
    const cudaError_t status =
        cudaHostRegister(data_, num_bytes, cudaHostRegisterPortable | cudaHostRegisterMapped);
    if (status == cudaErrorMemoryAllocation) {
      (void)cudaGetLastError();
      throw_not_enough_memory(num_bytes, what, "it cannot be pinned");
    }
    throw_if_failed(status, "cudaHostRegister", device_index_);
  }
  ~CudaHostRegistration() override {
    const DeviceScope scope(device_index_, std::nothrow);
    PD_CUDA_LOG(cudaHostUnregister(data_), device_index_);
  }

 private:
  const int device_index_;
  std::byte* const data_;
};

// Holds pinned memory for staging. The memory is mapped and touched as in HostMemory, and then pinned.
class CudaStagingMemory final : public Memory {
 public:
  CudaStagingMemory(int device_index, std::size_t num_bytes)
      : memory_(num_bytes, "staging memory of " + device_label(device_index)),
        registration_(device_index, memory_.data(), num_bytes,
                      "staging memory of " + device_label(device_index)) {}

  [[nodiscard]] std::byte* data() const override { return memory_.data(); }
  [[nodiscard]] std::size_t size_bytes() const override { return memory_.size_bytes(); }

 private:
  const HostMemory memory_;
  const CudaHostRegistration registration_;
};

class CudaDevice final : public Device {
 public:
  explicit CudaDevice(int device_index)
      : device_index_(device_index), events_(std::make_shared<FreeEvents>(device_index)) {
    cudaDeviceProp properties{};
    PD_CUDA(cudaGetDeviceProperties(&properties, device_index_), device_index_);
    name_ = device_label(device_index_) + " " + static_cast<const char*>(properties.name);
  }

  [[nodiscard]] DeviceType type() const override { return DeviceType::kCuda; }
  [[nodiscard]] int index() const override { return device_index_; }
  [[nodiscard]] std::string name() const override { return name_; }

  [[nodiscard]] std::unique_ptr<Stream> make_stream() override {
    return std::make_unique<CudaStream>(device_index_, std::make_shared<NativeStream>(device_index_));
  }
  [[nodiscard]] std::unique_ptr<Stream> make_copy_stream(CopyUse use) override {
    const std::lock_guard lock(mutex_);
    const std::size_t stream_index = num_copy_streams_.at(index_of(use))++ % kNumStreamsPerUse;
    return std::make_unique<CudaStream>(device_index_, copy_stream(use, stream_index));
  }
  [[nodiscard]] std::unique_ptr<Event> make_event() override {
    return std::make_unique<CudaEvent>(device_index_, events_);
  }
  [[nodiscard]] std::unique_ptr<Stream> wrap_stream(std::uintptr_t native_handle) override {
    // NOLINTNEXTLINE(performance-no-int-to-ptr): that is how frameworks hand a stream over
    return std::make_unique<CudaStream>(device_index_, reinterpret_cast<cudaStream_t>(native_handle));
  }
  [[nodiscard]] std::unique_ptr<Memory> allocate(std::size_t num_bytes, MemoryKind kind) override {
    if (kind == MemoryKind::kStaging) return std::make_unique<CudaStagingMemory>(device_index_, num_bytes);
    return std::make_unique<CudaDeviceMemory>(device_index_, num_bytes);
  }
  [[nodiscard]] std::unique_ptr<HostRegistration> register_host_memory(std::byte* data,
                                                                       std::size_t num_bytes) override {
    return std::make_unique<CudaHostRegistration>(device_index_, data, num_bytes,
                                                  "memory to pin for " + device_label(device_index_));
  }
  // Checks one of the copy streams, because the caller's stream may be capturing a graph.
  void check() override {
    const std::lock_guard lock(mutex_);
    CudaStream(device_index_, copy_stream(CopyUse::kTell, 0)->get()).check();
  }
  void synchronize() override {
    const DeviceScope scope(device_index_);
    PD_CUDA(cudaDeviceSynchronize(), device_index_);
  }
  [[nodiscard]] bool device_memory_is_host_memory() const override { return false; }

  [[nodiscard]] std::unique_ptr<ExportedMemory> export_memory(std::size_t num_bytes,
                                                              std::string* why) override {
    if (!has_cuda_ipc(device_index_, why)) return nullptr;
    const std::size_t num_granules = (num_bytes + kCudaIpcGranuleBytes - 1) / kCudaIpcGranuleBytes;
    auto memory = std::make_unique<CudaDeviceMemory>(device_index_, num_granules * kCudaIpcGranuleBytes);
    return export_cuda_memory(device_index_, std::move(memory), num_bytes, why);
  }
  [[nodiscard]] std::unique_ptr<Memory> import_memory(const std::string& handle, std::size_t num_bytes,
                                                      std::string* why) override {
    return import_cuda_memory(device_index_, handle, num_bytes, why);
  }

 private:
  // The number of streams for each of the 3 uses. A device has CUDA_DEVICE_MAX_CONNECTIONS queues, 8 by
  // default, so 2 are left: for the framework's compute stream and for its default stream. With two streams
  // per use, each direction of a straight pipeline has its own.
  static constexpr std::size_t kNumStreamsPerUse = 2;
  using CopyStreams = std::array<std::shared_ptr<const NativeStream>, kNumStreamsPerUse>;

  static std::size_t index_of(CopyUse use) { return static_cast<std::size_t>(use); }
  // The caller holds the mutex.
  [[nodiscard]] const std::shared_ptr<const NativeStream>& copy_stream(CopyUse use,
                                                                       std::size_t stream_index) {
    auto& stream = copy_streams_.at(index_of(use)).at(stream_index);
    if (!stream) stream = std::make_shared<NativeStream>(device_index_);
    return stream;
  }

  const int device_index_;
  const std::shared_ptr<FreeEvents> events_;  // shared with the events, which may outlive the device
  std::string name_;
  std::mutex mutex_;                                          // guards the members below
  std::array<CopyStreams, kNumCopyUses> copy_streams_;        // each is null until it is needed
  std::array<std::size_t, kNumCopyUses> num_copy_streams_{};  // calls of make_copy_stream(), by use
};

// 13020 is "13.2".
std::string version_text(int version) {
  return std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10);
}

// The oldest driver that runs programs of this toolkit's major version, as NVIDIA numbers drivers.
constexpr const char* kOldestDriver = CUDART_VERSION >= 13000 ? "580" : "525";

std::string why_no_device(cudaError_t status) {
  if (status == cudaSuccess) return "there is no CUDA device";
  (void)cudaGetLastError();
  if (status != cudaErrorInsufficientDriver) return cudaGetErrorString(status);
  int driver_version = 0;
  (void)cudaDriverGetVersion(&driver_version);
  if (driver_version == 0) return "there is no CUDA driver";
  return "it was built with CUDA " + version_text(CUDART_VERSION) + ", which needs driver " + kOldestDriver +
         " or later, and the driver here runs CUDA " + version_text(driver_version) + " at most";
}

// Returns the reason why the device does not run this build's kernels, or an empty text if it does. Makes no
// context.
std::string why_no_kernels(int device_index) {
  ComputeCapability has;
  PD_CUDA(cudaDeviceGetAttribute(&has.major, cudaDevAttrComputeCapabilityMajor, device_index), device_index);
  PD_CUDA(cudaDeviceGetAttribute(&has.minor, cudaDevAttrComputeCapabilityMinor, device_index), device_index);
  if (has_kernels_for(has)) return "";
  const bool is_dropped = CUDART_VERSION >= 13000 && has.major * 10 + has.minor < 75;
  return device_label(device_index) + " has compute capability " + std::to_string(has.major) + "." +
         std::to_string(has.minor) + ", and it was built for " + built_capabilities() +
         " and later: PIPEDREAM_CUDA_ARCHS=" + std::to_string(has.major * 10 + has.minor) +
         " at its installation adds kernels for this one" +
         (is_dropped ? ", with a CUDA 12 toolkit, as CUDA 13 has dropped it" : "");
}

struct DeviceCount {
  int num_devices = 0;
  std::string why_none;  // the reason why no device can be used; empty if one can
};

// Counts the devices. If the driver or all devices are missing or too old, it does not throw; why_none then
// has the reason.
DeviceCount count_devices() {
  DeviceCount count;
  const cudaError_t status = cudaGetDeviceCount(&count.num_devices);
  if (status != cudaSuccess || count.num_devices == 0) return {0, why_no_device(status)};
  for (int device_index = 0; device_index < count.num_devices; ++device_index) {
    std::string why = why_no_kernels(device_index);
    if (why.empty()) return {count.num_devices, ""};
    if (count.why_none.empty()) count.why_none = std::move(why);
  }
  return count;
}

}  // namespace

bool built_with_cuda() { return true; }

bool cuda_available() { return why_no_cuda().empty(); }

std::string why_no_cuda() { return count_devices().why_none; }

std::unique_ptr<Device> make_cuda_device(int index) {
  const DeviceCount count = count_devices();
  if (!count.why_none.empty()) {
    throw UserError(device_label(index) + " was asked for, but CUDA is not available: " + count.why_none +
                    "; use the host device");
  }
  if (index < 0 || index >= count.num_devices) {
    throw UserError(device_label(index) + " does not exist: this machine has " +
                    std::to_string(count.num_devices) + " CUDA device(s), counted from cuda:0");
  }
  if (const std::string why = why_no_kernels(index); !why.empty()) {
    throw UserError(device_label(index) + " was asked for, but pipedream cannot use it: " + why +
                    "; leave it out of CUDA_VISIBLE_DEVICES");
  }
  return std::make_unique<CudaDevice>(index);
}

}  // namespace pipedream
