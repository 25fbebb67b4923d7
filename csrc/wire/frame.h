// Defines the frame header: a fixed layout written by hand, little endian, with a checksum. Nothing here uses
// sockets, and only the message of a Failure allocates memory. Any thread.
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
// Bounds of minibatch and microbatch. They keep minibatch x microbatches + microbatch inside 64 bits.
inline constexpr std::int64_t kMinibatchMax = std::int64_t{1} << 42;
inline constexpr std::int64_t kMicrobatchMax = (std::int64_t{1} << 20) - 1;

enum class FrameKind : std::uint8_t {
  kHello = 1,   // the first frame in each direction
  kTensor = 2,  // one chunk of a tensor
  kCredit = 3,  // receiver to sender: it may send more items, into these slots
  kEnd = 4,     // there are no more items; `minibatch` is the number of minibatches
  kAbort = 5,   // the sender stops; the payload says why, in UTF-8
  kBye = 6,     // the sender will close the connection, which is then no failure
  kBeat = 7,    // a regular sign of life; has_pulse says whether the program lives, too
};

[[nodiscard]] std::string_view frame_kind_name(FrameKind kind);

// Identifies the connection to which a frame belongs. A frame with another identity comes from another run,
// incarnation or channel.
struct LinkIdentity {
  std::uint64_t run_id = 0;
  std::uint32_t incarnation = 0;  // how often the run was restarted
  std::uint32_t channel_id = 0;

  friend bool operator==(const LinkIdentity&, const LinkIdentity&) = default;
};

struct FrameHeader {
  FrameKind kind = FrameKind::kHello;
  LinkIdentity identity;
  std::uint64_t sequence = 0;  // counts from 0 per link and direction, without gaps; the link fills it in
  MinibatchId minibatch;
  MicrobatchIndex microbatch;
  std::uint16_t tensor_index = 0;
  std::uint16_t num_tensors = 0;
  DType dtype = DType::kUInt8;
  std::uint8_t num_dims = 0;
  std::array<std::int64_t, kNumDimsMax> shape{};
  // A receiver may post a place: memory of its choice for the next item, instead of a slot's memory. The
  // CREDIT that grants the place has its size in tensor_bytes, and its offset in the shared memory in
  // chunk_offset. Such a CREDIT grants one slot.
  std::uint64_t tensor_bytes = 0;
  std::uint64_t chunk_offset = 0;
  std::uint64_t payload_bytes = 0;
  // The number of the chunk's bytes, if the sender itself has written them into the receiver's slot or posted
  // place (on the same host, in memory that the receiver shares). Then the frame has no payload.
  std::uint64_t placed_bytes = 0;
  ItemFields fields{};          // TENSOR: the item's fields, the same in all its frames; END: boundary_events
  std::uint64_t plan_hash = 0;  // HELLO
  std::uint64_t num_work_items = 0;  // BEAT: how many work items the sender has completed
  bool has_pulse = false;            // BEAT: the sender's program is alive, not only its process
  std::uint16_t slot = 0;            // a slot of the receiver: granted by CREDIT, used by TENSOR
  std::uint64_t further_slots = 0;   // CREDIT: bit k grants slot + 1 + k, too
  bool has_last_slot = false;        // TENSOR: the sender has no other granted slot
  // TENSOR: how the tensor's bytes are encoded. shape and dtype are those before encoding.
  CodecKind codec = CodecKind::kNone;
  // CRC-32C of the payload, when has_payload_checksum.
  bool has_payload_checksum = false;
  std::uint32_t payload_checksum = 0;

  friend bool operator==(const FrameHeader&, const FrameHeader&) = default;
};

using FrameHeaderBytes = std::array<std::byte, kFrameHeaderBytes>;

void encode(const FrameHeader& header, std::span<std::byte, kFrameHeaderBytes> bytes);

// Reads a header. Returns kCorruptFrame, with the name of the field, unless all rules hold:
//   - The length is exact. Magic, format version and checksum are right. Kind, dtype, codec and flags are
//     known.
//   - minibatch, microbatch and payload_bytes are within their bounds. loss_scale is finite and not negative.
//   - num_dims <= 8. No dimension is negative, and those beyond num_dims are 0.
//   - TENSOR: the codec applies to the dtype, tensor_index < num_tensors, and shape x dtype does not
//     overflow. Without a codec shape x dtype == tensor_bytes. payload_bytes or placed_bytes is 0, and
//     chunk_offset + payload_bytes + placed_bytes <= tensor_bytes.
//   - Other kinds have no payload, and 0 in the fields of tensor and item, except dtype, minibatch and
//     microbatch. But END may have boundary_events, and ABORT a payload. CREDIT grants slots, none above
//     65,535, or one slot for a posted place: then tensor_bytes and chunk_offset have the size of the place
//     and its offset.
//   - Only HELLO has plan_hash, only BEAT num_work_items and has_pulse, only CREDIT further_slots, and only
//     TENSOR has_last_slot. Without has_payload_checksum, payload_checksum is 0.
[[nodiscard]] Result<FrameHeader> decode(std::span<const std::byte> bytes);

// Checks the rules of decode() that concern the values of fields. A link checks each header before it sends
// it, because a header that the peer would refuse is our bug.
[[nodiscard]] std::optional<Failure> find_violation(const FrameHeader& header);

// CRC-32C (Castagnoli). Uses the processor's instruction for it, if there is one.
[[nodiscard]] std::uint32_t crc32c(std::span<const std::byte> bytes, std::uint32_t seed = 0);

// Returns a 64-bit fingerprint of bytes, by which two workers find out whether they have read the same data.
// It is fast, and not cryptographic.
[[nodiscard]] std::uint64_t fingerprint(std::span<const std::byte> bytes, std::uint64_t seed = 0);

}  // namespace pipedream
