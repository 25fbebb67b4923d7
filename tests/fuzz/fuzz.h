// Helpers of the fuzz targets: they read an input piece by piece, and stop the fuzzer when a check fails.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>

#include "base/check.h"

// libFuzzer calls this function, which each target defines. replay.cc also calls it.
extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t num_bytes);

namespace pipedream {

// Takes values off the front of an input. After the input's end every value is zero.
class FuzzInput {
 public:
  FuzzInput(const std::uint8_t* data, std::size_t num_bytes) : left_(data, num_bytes) {}

  [[nodiscard]] bool empty() const { return left_.empty(); }

  template <class Value>
  Value take() {
    Value value{};
    const std::size_t num_bytes = std::min(sizeof(Value), left_.size());
    if (num_bytes > 0) std::memcpy(&value, left_.data(), num_bytes);
    left_ = left_.subspan(num_bytes);
    return value;
  }

  // Takes num_bytes, or all that is left if that is less.
  std::span<const std::byte> take_bytes(std::size_t num_bytes) {
    const auto taken = left_.first(std::min(num_bytes, left_.size()));
    left_ = left_.subspan(taken.size());
    return std::as_bytes(taken);
  }

 private:
  std::span<const std::uint8_t> left_;
};

}  // namespace pipedream
