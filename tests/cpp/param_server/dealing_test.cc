// Tests that every element has one owner, and how large the shards are.
#include "param_server/dealing.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <random>

#include "base/failure.h"

namespace pipedream {
namespace {

using Spec = ParameterSpec;

std::vector<std::size_t> bytes_by_shard(const std::vector<ShardChunk>& chunks, std::int64_t num_shards) {
  std::vector<std::size_t> bytes(static_cast<std::size_t>(num_shards));
  for (const ShardChunk& chunk : chunks)
    bytes.at(static_cast<std::size_t>(chunk.shard.value())) += chunk.end_bytes - chunk.begin_bytes;
  return bytes;
}

// Checks that the chunks have each element of each parameter once, at its place in the layout.
void expect_each_element_once(const WeightLayout& layout, const std::vector<ShardChunk>& chunks) {
  std::vector<std::int64_t> next_element(layout.parameters().size(), 0);
  std::size_t end_bytes = 0;
  for (const ShardChunk& chunk : chunks) {
    EXPECT_GE(chunk.begin_bytes, end_bytes);
    end_bytes = chunk.end_bytes;
    EXPECT_FALSE(chunk.pieces.empty());
    for (const ShardPiece& piece : chunk.pieces) {
      EXPECT_EQ(piece.first_element, next_element[piece.parameter_index]);
      EXPECT_GT(piece.num_elements, 0);
      next_element[piece.parameter_index] += piece.num_elements;
      const std::size_t element_bytes = dtype_bytes(layout.parameters()[piece.parameter_index].dtype);
      const std::size_t begin = layout.offset_bytes(piece.parameter_index) +
                                static_cast<std::size_t>(piece.first_element) * element_bytes;
      EXPECT_GE(begin, chunk.begin_bytes);
      EXPECT_LE(begin + static_cast<std::size_t>(piece.num_elements) * element_bytes, chunk.end_bytes);
    }
  }
  for (std::size_t parameter = 0; parameter < next_element.size(); ++parameter)
    EXPECT_EQ(next_element[parameter], layout.parameters()[parameter].num_elements) << parameter;
}

WeightLayout random_layout(std::mt19937& random) {
  std::vector<Spec> specs(std::uniform_int_distribution<std::size_t>(0, 12)(random));
  std::uniform_int_distribution<std::int64_t> small(0, 70);
  std::uniform_int_distribution<std::int64_t> large(0, 3'000'000);
  for (Spec& spec : specs) {
    spec.dtype = random() % 2 == 0 ? DType::kFloat32 : DType::kFloat64;
    spec.num_elements = random() % 3 == 0 ? large(random) : small(random);
  }
  return WeightLayout(std::move(specs));
}

TEST(Dealing, EveryElementHasOneOwner) {
  std::mt19937 random(1);
  for (int trial = 0; trial < 300; ++trial) {
    const WeightLayout layout = random_layout(random);
    const auto num_shards = static_cast<std::int64_t>(1 + random() % 5);
    for (const bool whole : {false, true}) expect_each_element_once(layout, deal(layout, num_shards, whole));
  }
}

TEST(Dealing, ShardsAreEqualButForOneAlignmentPerChunk) {
  const WeightLayout layout(
      {{"a", DType::kFloat32, 25'000'000}, {"b", DType::kFloat32, 7}, {"c", DType::kFloat64, 999}});
  for (const std::int64_t num_shards : {1, 2, 3, 4, 7}) {
    const std::vector<ShardChunk> chunks = deal(layout, num_shards, false);
    const std::vector<std::size_t> bytes = bytes_by_shard(chunks, num_shards);
    const auto [least, most] = std::ranges::minmax(bytes);
    EXPECT_LE(most - least, chunks.size() * kParameterAlignment) << num_shards;
    EXPECT_EQ(chunks.size() % static_cast<std::size_t>(num_shards), 0U);
    for (const ShardChunk& chunk : chunks) {
      const std::size_t chunk_bytes_max = shard_chunk_bytes_max(most);
      EXPECT_LE(chunk.end_bytes - chunk.begin_bytes, chunk_bytes_max + kParameterAlignment);
      EXPECT_GE(chunk.end_bytes - chunk.begin_bytes, chunk_bytes_max / 2);
    }
  }
}

TEST(Dealing, ChunksAreASixteenthOfAShardWithinTheirLimits) {
  constexpr std::size_t kMebibyte = std::size_t{1} << 20;
  EXPECT_EQ(shard_chunk_bytes_max(0), kMebibyte);
  EXPECT_EQ(shard_chunk_bytes_max(16 * kMebibyte), kMebibyte);
  EXPECT_EQ(shard_chunk_bytes_max(32 * kMebibyte), 2 * kMebibyte);
  EXPECT_EQ(shard_chunk_bytes_max(1000 * kMebibyte), 4 * kMebibyte);
  // Four owners share 64 MiB. Each has 16 chunks of 1 MiB.
  const WeightLayout layout({{"a", DType::kFloat32, 16 << 20}});
  EXPECT_EQ(deal(layout, 4, /*whole_tensors=*/false).size(), 64U);
}

TEST(Dealing, NeighboursGoToDifferentShards) {
  const std::vector<ShardChunk> chunks = deal(WeightLayout({{"a", DType::kFloat32, 8'000'000}}), 3, false);
  for (std::size_t chunk = 0; chunk < chunks.size(); ++chunk)
    EXPECT_EQ(chunks[chunk].shard, ShardIndex(static_cast<std::int64_t>(chunk % 3)));
}

TEST(Dealing, WholeTensorsAreNeverCutAndTheLargestAreSpread) {
  const WeightLayout layout({{"small", DType::kFloat32, 16},
                             {"large", DType::kFloat32, 4'000'000},
                             {"larger", DType::kFloat32, 5'000'000},
                             {"medium", DType::kFloat32, 900'000}});
  const std::vector<ShardChunk> chunks = deal(layout, 2, true);
  for (const ShardChunk& chunk : chunks) {
    for (const ShardPiece& piece : chunk.pieces)
      EXPECT_EQ(piece.num_elements, layout.parameters()[piece.parameter_index].num_elements);
  }
  const std::vector<std::size_t> bytes = bytes_by_shard(chunks, 2);
  EXPECT_EQ(bytes[0], 5'000'000U * 4);
  EXPECT_EQ(bytes[1], (4'000'000U + 900'000 + 16) * 4);
}

TEST(Dealing, AFewBytesLeaveShardsWithoutAChunk) {
  const std::vector<ShardChunk> chunks = deal(WeightLayout({{"scale", DType::kFloat32, 1}}), 3, false);
  ASSERT_EQ(chunks.size(), 1U);
  EXPECT_EQ(chunks[0].pieces, (std::vector<ShardPiece>{{0, 0, 1}}));
  EXPECT_TRUE(deal(WeightLayout({}), 3, false).empty());
}

TEST(Dealing, FewerThanOneShardIsRefused) { EXPECT_THROW((void)deal(WeightLayout({}), 0, false), UserError); }

// Returns the time of an exchange of one update. 1 is the time in which a link carries the bytes of all
// parameters. A spare owns a shard but computes no minibatches. On a link the transfers to each other replica
// (a push, then a pull) and to each spare get equal parts of the bandwidth. When the transfers to replicas
// are done, those to spares get all of it.
double taken(std::int64_t num_replicas, std::int64_t num_spares, double of_replica) {
  const auto replicas = static_cast<double>(num_replicas);
  const auto spares = static_cast<double>(num_spares);
  const double of_spare = (1.0 - replicas * of_replica) / spares;
  return 2.0 * of_replica * (replicas - 1.0 + spares) + replicas * (of_spare - 2.0 * of_replica);
}

TEST(Dealing, NoOtherSharesOfReplicasAndSparesTakeLess) {
  for (std::int64_t replicas = 2; replicas <= 16; ++replicas) {
    for (std::int64_t spares = 1; spares <= replicas; ++spares) {
      const std::vector<std::int64_t> shares = shard_shares(replicas, spares);
      const auto sum = static_cast<double>(std::accumulate(shares.begin(), shares.end(), std::int64_t{0}));
      const double found = taken(replicas, spares, static_cast<double>(shares.front()) / sum);
      const double most_owned = 1.0 / static_cast<double>(replicas + 2 * spares);
      for (int part = 0; part <= 8; ++part) {
        EXPECT_LE(found, taken(replicas, spares, most_owned * part / 8.0) + 1e-12)
            << replicas << " " << spares;
      }
      if (spares == 1 || spares == replicas) {
        const std::int64_t total = replicas * replicas + spares * replicas - 2 * spares;
        const double byteps = static_cast<double>(2 * replicas * (replicas - 1)) / static_cast<double>(total);
        EXPECT_NEAR(found, byteps, 1e-12) << replicas << " " << spares;
      }
    }
  }
  EXPECT_EQ(shard_shares(3, 0), (std::vector<std::int64_t>{1, 1, 1}));
  EXPECT_EQ(shard_shares(3, 1), (std::vector<std::int64_t>{1, 1, 1, 2}));
  EXPECT_EQ(shard_shares(3, 3), (std::vector<std::int64_t>{0, 0, 0, 1, 1, 1}));
  EXPECT_EQ(shard_shares(1, 0), (std::vector<std::int64_t>{1}));
  EXPECT_THROW((void)shard_shares(1, 1), UserError);
  EXPECT_THROW((void)shard_shares(2, 3), UserError);
  EXPECT_THROW((void)shard_shares(2, -1), UserError);
}

TEST(Dealing, ShardsAreAsLargeAsTheirShares) {
  const WeightLayout layout({{"one", DType::kFloat32, 5'000'000}, {"other", DType::kFloat32, 3'000'000}});
  for (const std::int64_t num_spares : {0, 1, 2, 3}) {
    const std::vector<std::int64_t> shares = shard_shares(3, num_spares);
    const std::vector<ShardChunk> chunks = deal(layout, shares, false);
    expect_each_element_once(layout, chunks);
    const std::vector<std::size_t> bytes = bytes_by_shard(chunks, static_cast<std::int64_t>(shares.size()));
    const std::int64_t sum = std::accumulate(shares.begin(), shares.end(), std::int64_t{0});
    for (std::size_t shard = 0; shard < shares.size(); ++shard) {
      const double share = static_cast<double>(shares[shard]) / static_cast<double>(sum);
      EXPECT_NEAR(static_cast<double>(bytes[shard]), share * 32e6, 1024.0) << num_spares << ", " << shard;
    }
    for (const ShardChunk& chunk : chunks)
      EXPECT_LE(chunk.end_bytes - chunk.begin_bytes, kShardChunkBytesMin + 64);
  }
  EXPECT_EQ(deal(layout, shard_shares(3, 0), false), deal(layout, 3, false));
  EXPECT_EQ(deal(layout, shard_shares(3, 0), true), deal(layout, 3, true));
  EXPECT_THROW((void)deal(layout, {0, 0}, false), UserError);
  EXPECT_THROW((void)deal(layout, {1, -1}, false), UserError);
}

TEST(Dealing, WholeTensorsGoToShardsByTheirShares) {
  std::mt19937 random(3);
  for (int trial = 0; trial < 100; ++trial) {
    const WeightLayout layout = random_layout(random);
    for (const std::int64_t num_spares : {1, 2, 3}) {
      const std::vector<ShardChunk> chunks = deal(layout, shard_shares(3, num_spares), true);
      expect_each_element_once(layout, chunks);
      for (const ShardChunk& chunk : chunks) {
        if (num_spares == 3) {
          EXPECT_GE(chunk.shard.value(), 3) << "the replicas' share is 0";
        }
      }
    }
  }
}

}  // namespace
}  // namespace pipedream
