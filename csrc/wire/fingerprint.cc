// Computes the fingerprint of bytes, as fast as they come from memory. Workers compare the results, so it is
// part of the wire format. Not cryptographic. Any thread.
//
// The bytes are read in stripes of eight words of 64 bits, one word per lane. Each lane has two sums. The
// first adds the lane's words, so a change of one word always changes it. The second adds products of each
// word's two halves, after a key that differs between stripes is mixed in. So it depends on the order of the
// words. At the end the lanes, the bytes after the last stripe, and the length are mixed.
#include <array>
#include <bit>
#include <cstring>

#include "wire/frame.h"

namespace pipedream {
namespace {

static_assert(std::endian::native == std::endian::little, "words are read as they lie in memory");

// Odd constants with about half of their bits set. They are the fractional parts of the golden ratio,
// sqrt(2), sqrt(3) and sqrt(5), made odd.
constexpr std::uint64_t kGolden = 0x9E3779B97F4A7C15;
constexpr std::uint64_t kRoot2 = 0x6A09E667F3BCC909;
constexpr std::uint64_t kRoot3 = 0xBB67AE8584CAA73B;
constexpr std::uint64_t kRoot5 = 0x3C6EF372FE94F82B;

constexpr std::size_t kWordBytes = sizeof(std::uint64_t);
constexpr std::size_t kNumLanes = 8;
constexpr std::size_t kStripeBytes = kNumLanes * kWordBytes;

// A vector has four lanes: one register with AVX2, two with SSE2. The arithmetic is the same.
using Vector = std::uint64_t __attribute__((vector_size(32)));
constexpr std::size_t kVectorLanes = sizeof(Vector) / kWordBytes;
constexpr std::size_t kNumVectors = kNumLanes / kVectorLanes;

struct Lanes {
  std::array<Vector, kNumVectors> sum{};
  std::array<Vector, kNumVectors> product{};
};

// Mixes a word into the state. For every state this step is invertible in the word, so different words give
// different states.
std::uint64_t absorb(std::uint64_t state, std::uint64_t word) {
  return std::rotl((state ^ word) * kGolden, 29) + kRoot2;
}

// Mixes the bits, so that each bit of the value may change any bit of the result.
std::uint64_t avalanche(std::uint64_t value) {
  value = (value ^ (value >> 32)) * kRoot3;
  value = (value ^ (value >> 29)) * kRoot5;
  return value ^ (value >> 32);
}

std::uint64_t read_word(const std::byte* bytes, std::size_t num_bytes) {
  std::uint64_t word = 0;
  std::memcpy(&word, bytes, num_bytes);
  return word;
}

__attribute__((always_inline)) inline void add_stripes(Lanes& lanes, const std::byte* next,
                                                       std::size_t num_stripes, std::uint64_t seed) {
  constexpr std::uint64_t kLowHalf = 0xFFFFFFFF;
  Lanes current;
  std::array<Vector, kNumVectors> key = {Vector{kGolden, kRoot2, kRoot3, kRoot5} ^ seed,
                                         Vector{~kRoot5, ~kRoot3, ~kRoot2, ~kGolden} ^ seed};
  for (; num_stripes > 0; --num_stripes, next += kStripeBytes) {
    for (std::size_t index = 0; index < kNumVectors; ++index) {
      Vector words;
      std::memcpy(&words, next + index * sizeof(Vector), sizeof(Vector));
      const Vector keyed = words ^ key[index];
      current.sum[index] += words;
      current.product[index] += (keyed & kLowHalf) * (keyed >> 32);
      key[index] += kGolden;
    }
  }
  lanes = current;
}

void add_stripes_baseline(Lanes& lanes, const std::byte* next, std::size_t num_stripes, std::uint64_t seed) {
  add_stripes(lanes, next, num_stripes, seed);
}

#if defined(__x86_64__)
__attribute__((target("avx2"))) void add_stripes_avx2(Lanes& lanes, const std::byte* next,
                                                      std::size_t num_stripes, std::uint64_t seed) {
  add_stripes(lanes, next, num_stripes, seed);
}
#endif

auto* best_add_stripes() {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx2") != 0) return &add_stripes_avx2;
#endif
  return &add_stripes_baseline;
}

}  // namespace

std::uint64_t fingerprint(std::span<const std::byte> bytes, std::uint64_t seed) {
  static auto* const add_all_stripes = best_add_stripes();
  const std::size_t num_stripes = bytes.size() / kStripeBytes;
  std::uint64_t mixed = avalanche(bytes.size() ^ kRoot5) ^ avalanche(seed ^ kGolden);
  if (num_stripes > 0) {
    Lanes lanes;
    add_all_stripes(lanes, bytes.data(), num_stripes, seed);
    for (std::size_t lane = 0; lane < kNumLanes; ++lane) {
      mixed = absorb(mixed, avalanche(lanes.sum[lane / kVectorLanes][lane % kVectorLanes]));
      mixed = absorb(mixed, avalanche(lanes.product[lane / kVectorLanes][lane % kVectorLanes]));
    }
  }
  bytes = bytes.subspan(num_stripes * kStripeBytes);
  for (; bytes.size() >= kWordBytes; bytes = bytes.subspan(kWordBytes)) {
    mixed = absorb(mixed, read_word(bytes.data(), kWordBytes));
  }
  if (!bytes.empty()) mixed = absorb(mixed, read_word(bytes.data(), bytes.size()));
  return avalanche(mixed);
}

}  // namespace pipedream
