// Carries the items of a stage's exchange over the worker's named channels. Used on the compute thread.
#include <cstring>
#include <utility>

#include "stage/worker.h"

namespace pipedream {

class ExchangeCarrier final : public ItemCarrier {
 public:
  explicit ExchangeCarrier(Worker& worker) : worker_(worker) {}

  Result<bool> send(const std::string& channel, const std::vector<TensorView>& tensors,
                    const ItemFields& fields, std::shared_ptr<void> owner, Deadline deadline) override {
    return worker_.send_item(channel, fields, tensors, std::move(owner), deadline);
  }
  Result<bool> tell(const std::string& channel, const ItemFields& fields, Deadline deadline) override {
    std::vector<TensorView> tensors;
    for (const TensorSpec& spec : worker_.sender(channel).spec.item.tensors()) {
      TensorView& tensor = tensors.emplace_back();
      tensor.dtype = spec.dtype;
      tensor.num_dims = spec.num_dims;
    }
    return worker_.send_item(channel, fields, tensors, nullptr, deadline);
  }
  Result<std::optional<CarriedItem>> receive(const std::string& channel, Deadline deadline) override {
    auto received = worker_.receive_item(channel, deadline);
    if (!received) return received.failure();
    if (!received.value()) return std::optional<CarriedItem>();
    auto held = std::make_shared<Held>(Held{worker_.pool_, std::move(*received.value())});
    const ReceivedItem& item = held->item;
    if (item.is_end) {
      return located({FailureKind::kCorruptFrame, channel + ": ended with items still due"});
    }
    CarriedItem carried{item.fields, {item.tensors.begin(), item.tensors.end()}, nullptr};
    carried.owner = std::move(held);
    return std::optional(std::move(carried));
  }
  Result<bool> wait_until_sent(const std::string& channel, std::size_t num_left_max,
                               Deadline deadline) override {
    return worker_.wait_until_sent(channel, num_left_max, deadline);
  }
  void post(const std::string& channel, std::span<const std::span<std::byte>> places) override {
    worker_.post_items(channel, places);
  }
  void copy(std::byte* to, const std::byte* from, std::size_t num_bytes) override {
    if (worker_.compute_stream_) {
      worker_.compute_stream_->copy(to, from, num_bytes);
    } else {
      std::memcpy(to, from, num_bytes);
    }
  }
  void zero(std::byte* to, std::size_t num_bytes) override {
    if (!worker_.compute_stream_) {
      std::memset(to, 0, num_bytes);
      return;
    }
    const std::vector<std::byte> zeros(num_bytes);  // rare: a minibatch that does not use a parameter
    worker_.compute_stream_->copy(to, zeros.data(), num_bytes);
    worker_.compute_stream_->synchronize();
  }
  void read(std::span<std::byte> to, const std::byte* from) override {
    copy(to.data(), from, to.size());
    if (worker_.compute_stream_) worker_.compute_stream_->synchronize();
  }
  void collect_released(const std::string& channel) override { worker_.collect_released(channel); }
  [[nodiscard]] Failure located(const Failure& failure) const override { return worker_.located(failure); }

 private:
  // Keeps the pool alive as long as the item's lease.
  struct Held {
    std::shared_ptr<Pool> pool;
    ReceivedItem item;
  };

  Worker& worker_;
};

ShardExchange& Worker::make_exchange(ExchangeSpec spec) {
  PD_CHECK(!exchange_ && !engine_, "a worker has one exchange, made before it starts");
  carrier_ = std::make_unique<ExchangeCarrier>(*this);
  exchange_ = std::make_unique<ShardExchange>(std::move(spec), *carrier_);
  return *exchange_;
}

}  // namespace pipedream
