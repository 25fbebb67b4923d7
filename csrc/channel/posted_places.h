// Queues the places where a receiving channel's next items will land, in the order of the items. One thread
// posts places; the thread that drives the transport removes them.
#pragma once

#include <cstddef>
#include <mutex>
#include <optional>
#include <span>

#include "base/ring_buffer.h"

namespace pipedream {

class PostedPlaces {
 public:
  explicit PostedPlaces(std::size_t num_places_max) : places_(num_places_max) {}

  // Aborts beyond num_places_max.
  void push(std::span<const std::span<std::byte>> places) {
    const std::lock_guard lock(mutex_);
    for (const std::span<std::byte> place : places) places_.push_back(place);
  }
  // Returns the first place and leaves it in the queue; empty when no place is queued.
  [[nodiscard]] std::optional<std::span<std::byte>> next() {
    const std::lock_guard lock(mutex_);
    if (places_.empty()) return std::nullopt;
    return places_.front();
  }
  [[nodiscard]] std::span<std::byte> take_next() {
    const std::lock_guard lock(mutex_);
    return places_.take_front();
  }

 private:
  std::mutex mutex_;  // guards places_
  RingBuffer<std::span<std::byte>> places_;
};

}  // namespace pipedream
