// Places where the next items of a receiving channel are to land, in the order of the items. One thread
// posts, the driving one takes.
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
  // It stays; empty when there is none.
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
