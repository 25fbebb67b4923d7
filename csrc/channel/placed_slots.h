// Holds the memory of a receiver on the same host, which the sender has mapped. The sender writes its items
// there itself: into the receiver's slots, which lie at equal distances, or into places that the receiver has
// posted. The memory may be host or device memory. Owned by an ItemCopier, which writes on its copy stream or
// on the thread that drives the transport.
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
  // slot_bytes: the size of a slot in the receiver's plan; 0 if the receiver posts places. Pins host memory
  // for the device.
  PlacedSlots(std::unique_ptr<SharedMemory> memory, Device& device, std::size_t slot_bytes)
      : memory_(std::move(memory)),
        registration_(memory_->on_device()
                          ? nullptr
                          : device.register_host_memory(memory_->data(), memory_->size_bytes())),
        slot_bytes_(slot_bytes) {}

  [[nodiscard]] bool on_device() const { return memory_->on_device(); }
  [[nodiscard]] bool are_posted() const { return slot_bytes_ == 0; }
  [[nodiscard]] std::size_t slot_offset(std::uint16_t slot) const {
    return slot * slot_stride_bytes(slot_bytes_);
  }
  [[nodiscard]] std::size_t slot_bytes() const { return slot_bytes_; }
  // Whether the range lies in the memory. Ask this about every range that the receiver names.
  [[nodiscard]] bool contains(std::size_t offset, std::size_t num_bytes) const {
    return offset <= memory_->size_bytes() && num_bytes <= memory_->size_bytes() - offset;
  }
  [[nodiscard]] std::byte* at(std::size_t offset) const {
    PD_CHECK(contains(offset, slot_bytes_), "byte " << offset << " of " << memory_->size_bytes());
    return memory_->data() + offset;
  }

 private:
  const std::unique_ptr<SharedMemory> memory_;
  const std::unique_ptr<HostRegistration> registration_;  // null for device memory
  const std::size_t slot_bytes_;
};

}  // namespace pipedream
