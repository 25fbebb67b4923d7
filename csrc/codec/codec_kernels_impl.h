// Contains the code of the codecs' loops. For each instruction set one source file includes it, and is
// compiled with its own flags (see CMakeLists.txt). So everything here has internal linkage, and only headers
// without shared inline functions may be included, for the reason in base/element.h. Pure; any thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "codec/codec_kernels.h"

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

template <class T>
void encode_int8_block(std::size_t count, const T* __restrict values, std::byte* __restrict encoded) {
  float numbers[kInt8Block];  // float64 is rounded to float32 first, because the scale is a float32
  for (std::size_t i = 0; i < count; ++i) numbers[i] = static_cast<float>(number_of(values[i]));
  encode_int8_block(count, static_cast<const float*>(numbers), encoded);
}

// Calls body(first element, number of elements, first encoded byte) for every block.
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
  const auto factor = static_cast<NumberOf<T>>(scale);
  const auto* __restrict const elements = reinterpret_cast<const std::int8_t*>(encoded + sizeof(scale));
  for (std::size_t i = 0; i < count; ++i)
    values[i] = element_of<T>(factor * static_cast<NumberOf<T>>(elements[i]));
}

template <class T>
void decode_int8(std::size_t num_elements, const std::byte* encoded, T* values) {
  for_each_int8_block(num_elements, [&](std::size_t first, std::size_t count, std::size_t block_at) {
    decode_int8_block(count, encoded + block_at, values + first);
  });
}

// ---- topk: one pass adds the values and lists candidates; a radix select then chooses from the list ----
//
//   1 A sample of the sums (residual + values) gives a bound. Somewhat more elements are above the bound than
//     must be sent.
//   2 residual += values, and every element above the bound is listed. If the list gets full, it keeps the
//     num_chosen largest elements, and the bound rises to the threshold between these and the others. Later
//     elements that equal the bound are not listed: of equal elements, the first ones are chosen.
//   3 If the sample's bound was too high, the list is too short. Then all elements are listed again, without
//     a bound.
//   4 The list is reduced to the num_chosen largest elements. Their indices and values are written.
//   5 The values that are sent, and values that are not finite, are removed from the residual.
//
// The sample changes the speed, not the elements that are chosen. A list entry has an element's position and
// its rough magnitude, so few elements are read a second time.

// Elements that are added and then listed at a time, so that they stay in the nearest cache.
constexpr std::size_t kChunkElements = 1024;
// Elements that are listed at a time. A group may write behind the list's last entry.
constexpr std::size_t kGroupElements = 8;
// Entries of the list on the stack, which is used if the encoded bytes have room for fewer.
constexpr std::size_t kListEntries = 4096;
constexpr std::size_t kFreeEntriesMin = kChunkElements + kGroupElements;
constexpr int kEntryBits = 32;
constexpr int kPositionBitsMin = 16;
constexpr std::size_t kListPartsMax = 1024;

// Keys are signed integers, because vector instructions compare signed integers. kNoBound is below every key.
template <class Number>
using KeyBound = std::make_signed_t<typename FloatLayout<Number>::Bits>;
template <class Number>
constexpr KeyBound<Number> kNoBound = -1;

// The listed elements. An entry has a code in its upper bits and the element's position within its part of
// the tensor in its lower bits. The code is (key - code_low) >> code_shift, but at most the largest code that
// fits.
template <class Number>
struct List {
  std::uint32_t* entries;  // ordered by the elements' positions
  std::size_t num_entries_max;
  std::size_t num_entries;
  KeyBound<Number> bound;  // only keys above it are listed
  typename FloatLayout<Number>::Bits code_low;
  int code_shift;
  int position_bits;
  std::size_t num_parts;
  std::uint32_t part_ends[kListPartsMax];  // for each part, the place behind its last entry

