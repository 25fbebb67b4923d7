// The text of the codecs' loops. Included by one source per instruction set, each compiled with its own flags
// (see CMakeLists.txt); everything here is of internal linkage, and only headers that are free of shared
// inline functions may be included, for the reason in codec_math.h. Pure; any thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "wire/codec_kernels.h"

namespace pipedream {
namespace {

template <class T>
void encode_bfloat16(std::size_t num_elements, const T* __restrict values,
                     std::uint16_t* __restrict encoded) {
  for (std::size_t i = 0; i < num_elements; ++i) encoded[i] = to_bfloat16(values[i]);
}

template <class T>
void decode_bfloat16(std::size_t num_elements, const std::uint16_t* __restrict encoded,
                     T* __restrict values) {
  for (std::size_t i = 0; i < num_elements; ++i) values[i] = static_cast<T>(from_bfloat16(encoded[i]));
}

template <class T>
void encode_float16(std::size_t num_elements, const T* __restrict values, std::uint16_t* __restrict encoded) {
  for (std::size_t i = 0; i < num_elements; ++i) encoded[i] = to_float16(values[i]);
}

template <class T>
void decode_float16(std::size_t num_elements, const std::uint16_t* __restrict encoded, T* __restrict values) {
  for (std::size_t i = 0; i < num_elements; ++i) values[i] = static_cast<T>(from_float16(encoded[i]));
}

// ---- int8 ----

void encode_int8_block(std::size_t count, const float* __restrict values, std::byte* __restrict encoded) {
  std::int32_t largest = 0;
  for (std::size_t i = 0; i < count; ++i) {
    const auto magnitude = static_cast<std::int32_t>(bits_of(values[i]) & FloatLayout<float>::kMagnitude);
    largest = magnitude > largest ? magnitude : largest;
  }
  const float scale = int8_scale(static_cast<std::uint32_t>(largest));
  std::memcpy(encoded, &scale, sizeof(scale));
  auto* __restrict const elements = reinterpret_cast<std::int8_t*>(encoded + sizeof(scale));
  if (is_nan_bits(bits_of(scale))) {
    std::memset(elements, 0, count);
    return;
  }
  for (std::size_t i = 0; i < count; ++i) elements[i] = to_int8(values[i], scale);
}

void encode_int8_block(std::size_t count, const double* __restrict values, std::byte* __restrict encoded) {
  float narrow[kInt8Block];  // its rounding is nothing beside int8's
  for (std::size_t i = 0; i < count; ++i) narrow[i] = static_cast<float>(values[i]);
  encode_int8_block(count, static_cast<const float*>(narrow), encoded);
}

// body(first element, how many, first encoded byte) for every block.
template <class Body>
void for_each_int8_block(std::size_t num_elements, const Body& body) {
  std::size_t block_at = 0;
  for (std::size_t first = 0; first < num_elements; first += kInt8Block) {
    const std::size_t left = num_elements - first;
    body(first, left < kInt8Block ? left : kInt8Block, block_at);
    block_at += kInt8BlockBytes;
  }
}

template <class T>
void encode_int8(std::size_t num_elements, const T* values, std::byte* encoded) {
  for_each_int8_block(num_elements, [&](std::size_t first, std::size_t count, std::size_t block_at) {
    encode_int8_block(count, values + first, encoded + block_at);
  });
}

template <class T>
void decode_int8_block(std::size_t count, const std::byte* __restrict encoded, T* __restrict values) {
  float scale = 0;
  std::memcpy(&scale, encoded, sizeof(scale));
  const auto factor = static_cast<T>(scale);
  const auto* __restrict const elements = reinterpret_cast<const std::int8_t*>(encoded + sizeof(scale));
  for (std::size_t i = 0; i < count; ++i) values[i] = factor * static_cast<T>(elements[i]);
}

template <class T>
void decode_int8(std::size_t num_elements, const std::byte* encoded, T* values) {
  for_each_int8_block(num_elements, [&](std::size_t first, std::size_t count, std::size_t block_at) {
    decode_int8_block(count, encoded + block_at, values + first);
  });
}

// ---- topk: a radix select over the keys' digits, from the top ----
//
//   1 residual += values, counting the first digit: the bucket that the last chosen key is in
//   2 as soon as the elements of that bucket and above fit in `encoded`, their indices are listed there
//   3 each further digit is counted within the bucket, over the list or over the whole tensor
//   4 the list loses what is below the threshold; values follow the indices
//   5 the residual loses what was sent, and what is not finite
//
// So the tensor is read twice, once to add and once to list, but where most of it is nearly equal.

// Magnitudes from `least` up to, but not including, `beyond`; a beyond above infinity is no bound.
template <class T>
struct MagnitudeRange {
  typename FloatLayout<T>::Bits least;
  typename FloatLayout<T>::Bits beyond;
};
template <class T>
constexpr typename FloatLayout<T>::Bits kNoBound = FloatLayout<T>::kMagnitude;

// Compared as numbers, which every processor does in vectors. A NaN is in every range, and so is everything
// below a `beyond` that is a NaN: whoever visits an element looks at its key.
template <class T>
PD_CODEC_ELEMENT bool may_be_within(MagnitudeRange<T> range, T element) {
  const T magnitude = from_bits<T>(bits_of(element) & FloatLayout<T>::kMagnitude);
  return !(magnitude < from_bits<T>(range.least)) && !(magnitude >= from_bits<T>(range.beyond));
}

// Elements that are first examined as a whole: most pieces have nothing within the range.
constexpr std::size_t kPieceElements = 32;

// Calls visit(index) in order for all elements within the range, and maybe for a NaN.
template <class T, class Visit>
void for_each_within(std::size_t num_elements, const T* elements, MagnitudeRange<T> range,
                     const Visit& visit) {
  std::size_t first = 0;
  for (; first + kPieceElements <= num_elements; first += kPieceElements) {
    typename FloatLayout<T>::Bits num_within = 0;
    for (std::size_t i = first; i < first + kPieceElements; ++i)
      num_within += may_be_within(range, elements[i]) ? 1U : 0U;
    if (num_within == 0) continue;
    // Found without a branch per element, which the processor could not predict.
    std::size_t found[kPieceElements];
    std::size_t num_found = 0;
    for (std::size_t i = first; i < first + kPieceElements; ++i) {
      found[num_found] = i;
      num_found += may_be_within(range, elements[i]) ? 1U : 0U;
    }
    for (std::size_t i = 0; i < num_found; ++i) visit(found[i]);
  }
  for (; first < num_elements; ++first) {
    if (may_be_within(range, elements[first])) visit(first);
  }
}

// Counters of neighbours are apart: equal ones (zeros) do not wait for each other.
struct Histogram {
  static constexpr std::size_t kNumCounters = 4;
  std::uint32_t counts[kNumCounters][kTopKBuckets] = {};

