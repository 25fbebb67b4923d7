// The frame header: hand-written fixed layout, little endian, checksummed. Bytes only: nothing here allocates
// or knows sockets. Any thread.
//
// A receiver checks magic, format version, checksum and ranges before it uses a single field. channel/ then
// checks against the plan whether this frame may come now.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "base/dtype.h"
#include "base/failure.h"
#include "base/ids.h"
#include "wire/codec_kind.h"
#include "wire/item_fields.h"

namespace pipedream {

inline constexpr std::uint32_t kFrameMagic = 0x4D445250;  // "PRDM" in memory
inline constexpr std::uint16_t kFrameFormatVersion = 6;
inline constexpr std::size_t kNumDimsMax = 8;
inline constexpr std::size_t kFrameHeaderBytes = 208;
inline constexpr std::size_t kChunkBytesMax = std::size_t{64} << 20;
// Bounds of minibatch and microbatch, so that minibatch x microbatches + microbatch fits 64 bits.
inline constexpr std::int64_t kMinibatchMax = std::int64_t{1} << 42;
inline constexpr std::int64_t kMicrobatchMax = (std::int64_t{1} << 20) - 1;

enum class FrameKind : std::uint8_t {
  kHello = 1,   // first frame in both directions
  kTensor = 2,  // a chunk of a tensor
  kCredit = 3,  // receiver to sender: more items may be sent, into these slots
  kEnd = 4,     // no more items; minibatch = their number of minibatches
  kAbort = 5,   // the sender stops; payload = why, UTF-8
  kBye = 6,     // farewell: closing the connection now is no failure
  kBeat = 7,    // the sender's program is alive, not its process alone
};

[[nodiscard]] std::string_view frame_kind_name(FrameKind kind);

// The conversation that a frame belongs to. A frame with another identity is from another run or incarnation.
struct LinkIdentity {
  std::uint64_t run_id = 0;
  std::uint32_t incarnation = 0;
  std::uint32_t channel_id = 0;

  friend bool operator==(const LinkIdentity&, const LinkIdentity&) = default;
};

struct FrameHeader {
  FrameKind kind = FrameKind::kHello;
  LinkIdentity identity;
  std::uint64_t sequence = 0;  // per link and direction, from 0, without gaps; the link fills it in
  MinibatchId minibatch;
  MicrobatchIndex microbatch;
  std::uint16_t tensor_index = 0;
  std::uint16_t num_tensors = 0;
  DType dtype = DType::kUInt8;
  std::uint8_t num_dims = 0;
  std::array<std::int64_t, kNumDimsMax> shape{};
  // CREDIT of a posted place (one slot): the place's bytes, and its offset in the shared memory.
  std::uint64_t tensor_bytes = 0;
  std::uint64_t chunk_offset = 0;
  std::uint64_t payload_bytes = 0;
  // The chunk's bytes, if the sender has written them into the receiver's slot itself (same host, shared
  // memory); the frame then has no payload.
  std::uint64_t placed_bytes = 0;
  ItemFields fields{};               // TENSOR: of the item, the same in all its frames; END: boundary_events
  std::uint64_t plan_hash = 0;       // HELLO
  std::uint64_t num_work_items = 0;  // BEAT: that the sender has completed
  bool has_pulse = false;            // BEAT: the sender's program lives, not only its process
  std::uint16_t slot = 0;            // of the receiver: granted by CREDIT, used by TENSOR
  std::uint64_t further_slots = 0;   // CREDIT: bit k: slot + 1 + k is granted, too
  bool has_last_slot = false;        // TENSOR: no other slot is granted to the sender
  // TENSOR: how tensor_bytes are encoded; shape and dtype are as they were before.
  CodecKind codec = CodecKind::kNone;
  // CRC-32C of the payload, when has_payload_checksum.
  bool has_payload_checksum = false;
  std::uint32_t payload_checksum = 0;

  friend bool operator==(const FrameHeader&, const FrameHeader&) = default;
};

using FrameHeaderBytes = std::array<std::byte, kFrameHeaderBytes>;

void encode(const FrameHeader& header, std::span<std::byte, kFrameHeaderBytes> bytes);

// kCorruptFrame, saying which field, unless every rule holds: exact length, magic, format version,
// checksum, known kind, dtype and codec, a codec only where it applies to the dtype, a minibatch and a
// microbatch within their bounds, num_dims <= 8, no negative dimension, shape x dtype without overflow and,
// unless encoded, == tensor_bytes, chunk_offset + payload_bytes + placed_bytes <= tensor_bytes for a tensor,
// one of these two zero, tensor_index < num_tensors, a finite loss_scale that is not negative. Frames of
// other kinds than TENSOR leave the tensor's and the item's fields zero (END has boundary_events, CREDIT has
// slots, 65,535 the last, or one slot and the place that is posted for it) and, but for ABORT, have no
// payload; plan_hash is HELLO's alone, num_work_items and has_pulse BEAT's, further_slots CREDIT's,
// has_last_slot TENSOR's.
[[nodiscard]] Result<FrameHeader> decode(std::span<const std::byte> bytes);

// The rules of decode() that concern single fields. A link checks each header before it sends: a header that
// the peer would refuse is our bug.
[[nodiscard]] std::optional<Failure> find_violation(const FrameHeader& header);

// CRC-32C (Castagnoli), hardware instruction where there is one.
[[nodiscard]] std::uint32_t crc32c(std::span<const std::byte> bytes, std::uint32_t seed = 0);

// 64-bit fingerprint of bytes, fast (not cryptographic): tells whether two workers read the same data.
[[nodiscard]] std::uint64_t fingerprint(std::span<const std::byte> bytes, std::uint64_t seed = 0);

}  // namespace pipedream
