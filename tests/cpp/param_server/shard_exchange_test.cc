// Tests the exchange of replicas in one thread, over queues instead of channels. A round is the minibatches
// of one update, one at each replica. However late a replica is, each gradient is in exactly one update and
// every replica gets every version. No item is sent, and none lands, too early.
#include "param_server/shard_exchange.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <deque>
#include <functional>
#include <random>

#include "param_server/queue_carrier.h"

namespace pipedream {
namespace {

constexpr std::int64_t kNumElements = 3;  // of each chunk; each chunk is one parameter
constexpr std::size_t kChunkBytes = 64;
constexpr std::int64_t kNumSlots = 2;
constexpr Deadline kAtOnce{};

struct Plan {
  std::int64_t num_replicas = 2;
  std::int64_t num_spares = 0;
  std::int64_t num_chunks = 2;  // chunks of each shard
  bool posts = false;
  bool keeps_gradients = false;

  [[nodiscard]] std::int64_t num_owners() const { return num_replicas + num_spares; }
  [[nodiscard]] std::int64_t num_parameters() const { return num_owners() * num_chunks; }
};

std::string channel(const std::string& kind, std::int64_t from, std::int64_t to) {
  return kind + " " + std::to_string(from) + " " + std::to_string(to);
}

// One owner of a shard: a replica, or a spare, which owns a shard but computes no gradients. Its weights
// begin as zeros, and a step subtracts the mean gradient.
class Owner {
 public:
  Owner(Queues& queues, const Plan& plan, std::int64_t index)
      : queues_(queues), plan_(plan), index_(index), carrier_(queues), exchange_(spec(), carrier_) {}

  // Pushes a gradient whose elements all have this value.
  void push(std::int64_t round, double value) { push(round, std::vector<double>(num_parameters(), value)); }
  // Pushes one gradient per parameter. All its elements have the value values[parameter]; 0 means no
  // gradient.
  void push(std::int64_t round, const std::vector<double>& values) {
    for (std::size_t parameter = 0; parameter < values.size(); ++parameter) {
      auto gradient = std::make_shared<std::vector<double>>(kNumElements, values[parameter]);
      exchange_.give(parameter, {view(*gradient), gradient});
    }
    ASSERT_TRUE(done(exchange_.push_given(1, kAtOnce)));
    exchange_.end_push(round, 1);
  }
  bool begin_update(std::int64_t round) {
    static_cast<void>(exchange_.begin_update(round));
    return true;
  }
  bool step(std::int64_t chunk) {
    auto found = exchange_.mean_of(chunk, 1, kAtOnce);
    EXPECT_TRUE(found.ok()) << found.failure().message;
    if (!found.value()) return false;
    const PieceGradients& gradients = found.value()->pieces.at(0);
    double* const written = weights(write_slot(), index_, chunk);
    std::copy_n(weights(slot_, index_, chunk), kNumElements, written);
    if (gradients.parts.empty()) return true;
    // If no other replica has a gradient in the round, there is one part, which needs no mean.
    EXPECT_TRUE(gradients.is_mean || gradients.parts.size() == 1);
    const TensorView& mean_view = gradients.is_mean ? gradients.place : gradients.parts[0];
    const auto* const mean = reinterpret_cast<const double*>(mean_view.data);  // NOLINT(*-reinterpret-cast)
    for (std::int64_t i = 0; i < kNumElements; ++i) written[i] -= mean[i];
    return true;
  }
  bool end_version() {
    if (!done(exchange_.end_version(kAtOnce))) return false;
    slot_ = write_slot();
    return true;
  }
  // Adds the owner's steps of a round. The test calls each step until it returns true.
  void add_round(std::int64_t round, const std::vector<double>& values,
                 std::deque<std::function<bool()>>& steps) {
    const double own = index_ < plan_.num_replicas ? values[static_cast<std::size_t>(index_)] : 0;
    if (own != 0) steps.emplace_back([=, this] { return push(round, own), true; });
    for (std::int64_t other = 0; other < plan_.num_replicas; ++other) {
      if (other == index_ || values[static_cast<std::size_t>(other)] == 0) continue;
      steps.emplace_back([=, this] { return begin_push_from(other, round); });
    }
    steps.emplace_back([=, this] { return begin_update(round); });
    steps.emplace_back([this] { return done(exchange_.begin_version(SlotIndex(write_slot()), kAtOnce)); });
    for (std::int64_t chunk = 0; chunk < plan_.num_chunks; ++chunk) {
      steps.emplace_back([=, this] { return step(chunk); });
      steps.emplace_back([=, this] { return done(exchange_.publish(chunk, kAtOnce)); });
    }
    steps.emplace_back([this] { return end_version(); });
    for (std::int64_t other = 0; index_ < plan_.num_replicas && other < plan_.num_owners(); ++other) {
      if (other != index_) steps.emplace_back([=, this] { return pull_from(other); });
    }
  }

