#include "param_server/shard_exchange.h"

#include <algorithm>

#include "base/check.h"
#include "param_server/aggregation.h"

namespace pipedream {
namespace {

// A push has two tensors: first the flags that say for each piece whether it has a gradient, then the chunk.
constexpr std::size_t kNumPushTensors = 2;

}  // namespace

ShardExchange::ShardExchange(ExchangeSpec spec, ItemCarrier& carrier)
    : spec_(std::move(spec)),
      carrier_(carrier),
      first_(spec_.rounds.first_version()),
      num_pushed_(first_.value()),
      pushes_(spec_, carrier),
      newest_(first_),
      slot_of_(spec_.slot_of) {
  slot_of_.try_emplace(first_, SlotIndex(0));
  for (const auto& [other, peer] : spec_.peers) newest_pulled_[other] = first_;
}

// Pushes to other owners.

Result<bool> ShardExchange::push_factors(const std::vector<TensorView>& factors,
                                         const std::shared_ptr<void>& owner, std::int64_t num_summed,
                                         Deadline deadline) {
  ItemFields fields;
  fields.num_minibatches = static_cast<std::uint32_t>(num_summed);
  for (auto to = spec_.peers.lower_bound(next_factored_); to != spec_.peers.end(); ++to) {
    if (!to->second.factors_to.empty()) {
      const Result<bool> sent = carrier_.send(to->second.factors_to, factors, fields, owner, deadline);
      if (!sent || !sent.value()) return sent;
    }
    next_factored_ = to->first.next();
  }
  next_factored_ = {};
  return true;
}

void ShardExchange::end_push(std::int64_t round, std::int64_t num_summed) {
  num_pushed_ = round + 1;
  std::vector<Gradient> gradients = pushes_.end_round();
  if (spec_.rounds.asynchronous) return;  // the worker applies its own gradients
  own_of_rounds_[round] = std::make_shared<OwnGradients>(OwnGradients{std::move(gradients), num_summed});
}

// Pushes from other replicas.

Result<bool> ShardExchange::begin_push_from(ReplicaIndex other, std::int64_t round, SlotIndex write_slot,
                                            Deadline deadline) {
  // The places are posted before this owner begins its update, because other owners may be faster and send
  // their new versions already.
  if (num_pushed_ > round && spec_.posts_early) post_places(write_slot);
  const ExchangePeer& from = peer(other);
  const bool has_factors = !from.factors_from.empty();
  Pushed pushed;
  if (has_factors || !spec_.chunks.empty()) {
    auto received = carrier_.receive(has_factors ? from.factors_from : from.push_from, deadline);
    if (!received) return received.failure();
    if (!received.value()) return false;
    CarriedItem& item = *received.value();
    pushed.num_summed = item.fields.num_minibatches;
    if (item.fields.is_end_of_data) {
      told_end_ = item.fields;
      return true;
    }
    (has_factors ? pushed.factors : pushed.chunk) = std::move(item);
  }
  pushed_[other] = std::move(pushed);
  return true;
}

Result<bool> ShardExchange::tell_end(std::int64_t num_minibatches, std::uint8_t boundary_events,
                                     Deadline deadline) {
  if (num_pushed_ < spec_.rounds.num_begun(spec_.replica, num_minibatches)) return true;
  ItemFields fields;
  fields.num_minibatches = static_cast<std::uint32_t>(num_minibatches);
  fields.is_end_of_data = true;
  fields.boundary_events = boundary_events;
  for (auto to = spec_.peers.lower_bound(next_told_); to != spec_.peers.end(); ++to) {
    const std::string& channel = to->second.factors_to.empty() ? to->second.push_to : to->second.factors_to;
    if (!channel.empty()) {
      const Result<bool> is_told = carrier_.tell(channel, fields, deadline);
      if (!is_told || !is_told.value()) return is_told;
    }
    next_told_ = to->first.next();
  }
  return true;
}

// The reason why the item does not fit the plan; empty if it fits.
std::optional<std::string> ShardExchange::misfit(const CarriedItem& item, const ExchangeChunk& chunk) const {
  if (item.fields.is_end_of_data) return "the data ended within a round";
  if (item.tensors.size() != kNumPushTensors) return std::to_string(item.tensors.size()) + " tensors";
  const std::size_t content_bytes = item.tensors[1].size_bytes();
  if (item.tensors[0].size_bytes() != chunk.pieces.size() ||
      (content_bytes != chunk.num_bytes && content_bytes != 0)) {
    return to_string(item.tensors[0]) + " and " + to_string(item.tensors[1]) + " for " +
           std::to_string(chunk.pieces.size()) + " pieces of " + std::to_string(chunk.num_bytes) + " bytes";
  }
  return std::nullopt;
}

Result<bool> ShardExchange::receive_chunk(ReplicaIndex other, const ExchangeChunk& chunk, Pushed& pushed,
                                          Deadline deadline) {
  const std::string& channel = peer(other).push_from;
  if (!pushed.chunk) {
    auto received = carrier_.receive(channel, deadline);
    if (!received) return received.failure();
    if (!received.value()) return false;
    pushed.chunk = std::move(*received.value());
  }
  if (const auto why = misfit(*pushed.chunk, chunk)) {
    return carrier_.located({FailureKind::kCorruptFrame, channel + ": " + *why});
  }
  return true;
}

Result<std::optional<ChunkGradients>> ShardExchange::mean_of(std::int64_t chunk_index, int num_threads,
                                                             Deadline deadline) {
  const ExchangeChunk& chunk = spec_.chunks.at(static_cast<std::size_t>(chunk_index));
  for (auto& [other, pushed] : pushed_) {
    const Result<bool> is_there = receive_chunk(other, chunk, pushed, deadline);
    if (!is_there) return is_there.failure();
    if (!is_there.value()) return std::optional<ChunkGradients>();
  }
  std::map<ReplicaIndex, std::vector<std::byte>> flags;
  for (const auto& [other, pushed] : pushed_) {
    std::vector<std::byte>& of_other = flags[other] = std::vector<std::byte>(chunk.pieces.size());
    carrier_.read(of_other, pushed.chunk->tensors[0].data);
    const bool has_any = std::ranges::any_of(of_other, [](std::byte flag) { return flag != std::byte{0}; });
    if (has_any && pushed.chunk->tensors[1].size_bytes() == 0) {
      return carrier_.located(
          {FailureKind::kCorruptFrame, peer(other).push_from + ": gradients without content"});
    }
  }
  ChunkGradients gradients;
  for (std::size_t position = 0; position < chunk.pieces.size(); ++position) {
    gradients.pieces.push_back(gradients_of(position, chunk, flags, num_threads));
  }
  auto owners = std::make_shared<std::vector<std::shared_ptr<void>>>();
  if (own_) owners->push_back(own_);
  for (auto& [other, pushed] : pushed_) owners->push_back(std::exchange(pushed.chunk, std::nullopt)->owner);
  gradients.owner = std::move(owners);
  return std::optional<ChunkGradients>(std::move(gradients));
}

PieceGradients ShardExchange::gradients_of(std::size_t position, const ExchangeChunk& chunk,
                                           const std::map<ReplicaIndex, std::vector<std::byte>>& flags,
                                           int num_threads) const {
  const ExchangePiece& piece = chunk.pieces[position];
  const TensorView own = own_ ? own_->by_parameter.at(piece.parameter_index).piece(piece) : TensorView();
  PieceGradients gradients;
  bool adds_own = own.data != nullptr;
  for (const auto& [other, pushed] : pushed_) {
    if (adds_own && spec_.replica < other) {
      gradients.parts.push_back(own);
      adds_own = false;
    }
    std::byte* const data = pushed.chunk->tensors[1].data + piece.begin_bytes;
    const TensorView received = flat_view(piece.dtype, data, piece.num_bytes());
    // `place` is never the memory of this owner's own gradient, which may have another use. It may be the
    // memory of a received item that has no gradient for this piece.
    if (!spec_.keeps_gradients) gradients.place = received;
    if (flags.at(other)[position] != std::byte{0}) gradients.parts.push_back(received);
  }
  if (adds_own) gradients.parts.push_back(own);
  const bool has_place = gradients.place.data != nullptr && !gradients.parts.empty();
  if (!has_place || !spec_.on_host || !is_aggregated(piece.dtype)) return gradients;
  std::vector<const void*> parts;
  for (const TensorView& part : gradients.parts) parts.push_back(part.data);
  aggregate(piece.dtype, parts, num_minibatches_, gradients.place.data, piece.num_elements, num_threads);
  gradients.is_mean = true;
  return gradients;
}

// The update.

ShardExchange::RoundGradients ShardExchange::begin_update(std::int64_t round) {
  round_ = round;
  if (auto own = own_of_rounds_.extract(round)) own_ = std::move(own.mapped());
  RoundGradients gradients;
  std::int64_t num_summed = own_ ? own_->num_summed : 0;
  for (auto& [other, pushed] : pushed_) {
    num_summed += pushed.num_summed;
    if (pushed.factors) gradients.factors.emplace_back(other, *std::exchange(pushed.factors, std::nullopt));
  }
  // The number of minibatches is computed from the numbers that the pushes report, because the number of
  // minibatches in the run may be unknown here.
  num_minibatches_ = gradients.num_minibatches = num_summed / spec_.rounds.num_microbatches;
  return gradients;
}

Result<bool> ShardExchange::wait_for_readers(SlotIndex write_slot, Deadline deadline) {
  const auto num_kept = [&](WeightVersion version) {
    return static_cast<std::size_t>(newest_.value() - version.value()) * spec_.chunks.size();
  };
  std::vector<WeightVersion> versions;
  for (const auto& [version, slot] : slot_of_) {
    if (slot == write_slot) versions.push_back(version);
  }
  if (!spec_.tied_slots.empty()) {
    versions.emplace_back(newest_.value() + 1 - static_cast<std::int64_t>(spec_.tied_slots.size()));
  }
  for (const WeightVersion version : versions) {
    for (const auto& [other, to] : spec_.peers) {
      if (to.pull_to.empty()) continue;
      const Result<bool> have_left = carrier_.wait_until_sent(to.pull_to, num_kept(version), deadline);
      if (!have_left || !have_left.value()) return have_left;
    }
  }
  return true;
}

Result<bool> ShardExchange::begin_version(SlotIndex write_slot, Deadline deadline) {
  const Result<bool> may_write = wait_for_readers(write_slot, deadline);
  if (!may_write || !may_write.value()) return may_write;
  post_places(write_slot);
  write_slot_ = write_slot;
  return true;
}

// From now on, lets the other owners' shards of the next version land in the slot.
void ShardExchange::post_places(SlotIndex write_slot) {
  if (posted_slot_ == write_slot) return;
  std::vector<std::span<std::byte>> places;
  for (const auto& [other, from] : spec_.peers) {
    if (!from.is_posted) continue;
    PD_CHECK(!posted_slot_, "slot " << write_slot.value() << " after slot " << posted_slot_->value());
    places.clear();
    for (const ExchangeChunk& chunk : from.shard.chunks) {
      places.emplace_back(place_of(chunk, write_slot, newest_.next()), chunk.num_bytes);
    }
    carrier_.post(from.pull_from, places);
  }
  posted_slot_ = write_slot;
}

Result<bool> ShardExchange::publish(std::int64_t chunk_index, Deadline deadline) {
  const ExchangeChunk& chunk = spec_.chunks.at(static_cast<std::size_t>(chunk_index));
  std::byte* const place = place_of(chunk, write_slot_, newest_.next());
  for (const auto& [other, to] : spec_.peers) {
    if (is_held_ || to.pull_to.empty()) continue;
    held_[other].push_back(flat_view(DType::kUInt8, place, chunk.num_bytes));
  }
  is_held_ = true;
  for (const auto& [other, held] : held_) {
    const Result<bool> sent = send_held(other, spec_.holds_versions ? Deadline{} : deadline);
    if (!sent) return sent;
    if (!sent.value() && !spec_.holds_versions) return false;
  }
  is_held_ = false;
  return true;
}

Result<bool> ShardExchange::send_held(ReplicaIndex other, Deadline deadline) {
  std::vector<TensorView>& held = held_.at(other);
  const ExchangePeer& to = peer(other);
  if (spec_.holds_versions && !to.push_to.empty() && !held.empty()) {
    const std::int64_t num_rounds_later = std::max<std::int64_t>(0, num_pushed_ - 1 - round_);
    const Result<bool> have_left = carrier_.wait_until_sent(
        to.push_to, static_cast<std::size_t>(num_rounds_later) * to.shard.chunks.size(), deadline);
    if (!have_left || !have_left.value()) return have_left;
  }
  while (!held.empty()) {
    const Result<bool> sent = carrier_.send(to.pull_to, {held.front()}, {}, nullptr, deadline);
    if (!sent || !sent.value()) return sent;
    held.erase(held.begin());
  }
  return true;
}

Result<bool> ShardExchange::end_version(Deadline deadline) {
  for (const auto& [other, held] : held_) {
    const Result<bool> sent = send_held(other, deadline);
    if (!sent || !sent.value()) return sent;
  }
  pushed_.clear();
  own_.reset();
  posted_slot_.reset();
  note_version(write_slot_);
  return true;
}

void ShardExchange::note_version(SlotIndex slot) {
  newest_ = newest_.next();
  std::erase_if(slot_of_, [&](const auto& version) { return version.second == slot; });
  slot_of_[newest_] = slot;
}

Result<bool> ShardExchange::wait_for_pushes(std::int64_t num_rounds_left, Deadline deadline) {
  for (const auto& [other, to] : spec_.peers) {
    if (to.push_to.empty()) continue;
    const auto num_left = static_cast<std::size_t>(num_rounds_left) * to.shard.chunks.size();
    const Result<bool> have_left = carrier_.wait_until_sent(to.push_to, num_left, deadline);
    if (!have_left || !have_left.value()) return have_left;
  }
  return true;
}

void ShardExchange::collect_pushed() {
  for (const auto& [other, to] : spec_.peers) {
    if (!to.push_to.empty()) carrier_.collect_released(to.push_to);
  }
}

// Pulls.

Result<bool> ShardExchange::pull_from(ReplicaIndex other, Deadline deadline) {
  const ExchangePeer& from = peer(other);
  const WeightVersion version = newest_pulled_.at(other).next();
  // Empty if no forward reads this version any more.
  const std::optional<SlotIndex> own_slot = slot_with(version);
  for (; num_chunks_pulled_ < from.shard.chunks.size(); ++num_chunks_pulled_) {
    const ExchangeChunk& chunk = from.shard.chunks[num_chunks_pulled_];
    auto received = carrier_.receive(from.pull_from, deadline);
    if (!received) return received.failure();
    if (!received.value()) return false;
    if (from.is_posted) continue;  // it has landed in its place
    const CarriedItem& item = *received.value();
    if (item.tensors.size() != 1 || item.tensors[0].size_bytes() != chunk.num_bytes) {
      return carrier_.located({FailureKind::kCorruptFrame, from.pull_from + ": no chunk of " +
                                                               std::to_string(chunk.num_bytes) + " bytes"});
    }
    std::byte* const place = place_of(chunk, own_slot, version);
    if (place != nullptr) carrier_.copy(place, item.tensors[0].data, chunk.num_bytes);
    if (!spec_.rounds.asynchronous) continue;
    const std::int64_t num_gradients = item.fields.num_minibatches;
    const auto [range, is_first] = contained_.try_emplace(version, num_gradients, num_gradients);
    range->second = {std::min(range->second.first, num_gradients),
                     std::max(range->second.second, num_gradients)};
  }
  num_chunks_pulled_ = 0;
  newest_pulled_[other] = version;
  return true;
}

std::optional<SlotIndex> ShardExchange::slot_with(WeightVersion version) const {
  const auto slot = slot_of_.find(version);
  return slot == slot_of_.end() ? std::nullopt : std::optional(slot->second);
}

WeightVersion ShardExchange::whole_version() const {
  WeightVersion whole = newest_;
  for (const auto& [other, pulled] : newest_pulled_) {
    if (!peer(other).pull_from.empty()) whole = std::min(whole, pulled);
  }
  return whole;
}

// The place of the chunk in the version's slot; null if own_slot is empty, because the slot has another
// version by now. A chunk of tied parameters always has a place, in tied_slots.
std::byte* ShardExchange::place_of(const ExchangeChunk& chunk, std::optional<SlotIndex> own_slot,
                                   WeightVersion version) const {
  if (chunk.is_tied) {
    const auto num_slots = static_cast<std::int64_t>(spec_.tied_slots.size());
    const std::int64_t slot = (version.value() - first_.value()) % num_slots;
    return spec_.tied_slots.at(static_cast<std::size_t>(slot)) + chunk.begin_bytes;
  }
  if (!own_slot) return nullptr;
  return spec_.own_slots.at(static_cast<std::size_t>(own_slot->value())) + chunk.begin_bytes;
}

}  // namespace pipedream
