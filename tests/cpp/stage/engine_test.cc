// Tests the engine alone, without channels: order, slots, accounting, and the calls that it refuses.
// worker_pipeline_test.cc tests it in whole pipelines.
#include "stage/engine.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "param_server/queue_carrier.h"
#include "param_server/shard_exchange.h"
#include "schedule/programs.h"

namespace pipedream {
namespace {

constexpr auto kPatience = std::chrono::seconds(60);
constexpr std::int64_t kPoison = -1;

// Returns every schedule of a straight or interleaved plan, with few stages and microbatches.
std::vector<ScheduleOptions> every_schedule() {
  std::vector<ScheduleOptions> cases;
  for (const std::string& schedule : pipeline_schedules()) {
    for (const Counts& in_flight : {Counts{1}, straight(2), straight(4), Counts{5, 2, 2}}) {
      for (const std::int64_t num_microbatches : {1, 3, 4, 6}) {
        if (schedule == "2bw" && num_microbatches < in_flight.front()) continue;
        cases.push_back(make_options(schedule, in_flight, num_microbatches));
      }
    }
  }
  for (const std::int64_t num_microbatches : {1, 2, 3, 4}) {
    cases.push_back(make_interleaved(2, 2, num_microbatches));
    cases.push_back(make_interleaved(2, 3, num_microbatches));
    cases.push_back(make_interleaved(3, 2, num_microbatches));
  }
  const std::size_t num_plain = cases.size();
  for (std::size_t index = 0; index < num_plain; ++index) {
    ScheduleOptions options = cases[index];
    options.recompute.assign(options.in_flight.size(), true);
    if (index % 2 == 0) options.recompute.front() = false;
    cases.push_back(std::move(options));
  }
  return cases;
}

std::string describe(const ScheduleOptions& options, std::int64_t worker, std::int64_t num_minibatches) {
  std::string text = options.schedule + ", in flight";
  for (const std::int64_t in_flight : options.in_flight) text += ' ' + std::to_string(in_flight);
  return text + ", microbatches " + std::to_string(options.num_microbatches) +
         (options.recompute.empty() ? "" : ", recompute") + ", worker " + std::to_string(worker) + " of " +
         std::to_string(num_workers(options)) + ", minibatches " + std::to_string(num_minibatches);
}

class Engine : public testing::Test {
 protected:
  void make(const ScheduleOptions& options, std::int64_t worker = 0, std::size_t num_spans_max = 100) {
    options_ = options;
    engine_.reset();
    slots_.clear();
    std::vector<StagePart> parts;
    for (const StageIndex stage : placement_of(options).stages_at(Rank(worker))) {
      slots_[stage] = std::make_unique<VersionSlots>(num_versions_kept(options, stage),
                                                     rounds_of(options, stage).first_version(),
                                                     oldest_version(options, stage));
      parts.push_back({stage, slots_[stage].get()});
    }
    engine_ = std::make_unique<StageEngine>(options, Rank(worker), parts, std::vector<EdgeChannel>(), wakeup_,
                                            num_spans_max);
  }
  // Replaces the wakeup by a new one, because a wakeup keeps its failure.
  static void renew(Wakeup& wakeup) {
    std::destroy_at(&wakeup);
    std::construct_at(&wakeup);
  }
  void make_pipedream(std::int64_t in_flight = 1, std::size_t num_spans_max = 100) {
    make(make_options("pipedream", {in_flight}), 0, num_spans_max);
  }
  // Returns the engine's next work item, or DONE if no item came in time or the engine has failed.
  WorkItem next() {
    auto work = engine_->next_work(Clock::now() + kPatience);
    EXPECT_TRUE(work.ok()) << work.failure().message;
    if (!work.ok() || !work.value()) return {};
    return std::move(*work.value());
  }
  std::optional<SlotIndex> complete(const WorkItem& work, std::int64_t compute_ns = 0) {
    if (!work.opcode) return std::nullopt;
    return engine_->complete(*work.opcode, {}, compute_ns);
  }
  // Returns the next work item of a run of num_minibatches, or DONE at its end. Tells the engine that the
  // data has ended if it hands out a forward after the last minibatch.
  WorkItem next_of(std::int64_t num_minibatches) {
    WorkItem work = next();
    if (work.opcode != Opcode::kForward || work.minibatch.value() < num_minibatches) return work;
    engine_->end_of_data(work.minibatch.value());
    return next();
  }
  // Runs num_minibatches to the end. Returns the instructions that the engine handed out, in order.
  Instructions run(std::int64_t num_minibatches, std::int64_t compute_ns = 0) {
    Instructions done;
    for (WorkItem work = next_of(num_minibatches); work.opcode.has_value(); work = next_of(num_minibatches)) {
      const bool updates = work.opcode == Opcode::kUpdate;
      done.push_back({*work.opcode, work.stage, work.minibatch, work.microbatch,
                      updates ? work.write_version : work.read_version, work.edge});
      complete(work, compute_ns);
    }
    return done;
  }
  // Makes the engine of every schedule and worker for every number of minibatches, and calls check().
  template <class Check>
  void for_every_run(Check check) {
    for (const ScheduleOptions& options : every_schedule()) {
      for (std::int64_t worker = 0; worker < num_workers(options); ++worker) {
        for (const std::int64_t num_minibatches : {0, 1, 2, 3, 4, 12}) {
          SCOPED_TRACE(describe(options, worker, num_minibatches));
          make(options, worker);
          check(Rank(worker), num_minibatches);
          if (HasFailure()) return;
        }
      }
    }
  }

