// The engine alone, without channels: order, slots, accounting, and what it refuses. The pipelines of
// worker_pipeline_test.cc show it between neighbours.
#include "stage/engine.h"

#include <gtest/gtest.h>

#include <string>
#include <utility>
#include <vector>

namespace pipedream {
namespace {

constexpr auto kPatience = std::chrono::seconds(60);

class Engine : public testing::Test {
 protected:
  void make(std::int64_t in_flight = 1, std::size_t num_spans_max = 100) {
    options_ = {"pipedream", StageIndex(0), 1, in_flight};
    slots_ = std::make_unique<VersionSlots>(in_flight);
    engine_ = std::make_unique<StageEngine>(options_, *slots_, StageChannels{}, wakeup_, num_spans_max);
  }
  // DONE when something else than work came.
  WorkItem next() {
    auto work = engine_->next_work(Clock::now() + kPatience);
    EXPECT_TRUE(work.ok()) << work.failure().message;
    if (!work.ok() || !work.value()) return {};
    return std::move(*work.value());
  }
  void complete(const WorkItem& work, std::int64_t compute_ns = 0) {
    switch (work.kind) {
      case WorkKind::kForward:
        return engine_->complete_forward({}, compute_ns);
      case WorkKind::kBackward:
        return engine_->complete_backward({}, compute_ns);
      case WorkKind::kUpdate:
        return engine_->complete_update(compute_ns);
      case WorkKind::kDone:
        return;
    }
  }
  // Runs so many minibatches to the end; what was handed out, in order.
  std::vector<Instruction> run(std::int64_t num_minibatches, std::int64_t compute_ns = 0) {
    std::vector<Instruction> done;
    for (WorkItem work = next(); work.kind != WorkKind::kDone; work = next()) {
      if (work.kind == WorkKind::kForward && work.minibatch.value() == num_minibatches) {
        engine_->end_of_data();
        continue;
      }
      const bool updates = work.kind == WorkKind::kUpdate;
      done.push_back({opcode_of(work.kind), work.minibatch, work.microbatch,
                      updates ? work.write_version : work.read_version});
      complete(work, compute_ns);
    }
    return done;
  }
  static Opcode opcode_of(WorkKind kind) {
    if (kind == WorkKind::kForward) return Opcode::kForward;
    return kind == WorkKind::kBackward ? Opcode::kBackward : Opcode::kUpdate;
  }

