// Defines the frame header: a fixed layout written by hand, little endian, with a checksum. Nothing here
// allocates memory or uses sockets. Any thread.
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

// Identifies the conversation to which a frame belongs. A frame with another identity is from another run or
// incarnation.
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
  // If a CREDIT grants a posted place, tensor_bytes is the size of the place and chunk_offset its offset in
  // the shared memory. Such a CREDIT grants one slot.
  std::uint64_t tensor_bytes = 0;
  std::uint64_t chunk_offset = 0;
  std::uint64_t payload_bytes = 0;
  // The number of the chunk's bytes, if the sender itself has written them into the receiver's slot (same
  // host, shared memory). Then the frame has no payload.
  std::uint64_t placed_bytes = 0;
  ItemFields fields{};               // TENSOR: of the item, the same in all its frames; END: boundary_events
  std::uint64_t plan_hash = 0;       // HELLO
  std::uint64_t num_work_items = 0;  // BEAT: the number that the sender has completed
  bool has_pulse = false;            // BEAT: the sender's program lives, not only its process
  std::uint16_t slot = 0;            // of the receiver: granted by CREDIT, used by TENSOR
  std::uint64_t further_slots = 0;   // CREDIT: bit k: slot + 1 + k is granted, too
  bool has_last_slot = false;        // TENSOR: the sender has no other granted slot
  // TENSOR: how the tensor's bytes are encoded. shape and dtype are those of the tensor before encoding.
  CodecKind codec = CodecKind::kNone;
  // CRC-32C of the payload, when has_payload_checksum.
  bool has_payload_checksum = false;
  std::uint32_t payload_checksum = 0;

  friend bool operator==(const FrameHeader&, const FrameHeader&) = default;
};

using FrameHeaderBytes = std::array<std::byte, kFrameHeaderBytes>;

void encode(const FrameHeader& header, std::span<std::byte, kFrameHeaderBytes> bytes);

// Reads a header. Returns kCorruptFrame, which names the field, unless all rules hold:
//   - The length is exact. Magic, format version and checksum are right. Kind, dtype, codec and flags are
//     known.
//   - minibatch and microbatch are within their bounds; loss_scale is finite and not negative.
//   - num_dims <= 8, and no dimension is negative.
//   - TENSOR: the codec applies to the dtype, tensor_index < num_tensors, and shape x dtype does not
//     overflow. Without a codec shape x dtype == tensor_bytes. payload_bytes or placed_bytes is 0, and
//     chunk_offset + payload_bytes + placed_bytes <= tensor_bytes.
//   - Other kinds have 0 in the fields of tensor and item, and no payload. There are three exceptions: END
//     has boundary_events, ABORT has a payload, and CREDIT has slots, at most up to slot 65,535, or one slot
//     and the place that is posted for it.
//   - Only HELLO has plan_hash, only BEAT num_work_items and has_pulse, only CREDIT further_slots, and only
//     TENSOR has_last_slot.
[[nodiscard]] Result<FrameHeader> decode(std::span<const std::byte> bytes);

// Checks the rules of decode() that concern single fields. A link checks each header before the header is
// sent, because a header that the peer would refuse is our bug.
[[nodiscard]] std::optional<Failure> find_violation(const FrameHeader& header);

// CRC-32C (Castagnoli). Uses the processor's instruction for it, if there is one.
[[nodiscard]] std::uint32_t crc32c(std::span<const std::byte> bytes, std::uint32_t seed = 0);

// A 64-bit fingerprint of bytes, by which two workers find out whether they read the same data. Fast, and not
// cryptographic.
[[nodiscard]] std::uint64_t fingerprint(std::span<const std::byte> bytes, std::uint64_t seed = 0);

}  // namespace pipedream
