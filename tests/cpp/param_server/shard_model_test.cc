// Explores every interleaving of replicas and their shards in a small model. The model executes the replicas'
// lists of instructions (transfers.h). Its queues keep all items in order but may be slow. A round is the
// minibatches of one update. A gradient is a power of two, so the value of a weight shows which gradients
// were added to it.
#include <gtest/gtest.h>

#include <algorithm>
#include <deque>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "schedule/transfers.h"

namespace pipedream {
namespace {

using Content = std::int64_t;  // has one bit for each minibatch
using Shard = std::vector<Content>;
using Version = std::vector<Shard>;  // indexed by shard

// A model of the first stage. Items from other stages are taken to be there at any time.
struct Model {
  ScheduleOptions options;
  Rounds rounds;
  std::vector<std::vector<Instruction>> programs;  // indexed by replica
  std::int64_t num_minibatches = 0;
  std::int64_t num_chunks = 2;  // chunks of each shard

  [[nodiscard]] std::int64_t num_replicas() const { return rounds.num_replicas; }
  [[nodiscard]] Content gradient_of(std::int64_t round, std::int64_t replica) const {
    const std::int64_t minibatch = rounds.first_of(ReplicaIndex(replica), round).value();
    return minibatch < num_minibatches ? Content{1} << minibatch : 0;
  }
  [[nodiscard]] std::vector<ReplicaIndex> members_of(std::int64_t round) const {
    std::vector<ReplicaIndex> members;
    for (std::int64_t replica = 0; replica < num_replicas(); ++replica) {
      if (gradient_of(round, replica) != 0) members.emplace_back(replica);
    }
    return members;
  }
};

struct Item {
  std::int64_t round = 0;
  std::int64_t chunk = 0;
  Content content = 0;

  friend auto operator<=>(const Item&, const Item&) = default;
};

struct Replica {
  std::size_t position = 0;
  std::int64_t newest = 0;
  std::vector<std::int64_t> pulled;          // indexed by replica: the newest version that came from it
  std::map<std::int64_t, Version> versions;  // versions that a forward or backward still reads
  std::vector<Content> master;               // the replica's own shard, by chunk
  // Gradients that have arrived, by round, replica and chunk.
  std::map<std::int64_t, std::map<std::int64_t, std::vector<Content>>> arrived;
  std::map<MinibatchId, Version> stashed;  // the versions that forwards have read

  friend auto operator<=>(const Replica&, const Replica&) = default;
};

// The state of all replicas and queues at one time.
struct State {
  std::vector<Replica> replicas;
  std::map<std::pair<std::int64_t, std::int64_t>, std::deque<Item>> pushes;  // keyed by sender and receiver
  std::map<std::pair<std::int64_t, std::int64_t>, std::deque<Item>> pulls;

  friend auto operator<=>(const State&, const State&) = default;
};

std::int64_t kept_from(const Model& model, const Replica& replica) {
  return replica.newest - num_versions_kept(model.options, StageIndex(0)) + 1;
}

class Explorer {
 public:
  explicit Explorer(Model model) : model_(std::move(model)) {}

  void run() {
    State state;
    for (std::int64_t index = 0; index < model_.num_replicas(); ++index) {
      Replica& replica = state.replicas.emplace_back();
      replica.pulled.assign(static_cast<std::size_t>(model_.num_replicas()), 0);
      replica.master.assign(static_cast<std::size_t>(num_chunks()), 0);
      replica.versions[0] = Version(static_cast<std::size_t>(model_.num_replicas()),
                                    Shard(static_cast<std::size_t>(num_chunks()), 0));
    }
    std::vector<State> ahead = {state};
    seen_.insert(state);
    while (!ahead.empty() && !testing::Test::HasFatalFailure()) {
      const State from = std::move(ahead.back());
      ahead.pop_back();
      bool moves = false;
      for (std::int64_t actor = 0; actor < 2 * model_.num_replicas(); ++actor) {
        for (std::int64_t client = 0; client < (actor < model_.num_replicas() ? 1 : model_.num_replicas());
             ++client) {
          State to = from;
          const bool moved = actor < model_.num_replicas() ? step(to, actor)
                                                           : serve(to, actor - model_.num_replicas(), client);
          if (!moved) continue;
          moves = true;
          if (seen_.insert(to).second) ahead.push_back(std::move(to));
        }
      }
      if (!moves) check_end(from);
    }
  }

