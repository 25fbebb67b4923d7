// One owner's side of the exchange of a stage's shards; the owner is a replica or a spare. It receives the
// gradients that the others push, makes their mean, sends each chunk of the owner's next version as soon as
// it is made, and lands the chunks of the others' versions where forwards read them.
//
//   round t           who asks      what is done here, chunk by chunk
//   RECV push         the engine    waits for the beginning of a replica's gradient; says where the others'
//                                   next versions may land
//   UPDATE            the worker    begin_update(), begin_version(); of each chunk mean_of(), then the
//                                   optimizer's step, then publish(); end_version()
//   SEND pull         nobody        nothing: UPDATE has sent every chunk
//   RECV pull         the engine    waits for all chunks of another's version t + 1
//
// A chunk's mean is made, and its version leaves, while the next chunk's gradients are on their way: both
// directions of a link are busy. Gradients are added in the order of the replicas, so that a run gives the
// same numbers however late one is.
//
// Owned by the stage's compute thread; every call is on it. A call that waits returns at its deadline; called
// again, it goes on where it stopped.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "base/failure.h"
#include "base/ids.h"
#include "channel/tensor.h"
#include "param_server/item_carrier.h"
#include "param_server/shard_rounds.h"
#include "schedule/rounds.h"

namespace pipedream {

struct ExchangePiece {
  std::size_t parameter_index = 0;
  std::int64_t first_element = 0;
  std::int64_t num_elements = 0;
  std::size_t begin_bytes = 0;  // in its chunk
  DType dtype = DType::kFloat32;
};

struct ExchangeChunk {
  std::size_t begin_bytes = 0;  // in the slot
  std::size_t num_bytes = 0;
  bool is_tied = false;  // of the slots of parameters that other stages use, too
  std::vector<ExchangePiece> pieces;
};

// Another owner, and the names of the channels to and from it; empty where there is none, as a spare pushes
// nothing and reads no version.
struct ExchangePeer {
  std::vector<ExchangeChunk> chunks;  // of its shard, in the order in which they travel
  std::string push_to;
  std::string push_from;
  std::string factors_to;  // an item of each round that comes before its chunks
  std::string factors_from;
  std::string pull_to;
  std::string pull_from;
  bool is_posted = false;  // its versions land where they are for
};

struct ExchangeSpec {
  Rounds rounds;
  ReplicaIndex replica;               // this owner
  std::vector<ExchangeChunk> chunks;  // of its shard, in the order in which they travel
  std::map<ReplicaIndex, ExchangePeer> peers;
  std::vector<std::byte*> own_slots;             // of the stage's versions, by slot
  std::map<WeightVersion, SlotIndex> slot_of{};  // what lies there; empty: the newest in the first
  std::vector<std::byte*> tied_slots;            // version v lies in slot (v - first) mod their number
  bool keeps_gradients = false;  // the optimizer may, so that no mean lies in the memory of a received item
  bool on_host = true;           // where means of float32 and float64 are made here
  // A version leaves for a replica after what is pushed to it: a link's channels share it evenly, and the
  // spares', for whose shards all wait last, would get less of it.
  bool holds_versions = false;
  bool posts_early = true;  // false: not before begin_version()
};

// This owner's gradients of a round, by parameter, flat; one without data is none.
struct OwnGradients {
  std::vector<TensorView> by_parameter;
  std::int64_t num_summed = 0;  // microbatches
  std::shared_ptr<void> owner;
};

// The mean gradient of a piece, or the parts that it is to be made of, in the order of the replicas; nothing
// if no replica has any. place: where it may lie, in the memory of a received item; without data there is
// none.
struct PieceGradients {
  std::vector<TensorView> parts;
  TensorView place;
  bool is_mean = false;
};
struct ChunkGradients {
  std::vector<PieceGradients> pieces;
  std::shared_ptr<void> owner;  // of their memory
};

class ShardExchange {
 public:
  ShardExchange(ExchangeSpec spec, ItemCarrier& carrier);

  // The program's.
  // The replica's gradient of the round has begun to come: true. write_slot: of the round's update, nobody
  // reads it any more.
  [[nodiscard]] Result<bool> begin_push_from(ReplicaIndex other, std::int64_t round, SlotIndex write_slot,
                                             Deadline deadline);
  // In place of a gradient, as the last begin_push_from() has heard: how many minibatches there are, and what
  // is due at their end.
  [[nodiscard]] std::optional<ItemFields> take_end() { return std::exchange(told_end_, std::nullopt); }
  // Says this on the way of the pushes, once all have been given to the channels: another may wait for one
  // that does not exist. Called once it is known, before whatever else waits, again and again.
  [[nodiscard]] Result<bool> tell_end(std::int64_t num_minibatches, std::uint8_t boundary_events,
                                      Deadline deadline);
  // The other's next version is in the slots, if it has one there still.
  [[nodiscard]] Result<bool> pull_from(ReplicaIndex other, Deadline deadline);