  ScheduleOptions options_;
  Wakeup wakeup_;
  std::map<StageIndex, std::unique_ptr<VersionSlots>> slots_;
  std::unique_ptr<StageEngine> engine_;
};

using EngineDeathTest = Engine;

TEST_F(Engine, HandsOutTheProgramOfEveryScheduleWhateverTheNumberOfMinibatches) {
  for_every_run([&](Rank worker, std::int64_t num_minibatches) {
    EXPECT_EQ(run(num_minibatches), make_compute_program(options_, worker, num_minibatches));
    const WorkItem done = next();  // the engine is done, and stays done
    EXPECT_EQ(done.opcode, std::nullopt);
    EXPECT_EQ(done.num_minibatches, num_minibatches);
    for (const auto& [stage, slots] : slots_) {
      const std::vector<VersionsRead>& versions = engine_->versions(stage);
      const std::int64_t m = options_.num_microbatches;
      ASSERT_EQ(versions.size(), static_cast<std::size_t>(num_minibatches * m));
      for (std::int64_t number = 0; number < num_minibatches * m; ++number) {
        const VersionsRead& read = versions[static_cast<std::size_t>(number)];
        const MinibatchId minibatch(number / m);
        const MicrobatchIndex microbatch(number % m);
        EXPECT_EQ(read.forward, forward_version(options_, stage, minibatch, microbatch));
        EXPECT_EQ(read.backward, backward_version(options_, stage, minibatch, microbatch));
      }
      EXPECT_EQ(slots->newest(), WeightVersion(num_minibatches));
      EXPECT_EQ(slots->num_live(), 1);  // all read versions but the newest are given back
    }
  });
}

// The engine hands out SENDs and RECVs only for tied parameters and norms. Activations and gradients travel
// with the forwards and backwards.
Instructions without_activations_and_gradients(Instructions program) {
  std::erase_if(program, [](const Instruction& instruction) {
    const EdgeKind kind = instruction.edge.kind;
    return travels(instruction.opcode) && (kind == EdgeKind::kActivation || kind == EdgeKind::kGradient);
  });
  return program;
}

TEST_F(Engine, HandsOutWhatTiesAndNormsExchangeWhereTheProgramHasIt) {
  for (ScheduleOptions options : every_schedule()) {
    const StageIndex last(num_stages(options) - 1);
    if (last.value() > 0) options.ties = {{StageIndex(0), last}};
    options.exchanges_norms = drains_every_minibatch(options);
    for (std::int64_t worker = 0; worker < num_workers(options); ++worker) {
      for (const std::int64_t num_minibatches : {0, 1, 2, 7}) {
        SCOPED_TRACE(describe(options, worker, num_minibatches));
        make(options, worker);
        // A stage with a stage upstream learns of the end by a channel, and these engines have no channels.
        if (!options.ties.empty() && slots_.contains(last)) continue;
        EXPECT_EQ(run(num_minibatches),
                  without_activations_and_gradients(make_program(options, Rank(worker), num_minibatches)));
      }
    }
  }
}

TEST_F(Engine, StartsAtAnyMinibatchFromTheVersionsThatAreThere) {
  for (ScheduleOptions options : every_schedule()) {
    options.first_minibatch = MinibatchId(9);
    for (const std::int64_t oldest : {9, 8, 0}) {
      options.oldest_minibatch = MinibatchId(oldest);
      for (std::int64_t worker = 0; worker < num_workers(options); ++worker) {
        SCOPED_TRACE(describe(options, worker, 14));
        make(options, worker);
        EXPECT_EQ(run(14), make_compute_program(options, Rank(worker), 14));
        for (const auto& [stage, slots] : slots_) {
          EXPECT_EQ(slots->newest(), WeightVersion(14));
          ASSERT_EQ(engine_->versions(stage).size(), static_cast<std::size_t>(5 * options.num_microbatches));
          EXPECT_EQ(engine_->versions(stage)[0].forward, forward_version(options, stage, MinibatchId(9)));
        }
      }
    }
  }
}

// Each slot holds the number of its version. The test fills it with poison while it is written, and again
// when the engine says that it is free.
TEST_F(Engine, EveryReadFindsItsVersionThoughFreedSlotsAreOverwritten) {
  for_every_run([&](Rank /*worker*/, std::int64_t num_minibatches) {
    std::map<StageIndex, std::vector<std::int64_t>> contents;
    for (const auto& [stage, slots] : slots_) {
      contents[stage].assign(static_cast<std::size_t>(slots->num_slots()), kPoison);
      contents[stage].front() = 0;
    }
    const auto content = [&](const WorkItem& work, SlotIndex slot) -> std::int64_t& {
      return contents.at(work.stage).at(static_cast<std::size_t>(slot.value()));
    };
    for (WorkItem work = next_of(num_minibatches); work.opcode.has_value(); work = next_of(num_minibatches)) {
      EXPECT_EQ(content(work, work.read_slot), work.read_version.value()) << engine_->position();
      if (work.opcode == Opcode::kUpdate) {
        EXPECT_EQ(work.write_version, work.read_version.next());
        // With one slot the update is in place.
        EXPECT_EQ(work.write_slot == work.read_slot, contents.at(work.stage).size() == 1);
        content(work, work.write_slot) = work.write_version.value();
      }
      const std::optional<SlotIndex> freed = complete(work);
      if (freed) content(work, *freed) = kPoison;
    }
    for (const auto& [stage, slots] : slots_) {  // a run that continues this one needs these versions
      const std::map<WeightVersion, SlotIndex> kept =
          engine_->kept_versions(stage, MinibatchId(num_minibatches));
      ASSERT_FALSE(kept.empty());
      if (stashes_versions(options_, stage)) {
        EXPECT_EQ(kept.begin()->first, forward_version(options_, stage, MinibatchId(num_minibatches)));
      }
      EXPECT_EQ(kept.rbegin()->first, slots->newest());
      for (const auto& [version, slot] : kept) {
        EXPECT_EQ(contents.at(stage).at(static_cast<std::size_t>(slot.value())), version.value());
      }
    }
  });
}

// The engine of replica 0 of a stage with two replicas. They exchange shards of one chunk over queues.
class ExchangingEngine : public Engine {
 protected:
  void make_exchanging(const std::vector<std::int64_t>& replicas) {
    queues_ = {};
    const ScheduleOptions options = make_replicated("pipedream", replicas);
    make(options);
    memory_.assign(static_cast<std::size_t>(num_versions_kept(options, StageIndex(0))),
                   Bytes(2 * kChunkBytes));
    ExchangeSpec spec;
    spec.rounds = rounds_of(options, StageIndex(0));
    spec.chunks = {{0, kChunkBytes, false, {{0, 0, 1, 0, DType::kFloat32}}}};
    for (Bytes& slot : memory_) spec.own_slots.push_back(slot.data());
    spec.push_slots = {push_slot_.data()};
    ExchangePeer& other = spec.peers[ReplicaIndex(1)];
    other.shard.chunks = {{kChunkBytes, kChunkBytes, false, {{1, 0, 1, 0, DType::kFloat32}}}};
    other.push_to = "push to";
    other.push_from = "push from";
    other.pull_to = "pull to";
    other.pull_from = "pull from";
    other.is_posted = true;
    exchange_ = std::make_unique<ShardExchange>(std::move(spec), carrier_);
    engine_ = std::make_unique<StageEngine>(
        options, Rank(0), std::vector<StagePart>{{StageIndex(0), slots_.at(StageIndex(0)).get()}},
        std::vector<EdgeChannel>(), wakeup_, 100, exchange_.get());
  }
  void push_from_the_other(const ItemFields& fields) {
    queues_.items["push from"].push_back({fields, {Bytes(1), Bytes(kChunkBytes)}});
  }
  static constexpr std::size_t kChunkBytes = 64;

