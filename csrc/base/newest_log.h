// A NewestLog keeps the newest items of a sequence. The constructor reserves the memory, so that adding an
// item allocates nothing. Not thread-safe; the owner guards it.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace pipedream {

template <class T>
class NewestLog {
 public:
  // 0: keeps nothing.
  explicit NewestLog(std::size_t num_kept_max) : num_kept_max_(num_kept_max) { items_.reserve(num_kept_max); }

  void add(const T& item) {
    ++num_added_;
    if (num_kept_max_ == 0) return;
    if (items_.size() < num_kept_max_) {
      items_.push_back(item);
    } else {
      items_[oldest_] = item;
      oldest_ = (oldest_ + 1) % num_kept_max_;
    }
  }
  [[nodiscard]] std::uint64_t num_added() const { return num_added_; }
  // Returns the item with this number, where items are numbered from 0 in the order of adding. Returns null
  // if there is no such item, or if a newer item has taken its place.
  [[nodiscard]] T* find(std::uint64_t number) {
    if (number >= num_added_ || num_added_ - number > items_.size()) return nullptr;
    return &items_[static_cast<std::size_t>(number % num_kept_max_)];
  }
  // Oldest first.
  [[nodiscard]] std::vector<T> items() const {
    std::vector<T> ordered(items_);
    std::rotate(ordered.begin(), ordered.begin() + static_cast<std::ptrdiff_t>(oldest_), ordered.end());
    return ordered;
  }

 private:
  const std::size_t num_kept_max_;
  std::vector<T> items_;
  std::size_t oldest_ = 0;
  std::uint64_t num_added_ = 0;
};

}  // namespace pipedream
