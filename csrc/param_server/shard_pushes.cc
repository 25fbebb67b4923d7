#include "param_server/shard_pushes.h"

#include <algorithm>
#include <span>
#include <utility>

#include "base/check.h"

namespace pipedream {
namespace {

bool is_filled(const ExchangeChunk& chunk) { return chunk.pieces.front().num_bytes() == chunk.num_bytes; }

}  // namespace

PushLayout::Chunk PushLayout::add(const ExchangeShard& shard, const ExchangeChunk& chunk) {
  Chunk place;
  if (!is_filled(chunk)) {
    place.copy_bytes = copied_bytes_;
    copied_bytes_ += chunk.num_bytes;
  } else if (feeds_back(shard)) {
    zero_bytes_ = std::max(zero_bytes_, chunk.num_bytes);
  }
  place.first_flag = num_flags_;
  num_flags_ += chunk.pieces.size();
  return place;
}

ShardPushes::ShardPushes(const ExchangeSpec& spec, ItemCarrier& carrier)
    : carrier_(carrier), layout_(spec.push_codec), slots_(spec.push_slots) {
  for (const auto& [other, peer] : spec.peers) {
    if (peer.push_to.empty()) continue;
    Receiver& to = receivers_.emplace_back(Receiver{&peer, {}});
    for (const ExchangeChunk& chunk : peer.shard.chunks) to.places.push_back(layout_.add(peer.shard, chunk));
  }
  PD_CHECK(!slots_.empty() || layout_.slot_bytes() == 0, layout_.slot_bytes());
  flags_.assign(slots_.size(), std::vector<std::byte>(layout_.num_flags()));
}

void ShardPushes::give(std::size_t parameter_index, Gradient gradient) {
  if (given_.size() <= parameter_index) given_.resize(parameter_index + 1);
  PD_CHECK(!given_[parameter_index], "parameter " << parameter_index << " twice in a round");
  given_[parameter_index] = std::move(gradient);
}

bool ShardPushes::has(std::size_t parameter_index) const {
  return parameter_index < given_.size() && given_[parameter_index].has_value();
}

Result<bool> ShardPushes::send_complete(std::int64_t num_summed, Deadline deadline) {
  for (Receiver& to : receivers_) {
    const std::vector<ExchangeChunk>& chunks = to.peer->shard.chunks;
    for (; to.num_sent < chunks.size(); ++to.num_sent) {
      const auto is_given = [&](const ExchangePiece& piece) { return has(piece.parameter_index); };
      if (!std::ranges::all_of(chunks[to.num_sent].pieces, is_given)) break;
      const Result<bool> sent = send(to, num_summed, deadline);
      if (!sent || !sent.value()) return sent;
    }
  }
  return true;
}

// Sends the receiver's next chunk.
Result<bool> ShardPushes::send(const Receiver& to, std::int64_t num_summed, Deadline deadline) {
  const ExchangeShard& shard = to.peer->shard;
  const ExchangeChunk& chunk = shard.chunks[to.num_sent];
  const PushLayout::Chunk& place = to.places[to.num_sent];
  const bool feeds_back = layout_.feeds_back(shard);
  item_.clear();
  item_.push_back(flags_of(chunk, place.first_flag, feeds_back));
  item_.push_back(content_of(chunk, place, shard.push_dtype, feeds_back));
  ItemFields fields;
  fields.num_minibatches = static_cast<std::uint32_t>(num_summed);
  const std::shared_ptr<void> owner =
      place.copy_bytes ? nullptr : given_[chunk.pieces.front().parameter_index]->owner;
  return carrier_.send(to.peer->push_to, item_, fields, owner, deadline);
}

// Returns the chunk's flags in the push slot. They are copied there only if they differ from the flags that
// the slot has from an earlier round.
TensorView ShardPushes::flags_of(const ExchangeChunk& chunk, std::size_t first_flag, bool feeds_back) {
  const std::span<std::byte> known = std::span(flags_[slot_index_]).subspan(first_flag, chunk.pieces.size());
  std::byte* const flags = slot() + layout_.flags_offset_bytes() + first_flag;
  bool are_as_known = true;
  for (std::size_t position = 0; position < known.size(); ++position) {
    const Gradient& gradient = *given_[chunk.pieces[position].parameter_index];
    const std::byte flag{feeds_back || gradient.content.data != nullptr};
    are_as_known &= known[position] == flag;
    known[position] = flag;
  }
  if (!are_as_known) carrier_.copy(flags, known.data(), known.size());
  return flat_view(DType::kUInt8, flags, known.size());
}

TensorView ShardPushes::content_of(const ExchangeChunk& chunk, const PushLayout::Chunk& place, DType dtype,
                                   bool feeds_back) {
  if (!place.copy_bytes) {
    const ExchangePiece& piece = chunk.pieces.front();
    const TensorView gradient = given_[piece.parameter_index]->piece(piece);
    if (gradient.data != nullptr) return flat_view(dtype, gradient.data, chunk.num_bytes);
    return flat_view(dtype, slot(), feeds_back ? chunk.num_bytes : 0);
  }
  std::byte* const copy = slot() + layout_.copies_offset_bytes() + *place.copy_bytes;
  for (const ExchangePiece& piece : chunk.pieces) {  // the gaps between them are zeros, and stay so
    const TensorView gradient = given_[piece.parameter_index]->piece(piece);
    if (gradient.data != nullptr) {
      carrier_.copy(copy + piece.begin_bytes, gradient.data, piece.num_bytes());
    } else {
      carrier_.zero(copy + piece.begin_bytes, piece.num_bytes());
    }
  }
  return flat_view(dtype, copy, chunk.num_bytes);
}

std::vector<Gradient> ShardPushes::end_round() {
  std::vector<Gradient> gradients;
  for (std::optional<Gradient>& gradient : given_) {
    gradients.push_back(gradient ? *std::move(gradient) : Gradient());
    gradient.reset();
  }
  for (Receiver& to : receivers_) {
    PD_CHECK(to.num_sent == to.places.size(), to.num_sent << " of " << to.places.size() << " chunks");
    to.num_sent = 0;
  }
  if (!slots_.empty()) slot_index_ = (slot_index_ + 1) % slots_.size();
  return gradients;
}

}  // namespace pipedream
