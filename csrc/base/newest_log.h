// The newest items of a sequence, in memory that is reserved when it is made: to add one allocates nothing.
// Not thread-safe: whoever owns it guards it.
#pragma once

#include <algorithm>
#include <cstddef>
#include <vector>

namespace pipedream {

template <class T>
class NewestLog {
 public:
  // 0: keeps nothing.
  explicit NewestLog(std::size_t num_kept_max) : num_kept_max_(num_kept_max) { items_.reserve(num_kept_max); }

  void add(const T& item) {
    if (num_kept_max_ == 0) return;
    if (items_.size() < num_kept_max_) {
      items_.push_back(item);
    } else {
      items_[oldest_] = item;
      oldest_ = (oldest_ + 1) % num_kept_max_;
    }
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
};

}  // namespace pipedream