  void add(std::size_t index, std::uint64_t bucket) { ++counts[index % kNumCounters][bucket]; }
  [[nodiscard]] std::uint32_t count(std::size_t bucket) const {
    std::uint32_t sum = 0;
    for (const auto& counter : counts) sum += counter[bucket];
    return sum;
  }
};

constexpr std::size_t kAddedElements = 1024;  // at a time: then they are counted out of the nearest cache

template <class T>
void add_and_count(const TopKEncode<T>& work, int shift, Histogram& histogram) {
  for (std::size_t first = 0; first < work.num_elements; first += kAddedElements) {
    const std::size_t left = work.num_elements - first;
    const std::size_t count = left < kAddedElements ? left : kAddedElements;
    const T* __restrict const values = work.values + first;
    T* __restrict const residual = work.residual + first;
    for (std::size_t i = 0; i < count; ++i) residual[i] += values[i];
    for (std::size_t i = 0; i < count; ++i) histogram.add(i, magnitude_key(residual[i]) >> shift);
  }
}

// Where the selection stands: the bucket that the last chosen key is in, by the digits examined so far.
template <class T>
struct Selection {
  typename FloatLayout<T>::Bits key = 0;       // the bucket's lowest; all keys of buckets above are chosen
  int shift = FloatLayout<T>::kMagnitudeBits;  // of the last digit examined: all of the bucket agree above it
  std::size_t num_of_bucket = 0;               // chosen of the bucket
  std::size_t num_in_bucket = 0;
  std::size_t num_listed = 0;  // at work.indices; 0 before there is a list

