// A Device gives a stage streams, events and memory. host/ (one thread per stream, truly asynchronous) and
// cuda/ implement this same interface. The tests in tests/cpp/device run on both.
//
// Async functions take the stream explicitly; there is no default stream.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>

namespace pipedream {

// Reports that the device refused a call, or that earlier work on it failed, most often a kernel of the
// user's model. The device cannot be used afterwards. The host backend never throws it. In Python it is a
// RuntimeError.
class DeviceError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

enum class DeviceType { kHost, kCuda };

enum class MemoryKind {
  kDevice,   // where the stage computes
  kStaging,  // pinned host memory between device and wire; on the host backend plain host memory
};

// An Event marks a point in a stream's order. After record(), the CPU or another stream can wait for it. Any
// thread may use it, but only one at a time may record it.
class Event {
 public:
  Event() = default;
  Event(const Event&) = delete;
  Event& operator=(const Event&) = delete;
  virtual ~Event() = default;

  // Returns whether everything before the last record() is done; true if there was no record().
  [[nodiscard]] virtual bool done() const = 0;
  // Blocks the calling CPU thread until done().
  virtual void wait() const = 0;
};

// The most operations that a stream of the host backend holds. While that many are pending, a thread that
// enqueues another one has to wait. CUDA's driver has a limit of its own.
inline constexpr std::size_t kStreamDepth = 512;

// A Stream is an ordered queue of asynchronous work. Any thread may enqueue work, and work is done in the
// order of the calls. The destructor finishes all enqueued work, except on a stream that
// Device::wrap_stream() has wrapped. Only events of the stream's own device may be used.
class Stream {
 public:
  Stream() = default;
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;
  virtual ~Stream() = default;

  // Copies num_bytes. Until the copy is done, both ranges must stay valid, and nothing else may write to
  // them. The ranges do not overlap.
  virtual void copy(void* to, const void* from, std::size_t num_bytes) = 0;
  virtual void record(Event& event) = 0;
  // Work enqueued after this starts only when the event is done. The CPU does not wait.
  virtual void wait(const Event& event) = 0;
  // Enqueues a function that runs on a CPU thread, in stream order. It must be short and must not call the
  // device.
  virtual void call(std::function<void()> function) = 0;
  // Returns whether a CUDA graph is being captured from this stream. If so, record() or wait() would become
  // part of that graph.
  [[nodiscard]] virtual bool is_capturing() const { return false; }
  // Blocks the calling CPU thread until everything enqueued is done. After an error of the device it throws
  // DeviceError, and no function of call() runs any more.
  virtual void synchronize() = 0;
  // Returns the handle that Device::wrap_stream() takes; 0 on the host.
  [[nodiscard]] virtual std::uintptr_t native_handle() const { return 0; }
};

// The use of a copy stream (Device::make_copy_stream()). A kTell stream only waits for events and runs
// functions of call().
enum class CopyUse { kSend, kTell, kReceive };
inline constexpr std::size_t kNumCopyUses = 3;

// Owns one allocation, or access to an imported one (Device::import_memory()). Host memory is aligned to at
// least 64 bytes, and the kernel is advised to use huge pages.
class Memory {
 public:
  Memory() = default;
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;
  virtual ~Memory() = default;

  [[nodiscard]] virtual std::byte* data() const = 0;
  [[nodiscard]] virtual std::size_t size_bytes() const = 0;
};

inline constexpr std::size_t kMemoryHandleBytesMax = 256;

// Device memory that other processes of this host can map, to write into it. Destroy it only after they have
// unmapped it.
class ExportedMemory : public Memory {
 public:
  // Returns the handle that Device::import_memory() takes: arbitrary bytes, at most kMemoryHandleBytesMax of
  // them.
  [[nodiscard]] virtual const std::string& handle() const = 0;
};

// Keeps host memory of the caller registered with the device. Destroy it before you free the memory.
class HostRegistration {
 public:
  HostRegistration() = default;
  HostRegistration(const HostRegistration&) = delete;
  HostRegistration& operator=(const HostRegistration&) = delete;
  virtual ~HostRegistration() = default;
};

class Device {
 public:
  Device() = default;
  Device(const Device&) = delete;
  Device& operator=(const Device&) = delete;
  virtual ~Device() = default;