  // Pushing, which who has the gradients does.
  // All of the round has been given to the channels.
  void end_push(std::int64_t round) { num_pushed_ = round + 1; }
  // Until all but so many rounds have left.
  [[nodiscard]] Result<bool> wait_for_pushes(std::int64_t num_rounds_left, Deadline deadline);

  // Lets go of gradients that have left.
  void collect_pushed();

  // An update, in this order.
  struct RoundGradients {
    std::int64_t num_minibatches = 0;                           // over which the mean is
    std::vector<std::pair<ReplicaIndex, CarriedItem>> factors;  // of the others
  };
  [[nodiscard]] RoundGradients begin_update(std::int64_t round, std::optional<OwnGradients> own);
  // Until what is in the slot has left for the others. Who has read it in this round has had it; who has no
  // minibatch in the last round need not.
  [[nodiscard]] Result<bool> wait_for_readers(SlotIndex write_slot, Deadline deadline);
  // So, and then the next version is written there.
  [[nodiscard]] Result<bool> begin_version(SlotIndex write_slot, Deadline deadline);
  // Chunk after chunk, once each, once all have pushed it; before begin_version() or after.
  [[nodiscard]] Result<std::optional<ChunkGradients>> mean_of(std::int64_t chunk, int num_threads,
                                                              Deadline deadline);
  // It is written. Sends it from where it lies.
  [[nodiscard]] Result<bool> publish(std::int64_t chunk, Deadline deadline);
  [[nodiscard]] Result<bool> end_version(Deadline deadline);
  // In place of all these, where updates are not of rounds: the slot has the next version.
  void note_version(SlotIndex slot);

  // The newest version of which all shards are here, and its slot where that has it still.
  [[nodiscard]] WeightVersion whole_version() const;
  [[nodiscard]] std::optional<SlotIndex> whole_slot() const { return slot_with(whole_version()); }

  // By version, the fewest and the most gradients that the chunks of the others say are in them.
  using Contained = std::map<WeightVersion, std::pair<std::int64_t, std::int64_t>>;
  [[nodiscard]] const Contained& contained() const { return contained_; }

 private:
  // Items that have come from a replica for the round that is updated next.
  struct Pushed {
    std::int64_t num_summed = 0;  // microbatches
    std::optional<CarriedItem> factors;
    std::optional<CarriedItem> chunk;  // the next one
  };

  [[nodiscard]] const ExchangePeer& peer(ReplicaIndex other) const { return spec_.peers.at(other); }
  [[nodiscard]] std::optional<std::string> misfit(const CarriedItem& item, const ExchangeChunk& chunk) const;
  [[nodiscard]] Result<bool> receive_chunk(ReplicaIndex other, const ExchangeChunk& chunk, Pushed& pushed,
                                           Deadline deadline);
  [[nodiscard]] PieceGradients gradients_of(std::size_t position, const ExchangeChunk& chunk,
                                            const std::map<ReplicaIndex, std::vector<std::byte>>& flags,
                                            int num_threads) const;
  [[nodiscard]] TensorView own_piece(const ExchangePiece& piece) const;
  void post_places(SlotIndex write_slot);
  [[nodiscard]] std::optional<SlotIndex> slot_with(WeightVersion version) const;
  [[nodiscard]] std::byte* place_of(const ExchangeChunk& chunk, std::optional<SlotIndex> own_slot,
                                    WeightVersion version) const;
  [[nodiscard]] Result<bool> send_held(ReplicaIndex other, Deadline deadline);

  const ExchangeSpec spec_;
  ItemCarrier& carrier_;
  const WeightVersion first_;
  ShardRounds arrivals_;
  std::map<ReplicaIndex, Pushed> pushed_;  // of the round that is updated next
  std::optional<ItemFields> told_end_;
  std::int64_t num_pushed_;  // rounds
  ReplicaIndex next_told_;   // of the others, who has not been told the end

  // The update that is being made.
  std::int64_t round_ = 0;
  std::int64_t num_minibatches_ = 0;
  std::optional<OwnGradients> own_;
  SlotIndex write_slot_;
  std::map<ReplicaIndex, std::vector<TensorView>> held_;  // chunks that are to leave, in their order
  bool is_held_ = false;                                  // the chunk that is being published

  // Versions.
  WeightVersion newest_;
  std::map<WeightVersion, SlotIndex> slot_of_;  // of those in the slots
  std::optional<SlotIndex> posted_slot_;        // for the next version
  std::map<ReplicaIndex, WeightVersion> newest_pulled_;
  std::size_t num_chunks_pulled_ = 0;  // of the version that is being pulled
  Contained contained_;
};

}  // namespace pipedream