  Queues queues_;
  QueueCarrier carrier_{queues_};
  std::vector<Bytes> memory_;
  Bytes push_slot_ = Bytes(kChunkBytes + 1);
  std::unique_ptr<ShardExchange> exchange_;
};

TEST_F(ExchangingEngine, OneSendARoundIsHandedOutAndTheOthersVersionLandsInTheSlotOfTheUpdate) {
  constexpr std::int64_t kNumRounds = 6;
  for (const std::vector<std::int64_t>& replicas : {std::vector<std::int64_t>{2}, {2, 1}, {2, 3}}) {
    make_exchanging(replicas);
    for (std::int64_t round = 0; round < kNumRounds; ++round) {
      push_from_the_other({.num_minibatches = 1});
      queues_.items["pull from"].push_back({{}, {Bytes(kChunkBytes)}});
    }
    std::int64_t num_pushes = 0;
    std::int64_t num_updates = 0;
    for (WorkItem work = next_of(2 * kNumRounds); work.opcode.has_value(); work = next_of(2 * kNumRounds)) {
      if (work.opcode == Opcode::kSend) {
        EXPECT_EQ(work.edge.kind, EdgeKind::kPush);
        for (const std::size_t parameter : {0, 1}) exchange_->give(parameter, {});
        ASSERT_TRUE(exchange_->push_given(1, {}).value());
        exchange_->end_push(num_pushes++, 1);
      }
      EXPECT_NE(work.opcode, Opcode::kRecv);
      if (work.opcode == Opcode::kUpdate) {
        const auto& posted = queues_.posted["pull from"];
        ASSERT_FALSE(posted.empty());
        EXPECT_EQ(posted.back().data(),
                  memory_.at(static_cast<std::size_t>(work.write_slot.value())).data() + kChunkBytes);
        static_cast<void>(exchange_->begin_update(num_updates++));
        ASSERT_TRUE(exchange_->begin_version(work.write_slot, {}).value());
        ASSERT_TRUE(exchange_->end_version({}).value());
      }
      complete(work);
    }
    EXPECT_EQ(num_pushes, kNumRounds);
    EXPECT_EQ(num_updates, kNumRounds);
    EXPECT_TRUE(queues_.items["pull from"].empty());
  }
}

// Returns whether no later instruction reads this backward's version, and the version is not the newest.
bool is_last_read(const Instructions& program, std::size_t position) {
  const Instruction& backward = program[position];
  const auto reads_it_later = [&](const Instruction& later) {
    return later.opcode != Opcode::kUpdate && later.stage == backward.stage &&
           later.version == backward.version;
  };
  const auto here = program.begin() + static_cast<std::ptrdiff_t>(position);
  const auto newest = std::count_if(program.begin(), here, [&](const Instruction& earlier) {
    return earlier.opcode == Opcode::kUpdate && earlier.stage == backward.stage;
  });
  return backward.version != WeightVersion(newest) && std::none_of(here + 1, program.end(), reads_it_later);
}

// Versions that a run which continues this run would read are not freed.
TEST_F(Engine, BackwardFreesASlotExactlyWhenItWasTheLastToReadAnOldVersion) {
  for_every_run([&](Rank worker, std::int64_t num_minibatches) {
    const Instructions program = make_compute_program(options_, worker, num_minibatches);
    const auto is_read_after_the_end = [&](const WorkItem& work) {
      return work.read_version >= forward_version(options_, work.stage, MinibatchId(num_minibatches));
    };
    std::size_t position = 0;
    for (WorkItem work = next_of(num_minibatches); work.opcode.has_value();
         work = next_of(num_minibatches), ++position) {
      const SlotIndex read_slot = work.read_slot;
      const std::optional<SlotIndex> freed = complete(work);
      ASSERT_LT(position, program.size());
      const bool expected = stashes_versions(options_, work.stage) && work.opcode == Opcode::kBackward &&
                            is_last_read(program, position) && !is_read_after_the_end(work);
      EXPECT_EQ(freed.has_value(), expected) << to_string(program[position]);
      if (freed) {
        EXPECT_EQ(*freed, read_slot);
      }
    }
    EXPECT_EQ(position, program.size());
  });
}

TEST_F(Engine, NumberOfSlotsFreedInARun) {
  const auto count = [&](const ScheduleOptions& options, std::int64_t worker) {
    make(options, worker);
    std::int64_t num_freed = 0;
    for (WorkItem work = next_of(20); work.opcode.has_value(); work = next_of(20)) {
      if (complete(work)) ++num_freed;
    }
    return num_freed;
  };
  // A backward frees a slot if it is the last to read a version that is no longer the newest. With 20
  // minibatches and n in flight this holds for 21 - n versions. With n = 1 it holds for none, because every
  // backward reads the newest version.
  EXPECT_EQ(count(make_options("pipedream", {3, 2, 1}), 0), 18);
  EXPECT_EQ(count(make_options("pipedream", {3, 2, 1}), 1), 19);
  EXPECT_EQ(count(make_options("pipedream", {3, 2, 1}), 2), 0);
  for (std::int64_t worker = 0; worker < 3; ++worker) {
    EXPECT_EQ(count(make_options("vertical_sync", {3, 2, 1}, 4), worker), 19);
    EXPECT_EQ(count(make_options("2bw", {3, 2, 1}, 4), worker), 19);
    EXPECT_EQ(count(make_options("naive", {3, 2, 1}, 4), worker), 0);
    EXPECT_EQ(count(make_options("flush", {3, 2, 1}, 4), worker), 0);
  }
  EXPECT_EQ(count(make_interleaved(2, 2, 4), 1), 0);
}

// One microbatch is in flight, and the stage reads an old version. The microbatches of a minibatch read that
// version one after the other. Between two of them no work item holds the version, but the slot must stay
// occupied until the last has read it.
TEST_F(Engine, SlotIsNotFreedBetweenTheMicrobatchesOfAMinibatch) {
  make(make_options("2bw", {1}, 3));
  std::vector<std::int64_t> freed_after;  // numbers of microbatches of minibatch 2, which read version 1
  for (WorkItem work = next_of(6); work.opcode.has_value(); work = next_of(6)) {
    const std::int64_t minibatch = work.minibatch.value();
    const std::int64_t microbatch = work.microbatch.value();
    if (complete(work) && minibatch == 2) freed_after.push_back(microbatch);
  }
  EXPECT_EQ(freed_after, std::vector<std::int64_t>{2});
}

TEST_F(Engine, NaiveHoldsNoVersionAndUpdatesInPlace) {
  make(make_options("naive", {3, 2, 1}, 2));
  const VersionSlots& slots = *slots_.at(StageIndex(0));
  for (WorkItem work = next_of(9); work.opcode.has_value(); work = next_of(9)) {
    EXPECT_EQ(slots.num_readers(slots.newest()), 0);
    EXPECT_EQ(work.read_slot, SlotIndex(0));
    if (work.opcode == Opcode::kUpdate) {
      EXPECT_EQ(work.write_slot, SlotIndex(0));
    }
    if (work.opcode == Opcode::kBackward) {
      EXPECT_EQ(work.read_version, slots.newest());
    }
    EXPECT_FALSE(complete(work).has_value());
  }
  EXPECT_EQ(slots.newest(), WeightVersion(9));
}

TEST_F(Engine, ForwardHoldsItsVersionUntilItsBackwardMicrobatchByMicrobatch) {
  make(make_options("pipedream", {2, 1}, 3));
  const VersionSlots& slots = *slots_.at(StageIndex(0));
  std::map<WeightVersion, std::int64_t> num_readers;
  for (WorkItem work = next_of(9); work.opcode.has_value(); work = next_of(9)) {
    if (work.opcode == Opcode::kForward) ++num_readers[work.read_version];
    EXPECT_EQ(slots.num_readers(work.read_version), num_readers[work.read_version]);
    if (work.opcode == Opcode::kBackward) --num_readers[work.read_version];
    complete(work);
  }
}

TEST_F(Engine, EndOfDataTakesTheForwardBack) {
  make(make_options("2bw", {2, 1}, 2));
  complete(next());
  complete(next());
  EXPECT_EQ(next().opcode, Opcode::kBackward);
  complete([] {
    WorkItem work;
    work.opcode = Opcode::kBackward;
    return work;
  }());
  const WorkItem forward = next();
  EXPECT_EQ(forward.opcode, Opcode::kForward);
  EXPECT_EQ(forward.minibatch, MinibatchId(1));
  EXPECT_EQ(slots_.at(StageIndex(0))->num_readers(WeightVersion(0)), 2);
  EXPECT_EQ(engine_->versions(StageIndex(0)).size(), 3U);
  engine_->end_of_data(1);
  EXPECT_EQ(slots_.at(StageIndex(0))->num_readers(WeightVersion(0)), 1);
  EXPECT_EQ(engine_->versions(StageIndex(0)).size(), 2U);
  EXPECT_EQ(next().opcode, Opcode::kBackward);
}

TEST_F(ExchangingEngine, AnEndOfDataThatAPusherTellsAndThatCannotBeIsAFailure) {
  for (const std::uint32_t told : {std::uint32_t{5}, std::uint32_t{1000}}) {
    renew(wakeup_);
    make_exchanging({2});
    push_from_the_other({.num_minibatches = told, .is_end_of_data = true});
    auto work = engine_->next_work(Clock::now() + kPatience);
    while (work.ok()) {
      complete(*work.value());
      work = engine_->next_work(Clock::now() + kPatience);
    }
    EXPECT_EQ(work.failure().kind, FailureKind::kCorruptFrame);
    EXPECT_NE(work.failure().message.find("says that the data ended after " + std::to_string(told)),
              std::string::npos)
        << work.failure().message;
  }
}

// Completes all items of a run of num_minibatches. There is an evaluation at minibatch 2 and one at the end,
// each with num_evaluated validation minibatches. With evaluates_first the first evaluation begins before the
// first forward of minibatch 2 is done.
Instructions run_evaluating(StageEngine& engine, std::int64_t num_minibatches, std::int64_t num_evaluated,
                            bool evaluates_first = false) {
  Instructions done;
  bool is_evaluated = false;
  bool is_at_end = false;
  for (;;) {
    auto work = engine.next_work(Clock::now() + kPatience);
    if (!work.ok() || !work.value()) return {};
    const WorkItem item = std::move(*work.value());
    if (!item.opcode) {
      if (is_at_end) return done;
      is_at_end = true;
      engine.begin_evaluation(MinibatchId(num_minibatches));
      continue;
    }
    if (item.opcode == Opcode::kForward && item.minibatch.value() == num_minibatches) {
      engine.end_of_data(num_minibatches);
      continue;
    }
    const bool is_first = item.minibatch.value() == 2 && item.microbatch.value() == 0;
    if (item.opcode == Opcode::kForward && is_first && evaluates_first) {
      if (!std::exchange(is_evaluated, true)) {
        engine.evaluate_first();
        continue;
      }
    } else if (item.opcode == Opcode::kForward && is_first) {
      engine.begin_evaluation(MinibatchId(2));
    }
    const bool updates = item.opcode == Opcode::kUpdate;
    done.push_back({*item.opcode, item.stage, item.minibatch, item.microbatch,
                    updates ? item.write_version : item.read_version, item.edge});
    Outgoing made;
    made.fields.is_end_of_data = item.opcode == Opcode::kEvaluate && item.microbatch.value() == num_evaluated;
    engine.complete(*item.opcode, std::move(made), 0);
  }
}

TEST_F(Engine, EvaluatesWhereTheProgramHasItUntilOneSaysThatItIsTheLast) {
  for (const std::string schedule : {"pipedream", "2bw", "flush"}) {
    for (const std::int64_t num_evaluated : {0, 3}) {
      ScheduleOptions options = make_options(schedule, {3}, 2);
      options.evaluates = true;
      make(options);
      const Instructions expected = make_program(
          options, Rank(0), 4, {{MinibatchId(2), num_evaluated}, {MinibatchId(4), num_evaluated}});
      EXPECT_EQ(run_evaluating(*engine_, 4, num_evaluated), expected) << schedule;
      EXPECT_EQ(engine_->spans().size(), expected.size());
    }
  }
}

TEST_F(Engine, EvaluatesBeforeAForwardThatIsHandedOutAgain) {
  for (const std::int64_t num_evaluated : {0, 3}) {
    ScheduleOptions options = make_options("flush", {1}, 2);
    options.evaluates = true;
    make(options);
    Instructions expected =
        make_program(options, Rank(0), 4, {{MinibatchId(2), num_evaluated}, {MinibatchId(4), num_evaluated}});
    const auto forward = std::ranges::find_if(expected, [](const Instruction& instruction) {
      return instruction.opcode == Opcode::kForward && instruction.minibatch == MinibatchId(2);
    });
    // In the program the evaluation comes after the forward.
    std::rotate(forward, forward + 1, forward + 2 + num_evaluated);
    EXPECT_EQ(run_evaluating(*engine_, 4, num_evaluated, true), expected);
    EXPECT_EQ(engine_->versions(StageIndex(0)).size(), 8U);
  }
}

TEST_F(Engine, SpansKeepTheLatestOldestFirst) {
  const auto expect_the_last = [&](std::size_t num_spans, const Instructions& done) {
    const std::vector<Span> spans = engine_->spans();
    ASSERT_EQ(spans.size(), num_spans);
    for (std::size_t index = 0; index < spans.size(); ++index) {
      const Instruction& expected = done[done.size() - num_spans + index];
      EXPECT_EQ(spans[index].opcode, expected.opcode);
      EXPECT_EQ(spans[index].stage, expected.stage);
      EXPECT_EQ(spans[index].minibatch, expected.minibatch);
      EXPECT_EQ(spans[index].microbatch, expected.microbatch);
      EXPECT_LE(spans[index].asked_ns, spans[index].ready_ns);
      EXPECT_LE(spans[index].ready_ns, spans[index].completed_ns);
      if (index > 0) {
        EXPECT_LE(spans[index - 1].completed_ns, spans[index].asked_ns);
      }
    }
  };
  for (const auto& [num_spans_max, num_spans] :
       {std::pair<std::size_t, std::size_t>{5, 5}, {12, 12}, {13, 12}}) {
    make_pipedream(1, num_spans_max);
    expect_the_last(num_spans, run(4));  // the run has 12 work items
  }
  ScheduleOptions options = make_interleaved(2, 2, 3);
  options.recompute.assign(4, true);
  make(options, 1, 30);
  expect_the_last(30, run(2));
}

TEST_F(Engine, TotalsAreTheSumsOfTheSpans) {
  make_pipedream(2);
  EXPECT_EQ(engine_->totals().num_work_items, 0);
  const std::int64_t began_ns = now_ns();
  run(5, 3);
  const EngineTotals totals = engine_->totals();
  EXPECT_EQ(totals.num_work_items, 15);
  EXPECT_EQ(totals.compute_ns, 45);
  EXPECT_EQ(totals.wait_ns, 0);  // without neighbours there are no waits
  EXPECT_GT(totals.elapsed_ns, 0);
  EXPECT_LE(totals.elapsed_ns, now_ns() - began_ns);
  const std::vector<Span> spans = engine_->spans();
  EXPECT_EQ(totals.elapsed_ns, spans.back().completed_ns - spans.front().asked_ns);
}

// The host asks for items 1 and 2 while the device still computes the item before. Only the device's idle
// time counts as wait. During the wait for item 1 the device was never idle, and during the wait for item 2
// always.
TEST_F(Engine, WhatADeviceDidIsToldLaterAndOfAWaitCountsWhatItWasIdleFor) {
  make_pipedream(1);
  for (const std::int64_t wait_ns : {0, 1'000'000'000, 1}) {
    const WorkItem work = next();
    engine_->add_wait(wait_ns);
    complete(work, kComputedLater);
  }
  const std::vector<Span> launched = engine_->spans();
  EXPECT_EQ(engine_->totals().compute_ns, 0);
  EXPECT_EQ(engine_->totals().wait_ns, 1'000'000'001);
  const std::int64_t began_ns = launched[0].asked_ns + 10;
  engine_->add_compute(began_ns, launched[1].ready_ns);
  engine_->add_compute(launched[1].ready_ns + 5, launched[2].asked_ns);
  engine_->add_compute(launched[2].completed_ns + 70, launched[2].completed_ns + 100);
  const std::vector<Span> spans = engine_->spans();
  EXPECT_EQ(spans[0].asked_ns, launched[0].asked_ns);
  EXPECT_EQ(spans[0].ready_ns, began_ns);
  EXPECT_EQ(spans[0].completed_ns, launched[1].ready_ns);
  EXPECT_EQ(spans[1].asked_ns, launched[1].ready_ns);
  EXPECT_EQ(spans[1].wait_ns, 0);
  EXPECT_EQ(spans[2].asked_ns, launched[2].asked_ns);
  EXPECT_EQ(spans[2].wait_ns, 1);
  EXPECT_EQ(spans[2].compute_ns, 30);
  const EngineTotals totals = engine_->totals();
  EXPECT_EQ(totals.num_work_items, 3);
  EXPECT_EQ(totals.wait_ns, 1);
  EXPECT_EQ(totals.compute_ns, spans[0].compute_ns + spans[1].compute_ns + 30);
  EXPECT_EQ(totals.elapsed_ns, launched[2].completed_ns + 100 - launched[0].asked_ns);
}

TEST_F(Engine, AnItemThatIsNoLongerKeptIsToldOfAllTheSame) {
  make_pipedream(1, 2);
  std::int64_t now = 0;
  for (int item = 0; item < 3; ++item) complete(next(), kComputedLater);
  for (int item = 0; item < 3; ++item, now += 10) engine_->add_compute(now, now + 4);
  EXPECT_EQ(engine_->totals().compute_ns, 12);
  EXPECT_EQ(engine_->spans()[0].completed_ns, 14);
  EXPECT_EQ(engine_->spans()[1].completed_ns, 24);
}

TEST_F(Engine, FailureElsewhereEndsAStageThatWaitsForNothingAndSaysWhereItWas) {
  make_pipedream();
  complete(next());
  complete(next());
  wakeup_.fail({FailureKind::kPeerLost, "stage 2 (rank 2) is lost"});
  wakeup_.fail({FailureKind::kTimeout, "a consequence"});
  for (int attempt = 0; attempt < 2; ++attempt) {
    const auto work = engine_->next_work(Clock::now() + kPatience);
    ASSERT_FALSE(work.ok());
    EXPECT_EQ(work.failure().kind, FailureKind::kPeerLost);
    EXPECT_EQ(work.failure().message, "stage 0 at minibatch 0 (UPDATE): stage 2 (rank 2) is lost");
  }
}

TEST_F(Engine, PositionIsTheWorkersOwnFromTheBeginning) {
  make(make_interleaved(2, 2, 2), 1);
  EXPECT_EQ(engine_->position(), "stage 1 at minibatch 0 (FORWARD)");
  complete(next());
  complete(next());
  EXPECT_EQ(next().stage, StageIndex(3));
  EXPECT_EQ(engine_->position(), "stage 3 at minibatch 0 (FORWARD)");
}

TEST_F(Engine, AbortIsPassedOnAsThePeerSaidIt) {
  make_pipedream();
  wakeup_.fail({FailureKind::kAborted, "stage 1: the loss is nan at minibatch 7"});
  const auto work = engine_->next_work(Clock::now() + kPatience);
  ASSERT_FALSE(work.ok());
  EXPECT_EQ(work.failure().kind, FailureKind::kAborted);
  EXPECT_EQ(work.failure().message, "stage 1: the loss is nan at minibatch 7");
}

TEST_F(EngineDeathTest, MisuseAborts) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  make(make_options("gpipe", {1}, 2));
  EXPECT_DEATH(engine_->complete(Opcode::kUpdate, {}, 0), "UPDATE completed while doing");
  EXPECT_DEATH(engine_->complete(Opcode::kRecompute, {}, 0), "RECOMPUTE completed while doing");
  EXPECT_DEATH(engine_->end_of_data(0), "check failed");
  EXPECT_DEATH(static_cast<void>(engine_->versions(StageIndex(1))), "stage 1 is not at rank 0");
  static_cast<void>(next());
  EXPECT_DEATH(static_cast<void>(next()), "not completed: FORWARD stage 0 minibatch 0");
  EXPECT_DEATH(engine_->complete(Opcode::kUpdate, {}, 0), "check failed");
  engine_->complete(Opcode::kForward, {}, 0);
  static_cast<void>(next());
  EXPECT_DEATH(engine_->end_of_data(0), "FORWARD stage 0 minibatch 0 microbatch 1");
}

TEST_F(EngineDeathTest, ComputeThatIsToldWithoutAnItemOrBackwardsAborts) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  make_pipedream();
  EXPECT_DEATH(engine_->add_compute(1, 2), "no item is left of 0");
  complete(next(), kComputedLater);
  EXPECT_DEATH(engine_->add_compute(2, 1), "0, 2, 1");
}

TEST_F(EngineDeathTest, StagesOfAnotherPlanAbort) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  VersionSlots one(1);
  VersionSlots two(2);
  const auto make_with = [&](const ScheduleOptions& options, std::int64_t worker,
                             const std::vector<StagePart>& parts) {
    const StageEngine engine(options, Rank(worker), parts, {}, wakeup_, 1);
  };
  const ScheduleOptions pipedream = make_options("pipedream", {2, 1});
  const ScheduleOptions interleaved = make_interleaved(2, 2, 2);
  EXPECT_DEATH(make_with(pipedream, 1, {{StageIndex(1), &two}}), "2 slots for 1 versions");
  EXPECT_DEATH(make_with(pipedream, 1, {{StageIndex(0), &two}}), "stage 0 at rank 1");
  EXPECT_DEATH(make_with(interleaved, 1, {{StageIndex(1), &one}}), "1 stages given for rank 1 of 2");
  EXPECT_DEATH(make_with(interleaved, 1, {{StageIndex(3), &one}, {StageIndex(1), &one}}),
               "stage 3 at rank 1");
}

}  // namespace
}  // namespace pipedream