  [[nodiscard]] std::uint32_t code_of(std::uint32_t entry) const { return entry >> position_bits; }
  [[nodiscard]] std::size_t index_of(std::size_t part, std::uint32_t entry) const {
    return (part << position_bits) + (entry & ((1U << position_bits) - 1));
  }
};

// Empties the list, and sets the range of codes. With a bound, most keys are just above the bound, so codes
// distinguish keys near the bound finely; the few keys that are much larger all get the largest code.
template <class Number>
void start_list(std::size_t num_elements, KeyBound<Number> bound, List<Number>& list) {
  using Layout = FloatLayout<Number>;
  list.position_bits = kPositionBitsMin;
  while (num_elements > kListPartsMax << list.position_bits) ++list.position_bits;
  const int code_bits = kEntryBits - list.position_bits;
  list.code_low = static_cast<typename Layout::Bits>(bound + 1);
  list.code_shift =
      (bound == kNoBound<Number> ? Layout::kMagnitudeBits : Layout::kMantissaBits - 1) - code_bits;
  list.bound = bound;
  list.num_entries = 0;
  list.num_parts = 0;
}

// Calls visit(part, entry, place of the entry) for all entries.
template <class Number, class Visit>
void for_each_entry(const List<Number>& list, const Visit& visit) {
  std::size_t place = 0;
  for (std::size_t part = 0; part < list.num_parts; ++part) {
    for (; place < list.part_ends[part]; ++place) visit(part, list.entries[place], place);
  }
}

// For each value of a byte: the positions of the bits that are 1, ascending.
struct OnesOfBytes {
  std::uint8_t places[256][kGroupElements] = {};

  constexpr OnesOfBytes() {
    for (std::size_t byte = 0; byte < 256; ++byte) {
      std::size_t num_ones = 0;
      for (std::size_t place = 0; place < kGroupElements; ++place) {
        if ((byte >> place & 1U) != 0) places[byte][num_ones++] = static_cast<std::uint8_t>(place);
      }
    }
  }
};
alignas(64) constexpr OnesOfBytes kOnesOfBytes;

// Appends the positions that are flagged, and returns the new number of entries. There is no branch per
// position, because the processor could not predict it. flags: one byte, 0 or 1, for each of `count`
// positions from `first` on; then zeros up to a whole group.
std::size_t append_flagged(std::size_t first, std::size_t count, const std::uint8_t* flags,
                           std::uint32_t* __restrict entries, std::size_t num_entries) {
  static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__);
  for (std::size_t group = 0; group < count; group += kGroupElements) {
    std::uint64_t bytes = 0;
    std::memcpy(&bytes, flags + group, sizeof(bytes));
    const auto bits = static_cast<std::size_t>((bytes * 0x0102040810204080U) >> 56U);
    std::uint8_t places[kGroupElements];
    std::memcpy(places, kOnesOfBytes.places[bits], sizeof(places));
    const auto base = static_cast<std::uint32_t>(first + group);
    std::uint32_t* const end = entries + num_entries;
    for (std::size_t i = 0; i < kGroupElements; ++i) end[i] = base + places[i];
    num_entries += static_cast<std::size_t>((bytes * 0x0101010101010101U) >> 56U);
  }
  return num_entries;
}

// Lists the elements of a chunk that are above the bound. The chunk lies within one part of the tensor.
template <class Number>
void list_chunk(const Number* residual, std::size_t first, std::size_t count, List<Number>& list) {
  alignas(64) std::uint8_t flags[kChunkElements];
  const KeyBound<Number> bound = list.bound;
  for (std::size_t i = 0; i < count; ++i) {
    const auto magnitude =
        static_cast<KeyBound<Number>>(bits_of(residual[first + i]) & FloatLayout<Number>::kMagnitude);
    flags[i] = magnitude > bound ? 1U : 0U;
  }
  for (std::size_t i = count; i % kGroupElements != 0; ++i) flags[i] = 0;
  const std::size_t part = first >> list.position_bits;
  const Number* const of_part = residual + (part << list.position_bits);
  const std::size_t end =
      append_flagged(first - (part << list.position_bits), count, flags, list.entries, list.num_entries);
  const auto code_max = (typename FloatLayout<Number>::Bits{1} << (kEntryBits - list.position_bits)) - 1;
  for (std::size_t place = list.num_entries; place < end; ++place) {
    const auto code = (magnitude_key(of_part[list.entries[place]]) - list.code_low) >> list.code_shift;
    list.entries[place] |= static_cast<std::uint32_t>(code < code_max ? code : code_max)
                           << list.position_bits;
  }
  list.num_entries = end;
  list.num_parts = part + 1;
  list.part_ends[part] = static_cast<std::uint32_t>(end);
}