  [[nodiscard]] virtual DeviceType type() const = 0;
  [[nodiscard]] virtual int index() const = 0;         // 0 on the host
  [[nodiscard]] virtual std::string name() const = 0;  // "host", "cuda:0 NVIDIA H100"

  [[nodiscard]] virtual std::unique_ptr<Stream> make_stream() = 0;
  // Returns a stream that may be shared by all callers with the same use. A device runs few streams at once.
  // With more streams, work would wait for work of other streams at random. On a shared stream work waits
  // only for work that was enqueued earlier, and never for a thread.
  [[nodiscard]] virtual std::unique_ptr<Stream> make_copy_stream(CopyUse /*use*/) { return make_stream(); }
  [[nodiscard]] virtual std::unique_ptr<Event> make_event() = 0;
  // Wraps a stream on which the caller's framework computes (a cudaStream_t as an integer). On the host the
  // handle is 0 and stands for the calling thread, so work is done when the call returns.
  [[nodiscard]] virtual std::unique_ptr<Stream> wrap_stream(std::uintptr_t native_handle) = 0;

  // Throws a UserError that names size and device if there is not enough memory. Device memory is zeroed.
  // Host memory is also touched page by page, so that the first minibatch does not pay for it. Host memory is
  // kStaging on CUDA, and both kinds on the host backend.
  [[nodiscard]] virtual std::unique_ptr<Memory> allocate(std::size_t num_bytes, MemoryKind kind) = 0;

  // Pins host memory that the device did not allocate, so that copies from and to it are as fast and as
  // asynchronous as with staging memory. data must be at a page's boundary. Does nothing on the host backend.
  // Throws a UserError that names the size if the memory cannot be pinned.
  [[nodiscard]] virtual std::unique_ptr<HostRegistration> register_host_memory(std::byte* data,
                                                                               std::size_t num_bytes) = 0;

  // Throws DeviceError if earlier work has failed. After an error, enqueued work and functions of call() may
  // never run. So a thread that waits for them must call check() now and then. Does not wait. Never throws on
  // the host backend.
  virtual void check() {}
  // Blocks the calling CPU thread until the device has done all work that this process has enqueued on any
  // stream, including the framework's streams. Does nothing on the host backend, where the framework enqueues
  // nothing.
  virtual void synchronize() {}

  // Returns whether the CPU can read device memory. If so, tensors are sent without a staging buffer.
  [[nodiscard]] virtual bool device_memory_is_host_memory() const = 0;

  // Allocates zeroed device memory that other processes can map. Returns null if that is not possible, and
  // the reason in *why. It is never possible on the host backend, which shares memory in another way
  // (SharedMemory). Throws UserError if allocate() would.
  [[nodiscard]] virtual std::unique_ptr<ExportedMemory> export_memory(std::size_t num_bytes,
                                                                      std::string* why = nullptr);
  // Maps memory that a device of this kind has exported, in any process of this host. This device's streams
  // can copy from and to it. Destroy the result before the exporter frees the memory. The handle is not
  // checked, so it must come from a trusted process. Returns null, and the reason in *why, if the memory
  // cannot be mapped.
  [[nodiscard]] virtual std::unique_ptr<Memory> import_memory(const std::string& handle,
                                                              std::size_t num_bytes,
                                                              std::string* why = nullptr);
};

[[nodiscard]] std::unique_ptr<Device> make_host_device();

// Returns whether CUDA can be used. It needs a build with CUDA, a driver that is new enough, and a device
// that runs this build's kernels. why_no_cuda() is the reason why CUDA cannot be used, or empty. Neither
// function makes a context.
[[nodiscard]] bool cuda_available();
[[nodiscard]] std::string why_no_cuda();
[[nodiscard]] bool built_with_cuda();
// Throws UserError if CUDA is not available, if the index does not exist, or if the device with this index
// runs no kernels of this build.
[[nodiscard]] std::unique_ptr<Device> make_cuda_device(int index);

}  // namespace pipedream
