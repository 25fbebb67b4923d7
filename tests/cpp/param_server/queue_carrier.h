// Replaces a worker's channels by queues. A queue has the items that one owner of a shard has sent and
// another owner has not taken. An item counts as sent when it is taken. Only one thread may use it.
#pragma once

#include <cstring>
#include <deque>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "param_server/item_carrier.h"

namespace pipedream {

using Bytes = std::vector<std::byte>;

struct QueuedItem {
  ItemFields fields;
  std::vector<Bytes> tensors;
  std::vector<const std::byte*> places{};  // the sender's memory of each tensor
};

constexpr std::size_t kReceivedBytes = 64;  // least size of a received tensor's memory

// The queues that all owners share.
struct Queues {
  std::map<std::string, std::deque<QueuedItem>> items;
  std::map<std::string, std::deque<std::span<std::byte>>> posted;
  std::set<std::string> has_no_room;
};

class QueueCarrier final : public ItemCarrier {
 public:
  explicit QueueCarrier(Queues& queues) : queues_(queues) {}

  Result<bool> send(const std::string& channel, const std::vector<TensorView>& tensors,
                    const ItemFields& fields, std::shared_ptr<void> /*owner*/,
                    Deadline /*deadline*/) override {
    if (queues_.has_no_room.contains(channel)) return false;
    QueuedItem& item = queues_.items[channel].emplace_back(QueuedItem{fields, {}});
    for (const TensorView& tensor : tensors) {
      item.tensors.emplace_back(tensor.data, tensor.data + tensor.size_bytes());
      item.places.push_back(tensor.data);
    }
    return true;
  }
  Result<bool> tell(const std::string& channel, const ItemFields& fields, Deadline /*deadline*/) override {
    if (queues_.has_no_room.contains(channel)) return false;
    queues_.items[channel].push_back({fields, {{}, {}}});
    return true;
  }
  Result<std::optional<CarriedItem>> receive(const std::string& channel, Deadline /*deadline*/) override {
    std::deque<QueuedItem>& items = queues_.items[channel];
    if (items.empty()) return std::optional<CarriedItem>();
    auto item = std::make_shared<QueuedItem>(std::move(items.front()));
    items.pop_front();
    std::deque<std::span<std::byte>>& posted = queues_.posted[channel];
    if (!posted.empty()) {
      std::memcpy(posted.front().data(), item->tensors.front().data(), posted.front().size());
      posted.pop_front();
    }
    CarriedItem carried{item->fields, {}, nullptr};
    for (Bytes& tensor : item->tensors) {
      TensorView view;
      view.dtype = DType::kUInt8;
      view.num_dims = 1;
      view.shape[0] = static_cast<std::int64_t>(tensor.size());
      tensor.reserve(kReceivedBytes);
      view.data = tensor.data();
      carried.tensors.push_back(view);
    }
    carried.owner = std::move(item);
    return std::optional(std::move(carried));
  }
  Result<bool> wait_until_sent(const std::string& channel, std::size_t num_left_max,
                               Deadline /*deadline*/) override {
    return queues_.items[channel].size() <= num_left_max;
  }
  void post(const std::string& channel, std::span<const std::span<std::byte>> places) override {
    for (const std::span<std::byte> place : places) queues_.posted[channel].push_back(place);
  }
  void copy(std::byte* to, const std::byte* from, std::size_t num_bytes) override {
    std::memcpy(to, from, num_bytes);
  }
  void zero(std::byte* to, std::size_t num_bytes) override { std::memset(to, 0, num_bytes); }
  void read(std::span<std::byte> to, const std::byte* from) override {
    std::memcpy(to.data(), from, to.size());
  }
  void collect_released(const std::string& /*channel*/) override {}
  [[nodiscard]] Failure located(const Failure& failure) const override { return failure; }

 private:
  Queues& queues_;
};

}  // namespace pipedream
