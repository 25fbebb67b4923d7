// Tests the frame header. An encoded header is decoded to the same header. Every wrong header is refused with
// an error that names the wrong field.
#include "wire/frame.h"

#include <gtest/gtest.h>

#include <array>
#include <cstring>
#include <functional>
#include <limits>
#include <random>
#include <set>
#include <string>
#include <utility>
#include <vector>

namespace pipedream {
namespace {

using HeaderBytes = std::array<std::byte, kFrameHeaderBytes>;

constexpr std::size_t kChecksumAt = 204;
constexpr std::size_t kSlotAt = 188;
constexpr std::size_t kCodecAt = 190;
constexpr std::size_t kNumMinibatchesAt = 200;
constexpr std::size_t kPlacedBytesAt = 136;
constexpr std::size_t kFingerprintAt = 144;
constexpr std::size_t kLossScaleAt = 152;
constexpr std::size_t kPlanHashAt = 160;
constexpr std::size_t kNumWorkItemsAt = 168;
constexpr std::size_t kKindAt = 180;
constexpr std::size_t kFlagsAt = 183;

constexpr FrameKind kTensorlessKinds[] = {FrameKind::kHello, FrameKind::kCredit, FrameKind::kEnd,
                                          FrameKind::kAbort, FrameKind::kBye,    FrameKind::kBeat};

FrameHeader tensor_header() {
  FrameHeader header;
  header.kind = FrameKind::kTensor;
  header.identity = {0x1122334455667788, 7, 42};
  header.sequence = 123456789012;
  header.minibatch = MinibatchId(1'000'000'007);
  header.microbatch = MicrobatchIndex(3);
  header.tensor_index = 1;
  header.num_tensors = 2;
  header.dtype = DType::kFloat32;
  header.num_dims = 4;
  header.shape = {128, 3, 10, 10, 0, 0, 0, 0};
  header.tensor_bytes = std::uint64_t{128} * 3 * 10 * 10 * 4;
  header.chunk_offset = 4096;
  header.payload_bytes = 8192;
  header.fields = {.data_fingerprint = 0xDEADBEEFCAFEF00D,
                   .loss_scale = 65536,
                   .gradients_overflowed = true,
                   .is_empty = true,
                   .num_minibatches = 0x89ABCDEF,
                   .is_end_of_data = true,
                   .boundary_events = 0xA5};
  header.slot = 0x0102;
  header.has_last_slot = true;
  header.has_payload_checksum = true;
  header.payload_checksum = 0x12345678;
  return header;
}

// Returns the header of a tensor whose bytes the sender has already placed in the receiver's slot.
FrameHeader placed_header() {
  FrameHeader header = tensor_header();
  std::swap(header.placed_bytes, header.payload_bytes);
  return header;
}

// Returns the header of a tensor that topk has encoded to a fifth of its bytes.
FrameHeader encoded_header() {
  FrameHeader header = tensor_header();
  header.codec = CodecKind::kTopK;
  header.tensor_bytes /= 5;
  return header;
}

FrameHeader header_of_kind(FrameKind kind) {
  FrameHeader header;
  header.kind = kind;
  header.identity = {1, 2, 3};
  if (kind == FrameKind::kHello) header.plan_hash = 99;
  if (kind == FrameKind::kBeat) {
    header.num_work_items = 100;
    header.has_pulse = true;
  }
  return header;
}

HeaderBytes encoded(const FrameHeader& header) {
  HeaderBytes bytes{};
  encode(header, bytes);
  return bytes;
}

// Puts `value` at `offset` and makes the checksum right again, as a buggy or malicious peer would.
template <class Value>
HeaderBytes forged(HeaderBytes bytes, std::size_t offset, Value value) {
  std::memcpy(bytes.data() + offset, &value, sizeof(value));
  const std::uint32_t checksum = crc32c(std::span<const std::byte>(bytes).first(kChecksumAt));
  std::memcpy(bytes.data() + kChecksumAt, &checksum, sizeof(checksum));
  return bytes;
}

void expect_refused(std::span<const std::byte> bytes, const std::string& field) {
  const Result<FrameHeader> result = decode(bytes);
  ASSERT_FALSE(result.ok()) << "expected a refusal that names " << field;
  EXPECT_EQ(result.failure().kind, FailureKind::kCorruptFrame);
  EXPECT_NE(result.failure().message.find(field), std::string::npos) << result.failure().message;
  EXPECT_EQ(result.failure().message.find('\n'), std::string::npos) << result.failure().message;
}

std::span<const std::byte> bytes_of(const std::string& text) { return std::as_bytes(std::span(text)); }

TEST(Frame, EveryKindSurvivesTheRoundTrip) {
  std::vector<FrameHeader> headers = {tensor_header(), placed_header(), encoded_header()};
  for (const FrameKind kind : kTensorlessKinds) {
    FrameHeader header = header_of_kind(kind);
    if (kind == FrameKind::kAbort) header.payload_bytes = 57;  // the payload is the reason
    if (kind == FrameKind::kCredit) {
      header.slot = std::numeric_limits<std::uint16_t>::max() - 64;
      header.further_slots = std::uint64_t{1} << 63 | 1;
    }
    if (kind == FrameKind::kEnd) header.minibatch = MinibatchId(kMinibatchMax);
    headers.push_back(header);
  }
  for (const FrameHeader& header : headers) {
    const Result<FrameHeader> result = decode(encoded(header));
    ASSERT_TRUE(result.ok()) << frame_kind_name(header.kind) << ": " << result.failure().message;
    EXPECT_EQ(result.value(), header) << frame_kind_name(header.kind);
  }
}

TEST(Frame, EveryCodecSurvivesTheRoundTripWhereItApplies) {
  for (const DType dtype : {DType::kFloat32, DType::kFloat64, DType::kFloat16, DType::kInt64}) {
    for (std::uint8_t code = 1; is_known_codec(code); ++code) {
      FrameHeader header = encoded_header();
      header.codec = static_cast<CodecKind>(code);
      header.dtype = dtype;
      const Result<FrameHeader> result = decode(encoded(header));
      const bool applies = applies_to(header.codec, dtype);
      ASSERT_EQ(result.ok(), applies) << int{code} << " of " << dtype_name(dtype);
      if (applies) {
        EXPECT_EQ(result.value(), header);
      } else {
        expect_refused(encoded(header), "codec");
      }
    }
  }
}

TEST(Frame, AnEncodedTensorMayHaveAnyNumberOfBytesButItsShapeIsStillChecked) {
  FrameHeader header = encoded_header();
  header.tensor_bytes = tensor_header().tensor_bytes + 1;
  EXPECT_TRUE(decode(encoded(header)).ok());
  header.shape = {std::int64_t{1} << 31, std::int64_t{1} << 31, 1 << 4, 1, 0, 0, 0, 0};
  expect_refused(encoded(header), "shape");
  header = encoded_header();
  header.payload_bytes = header.tensor_bytes - header.chunk_offset + 1;
  expect_refused(encoded(header), "payload_bytes");
}

TEST(Frame, WhatIsPlacedMayFillTheTensorAndHasNoChunkLimit) {
  FrameHeader header = placed_header();
  header.shape[0] = std::int64_t{1} << 20;
  header.tensor_bytes = (std::uint64_t{1} << 20) * 3 * 10 * 10 * 4;
  header.chunk_offset = 0;
  header.placed_bytes = header.tensor_bytes;
  EXPECT_GT(header.placed_bytes, kChunkBytesMax);
  EXPECT_TRUE(decode(encoded(header)).ok());
  header.placed_bytes += 1;
  expect_refused(encoded(header), "placed_bytes");
}

TEST(Frame, ScalarsEmptyTensorsAndEightDimensionsSurviveTheRoundTrip) {
  FrameHeader scalar = tensor_header();
  scalar.num_dims = 0;
  scalar.shape = {};
  scalar.tensor_bytes = 4;
  scalar.chunk_offset = 0;
  scalar.payload_bytes = 4;
  FrameHeader empty = tensor_header();
  empty.shape = {128, 0, 10, 10};
  empty.tensor_bytes = empty.chunk_offset = empty.payload_bytes = 0;
  FrameHeader deep = tensor_header();
  deep.num_dims = 8;
  deep.shape = {2, 2, 2, 2, 2, 2, 2, 32};
  deep.tensor_bytes = 128 * 32 * 4;
  for (const FrameHeader& header : {scalar, empty, deep}) {
    const Result<FrameHeader> result = decode(encoded(header));
    ASSERT_TRUE(result.ok()) << result.failure().message;
    EXPECT_EQ(result.value(), header);
  }
}

TEST(Frame, BytesOnTheWireNeverChange) {
  const HeaderBytes bytes = encoded(tensor_header());
  EXPECT_EQ(std::memcmp(bytes.data(), "PRDM\x06\x00\xD0\x00", 8), 0);
  EXPECT_EQ(std::memcmp(bytes.data() + 8, "\x88\x77\x66\x55\x44\x33\x22\x11", 8), 0);
  EXPECT_EQ(bytes[16], std::byte{7});
  EXPECT_EQ(bytes[20], std::byte{42});
  EXPECT_EQ(bytes[kKindAt], std::byte{2});      // the frame's kind
  EXPECT_EQ(bytes[kKindAt + 1], std::byte{8});  // the element type
  EXPECT_EQ(bytes[kKindAt + 2], std::byte{4});  // number of dimensions
  // The set flags are has_payload_checksum, gradients_overflowed, is_empty, is_end_of_data and has_last_slot.
  EXPECT_EQ(bytes[kFlagsAt], std::byte{47});
  EXPECT_EQ(std::memcmp(bytes.data() + kNumMinibatchesAt, "\xEF\xCD\xAB\x89", 4), 0);
  EXPECT_EQ(std::memcmp(bytes.data() + kFingerprintAt, "\x0D\xF0\xFE\xCA\xEF\xBE\xAD\xDE", 8), 0);
  EXPECT_EQ(std::memcmp(bytes.data() + kLossScaleAt, "\x00\x00\x00\x00\x00\x00\xF0\x40", 8), 0);
  EXPECT_EQ(bytes[kSlotAt], std::byte{2});
  EXPECT_EQ(bytes[kSlotAt + 1], std::byte{1});
  EXPECT_EQ(bytes[kCodecAt], std::byte{0});
  EXPECT_EQ(bytes[191], std::byte{0xA5});
  EXPECT_EQ(encoded(encoded_header())[kCodecAt], std::byte{4});
  EXPECT_EQ(encoded(placed_header())[kPlacedBytesAt + 1], std::byte{8192 >> 8});
  EXPECT_EQ(encoded(header_of_kind(FrameKind::kBeat))[kKindAt], std::byte{7});
  EXPECT_EQ(encoded(header_of_kind(FrameKind::kBeat))[kNumWorkItemsAt], std::byte{100});
  EXPECT_EQ(encoded(header_of_kind(FrameKind::kHello))[kPlanHashAt], std::byte{99});
}

TEST(Frame, EverySingleBitFlipIsRefused) {
  const HeaderBytes good = encoded(tensor_header());
  for (std::size_t bit = 0; bit < good.size() * 8; ++bit) {
    HeaderBytes bad = good;
    bad[bit / 8] ^= std::byte{1} << (bit % 8);
    ASSERT_FALSE(decode(bad).ok()) << "bit " << bit;
  }
}

TEST(Frame, EveryOtherLengthIsRefused) {
  std::vector<std::byte> bytes(kFrameHeaderBytes * 2);
  encode(tensor_header(), std::span(bytes).first<kFrameHeaderBytes>());
  for (std::size_t length = 0; length <= bytes.size(); ++length) {
    if (length == kFrameHeaderBytes) continue;
    expect_refused(std::span<const std::byte>(bytes).first(length), "length");
  }
}

TEST(Frame, RandomBytesAreRefused) {
  std::mt19937_64 random(1);
  HeaderBytes bytes{};
  for (int round = 0; round < 20'000; ++round) {
    for (std::byte& byte : bytes) byte = static_cast<std::byte>(random());
    ASSERT_FALSE(decode(bytes).ok());
    // Magic, version and checksum are right, so only the rules for the fields can refuse the header.
    const HeaderBytes plausible = forged(forged(bytes, 0, kFrameMagic), 4, kFrameFormatVersion);
    ASSERT_FALSE(decode(plausible).ok());
  }
}

TEST(Frame, RandomFieldsAreReadOnlyWhereNoRuleIsBroken) {
  // All fields have small values, so that many headers pass the first checks and some pass all checks.
  std::mt19937_64 random(4);
  int num_accepted = 0;
  for (int round = 0; round < 50'000; ++round) {
    FrameHeader header = header_of_kind(static_cast<FrameKind>(1 + random() % 7));
    if (header.kind == FrameKind::kTensor) header.num_tensors = 1;
    header.num_dims = static_cast<std::uint8_t>(random() % 3);
    for (std::size_t dim = 0; dim < 2; ++dim) header.shape[dim] = static_cast<std::int64_t>(random() % 3);
    header.dtype = random() % 2 == 0 ? DType::kUInt8 : DType::kFloat32;
    header.tensor_bytes = random() % 3;
    header.payload_bytes = random() % 2;
    header.placed_bytes = random() % 2;
    header.slot = static_cast<std::uint16_t>(random() % 2);
    header.codec = static_cast<CodecKind>(random() % 6);
    const Result<FrameHeader> result = decode(encoded(header));
    const bool is_known = is_known_codec(static_cast<std::uint8_t>(header.codec));
    ASSERT_EQ(result.ok(), is_known && !find_violation(header));
    if (!result.ok()) continue;
    ++num_accepted;
    ASSERT_EQ(result.value(), header);
    ASSERT_TRUE(header.kind == FrameKind::kTensor || header.codec == CodecKind::kNone);
    ASSERT_TRUE(header.payload_bytes == 0 || header.placed_bytes == 0);
    ASSERT_LE(header.payload_bytes + header.placed_bytes,
              header.kind == FrameKind::kAbort ? 1U : header.tensor_bytes);
  }
  EXPECT_GT(num_accepted, 100);
}

struct Violation {
  std::string field;
  std::function<void(FrameHeader&)> break_rule;
};

TEST(Frame, EachBrokenRuleIsRefusedByItsField) {
  const std::vector<Violation> violations = {
      {"minibatch", [](FrameHeader& header) { header.minibatch = MinibatchId(-1); }},
      {"minibatch", [](FrameHeader& header) { header.minibatch = MinibatchId(kMinibatchMax + 1); }},
      {"microbatch", [](FrameHeader& header) { header.microbatch = MicrobatchIndex(-1); }},
      {"microbatch", [](FrameHeader& header) { header.microbatch = MicrobatchIndex(kMicrobatchMax + 1); }},
      {"num_dims", [](FrameHeader& header) { header.num_dims = 9; }},
      {"shape[1]", [](FrameHeader& header) { header.shape[1] = -3; }},
      {"shape[5]", [](FrameHeader& header) { header.shape[5] = 1; }},
      {"tensor_index", [](FrameHeader& header) { header.tensor_index = 2; }},
      {"tensor_index", [](FrameHeader& header) { header.tensor_index = header.num_tensors = 0; }},
      {"tensor_bytes", [](FrameHeader& header) { header.tensor_bytes += 1; }},
      {"tensor_bytes", [](FrameHeader& header) { header.dtype = DType::kFloat64; }},
      {"chunk_offset", [](FrameHeader& header) { header.chunk_offset = header.tensor_bytes + 1; }},
      {"payload_bytes", [](FrameHeader& header) { header.chunk_offset = header.tensor_bytes - 8191; }},
      {"payload_bytes", [](FrameHeader& header) { header.payload_bytes = kChunkBytesMax + 1; }},
      {"payload_bytes", [](FrameHeader& header) { header.payload_bytes = ~std::uint64_t{0}; }},
      {"payload_checksum", [](FrameHeader& header) { header.has_payload_checksum = false; }},
      {"placed_bytes", [](FrameHeader& header) { header.placed_bytes = 1; }},
      {"loss_scale", [](FrameHeader& header) { header.fields.loss_scale = -1; }},
      {"loss_scale", [](FrameHeader& header) { header.fields.loss_scale = -0.0; }},
      {"loss_scale", [](FrameHeader& header) { header.fields.loss_scale = std::nan(""); }},
      {"loss_scale",
       [](FrameHeader& header) { header.fields.loss_scale = std::numeric_limits<double>::infinity(); }},
      {"plan_hash", [](FrameHeader& header) { header.plan_hash = 1; }},
      {"num_work_items", [](FrameHeader& header) { header.num_work_items = 1; }},
      {"has_pulse", [](FrameHeader& header) { header.has_pulse = true; }},
      {"codec",
       [](FrameHeader& header) {
         header.codec = CodecKind::kInt8;
         header.dtype = DType::kInt32;
       }},
  };
  for (const Violation& violation : violations) {
    FrameHeader header = tensor_header();
    violation.break_rule(header);
    expect_refused(encoded(header), violation.field);
    EXPECT_TRUE(find_violation(header)) << violation.field;
  }
  EXPECT_FALSE(find_violation(tensor_header()));
}

TEST(Frame, FramesWithoutATensorCarryNoneOfItsFields) {
  const std::vector<Violation> violations = {
      {"num_tensors", [](FrameHeader& header) { header.num_tensors = 1; }},
      {"tensor_index", [](FrameHeader& header) { header.tensor_index = 1; }},
      {"num_dims", [](FrameHeader& header) { header.num_dims = 1; }},
      {"chunk_offset", [](FrameHeader& header) { header.chunk_offset = 1; }},
      {"placed_bytes", [](FrameHeader& header) { header.placed_bytes = 1; }},
      {"codec", [](FrameHeader& header) { header.codec = CodecKind::kBFloat16; }},
      {"data_fingerprint", [](FrameHeader& header) { header.fields.data_fingerprint = 1; }},
      {"loss_scale", [](FrameHeader& header) { header.fields.loss_scale = 1; }},
      {"gradients_overflowed", [](FrameHeader& header) { header.fields.gradients_overflowed = true; }},
      {"is_empty", [](FrameHeader& header) { header.fields.is_empty = true; }},
      {"num_minibatches", [](FrameHeader& header) { header.fields.num_minibatches = 1; }},
      {"is_end_of_data", [](FrameHeader& header) { header.fields.is_end_of_data = true; }},
      {"has_last_slot", [](FrameHeader& header) { header.has_last_slot = true; }},
  };
  for (const FrameKind kind : kTensorlessKinds) {
    for (const Violation& violation : violations) {
      FrameHeader header = header_of_kind(kind);
      violation.break_rule(header);
      expect_refused(encoded(header), violation.field);
    }
    FrameHeader with_events = header_of_kind(kind);
    with_events.fields.boundary_events = 1;
    if (kind == FrameKind::kEnd) {
      EXPECT_EQ(decode(encoded(with_events)).value().fields.boundary_events, 1);
    } else {
      expect_refused(encoded(with_events), "boundary_events");
    }
    FrameHeader with_payload = header_of_kind(kind);
    with_payload.payload_bytes = 1;
    EXPECT_EQ(decode(encoded(with_payload)).ok(), kind == FrameKind::kAbort) << frame_kind_name(kind);
    FrameHeader with_slot = header_of_kind(kind);
    with_slot.slot = 1;
    EXPECT_EQ(decode(encoded(with_slot)).ok(), kind == FrameKind::kCredit) << frame_kind_name(kind);
    FrameHeader with_place = header_of_kind(kind);
    with_place.tensor_bytes = 1;
    EXPECT_EQ(decode(encoded(with_place)).ok(), kind == FrameKind::kCredit) << frame_kind_name(kind);
    FrameHeader with_slots = header_of_kind(kind);
    with_slots.further_slots = 1;
    EXPECT_EQ(decode(encoded(with_slots)).ok(), kind == FrameKind::kCredit) << frame_kind_name(kind);
    FrameHeader with_plan = header_of_kind(kind);
    with_plan.plan_hash = 1;
    EXPECT_EQ(decode(encoded(with_plan)).ok(), kind == FrameKind::kHello) << frame_kind_name(kind);
    FrameHeader with_count = header_of_kind(kind);
    with_count.num_work_items = 1;
    EXPECT_EQ(decode(encoded(with_count)).ok(), kind == FrameKind::kBeat) << frame_kind_name(kind);
    FrameHeader with_pulse = header_of_kind(kind);
    with_pulse.has_pulse = true;
    EXPECT_EQ(decode(encoded(with_pulse)).ok(), kind == FrameKind::kBeat) << frame_kind_name(kind);
  }
}

TEST(Frame, CreditsReachNoFurtherThanSlotsGo) {
  FrameHeader header = header_of_kind(FrameKind::kCredit);
  header.slot = std::numeric_limits<std::uint16_t>::max() - 2;
  header.further_slots = 0b11;
  EXPECT_TRUE(decode(encoded(header)).ok());
  header.further_slots = 0b111;
  expect_refused(encoded(header), "further_slots");
}

TEST(Frame, ACreditOfAPostedPlaceIsOfOneSlot) {
  FrameHeader header = header_of_kind(FrameKind::kCredit);
  header.slot = 3;
  header.tensor_bytes = 4096;
  header.chunk_offset = 64;
  const Result<FrameHeader> decoded = decode(encoded(header));
  ASSERT_TRUE(decoded.ok());
  EXPECT_EQ(decoded.value(), header);
  header.further_slots = 1;
  expect_refused(encoded(header), "further_slots");
  header.further_slots = 0;
  header.tensor_bytes = 0;
  expect_refused(encoded(header), "chunk_offset");
}

TEST(Frame, EnvelopeIsCheckedBeforeAnyField) {
  const HeaderBytes good = encoded(tensor_header());
  expect_refused(forged(good, 0, std::uint32_t{0x4D445251}), "magic");
  expect_refused(forged(good, 4, std::uint16_t{5}), "format_version");
  expect_refused(forged(good, 4, std::uint16_t{7}), "format_version");
  expect_refused(forged(good, 6, std::uint16_t{207}), "header_bytes");
  expect_refused(forged(good, kKindAt, std::uint8_t{0}), "kind");
  expect_refused(forged(good, kKindAt, std::uint8_t{8}), "kind");
  expect_refused(forged(good, kKindAt + 1, std::uint8_t{0}), "dtype");
  expect_refused(forged(good, kKindAt + 1, std::uint8_t{13}), "dtype");
  expect_refused(forged(good, kFlagsAt, std::uint8_t{64}), "flags");
  expect_refused(forged(good, kCodecAt, std::uint8_t{5}), "codec");
  expect_refused(forged(good, kCodecAt, std::uint8_t{255}), "codec");
  HeaderBytes flipped = good;
  flipped[24] ^= std::byte{1};
  expect_refused(flipped, "header_checksum");
}

TEST(Frame, ShapeThatOverflowsIsRefused) {
  FrameHeader header = tensor_header();
  header.shape = {std::int64_t{1} << 31, std::int64_t{1} << 31, 1 << 4, 1, 0, 0, 0, 0};
  header.tensor_bytes = 0;  // the shape's product modulo 2^64
  header.chunk_offset = header.payload_bytes = 0;
  expect_refused(encoded(header), "shape");
  header.shape.fill(std::numeric_limits<std::int64_t>::max());
  header.num_dims = 8;
  expect_refused(encoded(header), "shape");
  header.shape[7] = 0;  // an empty tensor has no bytes, whatever its other dimensions are
  EXPECT_TRUE(decode(encoded(header)).ok());
}

TEST(Crc32c, KnownVectors) {
  EXPECT_EQ(crc32c({}), 0u);
  EXPECT_EQ(crc32c(bytes_of("123456789")), 0xE3069283u);
  // RFC 3720, appendix B.4.
  EXPECT_EQ(crc32c(bytes_of(std::string(32, '\0'))), 0x8A9136AAu);
  EXPECT_EQ(crc32c(bytes_of(std::string(32, '\xFF'))), 0x62A8AB43u);
  std::string rising(32, '\0');
  for (std::size_t index = 0; index < rising.size(); ++index) rising[index] = static_cast<char>(index);
  EXPECT_EQ(crc32c(bytes_of(rising)), 0x46DD794Eu);
  EXPECT_EQ(crc32c(bytes_of(std::string(rising.rbegin(), rising.rend()))), 0x113FDB5Cu);
}

TEST(Crc32c, SeedContinuesAnEarlierPart) {
  const std::string text = "activations of stage 0 to stage 1, minibatch 17";
  for (std::size_t cut = 0; cut <= text.size(); ++cut) {
    EXPECT_EQ(crc32c(bytes_of(text.substr(cut)), crc32c(bytes_of(text.substr(0, cut)))),
              crc32c(bytes_of(text)));
  }
}

TEST(Fingerprint, EverySingleBitCounts) {
  for (const std::size_t length : {1u, 7u, 8u, 9u, 63u, 64u, 65u, 128u, 200u}) {
    std::string text(length, '\x5A');
    const std::uint64_t original = fingerprint(bytes_of(text));
    for (std::size_t bit = 0; bit < length * 8; ++bit) {
      std::string changed = text;
      changed[bit / 8] = static_cast<char>(changed[bit / 8] ^ (1 << (bit % 8)));
      ASSERT_NE(fingerprint(bytes_of(changed)), original) << length << " bytes, bit " << bit;
    }
  }
}

TEST(Fingerprint, EveryBitOfTheInputReachesHalfOfTheOutput) {
  std::mt19937_64 random(2);
  std::string text(200, '\0');  // three stripes of 64 bytes, and 8 bytes more
  double num_changed = 0;
  constexpr int kRounds = 2000;
  for (int round = 0; round < kRounds; ++round) {
    for (char& byte : text) byte = static_cast<char>(random());
    const std::uint64_t original = fingerprint(bytes_of(text));
    const std::size_t bit = random() % (text.size() * 8);
    text[bit / 8] = static_cast<char>(text[bit / 8] ^ (1 << (bit % 8)));
    num_changed += __builtin_popcountll(original ^ fingerprint(bytes_of(text)));
  }
  EXPECT_NEAR(num_changed / kRounds, 32.0, 1.0);
}

TEST(Fingerprint, OrderLengthAndSeedCount) {
  std::string text(96, '\0');
  for (std::size_t index = 0; index < text.size(); ++index) text[index] = static_cast<char>(index);
  const std::uint64_t original = fingerprint(bytes_of(text));
  for (std::size_t word = 8; word + 8 <= text.size(); word += 8) {
    std::string swapped = text;
    std::swap_ranges(swapped.begin(), swapped.begin() + 8,
                     swapped.begin() + static_cast<std::ptrdiff_t>(word));
    EXPECT_NE(fingerprint(bytes_of(swapped)), original) << "words 0 and " << word / 8;
  }
  EXPECT_NE(fingerprint(bytes_of(text), 1), original);
  std::vector<std::uint64_t> of_zeros;
  for (std::size_t length = 0; length < 200; ++length) {
    of_zeros.push_back(fingerprint(bytes_of(std::string(length, '\0'))));
    for (std::size_t shorter = 0; shorter < length; ++shorter) ASSERT_NE(of_zeros[shorter], of_zeros[length]);
  }
  EXPECT_EQ(fingerprint(bytes_of(text)), original);
}

// A stripe has one word for each of eight lanes. The fingerprint must depend on the order of the stripes.
// Otherwise two samples of a minibatch could change places unnoticed, because the sum of each lane's words
// stays the same.
TEST(Fingerprint, OrderOfStripesCounts) {
  for (const std::uint64_t label : {1u, 2u, 1000u}) {
    std::vector<std::uint64_t> labels(64, 0);
    std::set<std::uint64_t> seen;
    for (std::uint64_t& here : labels) {
      here = label;
      const auto* const text = reinterpret_cast<const char*>(labels.data());
      seen.insert(fingerprint(bytes_of(std::string(text, labels.size() * sizeof(label)))));
      here = 0;
    }
    EXPECT_EQ(seen.size(), labels.size()) << label;
  }
}

TEST(Fingerprint, ValueNeverChanges) {
  // Workers of one run compare fingerprints, so a new formula needs a new wire format version.
  EXPECT_EQ(fingerprint({}), 5621926231951721409u);
  const std::string text = "the same minibatch on both workers, more than one block long";
  EXPECT_EQ(fingerprint(bytes_of(text)), 3290633881614906863u);
  EXPECT_EQ(fingerprint(bytes_of(text + text + text)), 1865536793842939366u);
}

}  // namespace
}  // namespace pipedream
