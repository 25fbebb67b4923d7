// Shares device memory by cudaIpcGetMemHandle and cudaIpcOpenMemHandle. If one of these calls fails, the
// functions return null and the reason, because the bytes can travel in other ways. Other calls that fail
// throw DeviceError. CUDA cannot open a handle in the process that made it, so there the maker's pointer is
// used instead.
#include "device/cuda/cuda_ipc.h"

#include <cuda_runtime_api.h>
#include <unistd.h>

#include <cstdint>
#include <cstring>
#include <optional>
#include <type_traits>
#include <utility>

#include "base/check.h"
#include "device/cuda/cuda_calls.h"

namespace pipedream {
namespace {

// The bytes of ExportedMemory::handle(). They travel between processes of the same build on the same host.
struct Handle {
  cudaIpcMemHandle_t memory;
  cudaUUID_t device;
  std::uint64_t num_bytes;
  std::int64_t pid;
  std::uint64_t pointer;  // the memory's address in the maker's process
};
static_assert(std::is_trivially_copyable_v<Handle> && sizeof(Handle) <= kMemoryHandleBytesMax);

void say(std::string* why, const std::string& reason) {
  if (why != nullptr) *why = reason;
}

// Describes the error, and clears it in the runtime, so that the next call does not report it again.
std::string text_of(const char* call, cudaError_t status) {
  (void)cudaGetLastError();
  return std::string(call) + ": " + cudaGetErrorString(status) + " (" + cudaGetErrorName(status) + ")";
}

cudaUUID_t uuid_of(int device_index) {
  cudaDeviceProp properties{};
  PD_CUDA(cudaGetDeviceProperties(&properties, device_index), device_index);
  return properties.uuid;
}

bool same(const cudaUUID_t& one, const cudaUUID_t& other) {
  return std::memcmp(&one, &other, sizeof(cudaUUID_t)) == 0;
}

// Returns the device's index in this process, or nothing if this process does not see the device. Its memory
// can be mapped even then.
std::optional<int> index_of(const cudaUUID_t& uuid, int device_index) {
  int num_devices = 0;
  PD_CUDA(cudaGetDeviceCount(&num_devices), device_index);
  for (int other = 0; other < num_devices; ++other) {
    if (same(uuid_of(other), uuid)) return other;
  }
  return std::nullopt;
}

bool can_access(int device_index, const cudaUUID_t& uuid, std::string* why) {
  const std::optional<int> other = index_of(uuid, device_index);
  if (!other || *other == device_index) return true;
  int can = 0;
  PD_CUDA(cudaDeviceCanAccessPeer(&can, device_index, *other), device_index);
  if (can == 0) say(why, device_label(device_index) + " has no peer access to " + device_label(*other));
  return can != 0;
}

class CudaExportedMemory final : public ExportedMemory {
 public:
  CudaExportedMemory(std::unique_ptr<Memory> memory, std::size_t num_bytes, const Handle& handle)
      : memory_(std::move(memory)),
        num_bytes_(num_bytes),
        handle_(reinterpret_cast<const char*>(&handle), sizeof(handle)) {}

  [[nodiscard]] std::byte* data() const override { return memory_->data(); }
  [[nodiscard]] std::size_t size_bytes() const override { return num_bytes_; }
  [[nodiscard]] const std::string& handle() const override { return handle_; }

 private:
  const std::unique_ptr<Memory> memory_;
  const std::size_t num_bytes_;
  const std::string handle_;
};

class CudaImportedMemory final : public Memory {
 public:
  // opened: whether cudaIpcOpenMemHandle() has mapped the memory. If not, the memory was made in this
  // process, and its maker outlives this object.
  CudaImportedMemory(int device_index, std::byte* data, std::size_t num_bytes, bool opened)
      : device_index_(device_index), data_(data), num_bytes_(num_bytes), opened_(opened) {}
  ~CudaImportedMemory() override {
    if (!opened_) return;
    const DeviceScope scope(device_index_, std::nothrow);
    PD_CUDA_LOG(cudaIpcCloseMemHandle(data_), device_index_);
  }

  [[nodiscard]] std::byte* data() const override { return data_; }
  [[nodiscard]] std::size_t size_bytes() const override { return num_bytes_; }

 private:
  const int device_index_;
  std::byte* const data_;
  const std::size_t num_bytes_;
  const bool opened_;
};

}  // namespace

bool has_cuda_ipc(int device_index, std::string* why) {
#if CUDART_VERSION >= 12000
  int supported = 0;
  PD_CUDA(cudaDeviceGetAttribute(&supported, cudaDevAttrIpcEventSupport, device_index), device_index);
  if (supported == 0) say(why, device_label(device_index) + " does not support CUDA IPC");
  return supported != 0;
#else
  int unified = 0;
  PD_CUDA(cudaDeviceGetAttribute(&unified, cudaDevAttrUnifiedAddressing, device_index), device_index);
  if (unified == 0) say(why, device_label(device_index) + " does not support CUDA IPC");
  return unified != 0;
#endif
}

std::unique_ptr<ExportedMemory> export_cuda_memory(int device_index, std::unique_ptr<Memory> memory,
                                                   std::size_t num_bytes, std::string* why) {
  const DeviceScope scope(device_index);
  Handle handle{};
  const cudaError_t status = cudaIpcGetMemHandle(&handle.memory, memory->data());
  if (status != cudaSuccess) {
    say(why, device_label(device_index) + ": " + text_of("cudaIpcGetMemHandle", status));
    return nullptr;
  }
  handle.device = uuid_of(device_index);
  handle.num_bytes = num_bytes;
  handle.pid = ::getpid();
  handle.pointer = reinterpret_cast<std::uintptr_t>(memory->data());
  return std::make_unique<CudaExportedMemory>(std::move(memory), num_bytes, handle);
}

std::unique_ptr<Memory> import_cuda_memory(int device_index, const std::string& text, std::size_t num_bytes,
                                           std::string* why) {
  Handle handle{};
  if (text.size() != sizeof(handle)) {
    say(why, "it was exported by another build of pipedream");
    return nullptr;
  }
  std::memcpy(&handle, text.data(), sizeof(handle));
  if (handle.num_bytes != num_bytes) {
    say(why, std::to_string(handle.num_bytes) + " bytes were exported, not " + std::to_string(num_bytes));
    return nullptr;
  }
  const DeviceScope scope(device_index);
  if (!can_access(device_index, handle.device, why)) return nullptr;
  if (handle.pid == ::getpid()) {
    // NOLINTNEXTLINE(performance-no-int-to-ptr): it was a pointer in this process
    auto* const data = reinterpret_cast<std::byte*>(static_cast<std::uintptr_t>(handle.pointer));
    return std::make_unique<CudaImportedMemory>(device_index, data, num_bytes, /*opened=*/false);
  }
  void* data = nullptr;
  const cudaError_t status = cudaIpcOpenMemHandle(&data, handle.memory, cudaIpcMemLazyEnablePeerAccess);
  if (status != cudaSuccess) {
    say(why, device_label(device_index) + ": " + text_of("cudaIpcOpenMemHandle", status));
    return nullptr;
  }
  return std::make_unique<CudaImportedMemory>(device_index, static_cast<std::byte*>(data), num_bytes,
                                              /*opened=*/true);
}

}  // namespace pipedream
