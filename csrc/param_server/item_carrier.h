// An ItemCarrier sends and receives the items of an exchange between owners of shards, over channels that it
// knows by name. In a run the worker is the carrier; tests use queues. The carrier belongs to the owner of
// the exchange, who makes every call on one thread.
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

// An item and its tensors, which are valid while `owner` lives. If a received tensor is smaller than planned,
// its memory still has the planned size.
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

  // The functions with a deadline return false, or an empty optional, when it has passed. After send() the
  // tensors' memory must not change until wait_until_sent() says that the item is sent. `owner` keeps this
  // memory alive; it may be null.
  [[nodiscard]] virtual Result<bool> send(const std::string& channel, const std::vector<TensorView>& tensors,
                                          const ItemFields& fields, std::shared_ptr<void> owner,
                                          Deadline deadline) = 0;
  // Sends an item whose tensors have no elements.
  [[nodiscard]] virtual Result<bool> tell(const std::string& channel, const ItemFields& fields,
                                          Deadline deadline) = 0;
  [[nodiscard]] virtual Result<std::optional<CarriedItem>> receive(const std::string& channel,
                                                                   Deadline deadline) = 0;
  // Waits until at most num_left_max of the channel's items are unsent.
  [[nodiscard]] virtual Result<bool> wait_until_sent(const std::string& channel, std::size_t num_left_max,
                                                     Deadline deadline) = 0;

  // Lets the next items of a channel whose slots have no memory land in these places.
  virtual void post(const std::string& channel, std::span<const std::span<std::byte>> places) = 0;
  // copy(), zero() and read() run in the order of the device's work. copy() may read host memory, too. When
  // read() returns, the bytes are in host memory.
  virtual void copy(std::byte* to, const std::byte* from, std::size_t num_bytes) = 0;
  virtual void zero(std::byte* to, std::size_t num_bytes) = 0;
  virtual void read(std::span<std::byte> to, const std::byte* from) = 0;
  // Destroys the owners of items that are sent.
  virtual void collect_released(const std::string& channel) = 0;
  // Returns the failure with the worker's position in its program added to the message.
  [[nodiscard]] virtual Failure located(const Failure& failure) const = 0;
};

}  // namespace pipedream
