// Keeps a term of the pool, which is a group of slots, in shared memory into which senders of this host write
// directly. Owned by the pool.
#pragma once

#include <cstddef>
#include <memory>
#include <utility>

#include "device/device.h"
#include "transport/shared_memory.h"

namespace pipedream {

// The shared memory of a term. If it is host memory, it is pinned for the device.
class SharedTermMemory final : public Memory {
 public:
  SharedTermMemory(Device& device, std::unique_ptr<SharedMemory> memory)
      : memory_(std::move(memory)),
        registration_(memory_->on_device()
                          ? nullptr
                          : device.register_host_memory(memory_->data(), memory_->size_bytes())) {}

  [[nodiscard]] std::byte* data() const override { return memory_->data(); }
  [[nodiscard]] std::size_t size_bytes() const override { return memory_->size_bytes(); }
  [[nodiscard]] SharedMemory& shared() const { return *memory_; }

 private:
  const std::unique_ptr<SharedMemory> memory_;
  const std::unique_ptr<HostRegistration> registration_;  // null for device memory
};

}  // namespace pipedream
