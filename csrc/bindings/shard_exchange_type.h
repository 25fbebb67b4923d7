// Defines pipedream._core.ShardExchange, Python's access to a worker's exchange of shards. Between the calls
// Python does the optimizer's steps. Called with the GIL held; a wait releases it.
#pragma once

#include <pybind11/pybind11.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings/tensor_exchange.h"
#include "param_server/shard_exchange.h"
#include "stage/worker.h"

namespace pipedream {

// A chunk is (begin_bytes, num_bytes, is_tied, pieces), and a piece is (parameter, first element, number of
// elements, begin_bytes, dtype name).
using ExchangePieceRow = std::tuple<std::size_t, std::int64_t, std::int64_t, std::size_t, std::string>;
using ExchangeChunkRow = std::tuple<std::size_t, std::size_t, bool, std::vector<ExchangePieceRow>>;
// A shard is (chunks, name of the dtype in which its gradients are pushed).
using ExchangeShardRow = std::tuple<std::vector<ExchangeChunkRow>, std::string>;
// A peer is (shard, names of channels, is_posted). The names are push_to, push_from, factors_to,
// factors_from, pull_to and pull_from, as in ExchangePeer.
using ExchangePeerRow = std::tuple<ExchangeShardRow, std::vector<std::string>, bool>;

class PyShardExchange {
 public:
  // spec: keywords with the names of ExchangeSpec's members, with three differences. `shard` has `chunks`,
  // `tensors` is a TensorExchange, and `on_host` is not given. peers: by owner; own_slots, tied_slots,
  // push_slots: addresses.
  PyShardExchange(Worker& worker, const pybind11::kwargs& spec);

  void push_ready(std::size_t parameter, const pybind11::object& gradient, std::int64_t num_summed);
  void push_factors(const pybind11::list& factors, std::int64_t num_summed);
  void push(std::int64_t round, const pybind11::list& gradients, std::int64_t num_summed);
  pybind11::tuple begin_update(std::int64_t round);
  void wait_for_readers(SlotIndex slot);
  void begin_version(SlotIndex slot);
  pybind11::list mean_of(std::int64_t chunk, int num_threads);
  void publish(std::int64_t chunk);
  void end_version();
  void wait_for_pushes(std::int64_t num_rounds_left);
  void pull_from(ReplicaIndex other);
  [[nodiscard]] ShardExchange& exchange() const { return exchange_; }

 private:
  void give(std::size_t parameter, const pybind11::object& gradient);
  [[nodiscard]] Borrowed borrow(const pybind11::list& tensors,
                                const std::function<std::string()>& where) const;
  [[nodiscard]] pybind11::object lend(const TensorView& tensor, const std::shared_ptr<void>& owner) const;
  template <class Attempt>
  void wait(Attempt attempt);

  Worker& worker_;
  const std::shared_ptr<TensorExchange> tensors_;
  ShardExchange& exchange_;
};

void bind_shard_exchange(pybind11::module_& module);

}  // namespace pipedream
