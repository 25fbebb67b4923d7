// Does one owner's side of the exchange of a stage's shards; the owner is a replica or a spare. It receives
// the gradients that other replicas push and makes their mean. It sends each chunk of the owner's next
// version as soon as the chunk is made, or with spares after the owner's pushes. It lands the chunks of other
// owners' versions where forwards read them. A round is the minibatches whose gradients make one update
// (schedule/rounds.h).
//
//   round t           caller        what happens here
//   SEND push         the worker    give() for each gradient; push_given() during the backward and after it;
//                                   then end_push()
//   RECV push         the engine    begin_push_from() waits for the first gradients of a replica, and posts
//                                   places for the chunks of the other owners' next versions
//   UPDATE            the worker    begin_update() and begin_version(); for each chunk mean_of(), the
//                                   optimizer's step and publish(); then end_version()
//   SEND pull         nobody        nothing is left to do: UPDATE has sent every chunk
//   RECV pull         the engine    pull_from() waits for all chunks of another owner's version t + 1
//
// While the next chunk's gradients are on their way, a chunk's mean is made and its new version is sent. So
// both directions of a link are busy. Gradients are added in the order of the replicas, so that a run gives
// the same numbers whichever replica is late.
//
// Owned by the stage's compute thread, which makes every call. A call that waits returns at its deadline.
// When it is called again, it goes on where it stopped.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "base/failure.h"
#include "base/ids.h"
#include "channel/tensor.h"
#include "param_server/exchange_spec.h"
#include "param_server/item_carrier.h"
#include "param_server/shard_pushes.h"

namespace pipedream {

// This owner's gradients of a round.
struct OwnGradients {
  std::vector<Gradient> by_parameter;
  std::int64_t num_summed = 0;  // microbatches
};

// The gradients of a piece, in the order of the replicas; no parts if no replica has a gradient. place:
// memory of a received item that the mean may overwrite; without data if there is no such memory. is_mean:
// the mean is made already, and lies in `place`. Otherwise the caller makes it from the parts.
struct PieceGradients {
  std::vector<TensorView> parts;
  TensorView place;
  bool is_mean = false;
};
struct ChunkGradients {
  std::vector<PieceGradients> pieces;
  std::shared_ptr<void> owner;  // keeps their memory alive
};

class ShardExchange {
 public:
  ShardExchange(ExchangeSpec spec, ItemCarrier& carrier);

  // The engine calls the functions from here to pull_from(). begin_push_from() returns true once the
  // replica's gradient of the round has begun to arrive. write_slot: the slot that the round's update will
  // write. No forward and no backward reads it any more.
  [[nodiscard]] Result<bool> begin_push_from(ReplicaIndex other, std::int64_t round, SlotIndex write_slot,
                                             Deadline deadline);
  // The end of the data, if the last begin_push_from() received it instead of a gradient. It has the number
  // of minibatches and the events due at the end of the run.
  [[nodiscard]] std::optional<ItemFields> take_end() { return std::exchange(told_end_, std::nullopt); }
  // Sends the end of the data to the other owners over the channels of pushes or factors, after all pushes.
  // Otherwise another owner might wait for a push that does not exist. Once the end is known, call tell_end()
  // before every other wait.
  [[nodiscard]] Result<bool> tell_end(std::int64_t num_minibatches, std::uint8_t boundary_events,
                                      Deadline deadline);
  // Receives the other owner's shard of the next version. True once the shard's chunks are in the version's
  // slot, or are dropped because the slot has another version by now.
  [[nodiscard]] Result<bool> pull_from(ReplicaIndex other, Deadline deadline);

  // give() takes one of this replica's gradients of the round; each is given once. push_given() sends the
  // chunks that are complete by now (ShardPushes::send_complete()). num_summed: the number of microbatches
  // whose gradients are summed in the round.
  void give(std::size_t parameter_index, Gradient gradient) {
    pushes_.give(parameter_index, std::move(gradient));
  }
  [[nodiscard]] bool is_given(std::size_t parameter_index) const { return pushes_.has(parameter_index); }
  [[nodiscard]] Result<bool> push_given(std::int64_t num_summed, Deadline deadline) {
    return pushes_.send_complete(num_summed, deadline);
  }
  // Sends this replica's factors of the round (ExchangePeer::factors_to) to all other replicas.
  [[nodiscard]] Result<bool> push_factors(const std::vector<TensorView>& factors,
                                          const std::shared_ptr<void>& owner, std::int64_t num_summed,
                                          Deadline deadline);
  // Called when all gradients of the round are given and sent. Keeps the gradients for the round's update,
  // except with asynchronous shards, where the worker applies its own gradients.
  void end_push(std::int64_t round, std::int64_t num_summed);
  // Waits until there are at most num_rounds_left rounds whose pushes are not all sent.
  [[nodiscard]] Result<bool> wait_for_pushes(std::int64_t num_rounds_left, Deadline deadline);

  // Releases gradients that are sent.
  void collect_pushed();