  bool begin_push_from(std::int64_t other, std::int64_t round) {
    return done(exchange_.begin_push_from(ReplicaIndex(other), round, SlotIndex(write_slot()), kAtOnce));
  }
  bool pull_from(std::int64_t other) { return done(exchange_.pull_from(ReplicaIndex(other), kAtOnce)); }
  static bool done(const Result<bool>& result) {
    EXPECT_TRUE(result.ok()) << result.failure().message;
    return result.ok() && result.value();
  }

  [[nodiscard]] ShardExchange& exchange() { return exchange_; }
  [[nodiscard]] std::int64_t write_slot() const { return (slot_ + 1) % kNumSlots; }
  [[nodiscard]] double* weights(std::int64_t slot, std::int64_t shard, std::int64_t chunk) {
    Bytes& memory = slots_[static_cast<std::size_t>(slot)];
    return reinterpret_cast<double*>(memory.data() + parameter_of(shard, chunk) * kChunkBytes);  // NOLINT
  }
  // Returns the values of all elements in the newest version of all shards.
  [[nodiscard]] std::set<double> contents() {
    std::set<double> found;
    for (std::int64_t shard = 0; shard < plan_.num_owners(); ++shard) {
      for (std::int64_t chunk = 0; chunk < plan_.num_chunks; ++chunk) {
        found.insert(weights(slot_, shard, chunk), weights(slot_, shard, chunk) + kNumElements);
      }
    }
    return found;
  }

 private:
  [[nodiscard]] std::size_t num_parameters() const {
    return static_cast<std::size_t>(plan_.num_parameters());
  }
  [[nodiscard]] std::size_t parameter_of(std::int64_t shard, std::int64_t chunk) const {
    return static_cast<std::size_t>(chunk * plan_.num_owners() + shard);
  }
  static TensorView view(std::vector<double>& gradient) {
    TensorView made;
    if (gradient[0] == 0) return made;
    made.dtype = DType::kFloat64;
    made.num_dims = 1;
    made.shape[0] = kNumElements;
    made.data = reinterpret_cast<std::byte*>(gradient.data());  // NOLINT(*-reinterpret-cast)
    return made;
  }
  [[nodiscard]] std::vector<ExchangeChunk> chunks_of(std::int64_t shard) const {
    std::vector<ExchangeChunk> chunks;
    for (std::int64_t chunk = 0; chunk < plan_.num_chunks; ++chunk) {
      const std::size_t parameter = parameter_of(shard, chunk);
      chunks.push_back(
          {parameter * kChunkBytes, kChunkBytes, false, {{parameter, 0, kNumElements, 0, DType::kFloat64}}});
    }
    return chunks;
  }
  [[nodiscard]] ExchangeSpec spec() {
    ExchangeSpec made;
    made.rounds.num_replicas = made.rounds.minibatches_per_round = plan_.num_replicas;
    made.replica = ReplicaIndex(index_);
    made.chunks = chunks_of(index_);
    made.keeps_gradients = plan_.keeps_gradients;
    made.holds_versions = plan_.num_spares > 0;
    slots_.assign(kNumSlots, Bytes(num_parameters() * kChunkBytes));
    for (Bytes& slot : slots_) made.own_slots.push_back(slot.data());
    push_slot_.assign(num_parameters() * (kChunkBytes + 1), std::byte{0});
    made.push_slots = {push_slot_.data()};
    const bool is_replica = index_ < plan_.num_replicas;
    for (std::int64_t other = 0; other < plan_.num_owners(); ++other) {
      const bool other_is_replica = other < plan_.num_replicas;
      if (other == index_ || (!is_replica && !other_is_replica)) continue;
      ExchangePeer peer;
      peer.shard.chunks = chunks_of(other);
      peer.is_posted = plan_.posts;
      if (is_replica) peer.push_to = channel("push", index_, other);
      if (other_is_replica) peer.push_from = channel("push", other, index_);
      if (other_is_replica) peer.pull_to = channel("pull", index_, other);
      if (is_replica) peer.pull_from = channel("pull", other, index_);
      made.peers.emplace(ReplicaIndex(other), std::move(peer));
    }
    return made;
  }