  [[nodiscard]] bool is_final() const { return shift == 0 || num_of_bucket == num_in_bucket; }
};

template <class T>
void narrow(Selection<T>& selection, const Histogram& histogram, int shift) {
  std::size_t bucket = kTopKBuckets - 1;
  for (; histogram.count(bucket) < selection.num_of_bucket; --bucket)
    selection.num_of_bucket -= histogram.count(bucket);
  selection.key |= static_cast<typename FloatLayout<T>::Bits>(bucket) << shift;
  selection.shift = shift;
  selection.num_in_bucket = histogram.count(bucket);
}

template <class T>
void count_next_digit(const TopKEncode<T>& work, const Selection<T>& selection, int shift,
                      Histogram& histogram) {
  using Bits = typename FloatLayout<T>::Bits;
  const Bits digit_mask = (Bits{1} << (selection.shift - shift)) - 1;
  const auto visit = [&](std::size_t i) {
    const Bits key = magnitude_key(work.residual[i]);
    if (key >> selection.shift == selection.key >> selection.shift)
      histogram.add(i, (key >> shift) & digit_mask);
  };
  if (selection.num_listed > 0) {
    for (std::size_t entry = 0; entry < selection.num_listed; ++entry) visit(work.indices[entry]);
  } else {
    const Bits beyond = selection.key + (Bits{1} << selection.shift);  // of infinity's bucket: maybe the sign
    const MagnitudeRange<T> range{selection.key, beyond < kNoBound<T> ? beyond : kNoBound<T>};
    for_each_within(work.num_elements, work.residual, range, visit);
  }
}

// `encoded` has room for the indices of twice the elements that are chosen.
template <class T>
void list_if_it_fits(const TopKEncode<T>& work, Selection<T>& selection) {
  const std::size_t num_above = work.num_chosen - selection.num_of_bucket;
  if (selection.num_listed > 0 || num_above + selection.num_in_bucket > 2 * work.num_chosen) return;
  const MagnitudeRange<T> range{selection.key, kNoBound<T>};
  for_each_within(work.num_elements, work.residual, range, [&](std::size_t i) {
    work.indices[selection.num_listed++] = static_cast<std::uint32_t>(i);
  });
}

// The chosen indices, in order: those above the key, and of those equal to it, in the end, the first ones.
template <class T>
void write_indices(const TopKEncode<T>& work, const Selection<T>& selection) {
  std::size_t num_equal_left = selection.num_of_bucket;
  std::size_t num_written = 0;
  const auto visit = [&](std::size_t i) {
    const auto key = magnitude_key(work.residual[i]);
    const bool is_equal = key == selection.key;
    if (key < selection.key || (is_equal && num_equal_left == 0)) return;
    num_equal_left -= is_equal ? 1U : 0U;
    work.indices[num_written++] = static_cast<std::uint32_t>(i);
  };
  if (selection.num_listed > 0) {
    for (std::size_t entry = 0; entry < selection.num_listed; ++entry) visit(work.indices[entry]);
  } else {
    for_each_within(work.num_elements, work.residual, {selection.key, kNoBound<T>}, visit);
  }
}

// The infinities and NaNs that were not sent: there are none unless the last chosen key is one of theirs.
template <class T>
void forget_what_is_not_finite(const TopKEncode<T>& work, const Selection<T>& selection) {
  if (is_finite_key<T>(selection.key)) return;
  for_each_within(work.num_elements, work.residual, {FloatLayout<T>::kInfinity, kNoBound<T>},
                  [&](std::size_t i) { work.residual[i] = T(0); });
}

template <class T>
void encode_topk(const TopKEncode<T>& work) {
  Selection<T> selection;
  selection.num_of_bucket = work.num_chosen;
  Histogram histogram;
  const int first_shift = next_digit_shift(selection.shift);
  add_and_count(work, first_shift, histogram);
  narrow(selection, histogram, first_shift);
  list_if_it_fits(work, selection);
  while (!selection.is_final()) {
    const int shift = next_digit_shift(selection.shift);
    histogram = {};
    count_next_digit(work, selection, shift, histogram);
    narrow(selection, histogram, shift);
    list_if_it_fits(work, selection);
  }
  write_indices(work, selection);
  for (std::size_t entry = 0; entry < work.num_chosen; ++entry) {
    T& rest = work.residual[work.indices[entry]];
    const auto sent = static_cast<float>(rest);
    work.chosen_values[entry] = sent;
    rest = rest_of_sent(rest, sent);
  }
  forget_what_is_not_finite(work, selection);
}

template <class T>
constexpr CodecKernels<T> kCodecKernels = {encode_bfloat16<T>, decode_bfloat16<T>, encode_float16<T>,
                                           decode_float16<T>,  encode_int8<T>,     decode_int8<T>,
                                           encode_topk<T>};

}  // namespace
}  // namespace pipedream
