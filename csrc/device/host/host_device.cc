// Implements the host backend. A host device has no state: streams own their threads, and memory owns its
// mapping. Any thread.
#include "base/check.h"
#include "device/device.h"
#include "device/host/host_memory.h"
#include "device/host/host_stream.h"

namespace pipedream {
namespace {

class HostDevice final : public Device {
 public:
  [[nodiscard]] DeviceType type() const override { return DeviceType::kHost; }
  [[nodiscard]] int index() const override { return 0; }
  [[nodiscard]] std::string name() const override { return "host"; }

  [[nodiscard]] std::unique_ptr<Stream> make_stream() override { return std::make_unique<HostStream>(); }
  [[nodiscard]] std::unique_ptr<Event> make_event() override { return std::make_unique<HostEvent>(); }
  [[nodiscard]] std::unique_ptr<Stream> wrap_stream(std::uintptr_t native_handle) override {
    PD_CHECK(native_handle == 0, "a host stream has no handle, got " << native_handle);
    return std::make_unique<CallerStream>();
  }
  [[nodiscard]] std::unique_ptr<Memory> allocate(std::size_t num_bytes, MemoryKind kind) override {
    return std::make_unique<HostMemory>(
        num_bytes, kind == MemoryKind::kDevice ? "device memory on host" : "staging memory on host");
  }
  [[nodiscard]] std::unique_ptr<HostRegistration> register_host_memory(std::byte* /*data*/,
                                                                       std::size_t /*num_bytes*/) override {
    return std::make_unique<HostRegistration>();
  }
  [[nodiscard]] bool device_memory_is_host_memory() const override { return true; }
};

}  // namespace

std::unique_ptr<Device> make_host_device() { return std::make_unique<HostDevice>(); }

}  // namespace pipedream
