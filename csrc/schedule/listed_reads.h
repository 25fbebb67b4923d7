// A ListedReads has the weight versions that a written program (listed_program.h) reads at a stage. Pure
// arithmetic; any thread.
#pragma once

#include <cstdint>
#include <vector>

namespace pipedream {

// The list has one version for each microbatch number (rounds.h), from the start of the run. After its end
// the last numbers_per_body entries, those of the program's body, repeat. With each repetition the versions
// grow by versions_per_body.
class ListedReads {
 public:
  ListedReads() = default;
  ListedReads(std::vector<std::int64_t> versions, std::int64_t numbers_per_body,
              std::int64_t versions_per_body);

  [[nodiscard]] std::int64_t version_of(std::int64_t number) const {
    const std::int64_t bodies = num_bodies_before(number);
    return versions_[index_of(number, bodies)] + bodies * versions_per_body_;
  }
  // Returns the oldest version that the microbatch with this number, or any later one, reads.
  [[nodiscard]] std::int64_t oldest_from(std::int64_t number) const {
    const std::int64_t bodies = num_bodies_before(number);
    return oldest_[index_of(number, bodies)] + bodies * versions_per_body_;
  }
  // Returns the newest version that the microbatch with this number, or any earlier one, reads.
  [[nodiscard]] std::int64_t newest_until(std::int64_t number) const;
  // Returns the most by which newest_until() grows over num_numbers microbatches.
  [[nodiscard]] std::int64_t num_new_max(std::int64_t num_numbers) const;
  // Returns how many updates older, on average, the version that a microbatch reads is than the version that
  // its round updates. The mean is over the microbatches of one body. A round has microbatches_per_round
  // microbatches.
  [[nodiscard]] double mean_delay(std::int64_t microbatches_per_round) const;

  // Returns the length of the list. The microbatch with this number is the first that repeats an entry.
  [[nodiscard]] std::int64_t end() const { return static_cast<std::int64_t>(versions_.size()); }
  [[nodiscard]] std::int64_t numbers_per_body() const { return numbers_per_body_; }

  // The number of versions that the stage keeps for these reads. ListedProgram counts it.
  std::int64_t num_versions_kept = 1;

 private:
  [[nodiscard]] std::int64_t num_bodies_before(std::int64_t number) const {
    return number < end() ? 0 : (number - end()) / numbers_per_body_ + 1;
  }
  [[nodiscard]] std::size_t index_of(std::int64_t number, std::int64_t bodies) const {
    return static_cast<std::size_t>(number - bodies * numbers_per_body_);
  }

  std::vector<std::int64_t> versions_;
  std::vector<std::int64_t> oldest_;          // by number: oldest_from()
  std::vector<std::int64_t> newest_;          // by number: newest_until()
  std::vector<std::int64_t> newest_of_body_;  // the newest version up to each entry of the body
  std::int64_t numbers_per_body_ = 1;
  std::int64_t versions_per_body_ = 1;
};

}  // namespace pipedream
