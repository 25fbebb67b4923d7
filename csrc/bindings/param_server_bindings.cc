// Binds two things for pipedream._core: dealing parameters to shards, and the mean of the replicas'
// gradients. Python passes pointers as integers. The caller owns the tensors and has checked dtype,
// contiguity and size.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings/bindings.h"
#include "param_server/aggregation.h"
#include "param_server/dealing.h"

namespace py = pybind11;

namespace pipedream {

namespace {

using Parameter = std::tuple<std::string, std::string, std::int64_t>;  // name, dtype name, elements
using Piece = std::tuple<std::size_t, std::int64_t, std::int64_t>;     // parameter, first element, elements
using Chunk = std::tuple<std::int64_t, std::size_t, std::size_t, std::vector<Piece>>;  // shard, begin, end

std::vector<Chunk> deal_parameters(const std::vector<Parameter>& parameters, std::int64_t num_replicas,
                                   bool whole_tensors, std::int64_t num_spares) {
  std::vector<ParameterSpec> specs;
  for (const auto& [name, dtype, num_elements] : parameters)
    specs.push_back({name, dtype_from_name(dtype), num_elements});
  std::vector<Chunk> chunks;
  const std::vector<std::int64_t> shares = shard_shares(num_replicas, num_spares);
  for (const ShardChunk& chunk : deal(WeightLayout(std::move(specs)), shares, whole_tensors)) {
    std::vector<Piece> pieces;
    for (const ShardPiece& piece : chunk.pieces)
      pieces.emplace_back(piece.parameter_index, piece.first_element, piece.num_elements);
    chunks.emplace_back(chunk.shard.value(), chunk.begin_bytes, chunk.end_bytes, std::move(pieces));
  }
  return chunks;
}

void aggregate_parts(const std::vector<std::uintptr_t>& parts, std::int64_t num_minibatches,
                     std::uintptr_t mean, std::int64_t num_elements, const std::string& dtype,
                     int num_threads) {
  std::vector<const void*> addresses;
  for (const std::uintptr_t part : parts)
    addresses.push_back(reinterpret_cast<const void*>(part));  // NOLINT(performance-no-int-to-ptr)
  void* const target = reinterpret_cast<void*>(mean);          // NOLINT(performance-no-int-to-ptr)
  const py::gil_scoped_release released;
  aggregate(dtype_from_name(dtype), addresses, num_minibatches, target, num_elements, num_threads);
}

}  // namespace

void bind_param_server(py::module_& module) {
  module.def("deal_shards", &deal_parameters, py::arg("parameters"), py::arg("num_replicas"), py::kw_only(),
             py::arg("whole_tensors"), py::arg("num_spares") = 0);
  module.attr("SHARD_CHUNK_BYTES_MIN") = kShardChunkBytesMin;
  module.attr("NUM_SPARE_SLOTS") = kNumSpareSlots;
  module.def("shard_chunk_bytes_max", &shard_chunk_bytes_max, py::arg("shard_bytes"));
  module.def("shard_shares", &shard_shares, py::arg("num_replicas"), py::arg("num_spares"));
  module.def("aggregate", &aggregate_parts, py::arg("parts"), py::arg("num_minibatches"), py::arg("mean"),
             py::arg("num_elements"), py::kw_only(), py::arg("dtype"), py::arg("num_threads") = 1);
}

}  // namespace pipedream
