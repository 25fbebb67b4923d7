#include "bindings/shard_exchange_type.h"

#include <pybind11/stl.h>

#include <optional>

#include "bindings/waiting.h"

namespace py = pybind11;

namespace pipedream {

namespace {

std::vector<ExchangeChunk> chunks_of(const std::vector<ExchangeChunkRow>& rows) {
  std::vector<ExchangeChunk> chunks;
  for (const auto& [begin_bytes, num_bytes, is_tied, pieces] : rows) {
    ExchangeChunk& chunk = chunks.emplace_back(ExchangeChunk{begin_bytes, num_bytes, is_tied, {}});
    for (const auto& [parameter, first_element, num_elements, piece_begin_bytes, dtype] : pieces) {
      chunk.pieces.push_back(
          {parameter, first_element, num_elements, piece_begin_bytes, dtype_from_name(dtype)});
    }
  }
  return chunks;
}

std::vector<std::byte*> memory_of(const std::vector<std::uintptr_t>& addresses) {
  std::vector<std::byte*> memory;
  for (const std::uintptr_t address : addresses) {
    memory.push_back(reinterpret_cast<std::byte*>(address));  // NOLINT(performance-no-int-to-ptr)
  }
  return memory;
}

ExchangePeer peer_of(const ExchangePeerRow& row) {
  const auto& [chunks, names, is_posted] = row;
  return {chunks_of(chunks), names.at(0), names.at(1), names.at(2),
          names.at(3),       names.at(4), names.at(5), is_posted};
}

}  // namespace

PyShardExchange::PyShardExchange(Worker& worker, std::shared_ptr<TensorExchange> tensors,
                                 const Rounds& rounds, std::int64_t replica,
                                 const std::vector<ExchangeChunkRow>& chunks,
                                 const std::map<std::int64_t, ExchangePeerRow>& peers,
                                 const std::vector<std::uintptr_t>& own_slots,
                                 const std::vector<std::uintptr_t>& tied_slots,
                                 const std::map<std::int64_t, std::int64_t>& slot_of, bool keeps_gradients,
                                 bool holds_versions, bool posts_early)
    : worker_(worker), tensors_(std::move(tensors)), exchange_(worker.make_exchange([&] {
        ExchangeSpec spec;
        spec.rounds = rounds;
        spec.replica = ReplicaIndex(replica);
        spec.chunks = chunks_of(chunks);
        for (const auto& [other, row] : peers) spec.peers.emplace(other, peer_of(row));
        spec.own_slots = memory_of(own_slots);
        spec.tied_slots = memory_of(tied_slots);
        for (const auto& [version, slot] : slot_of) {
          spec.slot_of.emplace(WeightVersion(version), SlotIndex(slot));
        }
        spec.keeps_gradients = keeps_gradients;
        spec.on_host = worker.device().type() == DeviceType::kHost;
        spec.holds_versions = holds_versions;
        spec.posts_early = posts_early;
        return spec;
      }())) {}

template <class Attempt>
void PyShardExchange::wait(Attempt attempt) {
  static_cast<void>(with_signals(kForeverSeconds, attempt, [](bool is_done) { return is_done; }));
}

py::object PyShardExchange::lend(const TensorView& tensor, const std::shared_ptr<void>& owner) const {
  return tensors_->lend(tensor, worker_.device().type(), worker_.device().index(), owner);
}

OwnGradients PyShardExchange::own_gradients(const py::list& own, std::int64_t num_summed) const {
  py::list there;
  for (const py::handle gradient : own) {
    if (!gradient.is_none()) there.append(gradient);
  }
  Borrowed borrowed = tensors_->borrow(there, worker_.device().type(), worker_.device().index(),
                                       [] { return "the gradients of this replica"; });
  OwnGradients gradients{std::vector<TensorView>(own.size()), num_summed, std::move(borrowed.owner)};
  auto next = borrowed.tensors.begin();
  for (std::size_t parameter = 0; parameter < own.size(); ++parameter) {
    if (!own[parameter].is_none()) gradients.by_parameter[parameter] = *next++;
  }
  return gradients;
}

py::tuple PyShardExchange::begin_update(std::int64_t round, const py::object& own, std::int64_t num_summed) {
  std::optional<OwnGradients> gradients;
  if (!own.is_none()) gradients = own_gradients(own.cast<py::list>(), num_summed);
  ShardExchange::RoundGradients begun = exchange_.begin_update(round, std::move(gradients));
  py::dict factors;
  for (const auto& [other, item] : begun.factors) {
    py::list of_other;
    for (const TensorView& tensor : item.tensors) of_other.append(lend(tensor, item.owner));
    factors[py::int_(other.value())] = of_other;
  }
  return py::make_tuple(begun.num_minibatches, factors);
}

void PyShardExchange::wait_for_readers(std::int64_t slot) {
  wait([&](Deadline deadline) { return exchange_.wait_for_readers(SlotIndex(slot), deadline); });
}

void PyShardExchange::begin_version(std::int64_t slot) {
  wait([&](Deadline deadline) { return exchange_.begin_version(SlotIndex(slot), deadline); });
}

py::list PyShardExchange::mean_of(std::int64_t chunk, int num_threads) {
  const auto made = with_signals(
      kForeverSeconds, [&](Deadline deadline) { return exchange_.mean_of(chunk, num_threads, deadline); },
      [](const std::optional<ChunkGradients>& gradients) { return gradients.has_value(); });
  const ChunkGradients& gradients = *made.value();
  py::list pieces;
  for (const PieceGradients& piece : gradients.pieces) {
    if (piece.is_mean) {
      pieces.append(lend(piece.place, gradients.owner));
      continue;
    }
    py::list parts;
    for (const TensorView& part : piece.parts) parts.append(lend(part, gradients.owner));
    const bool has_place = piece.place.data != nullptr;
    pieces.append(py::make_tuple(parts, has_place ? lend(piece.place, gradients.owner) : py::none()));
  }
  return pieces;
}

void PyShardExchange::publish(std::int64_t chunk) {
  wait([&](Deadline deadline) { return exchange_.publish(chunk, deadline); });
}

void PyShardExchange::end_version() {
  wait([&](Deadline deadline) { return exchange_.end_version(deadline); });
}

void PyShardExchange::wait_for_pushes(std::int64_t num_rounds_left) {
  wait([&](Deadline deadline) { return exchange_.wait_for_pushes(num_rounds_left, deadline); });
  exchange_.collect_pushed();  // with the GIL, because this drops Python's tensors
}

void PyShardExchange::pull_from(std::int64_t other) {
  wait([&](Deadline deadline) { return exchange_.pull_from(ReplicaIndex(other), deadline); });
}

py::dict PyShardExchange::contained() const {
  py::dict rows;
  for (const auto& [version, range] : exchange_.contained()) rows[py::int_(version.value())] = range;
  return rows;
}

void bind_shard_exchange(py::module_& module) {
  py::class_<PyShardExchange>(module, "ShardExchange",
                              "One owner's end of the exchange of a stage's shards. Compute thread.")
      .def("begin_update", &PyShardExchange::begin_update, py::arg("round"), py::arg("own"),
           py::arg("num_summed"),
           "own: this replica's flat gradients of the round, by parameter: sums over num_summed "
           "microbatches; None if it has none. Returns (minibatches of the round, factors by replica).")
      .def("wait_for_readers", &PyShardExchange::wait_for_readers, py::arg("slot"),
           "Waits until the slot's version has been sent to all other replicas.")
      .def("begin_version", &PyShardExchange::begin_version, py::arg("slot"),
           "As wait_for_readers(); then the next version is written into the slot.")
      .def("mean_of", &PyShardExchange::mean_of, py::arg("chunk"), py::arg("num_threads") = 1,
           "Waits until all have pushed the chunk. For each of its pieces the mean gradient, or (the parts "
           "of the "
           "mean, in the order of the replicas, and memory in which it may lie, or None).")
      .def("publish", &PyShardExchange::publish, py::arg("chunk"),
           "The chunk of the new version is written: sends it to the others.")
      .def("end_version", &PyShardExchange::end_version)
      .def("end_push", &PyShardExchange::end_push, py::arg("round"),
           "All pushes of the round were given to the channels.")
      .def("wait_for_pushes", &PyShardExchange::wait_for_pushes, py::arg("num_rounds_left"),
           "Waits until pushes of at most so many rounds are still to be sent.")
      .def("pull_from", &PyShardExchange::pull_from, py::arg("other"),
           "Waits for the next version of this replica's shard.")
      .def("note_version", &PyShardExchange::note_version, py::arg("slot"),
           "The slot has the next version, of an update that is of no round.")
      .def(
          "whole_version",
          [](const PyShardExchange& self) { return self.exchange().whole_version().value(); },
          "The newest version of which all shards are here.")
      .def(
          "whole_slot",
          [](const PyShardExchange& self) -> std::optional<std::int64_t> {
            const auto slot = self.exchange().whole_slot();
            return slot ? std::optional(slot->value()) : std::nullopt;
          },
          "The slot of whole_version; None if it has been overwritten.")
      .def("contained", &PyShardExchange::contained,
           "By version, the fewest and the most gradients in the chunks of the others.");
}

}  // namespace pipedream
