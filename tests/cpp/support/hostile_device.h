// A device that behaves like CUDA, on the host, and is hostile: what works on it by luck does not work for
// long.
//
//   streams     run later, on threads of their own, delayed at random; a wrapped stream, too. Host functions
//               of all streams run one after the other
//   memory      the host that touches device memory gets SIGSEGV: only the streams' threads know where it is
//               mapped a second time. What a copy writes is poison (0xFF) from its begin until its end
//   order       an operation that is enqueued while another, which it is not ordered after, still reads or
//               writes the same bytes is a violation, whatever the delays; so is memory that is freed before
//               they are done, and a call of the device inside a host function
//   errors      any call fails on demand. After an error of the context every call fails, what is enqueued is
//               dropped and no host function runs any more
//
// The delays come from $PIPEDREAM_HOSTILE_SEED, or from a seed that the process prints. A violation fails the
// test when its device dies. Any thread; a device outlives its streams, events and memory. Devices of one
// process can use each other's memory, as those of CUDA with peer access, and export it to other processes.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "device/device.h"

namespace pipedream {

class HostileQueue;

class HostileDevice final : public Device {
 public:
  // What is refused; set before it is used. Empty: nothing.
  std::string why_not_exported;
  std::string why_not_imported;
  std::string why_no_memory;         // thrown, as UserError
  bool maps_another_memory = false;  // as a driver might, that reuses numbers

  // Which call fails: the one after so many others of this name, "" for any. It throws DeviceError with this
  // reason, and the context ends, unless it is to live on.
  struct Fault {
    std::string call;
    std::uint64_t num_calls_before = 0;
    std::string why = "an illegal memory access was encountered";
    bool ends_context = true;
  };

  HostileDevice();
  ~HostileDevice() override;
  HostileDevice(const HostileDevice&) = delete;
  HostileDevice& operator=(const HostileDevice&) = delete;

  void fail(Fault fault);
  // Enqueues work that the host functions do not see and that may wait: a kernel.
  void launch(Stream& stream, std::function<void()> kernel);
  // A kernel that ends the context, once it runs.
  void launch_fault(Stream& stream, std::string why);

  [[nodiscard]] std::uint64_t num_calls() const;  // that may fail
  [[nodiscard]] bool is_broken() const;           // its context has ended
  // Those so far, which no longer fail the test.
  [[nodiscard]] std::vector<std::string> take_violations();

  [[nodiscard]] int num_exported() const { return num_exported_; }  // and not freed
  [[nodiscard]] int num_imported() const { return num_imported_; }
  [[nodiscard]] int num_registered() const { return num_registered_; }  // ever

  [[nodiscard]] DeviceType type() const override { return DeviceType::kCuda; }
  [[nodiscard]] int index() const override { return 0; }
  [[nodiscard]] std::string name() const override { return "hostile:0"; }
  [[nodiscard]] std::unique_ptr<Stream> make_stream() override;
  [[nodiscard]] std::unique_ptr<Event> make_event() override;
  [[nodiscard]] std::unique_ptr<Stream> wrap_stream(std::uintptr_t native_handle) override;
  [[nodiscard]] std::unique_ptr<Memory> allocate(std::size_t num_bytes, MemoryKind kind) override;
  [[nodiscard]] std::unique_ptr<HostRegistration> register_host_memory(std::byte* data,
                                                                       std::size_t num_bytes) override;
  void check() override;
  [[nodiscard]] bool device_memory_is_host_memory() const override { return false; }
  [[nodiscard]] std::unique_ptr<ExportedMemory> export_memory(std::size_t num_bytes,
                                                              std::string* why) override;
  [[nodiscard]] std::unique_ptr<Memory> import_memory(const std::string& handle, std::size_t num_bytes,
                                                      std::string* why) override;

 private:
  friend class HostileQueue;
  friend class HostileStream;
  friend class HostileEvent;
  friend class HostileMemory;

  // All under the mutex of the process's driver.
  using Lock = std::unique_lock<std::mutex>;
  void enter(Lock& lock, const char* call);
  void end_context(Lock& lock, const std::string& why);
  void note_violation(std::string what);
  [[noreturn]] void throw_failed(const char* call, const std::string& why) const;

  const std::uint64_t seed_;
  std::uint64_t num_streams_ = 0;  // ever
  std::uint64_t num_calls_ = 0;
  std::optional<Fault> fault_;
  bool is_ending_ = false;            // no copy begins any more
  std::optional<std::string> ended_;  // the context, and why: none is under way
  std::vector<std::string> violations_;
  std::vector<HostileQueue*> queues_;
  std::map<std::uintptr_t, std::unique_ptr<HostileQueue>> wrapped_;  // by native handle
  std::atomic<int> num_exported_{0};
  std::atomic<int> num_imported_{0};
  std::atomic<int> num_registered_{0};
};

// Device memory with these bytes, once the stream has done what was enqueued. It dies after its own copy.
[[nodiscard]] std::shared_ptr<Memory> upload(Device& device, Stream& stream, std::vector<std::byte> bytes);

// Bytes of the device, or of the host, read by the stream once it has done what was enqueued before.
[[nodiscard]] std::vector<std::byte> read_bytes(Stream& stream, const void* data, std::size_t num_bytes);

}  // namespace pipedream