// Counts keys per bucket. Each bucket has several counters, which are used in turn, so that the addition for
// a key need not wait for that of an equal key before it.
struct Histogram {
  static constexpr std::size_t kNumCounters = 4;
  // The last bucket counts the keys that are in no bucket.
  std::uint32_t counts[kNumCounters][kTopKBuckets + 1] = {};
  std::size_t num_keys = 0;

  void add(std::size_t bucket) { ++counts[num_keys++ % kNumCounters][bucket]; }
  [[nodiscard]] std::uint32_t count(std::size_t bucket) const {
    std::uint32_t sum = 0;
    for (const auto& counter : counts) sum += counter[bucket];
    return sum;
  }
};

// The result of a search for the largest keys. All keys above `key` are chosen, and of the keys that equal
// `key` the first num_equal. is_whole: exactly as many keys as wanted are at least `key`, so all of these are
// chosen.
template <class Bits>
struct Threshold {
  Bits key;
  std::size_t num_equal;
  bool is_whole;
};

// Finds the threshold of the num_chosen largest keys. for_each_key(visit) calls visit(key) for every key,
// which is below 1 << key_bits.
template <class Bits, class ForEachKey>
Threshold<Bits> threshold_of(int key_bits, std::size_t num_chosen, const ForEachKey& for_each_key) {
  Threshold<Bits> found = {0, num_chosen, false};
  for (int bits_left = key_bits; bits_left > 0 && !found.is_whole;) {
    const int shift = next_digit_shift(bits_left);
    const Bits num_buckets = Bits{1} << (bits_left - shift);
    Histogram histogram;
    for_each_key([&](Bits key) {
      const Bits bucket = (key - found.key) >> shift;
      histogram.add(static_cast<std::size_t>(bucket < num_buckets ? bucket : num_buckets));
    });
    auto bucket = static_cast<std::size_t>(num_buckets) - 1;
    for (; histogram.count(bucket) < found.num_equal; --bucket) found.num_equal -= histogram.count(bucket);
    found.key += static_cast<Bits>(bucket) << shift;
    found.is_whole = histogram.count(bucket) == found.num_equal;
    bits_left = shift;
  }
  return found;
}

// Finds the threshold of the num_chosen largest entries in the list. It compares codes first, and then the
// keys of the entries that have the threshold's code. Writes that code to `code`.
template <class Number>
Threshold<typename FloatLayout<Number>::Bits> threshold_of_list(const List<Number>& list,
                                                                std::size_t num_chosen,
                                                                const Number* residual, std::uint32_t& code) {
  using Layout = FloatLayout<Number>;
  using Bits = typename Layout::Bits;
  const int code_bits = kEntryBits - list.position_bits;
  const auto by_code = threshold_of<std::uint32_t>(code_bits, num_chosen, [&](const auto& visit) {
    for (std::size_t place = 0; place < list.num_entries; ++place) visit(list.code_of(list.entries[place]));
  });
  code = by_code.key;
  if (by_code.is_whole)
    return {list.code_low + (Bits{by_code.key} << list.code_shift), by_code.num_equal, true};
  return threshold_of<Bits>(Layout::kMagnitudeBits, by_code.num_equal, [&](const auto& visit) {
    for_each_entry(list, [&](std::size_t part, std::uint32_t entry, std::size_t /*place*/) {
      if (list.code_of(entry) == by_code.key) visit(magnitude_key(residual[list.index_of(part, entry)]));
    });
  });
}

