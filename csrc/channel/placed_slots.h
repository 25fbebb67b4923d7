// The slots of a receiver of the same host, mapped here: the sender writes into them itself, into the
// receiver's device where that memory is. Owned by the send channel; written on its copy stream.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>

#include "base/check.h"
#include "device/device.h"
#include "pool/pool.h"
#include "transport/shared_memory.h"

namespace pipedream {

class PlacedSlots {
 public:
  // slot_bytes: as the receiver plans them, too. Pins host memory for the device.
  PlacedSlots(std::unique_ptr<SharedMemory> memory, Device& device, std::size_t slot_bytes)
      : memory_(std::move(memory)),
        registration_(memory_->on_device()
                          ? nullptr
                          : device.register_host_memory(memory_->data(), memory_->size_bytes())),
        slot_bytes_(slot_bytes) {
    memory_->claim();
  }

  [[nodiscard]] bool on_device() const { return memory_->on_device(); }
  // Whether all of the slot lies in the memory. To be asked of every slot that the receiver names.
  [[nodiscard]] bool contains(std::uint16_t slot) const {
    return slot * slot_stride_bytes(slot_bytes_) + slot_bytes_ <= memory_->size_bytes();
  }
  [[nodiscard]] std::byte* slot_data(std::uint16_t slot) const {
    PD_CHECK(contains(slot), "slot " << slot << " of " << slot_bytes_ << " bytes");
    return memory_->data() + slot * slot_stride_bytes(slot_bytes_);
  }

 private:
  const std::unique_ptr<SharedMemory> memory_;
  const std::unique_ptr<HostRegistration> registration_;  // null on a device
  const std::size_t slot_bytes_;
};

}  // namespace pipedream