  [[nodiscard]] std::size_t num_states() const { return seen_.size(); }
  [[nodiscard]] const std::set<std::vector<Content>>& read() const { return read_; }
  [[nodiscard]] std::int64_t num_ends() const { return num_ends_; }

 private:
  [[nodiscard]] std::int64_t num_chunks() const { return model_.num_chunks; }

  // Does the replica's next instruction and returns true, or returns false if the instruction must wait.
  [[nodiscard]] bool step(State& state, std::int64_t index) {
    Replica& replica = state.replicas[static_cast<std::size_t>(index)];
    const std::vector<Instruction>& program = model_.programs[static_cast<std::size_t>(index)];
    if (replica.position == program.size()) return false;
    const Instruction& instruction = program[replica.position];
    const std::int64_t round = model_.rounds.round_of(instruction.minibatch);
    switch (instruction.opcode) {
      case Opcode::kForward:
        forward(replica, index, instruction);
        break;
      case Opcode::kBackward:
        replica.stashed.erase(instruction.minibatch);
        break;
      case Opcode::kUpdate:
        update(state, index, round);
        break;
      case Opcode::kRecompute:
      case Opcode::kEvaluate:
        break;
      case Opcode::kSend:
        if (instruction.edge.kind != EdgeKind::kPush) break;
        for (std::int64_t chunk = 0; chunk < num_chunks(); ++chunk) {
          state.pushes[{index, instruction.edge.to.replica.value()}].push_back(
              {round, chunk, model_.gradient_of(round, index)});
        }
        break;
      case Opcode::kRecv:
        if (!receive(state, index, instruction, round)) return false;
        break;
    }
    ++replica.position;
    const std::int64_t first_kept = kept_from(model_, replica);
    std::erase_if(replica.versions, [&](const auto& version) { return version.first < first_kept; });
    return true;
  }

  void forward(Replica& replica, std::int64_t index, const Instruction& instruction) {
    const Version& version = replica.versions.at(instruction.version.value());
    replica.stashed[instruction.minibatch] = version;
    std::vector<Content> contents;
    for (std::int64_t shard = 0; shard < model_.num_replicas(); ++shard) {
      // A forward never mixes versions. It reads all shards at the same version.
      ASSERT_TRUE(shard == index ||
                  replica.pulled[static_cast<std::size_t>(shard)] >= instruction.version.value());
      for (const Content content : version[static_cast<std::size_t>(shard)]) {
        contents.push_back(content);
        check_read(content, index, instruction);
      }
    }
    read_.insert(contents);
  }

  // Checks that version v has exactly the gradients of the rounds before v. With asynchronous shards the
  // weights must have all earlier gradients of this replica, and none of its later ones.
  void check_read(Content content, std::int64_t index, const Instruction& instruction) const {
    Content expected = 0;
    Content own = 0;
    for (std::int64_t round = 0;
         round < model_.rounds.last_version(ReplicaIndex(0), model_.num_minibatches).value(); ++round) {
      own |= model_.gradient_of(round, index);
      if (round >= instruction.version.value()) continue;
      if (model_.options.asynchronous) {
        expected |= model_.gradient_of(round, index);
      } else {
        for (const ReplicaIndex member : model_.members_of(round)) {
          expected |= model_.gradient_of(round, member.value());
        }
      }
    }
    const std::int64_t delay = model_.rounds.round_of(instruction.minibatch) - instruction.version.value();
    EXPECT_LE(delay, model_.options.in_flight[0] - 1 + model_.options.staleness);
    EXPECT_EQ(model_.options.asynchronous ? content & own : content, expected) << to_string(instruction);
  }