  // An update calls begin_update(), begin_version(), mean_of() and publish() for each chunk, and at last
  // end_version().
  struct RoundGradients {
    std::int64_t num_minibatches = 0;                           // the mean's divisor
    std::vector<std::pair<ReplicaIndex, CarriedItem>> factors;  // from the other replicas
  };
  [[nodiscard]] RoundGradients begin_update(std::int64_t round);
  // Waits until this owner's shard in the slot is sent to all replicas, so that the slot may be overwritten.
  [[nodiscard]] Result<bool> wait_for_readers(SlotIndex write_slot, Deadline deadline);
  // Does wait_for_readers(), and lets the other owners' shards of the next version land in the slot.
  // Afterwards the caller may write the next version there.
  [[nodiscard]] Result<bool> begin_version(SlotIndex write_slot, Deadline deadline);
  // Returns a chunk's gradients once all replicas that have a minibatch in the round have pushed theirs.
  // Called once for each chunk, in order, before or after begin_version().
  [[nodiscard]] Result<std::optional<ChunkGradients>> mean_of(std::int64_t chunk, int num_threads,
                                                              Deadline deadline);
  // Sends the chunk of the new version. The caller has written the chunk to its place in the slot. With
  // ExchangeSpec::holds_versions the chunk may be sent later, at the latest in end_version().
  [[nodiscard]] Result<bool> publish(std::int64_t chunk, Deadline deadline);
  [[nodiscard]] Result<bool> end_version(Deadline deadline);
  // Notes that the slot now has the next version. An update of an asynchronous shard calls only this
  // function.
  void note_version(SlotIndex slot);

  // The newest version of which this owner has all shards. whole_slot() is its slot, if the slot still has
  // this version.
  [[nodiscard]] WeightVersion whole_version() const;
  [[nodiscard]] std::optional<SlotIndex> whole_slot() const { return slot_with(whole_version()); }

  // By version, the fewest and the most gradients that have updated a chunk of it which another owner sent.
  // Chunks differ in this with asynchronous shards only; otherwise the map is empty.
  using Contained = std::map<WeightVersion, std::pair<std::int64_t, std::int64_t>>;
  [[nodiscard]] const Contained& contained() const { return contained_; }

 private:
  // The items that a replica has pushed for the round that is updated next.
  struct Pushed {
    std::int64_t num_summed = 0;  // microbatches
    std::optional<CarriedItem> factors;
    std::optional<CarriedItem> chunk;  // the chunk that comes next
  };

  [[nodiscard]] const ExchangePeer& peer(ReplicaIndex other) const { return spec_.peers.at(other); }
  [[nodiscard]] std::optional<std::string> misfit(const CarriedItem& item, const ExchangeChunk& chunk) const;
  [[nodiscard]] Result<bool> receive_chunk(ReplicaIndex other, const ExchangeChunk& chunk, Pushed& pushed,
                                           Deadline deadline);
  [[nodiscard]] PieceGradients gradients_of(std::size_t position, const ExchangeChunk& chunk,
                                            const std::map<ReplicaIndex, std::vector<std::byte>>& flags,
                                            int num_threads) const;
  void post_places(SlotIndex write_slot);
  [[nodiscard]] std::optional<SlotIndex> slot_with(WeightVersion version) const;
  [[nodiscard]] std::byte* place_of(const ExchangeChunk& chunk, std::optional<SlotIndex> own_slot,
                                    WeightVersion version) const;
  [[nodiscard]] Result<bool> send_held(ReplicaIndex other, Deadline deadline);

  const ExchangeSpec spec_;
  ItemCarrier& carrier_;
  const WeightVersion first_;
  std::map<ReplicaIndex, Pushed> pushed_;  // the pushes for the round that is updated next
  std::optional<ItemFields> told_end_;
  std::int64_t num_pushed_;     // rounds whose pushes end_push() has ended
  ReplicaIndex next_told_;      // the first replica that tell_end() has not told
  ReplicaIndex next_factored_;  // the first replica that push_factors() has not sent to
  ShardPushes pushes_;
  std::map<std::int64_t, std::shared_ptr<OwnGradients>> own_of_rounds_;

  // The update that is being made.
  std::int64_t round_ = 0;
  std::int64_t num_minibatches_ = 0;
  std::shared_ptr<OwnGradients> own_;  // null: this owner has no minibatch in the round
  SlotIndex write_slot_;
  // The chunks of the new version that are not sent yet, in order.
  std::map<ReplicaIndex, std::vector<TensorView>> held_;
  bool is_held_ = false;  // whether the chunk being published is in held_

  // Versions.
  WeightVersion newest_;
  std::map<WeightVersion, SlotIndex> slot_of_;  // the slot of each version
  std::optional<SlotIndex> posted_slot_;        // the slot whose places are posted for the next version
  std::map<ReplicaIndex, WeightVersion> newest_pulled_;
  std::size_t num_chunks_pulled_ = 0;  // chunks of the version that is being pulled
  Contained contained_;
};

}  // namespace pipedream
