#include "bindings/shard_exchange_type.h"

#include <pybind11/stl.h>

#include <optional>

#include "bindings/id_caster.h"
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

ExchangeSpec spec_of(const py::kwargs& given, DeviceType device) {
  ExchangeSpec spec;
  spec.rounds = given["rounds"].cast<Rounds>();
  spec.replica = given["replica"].cast<ReplicaIndex>();
  spec.chunks = shard_of(given["shard"].cast<ExchangeShardRow>()).chunks;
  for (const auto& [other, row] : given["peers"].cast<std::map<ReplicaIndex, ExchangePeerRow>>()) {
    spec.peers.emplace(other, peer_of(row));
  }
  spec.own_slots = memory_of(given["own_slots"].cast<std::vector<std::uintptr_t>>());
  spec.tied_slots = memory_of(given["tied_slots"].cast<std::vector<std::uintptr_t>>());
  spec.push_slots = memory_of(given["push_slots"].cast<std::vector<std::uintptr_t>>());
  spec.push_codec = codec_from_name(given["push_codec"].cast<std::string>());
  spec.slot_of = given["slot_of"].cast<std::map<WeightVersion, SlotIndex>>();
  spec.keeps_gradients = given["keeps_gradients"].cast<bool>();
  spec.on_host = device == DeviceType::kHost;
  spec.holds_versions = given["holds_versions"].cast<bool>();
  spec.posts_early = given["posts_early"].cast<bool>();
  return spec;
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

PyShardExchange::PyShardExchange(Worker& worker, const py::kwargs& spec)
    : worker_(worker),
      tensors_(spec["tensors"].cast<std::shared_ptr<TensorExchange>>()),
      exchange_(worker.make_exchange(spec_of(spec, worker.device().type()))) {}

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
    factors[py::cast(other)] = of_other;
  }
  return py::make_tuple(begun.num_minibatches, factors);
}

void PyShardExchange::wait_for_readers(SlotIndex slot) {
  wait([&](Deadline deadline) { return exchange_.wait_for_readers(slot, deadline); });
}

void PyShardExchange::begin_version(SlotIndex slot) {
  wait([&](Deadline deadline) { return exchange_.begin_version(slot, deadline); });
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

void PyShardExchange::pull_from(ReplicaIndex other) {
  wait([&](Deadline deadline) { return exchange_.pull_from(other, deadline); });
}

void bind_shard_exchange(py::module_& module) {
  module.def("push_slot_bytes", &push_slot_bytes, py::arg("shards"), py::arg("codec"));
  py::class_<PyShardExchange>(module, "ShardExchange")
      .def("push_ready", &PyShardExchange::push_ready, py::arg("parameter"), py::arg("gradient"),
           py::arg("num_summed"))
      .def("push_factors", &PyShardExchange::push_factors, py::arg("factors"), py::arg("num_summed"))
      .def("push", &PyShardExchange::push, py::arg("round"), py::arg("gradients"), py::arg("num_summed"))
      .def("begin_update", &PyShardExchange::begin_update, py::arg("round"))
      .def("wait_for_readers", &PyShardExchange::wait_for_readers, py::arg("slot"))
      .def("begin_version", &PyShardExchange::begin_version, py::arg("slot"))
      .def("mean_of", &PyShardExchange::mean_of, py::arg("chunk"), py::arg("num_threads") = 1)
      .def("publish", &PyShardExchange::publish, py::arg("chunk"))
      .def("end_version", &PyShardExchange::end_version)
      .def("wait_for_pushes", &PyShardExchange::wait_for_pushes, py::arg("num_rounds_left"))
      .def("pull_from", &PyShardExchange::pull_from, py::arg("other"))
      .def(
          "note_version", [](PyShardExchange& self, SlotIndex slot) { self.exchange().note_version(slot); },
          py::arg("slot"))
      .def("whole_version", [](const PyShardExchange& self) { return self.exchange().whole_version(); })
      .def("whole_slot", [](const PyShardExchange& self) { return self.exchange().whole_slot(); })
      .def("contained", [](const PyShardExchange& self) { return self.exchange().contained(); });
}

}  // namespace pipedream