  void update(State& state, std::int64_t index, std::int64_t round) {
    Replica& replica = state.replicas[static_cast<std::size_t>(index)];
    ++replica.newest;
    Version& version = replica.versions[replica.newest];
    version = replica.versions.at(replica.newest - 1);
    const Content own = model_.gradient_of(round, index);
    if (!model_.options.asynchronous) {
      for (const ReplicaIndex member : model_.members_of(round)) {
        for (std::int64_t chunk = 0; chunk < num_chunks(); ++chunk) {
          const Content part =
              member.value() == index
                  ? own
                  : replica.arrived[round][member.value()].at(static_cast<std::size_t>(chunk));
          add(replica, chunk, part);
        }
      }
      replica.arrived.erase(round);
    } else {
      for (std::int64_t chunk = 0; chunk < num_chunks(); ++chunk) add(replica, chunk, own);
    }
    version[static_cast<std::size_t>(index)] = replica.master;
    if (model_.options.asynchronous) return;
    for (std::int64_t other = 0; other < model_.num_replicas(); ++other) {
      if (other == index) continue;
      for (std::int64_t chunk = 0; chunk < num_chunks(); ++chunk) {
        state.pulls[{index, other}].push_back(
            {round, chunk, replica.master[static_cast<std::size_t>(chunk)]});
      }
    }
  }

  // Lets an asynchronous shard apply the next chunk that the client has pushed, and send the answer.
  [[nodiscard]] bool serve(State& state, std::int64_t index, std::int64_t client) {
    const auto pushed = state.pushes.find({client, index});
    if (!model_.options.asynchronous || pushed == state.pushes.end() || pushed->second.empty()) return false;
    const Item item = pushed->second.front();
    pushed->second.pop_front();
    Replica& owner = state.replicas[static_cast<std::size_t>(index)];
    add(owner, item.chunk, item.content);
    std::deque<Item>& answers = state.pulls[{index, client}];
    EXPECT_LT(answers.size(), static_cast<std::size_t>(num_chunks())) << "more than one answer waits";
    answers.push_back({item.round, item.chunk, owner.master[static_cast<std::size_t>(item.chunk)]});
    return true;
  }

  [[nodiscard]] bool receive(State& state, std::int64_t index, const Instruction& instruction,
                             std::int64_t round) {
    if (instruction.edge.from.stage != instruction.edge.to.stage) return true;
    Replica& replica = state.replicas[static_cast<std::size_t>(index)];
    const std::int64_t from = instruction.edge.from.replica.value();
    const bool is_push = instruction.edge.kind == EdgeKind::kPush;
    std::deque<Item>& queue = (is_push ? state.pushes : state.pulls)[{from, index}];
    if (queue.size() < static_cast<std::size_t>(num_chunks())) return false;
    std::vector<Content> contents;
    for (std::int64_t chunk = 0; chunk < num_chunks(); ++chunk) {
      EXPECT_EQ(queue.front().round, round);
      EXPECT_EQ(queue.front().chunk, chunk);
      contents.push_back(queue.front().content);
      queue.pop_front();
    }
    if (is_push) {
      replica.arrived[round][from] = contents;
      return true;
    }
    const auto shard = static_cast<std::size_t>(from);
    EXPECT_EQ(++replica.pulled[shard], round + 1);
    // Puts the received shard into its version, and into the later versions that are made from this version.
    for (auto& [number, version] : replica.versions) {
      if (number >= round + 1) version[shard] = contents;
    }
    return true;
  }

  // Adds a gradient. If it were added twice, its bit would be carried into the next gradient's bit.
  static void add(Replica& owner, std::int64_t chunk, Content gradient) {
    Content& content = owner.master[static_cast<std::size_t>(chunk)];
    EXPECT_EQ(content & gradient, 0);
    content += gradient;
  }