// Reduces the list, which has at least num_chosen entries, to the num_chosen largest entries. Raises the
// bound to their threshold, because a later element that only equals it is not chosen.
template <class Number>
void keep_largest(std::size_t num_chosen, const Number* residual, List<Number>& list) {
  if (list.num_entries == num_chosen) return;
  std::uint32_t code = 0;
  auto threshold = threshold_of_list(list, num_chosen, residual, code);
  std::size_t num_kept = 0;
  std::size_t place = 0;
  for (std::size_t part = 0; part < list.num_parts; ++part) {
    for (; place < list.part_ends[part]; ++place) {
      const std::uint32_t entry = list.entries[place];
      bool is_chosen = list.code_of(entry) > code;
      if (list.code_of(entry) == code) {
        const auto key = magnitude_key(residual[list.index_of(part, entry)]);
        const bool is_chosen_equal = key == threshold.key && threshold.num_equal > 0;
        threshold.num_equal -= is_chosen_equal ? 1U : 0U;
        is_chosen = key > threshold.key || is_chosen_equal;
      }
      list.entries[num_kept] = entry;
      num_kept += is_chosen ? 1U : 0U;
    }
    list.part_ends[part] = static_cast<std::uint32_t>(num_kept);
  }
  list.num_entries = num_kept;
  list.bound = static_cast<KeyBound<Number>>(threshold.key);
}

// Lists all elements above the list's bound. They include the num_chosen largest elements, unless fewer than
// num_chosen are above the bound. is_added: whether the values are already added to the residual.
template <class T>
void list_all(const TopKEncode<T>& work, bool is_added, List<NumberOf<T>>& list) {
  for (std::size_t first = 0; first < work.num_elements; first += kChunkElements) {
    const std::size_t left = work.num_elements - first;
    const std::size_t count = left < kChunkElements ? left : kChunkElements;
    const T* __restrict const values = work.values + first;
    NumberOf<T>* __restrict const residual = work.residual + first;
    if (!is_added) {
      for (std::size_t i = 0; i < count; ++i) residual[i] += number_of(values[i]);
    }
    if (list.num_entries + kFreeEntriesMin > list.num_entries_max)
      keep_largest(work.num_chosen, work.residual, list);
    list_chunk(work.residual, first, count, list);
  }
}

// Returns a bound that almost surely has at least num_chosen elements above it, and not many more. About
// num_expected of the num_chosen largest elements are in the sample. The bound has this many sampled elements
// above it, and four standard deviations more.
template <class T>
KeyBound<NumberOf<T>> sampled_bound(const TopKEncode<T>& work) {
  using Layout = FloatLayout<NumberOf<T>>;
  using Bits = typename Layout::Bits;
  const std::size_t num_runs = topk_sample_runs(work.num_elements);
  const std::size_t num_sampled = num_runs * kTopKRunElements;
  const double num_expected = static_cast<double>(work.num_chosen) * static_cast<double>(num_sampled) /
                              static_cast<double>(work.num_elements);
  const auto num_above = static_cast<std::size_t>(num_expected + 4 * __builtin_sqrt(num_expected) + 4);
  if (num_above >= num_sampled) return kNoBound<NumberOf<T>>;
  Bits keys[kTopKSampleMax];
  for (std::size_t run = 0; run < num_runs; ++run) {
    const std::size_t first = topk_sample_at(work.num_elements, run);
    for (std::size_t i = 0; i < kTopKRunElements; ++i) {
      const auto sum = work.residual[first + i] + number_of(work.values[first + i]);
      keys[run * kTopKRunElements + i] = magnitude_key(sum);
    }
  }
  const auto threshold = threshold_of<Bits>(Layout::kMagnitudeBits, num_above, [&](const auto& visit) {
    for (std::size_t i = 0; i < num_sampled; ++i) visit(keys[i]);
  });
  return static_cast<KeyBound<NumberOf<T>>>(threshold.key) - 1;
}

