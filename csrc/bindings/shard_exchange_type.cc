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

ExchangeShard shard_of(const ExchangeShardRow& row) {
  const auto& [chunks, push_dtype] = row;
  return {chunks_of(chunks), dtype_from_name(push_dtype)};
}

ExchangePeer peer_of(const ExchangePeerRow& row) {
  const auto& [shard, names, is_posted] = row;
  return {shard_of(shard), names.at(0), names.at(1), names.at(2),
          names.at(3),     names.at(4), names.at(5), is_posted};
}

std::size_t push_slot_bytes(const std::vector<ExchangeShardRow>& shards, const std::string& codec) {
  PushLayout layout(codec_from_name(codec));
  for (const ExchangeShardRow& row : shards) {
    const ExchangeShard shard = shard_of(row);
    for (const ExchangeChunk& chunk : shard.chunks) layout.add(shard, chunk);
  }
  return layout.slot_bytes();
}

}  // namespace

PyShardExchange::PyShardExchange(Worker& worker, std::shared_ptr<TensorExchange> tensors,
                                 const Rounds& rounds, std::int64_t replica, const ExchangeShardRow& shard,
                                 const std::map<std::int64_t, ExchangePeerRow>& peers,
                                 const std::vector<std::uintptr_t>& own_slots,
                                 const std::vector<std::uintptr_t>& tied_slots,
                                 const std::vector<std::uintptr_t>& push_slots, const std::string& push_codec,
                                 const std::map<std::int64_t, std::int64_t>& slot_of, bool keeps_gradients,
                                 bool holds_versions, bool posts_early)
    : worker_(worker), tensors_(std::move(tensors)), exchange_(worker.make_exchange([&] {
        ExchangeSpec spec;
        spec.rounds = rounds;
        spec.replica = ReplicaIndex(replica);
        spec.chunks = shard_of(shard).chunks;
        for (const auto& [other, row] : peers) spec.peers.emplace(other, peer_of(row));
        spec.own_slots = memory_of(own_slots);
        spec.tied_slots = memory_of(tied_slots);
        spec.push_slots = memory_of(push_slots);
        spec.push_codec = codec_from_name(push_codec);
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

Borrowed PyShardExchange::borrow(const py::list& tensors, const std::function<std::string()>& where) const {
  return tensors_->borrow(tensors, worker_.device().type(), worker_.device().index(), where);
}

void PyShardExchange::give(std::size_t parameter, const py::object& gradient) {
  Gradient given;
  if (!gradient.is_none()) {
    py::list one;
    one.append(gradient);
    Borrowed borrowed = borrow(one, [&] { return "the gradient of parameter " + std::to_string(parameter); });
    given = {borrowed.tensors.front(), std::move(borrowed.owner)};
  }
  exchange_.give(parameter, std::move(given));
}

void PyShardExchange::push_ready(std::size_t parameter, const py::object& gradient, std::int64_t num_summed) {
  give(parameter, gradient);
  wait([&](Deadline deadline) { return exchange_.push_given(num_summed, deadline); });
}

void PyShardExchange::push_factors(const py::list& factors, std::int64_t num_summed) {
  const Borrowed borrowed = borrow(factors, [] { return "the factors of this replica"; });
  wait([&](Deadline deadline) {
    return exchange_.push_factors(borrowed.tensors, borrowed.owner, num_summed, deadline);
  });
}

void PyShardExchange::push(std::int64_t round, const py::list& gradients, std::int64_t num_summed) {
  for (std::size_t parameter = 0; parameter < gradients.size(); ++parameter) {
    if (!exchange_.is_given(parameter)) give(parameter, gradients[parameter]);
  }
  wait([&](Deadline deadline) { return exchange_.push_given(num_summed, deadline); });
  exchange_.end_push(round, num_summed);
}

py::tuple PyShardExchange::begin_update(std::int64_t round) {
  ShardExchange::RoundGradients begun = exchange_.begin_update(round);
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
  module.def("push_slot_bytes", &push_slot_bytes, py::arg("shards"), py::arg("codec"),
             "The memory that a round's pushes to the owners of these shards take beside the gradients.");
  py::class_<PyShardExchange>(module, "ShardExchange",
                              "One owner's end of the exchange of a stage's shards. Compute thread.")
      .def("push_ready", &PyShardExchange::push_ready, py::arg("parameter"), py::arg("gradient"),
           py::arg("num_summed"),
           "Gives a gradient of the round that is pushed next, flat, the sum over so many microbatches, and "
           "sends the chunks of which all gradients are given.")
      .def("push_factors", &PyShardExchange::push_factors, py::arg("factors"), py::arg("num_summed"),
           "Sends the tensors to all others, as an item beside the round's chunks.")
      .def("push", &PyShardExchange::push, py::arg("round"), py::arg("gradients"), py::arg("num_summed"),
           "Gives all gradients of the round by parameter, None where there is none, sends the chunks that "
           "have not left, and keeps the gradients for the round's update.")
      .def("begin_update", &PyShardExchange::begin_update, py::arg("round"),
           "Returns the number of the round's minibatches, and the factors by replica.")
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
