// Tests that gradients are added in the order of the replicas, whatever the threads do.
#include "param_server/aggregation.h"

#include <gtest/gtest.h>

#include <random>
#include <thread>
#include <vector>

#include "base/element.h"

namespace pipedream {
namespace {

template <class T>
std::vector<std::vector<T>> random_parts(std::size_t num_parts, std::size_t num_elements) {
  std::mt19937 random(static_cast<unsigned>(num_parts + num_elements));
  std::normal_distribution<T> normal;
  std::vector<std::vector<T>> parts(num_parts, std::vector<T>(num_elements));
  for (std::vector<T>& part : parts) {
    for (T& element : part) element = normal(random);
  }
  return parts;
}

template <class T>
std::vector<T> mean_in_order(const std::vector<std::vector<T>>& parts) {
  std::vector<T> mean = parts[0];
  for (std::size_t i = 0; i < mean.size(); ++i) {
    for (std::size_t part = 1; part < parts.size(); ++part) mean[i] += parts[part][i];
    mean[i] /= static_cast<T>(parts.size());
  }
  return mean;
}

template <class T>
std::vector<const void*> addresses_of(const std::vector<std::vector<T>>& parts) {
  std::vector<const void*> addresses;
  for (const std::vector<T>& part : parts) addresses.push_back(part.data());
  return addresses;
}

template <class T>
void expect_mean_in_order(DType dtype) {
  for (const std::size_t num_parts : {1U, 2U, 3U, 5U}) {
    for (const std::size_t num_elements : {0U, 1U, 4095U, 4096U, 200'001U}) {
      const std::vector<std::vector<T>> parts = random_parts<T>(num_parts, num_elements);
      for (const int num_threads : {1, 3}) {
        std::vector<T> mean(num_elements);
        aggregate(dtype, addresses_of(parts), static_cast<std::int64_t>(num_parts), mean.data(),
                  static_cast<std::int64_t>(num_elements), num_threads);
        EXPECT_EQ(mean, mean_in_order(parts)) << num_parts << " parts of " << num_elements;
      }
    }
  }
}

TEST(Aggregation, AddsInTheOrderOfTheParts) {
  expect_mean_in_order<float>(DType::kFloat32);
  expect_mean_in_order<double>(DType::kFloat64);
}

TEST(Aggregation, TheMeanMayReplaceAnyPart) {
  for (std::size_t replaced = 0; replaced < 3; ++replaced) {
    std::vector<std::vector<float>> parts = random_parts<float>(3, 10'000);
    const std::vector<float> expected = mean_in_order(parts);
    aggregate(DType::kFloat32, addresses_of(parts), 3, parts[replaced].data(), 10'000, 2);
    EXPECT_EQ(parts[replaced], expected);
  }
}

TEST(Aggregation, DistinctPowersOfTwoNameEveryPart) {
  std::vector<std::vector<double>> parts;
  for (int part = 0; part < 20; ++part)
    parts.emplace_back(5000, static_cast<double>(std::int64_t{1} << part));
  std::vector<double> mean(5000);
  aggregate(DType::kFloat64, addresses_of(parts), 20, mean.data(), 5000, 2);
  for (const double element : mean) EXPECT_EQ(element * 20, static_cast<double>((std::int64_t{1} << 20) - 1));
}

TEST(Aggregation, AMemberWithoutAGradientCounts) {
  const std::vector<std::vector<float>> parts = {{3, 6}, {0, 3}};
  std::vector<float> mean(2);
  aggregate(DType::kFloat32, addresses_of(parts), 3, mean.data(), 2, 1);
  EXPECT_EQ(mean, (std::vector<float>{1, 3}));
}

TEST(Aggregation, ThreadsOfTheProcessMayAggregateAtOnce) {
  const std::vector<std::vector<float>> parts = random_parts<float>(2, 300'000);
  const std::vector<float> expected = mean_in_order(parts);
  std::vector<std::vector<float>> means(3, std::vector<float>(300'000));
  std::vector<std::thread> threads;
  for (std::vector<float>& mean : means)
    threads.emplace_back(
        [&] { aggregate(DType::kFloat32, addresses_of(parts), 2, mean.data(), 300'000, 2); });
  for (std::thread& thread : threads) thread.join();
  for (const std::vector<float>& mean : means) EXPECT_EQ(mean, expected);
}

TEST(Aggregation, BFloat16IsAddedInFloat32AndRoundedOnce) {
  const std::vector<std::vector<float>> wide = random_parts<float>(5, 200'001);
  std::vector<std::vector<BFloat16>> parts;
  std::vector<std::vector<float>> rounded;
  for (const std::vector<float>& part : wide) {
    parts.emplace_back();
    rounded.emplace_back();
    for (const float value : part) {
      parts.back().push_back({to_bfloat16(value)});
      rounded.back().push_back(number_of(parts.back().back()));
    }
  }
  const std::vector<float> expected = mean_in_order(rounded);
  aggregate(DType::kBFloat16, addresses_of(parts), 5, parts[2].data(), 200'001, 2);
  for (std::size_t i = 0; i < expected.size(); ++i)
    ASSERT_EQ(parts[2][i].bits, to_bfloat16(expected[i])) << "element " << i;
}

TEST(Aggregation, OtherDTypesAreNotForIt) {
  EXPECT_FALSE(is_aggregated(DType::kFloat16));
  EXPECT_FALSE(is_aggregated(DType::kComplex64));
  EXPECT_TRUE(is_aggregated(DType::kFloat32));
}

}  // namespace
}  // namespace pipedream
