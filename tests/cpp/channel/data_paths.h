// Lists the ways in which an item's bytes travel, for the channel tests. A staged item is copied through host
// buffers. A placed item is written by the sender into the receiver's memory.
#pragma once

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/check.h"
#include "device/device.h"
#include "pool/pool.h"
#include "support/hostile_device.h"
#include "transport/recorder.h"
#include "transport/shared_memory.h"

namespace pipedream {

enum class DataPath {
  kDirect,        // the wire reads the tensors, and writes the receiver's slots
  kStaged,        // the bytes go through staging buffers at both ends
  kPlaced,        // the sender writes into the receiver's slots
  kPlacedStaged,  // the sender writes into the receiver's staging buffers
  // The same paths on hostile devices, whose memory the wire cannot reach.
  kDeviceStaged,
  kDevicePlacedStaged,
  kDevicePlaced,
  // The same on CUDA.
  kCudaStaged,
  kCudaPlacedStaged,
  kCudaPlaced,
};

inline bool is_on_cuda(DataPath data_path) { return data_path >= DataPath::kCudaStaged; }
inline bool is_on_device(DataPath data_path) { return data_path >= DataPath::kDeviceStaged; }
inline bool is_placed_on_device(DataPath data_path) {
  return data_path == DataPath::kDevicePlaced || data_path == DataPath::kCudaPlaced;
}
inline bool is_staged(DataPath data_path) {
  return data_path != DataPath::kDirect && data_path != DataPath::kPlaced && !is_placed_on_device(data_path);
}
inline bool is_placed(DataPath data_path) {
  return data_path != DataPath::kDirect && data_path != DataPath::kStaged &&
         data_path != DataPath::kDeviceStaged && data_path != DataPath::kCudaStaged;
}

// Returns the paths. If CUDA is available, each path on hostile devices is repeated on CUDA.
inline std::vector<DataPath> with_cuda(std::vector<DataPath> data_paths) {
  if (!cuda_available()) return data_paths;
  constexpr int kFromHostileToCuda =
      static_cast<int>(DataPath::kCudaStaged) - static_cast<int>(DataPath::kDeviceStaged);
  for (std::size_t index = 0; index < data_paths.size(); ++index) {
    const DataPath data_path = data_paths[index];
    if (!is_on_device(data_path) || is_on_cuda(data_path)) continue;
    data_paths.push_back(static_cast<DataPath>(static_cast<int>(data_path) + kFromHostileToCuda));
  }
  return data_paths;
}

inline std::unique_ptr<Device> make_device_of(DataPath data_path) {
  if (is_on_cuda(data_path)) return make_cuda_device(0);
  if (is_on_device(data_path)) return std::make_unique<HostileDevice>();
  return make_host_device();
}

inline std::string data_path_name(DataPath data_path) {
  switch (data_path) {
    case DataPath::kDirect:
      return "Direct";
    case DataPath::kStaged:
      return "Staged";
    case DataPath::kPlaced:
      return "Placed";
    case DataPath::kPlacedStaged:
      return "PlacedStaged";
    case DataPath::kDeviceStaged:
      return "DeviceStaged";
    case DataPath::kDevicePlacedStaged:
      return "DevicePlacedStaged";
    case DataPath::kDevicePlaced:
      return "DevicePlaced";
    case DataPath::kCudaStaged:
      return "CudaStaged";
    case DataPath::kCudaPlacedStaged:
      return "CudaPlacedStaged";
    case DataPath::kCudaPlaced:
      return "CudaPlaced";
  }
  PD_CHECK(false, "data_path " << static_cast<int>(data_path));
}

// Shared memory for one pool term. Host memory is pinned for the device, as in Worker.
class SharedTerm final : public Memory {
 public:
  SharedTerm(Device& device, std::unique_ptr<SharedMemory> memory)
      : memory_(std::move(memory)),
        registration_(memory_->on_device()
                          ? nullptr
                          : device.register_host_memory(memory_->data(), memory_->size_bytes())) {}
  [[nodiscard]] std::byte* data() const override { return memory_->data(); }
  [[nodiscard]] std::size_t size_bytes() const override { return memory_->size_bytes(); }

 private:
  const std::unique_ptr<SharedMemory> memory_;
  const std::unique_ptr<HostRegistration> registration_;
};

// Identifies the memory of a term. The tests have a single channel, so both ends know this value.
inline SharedMemoryUse shared_use(std::size_t slot_bytes) { return {link_options().identity, slot_bytes}; }

// Gives the term shared memory. Once the pool is sealed, `shared` points to it. The device outlives the pool.
inline PoolTerm in_shared_memory(PoolTerm term, Device& device, const SharedMemory*& shared) {
  term.allocate = [&device, &shared, use = shared_use(term.slot_bytes)](std::size_t num_bytes) {
    auto memory = SharedMemory::make(num_bytes, use);
    shared = memory.get();
    return std::make_unique<SharedTerm>(device, std::move(memory));
  };
  return term;
}

// Gives the term memory of the device that both ends can map.
inline PoolTerm in_device_memory(PoolTerm term, Device& device, const SharedMemory*& shared) {
  term.allocate = [&device, &shared, use = shared_use(term.slot_bytes)](std::size_t num_bytes) {
    auto memory = SharedMemory::make_on(device, num_bytes, use);
    shared = memory.get();
    return std::make_unique<SharedTerm>(device, std::move(memory));
  };
  return term;
}

}  // namespace pipedream
