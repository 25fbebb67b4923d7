// Holds a tensor with its encoding and its residual in host memory, for the tests of the codecs. It also has
// a simple topk to which the tests compare the codec.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstring>
#include <limits>
#include <memory>
#include <numeric>
#include <span>
#include <vector>

#include "codec/codec.h"
#include "codec/codec_math.h"
#include "device/device.h"

namespace pipedream {

// Returns the indices of the num_chosen elements with the largest magnitudes, ascending. Among equal elements
// the first ones are chosen, as by a stable sort.
template <class T>
std::vector<std::uint32_t> largest_by_sort(const std::vector<T>& values, std::size_t num_chosen) {
  std::vector<T> magnitudes(values.size());
  std::transform(values.begin(), values.end(), magnitudes.begin(), [](T value) {
    return std::isnan(value) ? std::numeric_limits<T>::infinity() : std::abs(value);
  });
  std::vector<std::uint32_t> indices(values.size());
  std::iota(indices.begin(), indices.end(), std::uint32_t{0});
  std::nth_element(indices.begin(), indices.begin() + static_cast<std::ptrdiff_t>(num_chosen), indices.end(),
                   [&](std::uint32_t a, std::uint32_t b) {
                     return magnitudes[a] != magnitudes[b] ? magnitudes[a] > magnitudes[b] : a < b;
                   });
  indices.resize(num_chosen);
  std::sort(indices.begin(), indices.end());
  return indices;
}

template <class T>
constexpr DType kDTypeOf = DType::kFloat32;
template <>
constexpr DType kDTypeOf<double> = DType::kFloat64;
template <>
constexpr DType kDTypeOf<BFloat16> = DType::kBFloat16;
template <>
constexpr DType kDTypeOf<Float16> = DType::kFloat16;

template <class T>
class Encoding {
 public:
  Encoding(const Codec& codec, std::size_t num_elements) {
    work_.codec = codec;
    work_.dtype = kDTypeOf<T>;
    work_.num_elements = num_elements;
    encoded_bytes_ = encoded_bytes(codec, work_.dtype, num_elements);
    work_.values = memory(num_elements * sizeof(T));
    work_.encoded = memory(encoded_bytes_);
    if (codec.kind == CodecKind::kTopK) work_.residual = memory(num_elements * sizeof(NumberOf<T>));
  }

  [[nodiscard]] const CodecWork& work() const { return work_; }
  [[nodiscard]] std::byte* encoded() const { return work_.encoded; }
  [[nodiscard]] std::span<const std::byte> encoded_span() const { return {work_.encoded, encoded_bytes_}; }
  [[nodiscard]] std::vector<T> values() const { return elements<T>(work_.values); }
  [[nodiscard]] std::vector<NumberOf<T>> residual() const { return elements<NumberOf<T>>(work_.residual); }
  void set_values(const std::vector<T>& values) {
    if (!values.empty()) std::memcpy(work_.values, values.data(), values.size() * sizeof(T));
  }

  void encode(const std::vector<T>& values) {
    set_values(values);
    encode_host(work_);
  }
  [[nodiscard]] std::vector<T> decode() {
    if (work_.num_elements > 0) std::memset(work_.values, 0x55, work_.num_elements * sizeof(T));
    decode_host(work_);
    return values();
  }
  // Encodes and decodes the values. The result is the tensor that arrives at the other end.
  [[nodiscard]] std::vector<T> sent(const std::vector<T>& values) {
    encode(values);
    return decode();
  }

  // Returns the number of entries that topk sends.
  [[nodiscard]] std::size_t num_entries() const {
    return encoded_bytes_ / (sizeof(std::uint32_t) + sizeof(SentOf<T>));
  }
  [[nodiscard]] std::vector<std::uint32_t> indices() const {
    std::vector<std::uint32_t> indices(num_entries());
    if (!indices.empty()) std::memcpy(indices.data(), work_.encoded, indices.size() * sizeof(std::uint32_t));
    return indices;
  }

 private:
  std::byte* memory(std::size_t num_bytes) {
    if (num_bytes == 0) return nullptr;
    memories_.push_back(device_->allocate(num_bytes, MemoryKind::kStaging));
    return memories_.back()->data();
  }
  template <class Element>
  std::vector<Element> elements(const std::byte* bytes) const {
    std::vector<Element> elements(work_.num_elements);
    if (!elements.empty()) std::memcpy(elements.data(), bytes, elements.size() * sizeof(Element));
    return elements;
  }

  const std::unique_ptr<Device> device_ = make_host_device();
  std::vector<std::unique_ptr<Memory>> memories_;
  CodecWork work_;
  std::size_t encoded_bytes_ = 0;
};

}  // namespace pipedream
