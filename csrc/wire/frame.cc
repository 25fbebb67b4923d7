// Encodes and decodes frame headers. Pure functions; any thread.
#include "wire/frame.h"

#include <array>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstring>
#include <limits>
#include <optional>
#include <type_traits>
#include <utility>

namespace pipedream {
namespace {

static_assert(std::endian::native == std::endian::little, "fields are copied as they lie in memory");

// The header's bytes on the wire. Every byte belongs to a field, so a header has exactly one encoding.
struct WireHeader {
  std::uint32_t magic;
  std::uint16_t format_version;
  std::uint16_t header_bytes;
  std::uint64_t run_id;
  std::uint32_t incarnation;
  std::uint32_t channel_id;
  std::uint64_t sequence;
  std::int64_t minibatch;
  std::int64_t microbatch;
  std::array<std::int64_t, kNumDimsMax> shape;
  std::uint64_t tensor_bytes;
  std::uint64_t chunk_offset;
  std::uint64_t payload_bytes;
  std::uint64_t placed_bytes;
  std::uint64_t data_fingerprint;
  double loss_scale;
  std::uint64_t plan_hash;
  std::uint64_t num_work_items;
  std::uint16_t tensor_index;
  std::uint16_t num_tensors;
  std::uint8_t kind;
  std::uint8_t dtype;
  std::uint8_t num_dims;
  std::uint8_t flags;
  std::uint32_t payload_checksum;
  std::uint16_t slot;
  std::uint8_t codec;
  std::uint8_t boundary_events;
  std::uint64_t further_slots;
  std::uint32_t num_minibatches;
  std::uint32_t header_checksum;  // CRC-32C of all bytes before it
};

static_assert(std::is_trivially_copyable_v<WireHeader>);
static_assert(sizeof(WireHeader) == kFrameHeaderBytes);
static_assert(std::numeric_limits<double>::is_iec559 && sizeof(double) == 8);

constexpr std::uint8_t kFlagPayloadChecksum = 1;
constexpr std::uint8_t kFlagGradientsOverflowed = 2;
constexpr std::uint8_t kFlagEmpty = 4;
constexpr std::uint8_t kFlagEndOfData = 8;
constexpr std::uint8_t kFlagPulse = 16;
constexpr std::uint8_t kFlagLastSlot = 32;
constexpr std::uint8_t kKnownFlags = kFlagPayloadChecksum | kFlagGradientsOverflowed | kFlagEmpty |
                                     kFlagEndOfData | kFlagPulse | kFlagLastSlot;

std::uint32_t checksum_of(std::span<const std::byte> bytes) {
  return crc32c(bytes.first(offsetof(WireHeader, header_checksum)));
}

bool is_known_kind(std::uint8_t code) {
  return code >= static_cast<std::uint8_t>(FrameKind::kHello) &&
         code <= static_cast<std::uint8_t>(FrameKind::kBeat);
}

// Calls move(field of `header`, same field of `wire`) for each field that `wire` holds as it is. Flags share
// one byte.
template <class Header, class Wire, class Move>
void for_each_field(Header& header, Wire& wire, Move move) {
  move(header.identity.run_id, wire.run_id);
  move(header.identity.incarnation, wire.incarnation);
  move(header.identity.channel_id, wire.channel_id);
  move(header.sequence, wire.sequence);
  move(header.minibatch, wire.minibatch);
  move(header.microbatch, wire.microbatch);
  move(header.shape, wire.shape);
  move(header.tensor_bytes, wire.tensor_bytes);
  move(header.chunk_offset, wire.chunk_offset);
  move(header.payload_bytes, wire.payload_bytes);
  move(header.placed_bytes, wire.placed_bytes);
  move(header.fields.data_fingerprint, wire.data_fingerprint);
  move(header.fields.loss_scale, wire.loss_scale);
  move(header.plan_hash, wire.plan_hash);
  move(header.num_work_items, wire.num_work_items);
  move(header.tensor_index, wire.tensor_index);
  move(header.num_tensors, wire.num_tensors);
  move(header.kind, wire.kind);
  move(header.dtype, wire.dtype);
  move(header.num_dims, wire.num_dims);
  move(header.payload_checksum, wire.payload_checksum);
  move(header.slot, wire.slot);
  move(header.codec, wire.codec);
  move(header.fields.boundary_events, wire.boundary_events);
  move(header.further_slots, wire.further_slots);
  move(header.fields.num_minibatches, wire.num_minibatches);
}

// Calls visit(bit, field of `header`) for each flag.
template <class Header, class Visit>
void for_each_flag(Header& header, Visit visit) {
  visit(kFlagPayloadChecksum, header.has_payload_checksum);
  visit(kFlagGradientsOverflowed, header.fields.gradients_overflowed);
  visit(kFlagEmpty, header.fields.is_empty);
  visit(kFlagEndOfData, header.fields.is_end_of_data);
  visit(kFlagPulse, header.has_pulse);
  visit(kFlagLastSlot, header.has_last_slot);
}

template <class Tag>
std::int64_t on_wire(StrongId<Tag> id) {
  return id.value();
}

template <class Value>
Value on_wire(Value value) {
  return value;
}

Failure corrupt(const std::string& what) {
  return {FailureKind::kCorruptFrame, "corrupt frame header: " + what};
}

template <class Value>
Failure corrupt_field(std::string_view field, Value value, const std::string& rule) {
  return corrupt(std::string(field) + " " + std::to_string(value) + ", " + rule);
}

// Returns the number of bytes of a tensor with this shape and dtype, or nothing if it does not fit 64 bits.
// No dimension may be negative.
std::optional<std::uint64_t> shape_bytes(const FrameHeader& header) {
  std::uint64_t num_bytes = dtype_bytes(header.dtype);
  bool overflow = false;
  for (std::size_t dim = 0; dim < header.num_dims; ++dim) {
    const auto extent = static_cast<std::uint64_t>(header.shape[dim]);
    if (extent == 0) return 0;
    overflow = overflow || num_bytes > std::numeric_limits<std::uint64_t>::max() / extent;
    num_bytes *= extent;
  }
  if (overflow) return std::nullopt;
  return num_bytes;
}

std::optional<Failure> shape_violation(const FrameHeader& header) {
  if (header.num_dims > kNumDimsMax) {
    return corrupt_field("num_dims", header.num_dims, "at most " + std::to_string(kNumDimsMax));
  }
  for (std::size_t dim = 0; dim < kNumDimsMax; ++dim) {
    const bool used = dim < header.num_dims;
    if (used ? header.shape[dim] >= 0 : header.shape[dim] == 0) continue;
    return corrupt_field(
        "shape[" + std::to_string(dim) + "]", header.shape[dim],
        used ? "must not be negative" : "must be 0 beyond num_dims " + std::to_string(header.num_dims));
  }
  return std::nullopt;
}

std::optional<Failure> tensor_violation(const FrameHeader& header) {
  if (header.tensor_index >= header.num_tensors) {
    return corrupt_field("tensor_index", header.tensor_index,
                         "must be below num_tensors " + std::to_string(header.num_tensors));
  }
  const std::optional<std::uint64_t> num_bytes = shape_bytes(header);
  if (!num_bytes) return corrupt("shape has more bytes than 64 bits can count");
  if (!applies_to(header.codec, header.dtype)) {
    return corrupt_field("codec", static_cast<std::uint8_t>(header.codec),
                         "does not apply to " + std::string(dtype_name(header.dtype)));
  }
  // Only the channel can check the bytes of an encoded tensor, because they depend on the codec's share.
  if (header.codec == CodecKind::kNone && header.tensor_bytes != *num_bytes) {
    return corrupt_field("tensor_bytes", header.tensor_bytes,
                         "shape and dtype make " + std::to_string(*num_bytes));
  }
  if (header.chunk_offset > header.tensor_bytes) {
    return corrupt_field("chunk_offset", header.chunk_offset,
                         "beyond tensor_bytes " + std::to_string(header.tensor_bytes));
  }
  if (header.payload_bytes != 0 && header.placed_bytes != 0) {
    return corrupt_field("placed_bytes", header.placed_bytes,
                         "must be 0 beside payload_bytes " + std::to_string(header.payload_bytes));
  }
  const auto [field, num_chunk_bytes] = header.placed_bytes != 0
                                            ? std::pair("placed_bytes", header.placed_bytes)
                                            : std::pair("payload_bytes", header.payload_bytes);
  if (num_chunk_bytes > header.tensor_bytes - header.chunk_offset) {
    return corrupt_field(field, num_chunk_bytes,
                         "from chunk_offset " + std::to_string(header.chunk_offset) +
                             " beyond tensor_bytes " + std::to_string(header.tensor_bytes));
  }
  return std::nullopt;
}

// Returns the highest slot that a CREDIT grants.
std::size_t last_slot_of(const FrameHeader& header) {
  return std::size_t{header.slot} + static_cast<std::size_t>(std::bit_width(header.further_slots));
}

template <class Value>
Failure not_zero(const FrameHeader& header, std::string_view field, Value value) {
  return corrupt_field(field, value,
                       "must be 0 in a " + std::string(frame_kind_name(header.kind)) + " frame");
}

// Checks that a frame without a tensor has 0 in the fields that describe a tensor or an item, except dtype,
// minibatch and microbatch.
std::optional<Failure> tensorless_violation(const FrameHeader& header) {
  if (header.num_tensors != 0) return not_zero(header, "num_tensors", header.num_tensors);
  if (header.tensor_index != 0) return not_zero(header, "tensor_index", header.tensor_index);
  if (header.num_dims != 0) return not_zero(header, "num_dims", header.num_dims);
  const bool is_credit = header.kind == FrameKind::kCredit;
  if (header.tensor_bytes != 0 && !is_credit) return not_zero(header, "tensor_bytes", header.tensor_bytes);
  if (header.chunk_offset != 0 && !is_credit) return not_zero(header, "chunk_offset", header.chunk_offset);
  if (header.placed_bytes != 0) return not_zero(header, "placed_bytes", header.placed_bytes);
  if (header.codec != CodecKind::kNone)
    return not_zero(header, "codec", static_cast<std::uint8_t>(header.codec));
  if (header.slot != 0 && !is_credit) return not_zero(header, "slot", header.slot);
  if (header.has_last_slot) return not_zero(header, "has_last_slot", 1);
  if (header.payload_bytes != 0 && header.kind != FrameKind::kAbort) {
    return not_zero(header, "payload_bytes", header.payload_bytes);
  }
  const ItemFields& fields = header.fields;
  if (fields.data_fingerprint != 0) return not_zero(header, "data_fingerprint", fields.data_fingerprint);
  if (fields.loss_scale != 0) return not_zero(header, "loss_scale", fields.loss_scale);
  if (fields.gradients_overflowed) return not_zero(header, "gradients_overflowed", 1);
  if (fields.is_empty) return not_zero(header, "is_empty", 1);
  if (fields.num_minibatches != 0) return not_zero(header, "num_minibatches", fields.num_minibatches);
  if (fields.is_end_of_data) return not_zero(header, "is_end_of_data", 1);
  if (fields.boundary_events != 0 && header.kind != FrameKind::kEnd) {
    return not_zero(header, "boundary_events", fields.boundary_events);
  }
  return std::nullopt;
}

std::optional<Failure> credit_violation(const FrameHeader& header) {
  const bool is_credit = header.kind == FrameKind::kCredit;
  if (is_credit && header.chunk_offset != 0 && header.tensor_bytes == 0) {
    return corrupt_field("chunk_offset", header.chunk_offset, "of no posted bytes");
  }
  if (header.further_slots == 0) return std::nullopt;
  if (!is_credit) return not_zero(header, "further_slots", header.further_slots);
  if (header.tensor_bytes != 0) {
    return corrupt_field("further_slots", header.further_slots, "must be 0 where a place is posted");
  }
  if (last_slot_of(header) <= std::numeric_limits<std::uint16_t>::max()) return std::nullopt;
  return corrupt_field("further_slots", header.further_slots,
                       "reaches beyond slot 65535 from slot " + std::to_string(header.slot));
}

// Checks the rules that must hold before the bytes may be read as fields.
std::optional<Failure> envelope_violation(const WireHeader& wire, std::span<const std::byte> bytes) {
  if (wire.magic != kFrameMagic)
    return corrupt_field("magic", wire.magic, "expected " + std::to_string(kFrameMagic));
  if (wire.format_version != kFrameFormatVersion) {
    return corrupt_field("format_version", wire.format_version,
                         "this build speaks " + std::to_string(kFrameFormatVersion));
  }
  if (wire.header_checksum != checksum_of(bytes)) return corrupt("header_checksum does not match the bytes");
  if (wire.header_bytes != kFrameHeaderBytes) {
    return corrupt_field("header_bytes", wire.header_bytes, "expected " + std::to_string(kFrameHeaderBytes));
  }
  if (!is_known_kind(wire.kind)) return corrupt_field("kind", wire.kind, "unknown");
  if (!is_known_dtype(wire.dtype)) return corrupt_field("dtype", wire.dtype, "unknown");
  if ((wire.flags & ~kKnownFlags) != 0) return corrupt_field("flags", wire.flags, "unknown bits");
  if (!is_known_codec(wire.codec)) return corrupt_field("codec", wire.codec, "unknown");
  return std::nullopt;
}

}  // namespace

std::string_view frame_kind_name(FrameKind kind) {
  constexpr std::array<std::string_view, 7> kNames = {"HELLO", "TENSOR", "CREDIT", "END",
                                                      "ABORT", "BYE",    "BEAT"};
  return kNames.at(static_cast<std::size_t>(kind) - 1);
}

void encode(const FrameHeader& header, std::span<std::byte, kFrameHeaderBytes> bytes) {
  WireHeader wire{};
  wire.magic = kFrameMagic;
  wire.format_version = kFrameFormatVersion;
  wire.header_bytes = kFrameHeaderBytes;
  for_each_field(header, wire, []<class Field>(const auto& field, Field& in_wire) {
    in_wire = static_cast<Field>(on_wire(field));
  });
  for_each_flag(header, [&](std::uint8_t flag, bool is_set) {
    if (is_set) wire.flags = static_cast<std::uint8_t>(wire.flags | flag);
  });
  std::memcpy(bytes.data(), &wire, sizeof(wire));
  wire.header_checksum = checksum_of(bytes);
  std::memcpy(bytes.data(), &wire, sizeof(wire));
}

std::optional<Failure> find_violation(const FrameHeader& header) {
  if (header.minibatch.value() < 0 || header.minibatch.value() > kMinibatchMax) {
    return corrupt_field("minibatch", header.minibatch.value(), "from 0 to " + std::to_string(kMinibatchMax));
  }
  if (header.microbatch.value() < 0 || header.microbatch.value() > kMicrobatchMax) {
    return corrupt_field("microbatch", header.microbatch.value(),
                         "from 0 to " + std::to_string(kMicrobatchMax));
  }
  if (header.payload_bytes > kChunkBytesMax) {
    return corrupt_field("payload_bytes", header.payload_bytes, "at most " + std::to_string(kChunkBytesMax));
  }
  if (!header.has_payload_checksum && header.payload_checksum != 0) {
    return corrupt_field("payload_checksum", header.payload_checksum, "must be 0 when there is none");
  }
  if (!std::isfinite(header.fields.loss_scale) || std::signbit(header.fields.loss_scale)) {
    return corrupt_field("loss_scale", header.fields.loss_scale, "must be finite and not negative");
  }
  if (header.plan_hash != 0 && header.kind != FrameKind::kHello) {
    return not_zero(header, "plan_hash", header.plan_hash);
  }
  if (header.num_work_items != 0 && header.kind != FrameKind::kBeat) {
    return not_zero(header, "num_work_items", header.num_work_items);
  }
  if (header.has_pulse && header.kind != FrameKind::kBeat) return not_zero(header, "has_pulse", true);
  if (auto violation = credit_violation(header)) return violation;
  if (auto violation = shape_violation(header)) return violation;
  return header.kind == FrameKind::kTensor ? tensor_violation(header) : tensorless_violation(header);
}

Result<FrameHeader> decode(std::span<const std::byte> bytes) {
  if (bytes.size() != kFrameHeaderBytes) {
    return corrupt_field("length", bytes.size(), "expected " + std::to_string(kFrameHeaderBytes) + " bytes");
  }
  WireHeader wire{};
  std::memcpy(&wire, bytes.data(), sizeof(wire));
  if (auto violation = envelope_violation(wire, bytes)) return *violation;

  FrameHeader header;
  for_each_field(header, wire,
                 []<class Field>(Field& field, const auto& in_wire) { field = static_cast<Field>(in_wire); });
  for_each_flag(header, [&](std::uint8_t flag, bool& is_set) { is_set = (wire.flags & flag) != 0; });
  if (auto violation = find_violation(header)) return *violation;
  return header;
}

}  // namespace pipedream