  ProgramOptions options_;
  Wakeup wakeup_;
  std::unique_ptr<VersionSlots> slots_;
  std::unique_ptr<StageEngine> engine_;
};

using EngineDeathTest = Engine;

TEST_F(Engine, HandsOutTheProgramWhateverTheNumberOfMinibatches) {
  for (std::int64_t in_flight = 1; in_flight <= 4; ++in_flight) {
    for (const std::int64_t num_minibatches : {0, 1, 2, 3, 4, 20}) {
      SCOPED_TRACE("in_flight " + std::to_string(in_flight) + ", minibatches " +
                   std::to_string(num_minibatches));
      make(in_flight);
      EXPECT_EQ(run(num_minibatches), make_program(options_, num_minibatches));
      const WorkItem done = next();  // asking again changes nothing
      EXPECT_EQ(done.kind, WorkKind::kDone);
      EXPECT_EQ(done.num_minibatches, num_minibatches);
      ASSERT_EQ(engine_->versions().size(), static_cast<std::size_t>(num_minibatches));
      for (std::int64_t minibatch = 0; minibatch < num_minibatches; ++minibatch) {
        const WeightVersion expected(std::max<std::int64_t>(0, minibatch - in_flight + 1));
        EXPECT_EQ(engine_->versions()[static_cast<std::size_t>(minibatch)].forward, expected);
        EXPECT_EQ(engine_->versions()[static_cast<std::size_t>(minibatch)].backward, expected);
      }
      EXPECT_EQ(slots_->newest(), WeightVersion(num_minibatches));
      EXPECT_EQ(slots_->num_live(), 1);  // every version that was read was given back
    }
  }
}

TEST_F(Engine, UpdateNeverWritesASlotThatIsReadAndInPlaceOnlyWithASingleSlot) {
  make(3);
  std::vector<std::int64_t> slot_of(20, -1);  // by minibatch: the slot its forward reads
  for (WorkItem work = next(); work.kind != WorkKind::kDone; work = next()) {
    const auto minibatch = static_cast<std::size_t>(work.minibatch.value());
    if (work.kind == WorkKind::kForward) {
      if (minibatch == 12) {
        engine_->end_of_data();
        continue;
      }
      slot_of[minibatch] = work.read_slot.value();
    } else if (work.kind == WorkKind::kBackward) {
      EXPECT_EQ(work.read_slot.value(), slot_of[minibatch]);
    } else {
      EXPECT_NE(work.write_slot, work.read_slot);
      EXPECT_EQ(work.write_version, work.read_version.next());
      for (std::size_t later = minibatch + 1; later < slot_of.size() && slot_of[later] >= 0; ++later) {
        EXPECT_NE(work.write_slot.value(), slot_of[later]) << "minibatch " << later << " still reads it";
      }
    }
    complete(work);
  }
  make(1);
  complete(next());
  complete(next());
  const WorkItem update = next();
  EXPECT_EQ(update.kind, WorkKind::kUpdate);
  EXPECT_EQ(update.write_slot, update.read_slot);
}

TEST_F(Engine, SpansKeepTheLatestOldestFirst) {
  make(1, 5);
  const std::vector<Instruction> done = run(4);  // 12 work items
  const std::vector<Span> spans = engine_->spans();
  ASSERT_EQ(spans.size(), 5U);
  for (std::size_t index = 0; index < spans.size(); ++index) {
    const Instruction& expected = done[done.size() - 5 + index];
    EXPECT_EQ(opcode_of(spans[index].kind), expected.opcode);
    EXPECT_EQ(spans[index].minibatch, expected.minibatch);
    EXPECT_LE(spans[index].asked_ns, spans[index].ready_ns);
    EXPECT_LE(spans[index].ready_ns, spans[index].completed_ns);
    if (index > 0) {
      EXPECT_LE(spans[index - 1].completed_ns, spans[index].asked_ns);
    }
  }
  make(1, 12);
  run(4);
  EXPECT_EQ(engine_->spans().size(), 12U);  // just full
  EXPECT_EQ(engine_->spans().front().minibatch, MinibatchId(0));
  make(1, 13);
  run(4);
  EXPECT_EQ(engine_->spans().size(), 12U);
}

TEST_F(Engine, TotalsAreTheSumsOfTheSpans) {
  make(2);
  EXPECT_EQ(engine_->totals().num_work_items, 0);
  const std::int64_t began_ns = now_ns();
  run(5, 3);
  const EngineTotals totals = engine_->totals();
  EXPECT_EQ(totals.num_work_items, 15);
  EXPECT_EQ(totals.compute_ns, 45);
  EXPECT_EQ(totals.wait_ns, 0);  // without neighbours there is nothing to wait for
  EXPECT_GT(totals.elapsed_ns, 0);
  EXPECT_LE(totals.elapsed_ns, now_ns() - began_ns);
  const std::vector<Span> spans = engine_->spans();
  EXPECT_EQ(totals.elapsed_ns, spans.back().completed_ns - spans.front().asked_ns);
}

TEST_F(Engine, FailureElsewhereEndsAStageThatWaitsForNothingAndSaysWhereItWas) {
  make();
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

TEST_F(Engine, AbortIsPassedOnAsThePeerSaidIt) {
  make();
  wakeup_.fail({FailureKind::kAborted, "stage 1: the loss is nan at minibatch 7"});
  const auto work = engine_->next_work(Clock::now() + kPatience);
  ASSERT_FALSE(work.ok());
  EXPECT_EQ(work.failure().kind, FailureKind::kAborted);
  EXPECT_EQ(work.failure().message, "stage 1: the loss is nan at minibatch 7");
}

TEST_F(EngineDeathTest, MisuseAborts) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  make();
  EXPECT_DEATH(engine_->complete_update(0), "UPDATE completed while doing");
  EXPECT_DEATH(engine_->end_of_data(), "check failed");
  static_cast<void>(next());
  EXPECT_DEATH(static_cast<void>(next()), "not completed: FORWARD minibatch 0");
  EXPECT_DEATH(engine_->complete_update(0), "check failed");
  VersionSlots too_many(2);
  EXPECT_DEATH(StageEngine(options_, too_many, {}, wakeup_, 1), "2 slots for 1 versions");
}

}  // namespace
}  // namespace pipedream
