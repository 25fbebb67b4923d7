// Which workers of a machine run when there are more of them than cores, as Linux has it: a queue for each
// core, turns, and an idle core that takes a waiting worker at the timer's next tick alone.
// planning/run_queues.py says more; this is the same, to the bit.
//
// Pure; any thread.
#pragma once

#include <cstddef>
#include <deque>
#include <vector>

namespace pipedream {

class RunQueues {
 public:
  // Workers are numbered from 0. Both at least 1.
  RunQueues(std::size_t num_workers, std::size_t num_cores);

  // It has something to do from now on.
  void enter(std::size_t worker);
  // It waits from now on.
  void leave(std::size_t worker);

  // At most one for each core.
  [[nodiscard]] std::vector<std::size_t> running() const;

  // From now, until others run though nobody comes or goes; infinite where nobody waits for a core.
  [[nodiscard]] double next_change_ms(double now_ms) const;

  // At most next_change_ms().
  void pass_time(double now_ms, double passing_ms);

 private:
  void balance();

  const double turn_ms_;
  std::vector<std::size_t> core_of_;
  std::vector<std::deque<std::size_t>> queues_;
  std::vector<double> turn_left_ms_;
};

}  // namespace pipedream