// Writes the indices and values of the list's entries, which are by now the num_chosen chosen elements. The
// entries may lie in the memory to which the indices are written.
template <class T>
void write_chosen(const TopKEncode<T>& work, const List<NumberOf<T>>& list) {
  for_each_entry(list, [&](std::size_t part, std::uint32_t entry, std::size_t place) {
    work.indices[place] = static_cast<std::uint32_t>(list.index_of(part, entry));
  });
  for (std::size_t place = 0; place < work.num_chosen; ++place) {
    NumberOf<T>& rest = work.residual[work.indices[place]];
    const auto sent = element_of<SentOf<T>>(rest);
    work.chosen_values[place] = sent;
    rest = rest_of_sent(rest, sent);
  }
}

// Sets infinities and NaNs in the residual to zero if they were not sent. All elements above the bound were
// sent, so one is left only if the bound itself is an infinity or a NaN.
template <class Number>
void forget_what_is_not_finite(std::size_t num_elements, Number* residual, KeyBound<Number> bound) {
  using Bits = typename FloatLayout<Number>::Bits;
  if (bound == kNoBound<Number> || is_finite_key<Number>(static_cast<Bits>(bound))) return;
  for (std::size_t i = 0; i < num_elements; ++i)
    residual[i] = is_finite_key<Number>(magnitude_key(residual[i])) ? residual[i] : Number(0);
}

template <class T>
void encode_topk(const TopKEncode<T>& work) {
  constexpr std::size_t kSentBytes = sizeof(std::uint32_t) + sizeof(SentOf<T>);
  // The list lies in the memory for the encoded bytes, which has kSentBytes for each sent element. So it
  // holds twice as many entries as elements are sent, or one and a half times as many with 16-bit values. If
  // these are fewer than kListEntries, the list lies on the stack.
  static_assert(kListEntries - kListEntries * sizeof(std::uint32_t) / kSentBytes > kFreeEntriesMin);
  std::uint32_t own_entries[kListEntries];
  const std::size_t num_fit = work.num_chosen * kSentBytes / sizeof(std::uint32_t);
  const bool fits = num_fit >= kListEntries;
  List<NumberOf<T>> list;
  list.entries = fits ? work.indices : own_entries;
  list.num_entries_max = fits ? num_fit : kListEntries;
  start_list(work.num_elements, sampled_bound(work), list);
  list_all(work, /*is_added=*/false, list);
  if (list.num_entries < work.num_chosen) {
    start_list(work.num_elements, kNoBound<NumberOf<T>>, list);
    list_all(work, /*is_added=*/true, list);
  }
  keep_largest(work.num_chosen, work.residual, list);
  write_chosen(work, list);
  forget_what_is_not_finite(work.num_elements, work.residual, list.bound);
}

template <class T>
constexpr CodecKernels<T> kCodecKernels = {encode_bfloat16<T>, decode_bfloat16<T>, encode_float16<T>,
                                           decode_float16<T>,  encode_int8<T>,     decode_int8<T>,
                                           encode_topk<T>};
// bfloat16 and float16 have 16 bits already, so there is nothing to round to 16 bits.
template <class T>
constexpr CodecKernels<T> kHalfCodecKernels = {nullptr,        nullptr,        nullptr,       nullptr,
                                               encode_int8<T>, decode_int8<T>, encode_topk<T>};

CodecKernelSet codec_kernel_set(const char* name) {
  return {name, &kCodecKernels<float>, &kCodecKernels<double>, &kHalfCodecKernels<BFloat16>,
          &kHalfCodecKernels<Float16>};
}

}  // namespace
}  // namespace pipedream