  void check_end(const State& state) {
    ++num_ends_;
    const Content all = (Content{1} << model_.num_minibatches) - 1;
    for (std::int64_t index = 0; index < model_.num_replicas(); ++index) {
      const Replica& replica = state.replicas[static_cast<std::size_t>(index)];
      ASSERT_EQ(replica.position, model_.programs[static_cast<std::size_t>(index)].size()) << "deadlock";
      EXPECT_EQ(replica.master, std::vector<Content>(static_cast<std::size_t>(num_chunks()), all));
    }
    for (const auto* queues : {&state.pushes, &state.pulls}) {
      for (const auto& [ends, queue] : *queues) EXPECT_TRUE(queue.empty());
    }
  }

  const Model model_;
  std::set<State> seen_;
  std::set<std::vector<Content>> read_;
  std::int64_t num_ends_ = 0;
};

struct Case {
  std::vector<std::int64_t> num_replicas;
  std::int64_t num_minibatches;
  std::int64_t staleness;
  bool asynchronous;
  std::int64_t num_chunks = 2;
};

Model make_model(const Case& tried) {
  Model model;
  model.options.schedule = tried.num_replicas.size() == 1 ? "data_parallel" : "pipedream";
  model.options.in_flight = derive_in_flight(tried.num_replicas);
  model.options.placement = Placement::in_order(tried.num_replicas);
  model.options.staleness = tried.staleness;
  model.options.asynchronous = tried.asynchronous;
  model.rounds = rounds_of(model.options, StageIndex(0));
  model.num_minibatches = tried.num_minibatches;
  model.num_chunks = tried.num_chunks;
  for (std::int64_t replica = 0; replica < tried.num_replicas[0]; ++replica) {
    model.programs.push_back(make_program(model.options, Rank(replica), tried.num_minibatches));
  }
  return model;
}

class ShardModel : public testing::TestWithParam<Case> {};

TEST_P(ShardModel, EveryInterleavingAppliesEachGradientOnceAndReadsWhatItsVersionSays) {
  Explorer explorer(make_model(GetParam()));
  explorer.run();
  // All interleavings of synchronous shards (bsp, ssp) end in the same state.
  EXPECT_TRUE(GetParam().asynchronous || explorer.num_ends() == 1) << explorer.num_ends();
  EXPECT_GT(explorer.num_states(), 100U);
}

INSTANTIATE_TEST_SUITE_P(Small, ShardModel,
                         testing::Values(Case{{2}, 5, 0, false}, Case{{2, 1}, 6, 0, false},
                                         Case{{2, 1}, 7, 1, false}, Case{{2, 1}, 7, 2, false},
                                         Case{{3}, 4, 0, false}, Case{{2}, 4, 0, true},
                                         Case{{2, 1}, 4, 0, true}, Case{{3}, 2, 0, true, 1}),
                         [](const auto& param) {
                           const Case& tried = param.param;
                           std::string name = tried.asynchronous    ? "asp"
                                              : tried.staleness > 0 ? "ssp"
                                                                    : "bsp";
                           for (const std::int64_t count : tried.num_replicas)
                             name += '_' + std::to_string(count);
                           return name + "_staleness_" + std::to_string(tried.staleness);
                         });

TEST(ShardModelOfAsynchronousShards, WhatIsReadDependsOnWhoIsFasterAndOfOthersMayBeMixed) {
  Explorer explorer(make_model({{2}, 4, 0, true}));
  explorer.run();
  // Minibatch 2 is at replica 0. It reads the gradient of minibatch 0, value 1, in every chunk, because
  // replica 0 made it. It may read the gradient of minibatch 1, value 2, in any of the chunks.
  std::set<std::vector<Content>> of_minibatch_2;
  for (const std::vector<Content>& contents : explorer.read()) {
    const bool has_own = std::ranges::all_of(contents, [](Content content) { return (content & 1) != 0; });
    const bool has_later = std::ranges::any_of(contents, [](Content content) { return content > 3; });
    if (has_own && !has_later) of_minibatch_2.insert(contents);
  }
  EXPECT_TRUE(of_minibatch_2.contains({1, 1, 1, 1}));
  EXPECT_TRUE(of_minibatch_2.contains({3, 3, 3, 3}));
  EXPECT_TRUE(of_minibatch_2.contains({1, 1, 1, 3}));
}

}  // namespace
}  // namespace pipedream