  Queues& queues_;
  const Plan plan_;
  const std::int64_t index_;
  std::vector<Bytes> slots_;
  Bytes push_slot_;
  std::int64_t slot_ = 0;  // the slot of the newest version
  QueueCarrier carrier_;
  ShardExchange exchange_;
};

// Makes the owners. They must not move, because an exchange has addresses of its owner's memory.
std::vector<std::unique_ptr<Owner>> make_owners(Queues& queues, const Plan& plan) {
  std::vector<std::unique_ptr<Owner>> owners;
  for (std::int64_t index = 0; index < plan.num_owners(); ++index) {
    owners.push_back(std::make_unique<Owner>(queues, plan, index));
  }
  return owners;
}

class ShardExchangeOfAnyDelay : public testing::TestWithParam<Plan> {};

TEST_P(ShardExchangeOfAnyDelay, HasEachGradientInOneUpdateAndEveryVersionAtEveryReplica) {
  const Plan& plan = GetParam();
  for (unsigned seed = 0; seed < 20; ++seed) {
    std::mt19937 random(seed);
    Queues queues;
    const auto owners = make_owners(queues, plan);
    const std::int64_t num_minibatches = 3 * plan.num_replicas + 1 + seed % plan.num_replicas;
    std::vector<std::deque<std::function<bool()>>> steps(owners.size());
    double expected = 0;
    for (std::int64_t round = 0; round * plan.num_replicas < num_minibatches; ++round) {
      // Gradients are distinct powers of two, so a sum shows which gradients it has.
      std::vector<double> values(static_cast<std::size_t>(plan.num_replicas));
      double sum = 0;
      std::int64_t count = 0;
      for (std::int64_t replica = 0; replica < plan.num_replicas; ++replica) {
        const std::int64_t minibatch = round * plan.num_replicas + replica;
        if (minibatch >= num_minibatches) break;
        sum += values[static_cast<std::size_t>(replica)] = static_cast<double>(std::int64_t{1} << minibatch);
        ++count;
      }
      expected -= sum / static_cast<double>(count);
      for (std::size_t index = 0; index < owners.size(); ++index)
        owners[index]->add_round(round, values, steps[index]);
    }
    std::size_t num_refused = 0;  // consecutive steps that returned false
    while (num_refused < 1000 && std::ranges::any_of(steps, [](const auto& left) { return !left.empty(); })) {
      auto& of_owner = steps[random() % steps.size()];
      const bool is_done = !of_owner.empty() && of_owner.front()();
      if (is_done) of_owner.pop_front();
      num_refused = is_done ? 0 : num_refused + 1;
    }
    ASSERT_LT(num_refused, 1000U) << "deadlock, seed " << seed;
    for (std::int64_t replica = 0; replica < plan.num_replicas; ++replica) {
      const std::set<double> found = owners[static_cast<std::size_t>(replica)]->contents();
      ASSERT_EQ(found.size(), 1U);
      EXPECT_NEAR(*found.begin(), expected, 1e-9);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Plans, ShardExchangeOfAnyDelay,
                         testing::Values(Plan{}, Plan{.num_replicas = 3}, Plan{.posts = true},
                                         Plan{.num_replicas = 4, .num_chunks = 1, .posts = true},
                                         Plan{.num_replicas = 3, .num_spares = 1},
                                         Plan{.num_replicas = 2, .num_spares = 2, .num_chunks = 3}));

// Two replicas that have pushed their first round.
class PushedRound : public testing::Test {
 protected:
  void make(const Plan& plan) {
    owners_ = make_owners(queues_, plan);
    for (std::size_t index = 0; index < static_cast<std::size_t>(plan.num_replicas); ++index) {
      owners_[index]->push(0, static_cast<double>(index + 1));
    }
  }
  [[nodiscard]] Owner& first() { return *owners_[0]; }
  [[nodiscard]] std::deque<QueuedItem>& queue(const std::string& name) { return queues_.items[name]; }

  Queues queues_;
  std::vector<std::unique_ptr<Owner>> owners_;
};

TEST_F(PushedRound, AChunkLeavesBeforeTheNextOnesGradientsHaveCome) {
  make({});
  queue("push 1 0").pop_back();
  ASSERT_TRUE(first().begin_push_from(1, 0));
  first().begin_update(0);
  ASSERT_TRUE(Owner::done(first().exchange().begin_version(SlotIndex(1), kAtOnce)));
  ASSERT_TRUE(first().step(0));
  ASSERT_TRUE(Owner::done(first().exchange().publish(0, kAtOnce)));
  EXPECT_FALSE(first().step(1));
  EXPECT_EQ(queue("pull 0 1").size(), 1U);
}

TEST_F(PushedRound, WhoHasPushedTakesTheOthersVersionBeforeItsOwnUpdate) {
  make({.posts = true});
  ASSERT_TRUE(first().begin_push_from(1, 0));
  const auto& posted = queues_.posted["pull 1 0"];
  ASSERT_EQ(posted.size(), 2U);
  EXPECT_EQ(static_cast<void*>(posted[0].data()), first().weights(1, 1, 0));
  EXPECT_EQ(static_cast<void*>(posted[1].data()), first().weights(1, 1, 1));
  first().begin_update(0);
  ASSERT_TRUE(Owner::done(first().exchange().begin_version(SlotIndex(1), kAtOnce)));
  EXPECT_EQ(posted.size(), 2U);  // the place of each of the two chunks was posted once
}

TEST_F(PushedRound, WhoHasNotPushedTakesTheOthersVersionWithItsOwnUpdate) {
  make({.num_replicas = 1, .num_spares = 1, .posts = true});
  Plan plan{.posts = true};
  Owner late(queues_, plan, 1);  // replica 1, in its last round
  ASSERT_TRUE(late.begin_push_from(0, 0));
  EXPECT_TRUE(queues_.posted["pull 0 1"].empty());
  late.begin_update(0);
  ASSERT_TRUE(Owner::done(late.exchange().begin_version(SlotIndex(1), kAtOnce)));
  EXPECT_EQ(queues_.posted["pull 0 1"].size(), 2U);
}

TEST_F(PushedRound, ASlotIsNotWrittenBeforeItsVersionHasLeft) {
  make({.num_chunks = 1});
  for (std::int64_t round = 0; round < 2; ++round) {
    if (round == 1) owners_[1]->push(1, 1);
    if (round == 1) first().push(1, 1);
    ASSERT_TRUE(first().begin_push_from(1, round));
    first().begin_update(round);
    ASSERT_TRUE(Owner::done(first().exchange().begin_version(SlotIndex(first().write_slot()), kAtOnce)));
    ASSERT_TRUE(first().step(0));
    ASSERT_TRUE(Owner::done(first().exchange().publish(0, kAtOnce)));
    ASSERT_TRUE(first().end_version());
  }
  ASSERT_EQ(queue("pull 0 1").size(), 2U);  // of versions 1 and 2
  EXPECT_FALSE(Owner::done(first().exchange().wait_for_readers(SlotIndex(1), kAtOnce)));
  EXPECT_FALSE(Owner::done(first().exchange().begin_version(SlotIndex(1), kAtOnce)));
  ASSERT_TRUE(owners_[1]->pull_from(0));
  EXPECT_TRUE(Owner::done(first().exchange().begin_version(SlotIndex(1), kAtOnce)));
}

TEST_F(PushedRound, WhereThereAreSparesAVersionLeavesAfterWhatIsPushedThere) {
  for (const std::int64_t num_spares : {0, 1}) {
    queues_ = {};
    make({.num_replicas = 3, .num_spares = num_spares, .num_chunks = 1});
    ASSERT_TRUE(first().begin_push_from(1, 0));
    ASSERT_TRUE(first().begin_push_from(2, 0));
    first().begin_update(0);
    ASSERT_TRUE(Owner::done(first().exchange().begin_version(SlotIndex(1), kAtOnce)));
    ASSERT_TRUE(first().step(0));
    queue("push 0 2").clear();  // has left
    ASSERT_TRUE(Owner::done(first().exchange().publish(0, kAtOnce)));
    EXPECT_EQ(queue("pull 0 1").size(), num_spares == 0 ? 1U : 0U);
    EXPECT_EQ(queue("pull 0 2").size(), 1U);
    EXPECT_EQ(first().end_version(), num_spares == 0);
    queue("push 0 1").clear();
    EXPECT_TRUE(num_spares == 0 || first().end_version());
    EXPECT_EQ(queue("pull 0 1").size(), 1U);
  }
}

TEST_F(PushedRound, AVersionThatFindsNoRoomLeavesOnceForEach) {
  make({.num_replicas = 3, .num_chunks = 1});
  ASSERT_TRUE(first().begin_push_from(1, 0) && first().begin_push_from(2, 0) && first().begin_update(0));
  ASSERT_TRUE(Owner::done(first().exchange().begin_version(SlotIndex(1), kAtOnce)));
  ASSERT_TRUE(first().step(0));
  queues_.has_no_room = {"pull 0 2"};
  EXPECT_FALSE(Owner::done(first().exchange().publish(0, kAtOnce)));
  queues_.has_no_room.clear();
  EXPECT_TRUE(Owner::done(first().exchange().publish(0, kAtOnce)));
  EXPECT_EQ(queue("pull 0 1").size(), 1U);
  EXPECT_EQ(queue("pull 0 2").size(), 1U);
}

TEST(ShardExchange, AMissingGradientCountsAsZeroAndOneThatNobodyHasIsNone) {
  Queues queues;
  const auto owners = make_owners(queues, {});
  // Replica 0's shard has parameters 0 and 2.
  owners[0]->push(0, {0, 1, 0, 1});
  owners[1]->push(0, {6, 1, 0, 1});
  ASSERT_TRUE(owners[0]->begin_push_from(1, 0));
  owners[0]->begin_update(0);
  auto of_one = owners[0]->exchange().mean_of(0, 1, kAtOnce);
  const PieceGradients& mean = of_one.value()->pieces.at(0);
  ASSERT_TRUE(mean.is_mean);
  EXPECT_EQ(*reinterpret_cast<const double*>(mean.place.data), 3.0);  // NOLINT(*-reinterpret-cast)
  auto of_none = owners[0]->exchange().mean_of(1, 1, kAtOnce);
  EXPECT_TRUE(of_none.value()->pieces.at(0).parts.empty());
}

TEST(ShardExchange, AnOptimizerThatKeepsGradientsGetsThePartsInTheOrderOfTheReplicas) {
  Queues queues;
  const auto owners = make_owners(queues, {.num_replicas = 3, .keeps_gradients = true});
  for (std::size_t index = 0; index < owners.size(); ++index)
    owners[index]->push(0, static_cast<double>(index + 1));
  ASSERT_TRUE(owners[1]->begin_push_from(2, 0));
  ASSERT_TRUE(owners[1]->begin_push_from(0, 0));
  owners[1]->begin_update(0);
  auto found = owners[1]->exchange().mean_of(0, 1, kAtOnce);
  const PieceGradients& gradients = found.value()->pieces.at(0);
  EXPECT_EQ(gradients.place.data, nullptr);
  ASSERT_EQ(gradients.parts.size(), 3U);
  for (std::size_t part = 0; part < 3; ++part) {
    EXPECT_EQ(*reinterpret_cast<const double*>(gradients.parts[part].data),
              static_cast<double>(part + 1));  // NOLINT
  }
}

TEST(ShardExchange, WhoWaitsForAMinibatchThatDoesNotExistHearsHowManyThereAre) {
  Queues queues;
  const auto owners = make_owners(queues, {});
  queues.items["push 1 0"].push_back({{.num_minibatches = 3, .is_end_of_data = true}, {{}, {}}});
  EXPECT_EQ(owners[0]->exchange().take_end(), std::nullopt);
  ASSERT_TRUE(owners[0]->begin_push_from(1, 1));
  EXPECT_EQ(owners[0]->exchange().take_end()->num_minibatches, 3);
  EXPECT_EQ(owners[0]->exchange().take_end(), std::nullopt);
}

TEST(ShardExchange, HowManyMinibatchesThereAreIsToldOnceAfterAllPushes) {
  Queues queues;
  const auto owners = make_owners(queues, {.num_replicas = 3});
  ShardExchange& second = owners[1]->exchange();
  ASSERT_TRUE(Owner::done(second.tell_end(3, 5, kAtOnce)));
  EXPECT_TRUE(queues.items.empty());
  owners[1]->push(0, 1);
  queues.has_no_room = {"push 1 2"};
  EXPECT_FALSE(Owner::done(second.tell_end(3, 5, kAtOnce)));
  queues.has_no_room.clear();
  for (int time = 0; time < 2; ++time) ASSERT_TRUE(Owner::done(second.tell_end(3, 5, kAtOnce)));
  for (const char* const channel_name : {"push 1 0", "push 1 2"}) {
    const std::deque<QueuedItem>& items = queues.items[channel_name];
    ASSERT_EQ(items.size(), 3U);
    EXPECT_EQ(items.back().fields,
              (ItemFields{.num_minibatches = 3, .is_end_of_data = true, .boundary_events = 5}));
  }
}

TEST(ShardExchange, GradientsOfALaterRoundWaitForItsUpdate) {
  Queues queues;
  const auto owners = make_owners(queues, {.num_chunks = 1});
  for (const std::int64_t round : {0, 1}) {
    for (const auto& owner : owners) owner->push(round, static_cast<double>(4 + round));
  }
  for (const std::int64_t round : {0, 1}) {
    ASSERT_TRUE(owners[0]->begin_push_from(1, round));
    owners[0]->begin_update(round);
    ASSERT_TRUE(
        Owner::done(owners[0]->exchange().begin_version(SlotIndex(owners[0]->write_slot()), kAtOnce)));
    ASSERT_TRUE(owners[0]->step(0));
    const std::int64_t written = owners[0]->write_slot();
    EXPECT_EQ(*owners[0]->weights(written, 0, 0), round == 0 ? -4 : -9);
    ASSERT_TRUE(owners[0]->end_version());
  }
}

TEST(ShardExchange, FactorsGoToAllOthersOnce) {
  Queues queues;
  ExchangeSpec spec;
  spec.rounds.num_replicas = spec.rounds.minibatches_per_round = 3;
  for (const std::int64_t other : {1, 2}) {
    spec.peers[ReplicaIndex(other)].factors_to = channel("factors", 0, other);
  }
  QueueCarrier carrier(queues);
  ShardExchange exchange(std::move(spec), carrier);
  Bytes factor(8, std::byte{5});
  const std::vector<TensorView> factors = {flat_view(DType::kUInt8, factor.data(), factor.size())};
  queues.has_no_room = {"factors 0 2"};
  EXPECT_FALSE(Owner::done(exchange.push_factors(factors, nullptr, 2, kAtOnce)));
  queues.has_no_room.clear();
  for (const std::size_t round : {1, 2}) {
    EXPECT_TRUE(Owner::done(exchange.push_factors(factors, nullptr, 2, kAtOnce)));
    for (const char* const name : {"factors 0 1", "factors 0 2"}) {
      ASSERT_EQ(queues.items[name].size(), round);
      EXPECT_EQ(queues.items[name].back().tensors.at(0), factor);
      EXPECT_EQ(queues.items[name].back().fields.num_minibatches, 2);
    }
  }
}

TEST(ShardExchange, AChunkOfAnotherSizeIsRefused) {
  Queues queues;
  const auto owners = make_owners(queues, {});
  queues.items["push 1 0"].push_back({{.num_minibatches = 1}, {Bytes(1), Bytes(8)}});
  ASSERT_TRUE(owners[0]->begin_push_from(1, 0));
  owners[0]->begin_update(0);
  const auto pushed = owners[0]->exchange().mean_of(0, 1, kAtOnce);
  ASSERT_FALSE(pushed.ok());
  EXPECT_EQ(pushed.failure().message, "push 1 0: uint8[1] and uint8[8] for 1 pieces of 64 bytes");
  for (const auto flag : {0, 1}) {  // flag 0: the chunk is empty, because it has no gradient
    Owner owner(queues, {}, 0);
    queues.items["push 1 0"].push_back({{.num_minibatches = 1}, {Bytes{std::byte(flag)}, Bytes()}});
    ASSERT_TRUE(owner.begin_push_from(1, 0));
    owner.begin_update(0);
    EXPECT_EQ(owner.exchange().mean_of(0, 1, kAtOnce).ok(), flag == 0);
  }
  queues.items["pull 1 0"].push_back({{}, {Bytes(8)}});
  const auto pulled = owners[0]->exchange().pull_from(ReplicaIndex(1), kAtOnce);
  ASSERT_FALSE(pulled.ok());
  EXPECT_EQ(pulled.failure().message, "pull 1 0: no chunk of 64 bytes");
}

}  // namespace
}  // namespace pipedream
