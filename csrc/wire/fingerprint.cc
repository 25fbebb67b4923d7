// Fingerprint of bytes: four independent lanes of 64 bits, each a chain of rotate, multiply and add, so
// that the processor overlaps their multiplications; then the lanes, the tail and the length are mixed.
// Not cryptographic. The result is compared between workers, so it is part of the wire format. Any thread.
#include <array>
#include <bit>
#include <cstring>

#include "wire/frame.h"

namespace pipedream {
namespace {

static_assert(std::endian::native == std::endian::little, "words are read as they lie in memory");

// Odd, with about half of their bits set: the fractional parts of the golden ratio, sqrt(2), sqrt(3) and
// sqrt(5), each made odd.
constexpr std::uint64_t kGolden = 0x9E3779B97F4A7C15;
constexpr std::uint64_t kRoot2 = 0x6A09E667F3BCC909;
constexpr std::uint64_t kRoot3 = 0xBB67AE8584CAA73B;
constexpr std::uint64_t kRoot5 = 0x3C6EF372FE94F82B;

constexpr std::size_t kNumLanes = 4;
constexpr std::size_t kWordBytes = sizeof(std::uint64_t);

// Invertible in the word for each lane value: a changed word always changes the lane.
std::uint64_t absorb(std::uint64_t lane, std::uint64_t word) {
  return std::rotl((lane ^ word) * kGolden, 29) + kRoot2;
}

// Spreads every bit over all of them.
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

}  // namespace

std::uint64_t fingerprint(std::span<const std::byte> bytes, std::uint64_t seed) {
  const std::byte* next = bytes.data();
  std::size_t num_left = bytes.size();
  std::array<std::uint64_t, kNumLanes> lanes = {seed ^ kGolden, seed + kRoot2, seed ^ kRoot3, seed + kRoot5};
  for (; num_left >= kNumLanes * kWordBytes; num_left -= kNumLanes * kWordBytes) {
    for (std::size_t lane = 0; lane < kNumLanes; ++lane) {
      lanes[lane] = absorb(lanes[lane], read_word(next + lane * kWordBytes, kWordBytes));
    }
    next += kNumLanes * kWordBytes;
  }
  std::uint64_t mixed = avalanche(bytes.size() ^ kRoot5);
  for (const std::uint64_t lane : lanes) mixed = absorb(mixed, avalanche(lane));
  for (; num_left >= kWordBytes; num_left -= kWordBytes) {
    mixed = absorb(mixed, read_word(next, kWordBytes));
    next += kWordBytes;
  }
  if (num_left > 0) mixed = absorb(mixed, read_word(next, num_left));
  return avalanche(mixed);
}

}  // namespace pipedream
