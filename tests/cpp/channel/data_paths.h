// The ways on which an item's bytes travel, as the channel tests make them.
#pragma once

#include <memory>
#include <string>
#include <utility>

#include "base/check.h"
#include "device/device.h"
#include "pool/pool.h"
#include "support/hostile_device.h"
#include "transport/recorder.h"
#include "transport/shared_memory.h"

namespace pipedream {

enum class DataPath {
  kDirect,        // the wire reads the tensors, and writes the receiver's slots
  kStaged,        // through staging buffers at both ends
  kPlaced,        // the sender writes into the receiver's slots
  kPlacedStaged,  // the sender writes into the receiver's staging buffers
  // Of devices whose memory the wire cannot reach: hostile ones.
  kDeviceStaged,
  kDevicePlacedStaged,
  kDevicePlaced,
};

inline bool is_on_device(DataPath data_path) {
  return data_path == DataPath::kDeviceStaged || data_path == DataPath::kDevicePlacedStaged ||
         data_path == DataPath::kDevicePlaced;
}
inline bool is_staged(DataPath data_path) {
  return data_path == DataPath::kStaged || data_path == DataPath::kPlacedStaged ||
         data_path == DataPath::kDeviceStaged || data_path == DataPath::kDevicePlacedStaged;
}
inline bool is_placed(DataPath data_path) {
  return data_path != DataPath::kDirect && data_path != DataPath::kStaged &&
         data_path != DataPath::kDeviceStaged;
}

inline std::unique_ptr<Device> make_device_of(DataPath data_path) {
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
  }
  PD_CHECK(false, "data_path " << static_cast<int>(data_path));
}

// Shared memory as a pool term's own.
class SharedTerm final : public Memory {
 public:
  explicit SharedTerm(std::unique_ptr<SharedMemory> memory) : memory_(std::move(memory)) {}
  [[nodiscard]] std::byte* data() const override { return memory_->data(); }
  [[nodiscard]] std::size_t size_bytes() const override { return memory_->size_bytes(); }

 private:
  const std::unique_ptr<SharedMemory> memory_;
};

// What the memory of a term is for, as both ends of the tests' one channel know it.
inline SharedMemoryUse shared_use(std::size_t slot_bytes) { return {link_options().identity, slot_bytes}; }

// The term with memory that is shared; `shared` says where once the pool is sealed.
inline PoolTerm in_shared_memory(PoolTerm term, const SharedMemory*& shared) {
  term.allocate = [&shared, use = shared_use(term.slot_bytes)](std::size_t num_bytes) {
    auto memory = SharedMemory::make(num_bytes, use);
    shared = memory.get();
    return std::make_unique<SharedTerm>(std::move(memory));
  };
  return term;
}

// The same with memory of the device, which outlives the pool.
inline PoolTerm in_device_memory(PoolTerm term, Device& device, const SharedMemory*& shared) {
  term.allocate = [&device, &shared, use = shared_use(term.slot_bytes)](std::size_t num_bytes) {
    auto memory = SharedMemory::make_on(device, num_bytes, use);
    shared = memory.get();
    return std::make_unique<SharedTerm>(std::move(memory));
  };
  return term;
}

}  // namespace pipedream
