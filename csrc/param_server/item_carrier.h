// An ItemCarrier carries the items of an exchange between owners of shards, by the names of channels: a
// worker does, or queues in a test. Owned by who owns the exchange; every call is on its thread.
#pragma once

#include <cstddef>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/clock.h"
#include "base/failure.h"
#include "channel/tensor.h"
#include "wire/item_fields.h"

namespace pipedream {

// The tensors are valid while the owner lives.
struct CarriedItem {
  ItemFields fields{};
  std::vector<TensorView> tensors;
  std::shared_ptr<void> owner;
};

class ItemCarrier {
 public:
  ItemCarrier() = default;
  ItemCarrier(const ItemCarrier&) = delete;
  ItemCarrier& operator=(const ItemCarrier&) = delete;
  virtual ~ItemCarrier() = default;

  // Each gives false, or nothing, at the deadline.
  // The tensor's memory stays as it is until wait_until_sent() says that the item has left.
  [[nodiscard]] virtual Result<bool> send(const std::string& channel, const TensorView& tensor,
                                          Deadline deadline) = 0;
  // An item whose tensors have no elements.
  [[nodiscard]] virtual Result<bool> tell(const std::string& channel, const ItemFields& fields,
                                          Deadline deadline) = 0;
  [[nodiscard]] virtual Result<std::optional<CarriedItem>> receive(const std::string& channel,
                                                                   Deadline deadline) = 0;
  // Until at most so many of the channel's items have not left.
  [[nodiscard]] virtual Result<bool> wait_until_sent(const std::string& channel, std::size_t num_left_max,
                                                     Deadline deadline) = 0;

  // The channel's next items, which have no slots, are to land there.
  virtual void post(const std::string& channel, std::span<const std::span<std::byte>> places) = 0;
  // Both in the order of what the device computes. read: when it returns the bytes are in host memory.
  virtual void copy(std::byte* to, const std::byte* from, std::size_t num_bytes) = 0;
  virtual void read(std::span<std::byte> to, const std::byte* from) = 0;
  // Lets go of what kept items alive that have left.
  virtual void collect_released(const std::string& channel) = 0;
  // With where the worker is in its program.
  [[nodiscard]] virtual Failure located(const Failure& failure) const = 0;
};

}  // namespace pipedream
