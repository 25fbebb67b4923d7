// A RingBuffer is a FIFO in a ring of fixed size, which the constructor allocates. Not thread-safe; the owner
// guards it.
#pragma once

#include <cstddef>
#include <optional>
#include <utility>
#include <vector>

#include "base/check.h"

namespace pipedream {

template <class T>
class RingBuffer {
 public:
  explicit RingBuffer(std::size_t num_items_max) : places_(num_items_max) {}

  [[nodiscard]] bool empty() const { return num_items_ == 0; }
  [[nodiscard]] bool full() const { return num_items_ == places_.size(); }
  [[nodiscard]] std::size_t size() const { return num_items_; }
  [[nodiscard]] std::size_t num_items_max() const { return places_.size(); }

  // Adds an item at the end. Aborts if the ring is full, because its owner must respect the bound.
  void push_back(T item) {
    PD_CHECK(!full(), "a ring of " << places_.size() << " items is full");
    places_[place_of(num_items_)].emplace(std::move(item));
    ++num_items_;
  }
  // Returns the item at this index, counted from the front.
  [[nodiscard]] T& operator[](std::size_t index) {
    PD_CHECK(index < num_items_, "item " << index << " of " << num_items_);
    return *places_[place_of(index)];
  }
  [[nodiscard]] T& front() { return (*this)[0]; }
  void pop_front() { static_cast<void>(take_front()); }
  [[nodiscard]] T take_front() {
    T item = std::move(front());
    places_[first_].reset();
    first_ = place_of(1);
    --num_items_;
    return item;
  }
  void clear() {
    while (!empty()) pop_front();
  }

 private:
  [[nodiscard]] std::size_t place_of(std::size_t index) const {
    const std::size_t place = first_ + index;
    return place < places_.size() ? place : place - places_.size();
  }

  std::vector<std::optional<T>> places_;
  std::size_t first_ = 0;
  std::size_t num_items_ = 0;
};

}  // namespace pipedream
