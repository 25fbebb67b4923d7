// A HostileDevice is a device on the host that behaves like CUDA in the least convenient way, so that code
// which works only by luck soon fails.
//
//   streams     run later, on threads of their own, with random delays; wrapped streams, too. Host functions
//               of all streams run one after the other
//   memory      a host thread that touches device memory gets SIGSEGV. Only the streams' threads have a
//               second mapping. While a copy runs, the bytes that it writes are poison (0xFF)
//   order       these are violations, whatever the delays: a copy is enqueued while another copy, which it is
//               not ordered after, still uses the same bytes, and one of the two writes them; memory is freed
//               before its copies are done; a host function calls the device or destroys an event
//   errors      any call can be made to fail. After an error of the context every call fails, enqueued work
//               is dropped, and no host function runs any more
//
// The delays come from the seed $PIPEDREAM_HOSTILE_SEED, or from one that the process prints. A violation
// fails the test when its device is destroyed. Any thread. A device must outlive its streams, events and
// memory. Devices of one process can use each other's memory, as CUDA's can with peer access, and can export
// it to other processes.
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
  // Reasons for which the device refuses calls; empty if it does not. Set them before the device is used.
  std::string why_not_exported;
  std::string why_not_imported;
  std::string why_no_memory;  // thrown as a UserError
  // Makes import_memory() map another memory, as a driver that reuses numbers might.
  bool maps_another_memory = false;

  // Chooses the call that fails: the call of this name after num_calls_before others. "" counts calls of any
  // name. The call throws DeviceError with the text `why`. It also ends the context if ends_context is set.
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
  // Enqueues a kernel. The kernel may wait, because it does not hold up the host functions of other streams.
  void launch(Stream& stream, std::function<void()> kernel);
  // Enqueues a kernel that ends the context when it runs.
  void launch_fault(Stream& stream, std::string why);

  [[nodiscard]] std::uint64_t num_calls() const;  // calls so far that could have failed
  [[nodiscard]] bool is_broken() const;           // whether the context has ended
  // Returns the violations so far. They no longer fail the test.
  [[nodiscard]] std::vector<std::string> take_violations();

  [[nodiscard]] int num_exported() const { return num_exported_; }  // exported and not yet freed
  [[nodiscard]] int num_imported() const { return num_imported_; }
  // How often host memory was registered so far.
  [[nodiscard]] int num_registered() const { return num_registered_; }

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

  // Callers of these functions hold the mutex of the process's driver.
  using Lock = std::unique_lock<std::mutex>;
  void enter(Lock& lock, const char* call);
  void end_context(Lock& lock, const std::string& why);
  void note_violation(std::string what);
  [[noreturn]] void throw_failed(const char* call, const std::string& why) const;

  const std::uint64_t seed_;
  std::uint64_t num_streams_ = 0;  // all that were ever made
  std::uint64_t num_calls_ = 0;
  std::optional<Fault> fault_;
  bool is_ending_ = false;            // no further copy begins
  std::optional<std::string> ended_;  // Why the context has ended. No copy is running then.
  std::vector<std::string> violations_;
  std::vector<HostileQueue*> queues_;
  std::map<std::uintptr_t, std::unique_ptr<HostileQueue>> wrapped_;  // by native handle
  std::atomic<int> num_exported_{0};
  std::atomic<int> num_imported_{0};
  std::atomic<int> num_registered_{0};
};

// Copies the bytes to new device memory on the stream. The memory is freed only after that copy.
[[nodiscard]] std::shared_ptr<Memory> upload(Device& device, Stream& stream, std::vector<std::byte> bytes);

// Waits until the stream has done all work enqueued before, and reads bytes of the device or of the host.
[[nodiscard]] std::vector<std::byte> read_bytes(Stream& stream, const void* data, std::size_t num_bytes);

}  // namespace pipedream
