#include "schedule/listed_reads.h"

#include <algorithm>
#include <utility>

namespace pipedream {

ListedReads::ListedReads(std::vector<std::int64_t> versions, std::int64_t numbers_per_body,
                         std::int64_t versions_per_body)
    : versions_(std::move(versions)),
      oldest_(versions_),
      newest_(versions_),
      numbers_per_body_(numbers_per_body),
      versions_per_body_(versions_per_body) {
  const auto body = versions_.end() - numbers_per_body_;
  // The oldest version that any later body reads.
  std::int64_t oldest = *std::min_element(body, versions_.end()) + versions_per_body_;
  for (auto version = oldest_.rbegin(); version != oldest_.rend(); ++version) {
    oldest = *version = std::min(oldest, *version);
  }
  newest_of_body_.assign(body, versions_.end());
  for (std::vector<std::int64_t>* running : {&newest_, &newest_of_body_}) {
    for (std::size_t i = 1; i < running->size(); ++i)
      (*running)[i] = std::max((*running)[i - 1], (*running)[i]);
  }
}

std::int64_t ListedReads::newest_until(std::int64_t number) const {
  const std::int64_t bodies = num_bodies_before(number);
  if (bodies == 0) return newest_[static_cast<std::size_t>(number)];
  const std::size_t in_body = index_of(number, bodies) - (versions_.size() - newest_of_body_.size());
  const std::int64_t of_this_body = newest_of_body_[in_body] + bodies * versions_per_body_;
  const std::int64_t of_body_before = newest_of_body_.back() + (bodies - 1) * versions_per_body_;
  return std::max({newest_.back(), of_this_body, of_body_before});
}

std::int64_t ListedReads::num_new_max(std::int64_t num_numbers) const {
  std::int64_t num_new = 0;
  for (std::int64_t number = 0; number < end() + 2 * numbers_per_body_ + num_numbers; ++number) {
    const std::int64_t before = number < num_numbers ? 0 : newest_until(number - num_numbers);
    num_new = std::max(num_new, newest_until(number) - before);
  }
  return num_new;
}

double ListedReads::mean_delay(std::int64_t microbatches_per_round) const {
  std::int64_t num_late = 0;
  for (std::int64_t number = end() - numbers_per_body_; number < end(); ++number) {
    num_late += number / microbatches_per_round - version_of(number);
  }
  return static_cast<double>(num_late) / static_cast<double>(numbers_per_body_);
}

}  // namespace pipedream
