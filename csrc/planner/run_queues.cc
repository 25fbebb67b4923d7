#include "planner/run_queues.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>

namespace pipedream {
namespace {

constexpr double kTickMs = 4.0;      // CONFIG_HZ=250
constexpr double kBaseTurnMs = 0.7;  // of one core; a turn is longer the more there are, up to eight

double next_tick_ms(double now_ms) { return (std::floor(now_ms / kTickMs) + 1) * kTickMs; }

}  // namespace

RunQueues::RunQueues(std::size_t num_workers, std::size_t num_cores)
    : turn_ms_(kBaseTurnMs * static_cast<double>(std::bit_width(std::min<std::size_t>(num_cores, 8)))),
      queues_(num_cores),
      turn_left_ms_(num_cores, turn_ms_) {
  for (std::size_t worker = 0; worker < num_workers; ++worker) core_of_.push_back(worker % num_cores);
}

void RunQueues::enter(std::size_t worker) {
  std::size_t& core = core_of_[worker];
  if (!queues_[core].empty()) {
    const auto idle = std::ranges::find_if(queues_, [](const auto& queue) { return queue.empty(); });
    if (idle != queues_.end()) core = static_cast<std::size_t>(idle - queues_.begin());
  }
  queues_[core].push_back(worker);
}

void RunQueues::leave(std::size_t worker) {
  const std::size_t core = core_of_[worker];
  if (queues_[core].front() == worker) turn_left_ms_[core] = turn_ms_;
  std::erase(queues_[core], worker);
}

std::vector<std::size_t> RunQueues::running() const {
  std::vector<std::size_t> workers;
  for (const auto& queue : queues_) {
    if (!queue.empty()) workers.push_back(queue.front());
  }
  return workers;
}

double RunQueues::next_change_ms(double now_ms) const {
  double until_ms = std::numeric_limits<double>::infinity();
  bool has_idle = false;
  for (std::size_t core = 0; core < queues_.size(); ++core) {
    has_idle = has_idle || queues_[core].empty();
    if (queues_[core].size() > 1) until_ms = std::min(until_ms, turn_left_ms_[core]);
  }
  const bool is_crowded = until_ms != std::numeric_limits<double>::infinity();
  return is_crowded && has_idle ? std::min(until_ms, next_tick_ms(now_ms) - now_ms) : until_ms;
}

void RunQueues::pass_time(double now_ms, double passing_ms) {
  const bool is_tick = now_ms + passing_ms >= next_tick_ms(now_ms);
  for (std::size_t core = 0; core < queues_.size(); ++core) {
    auto& queue = queues_[core];
    turn_left_ms_[core] -= passing_ms;
    if (turn_left_ms_[core] > 0) continue;
    if (!queue.empty()) {
      queue.push_back(queue.front());
      queue.pop_front();
    }
    turn_left_ms_[core] = turn_ms_;
  }
  if (is_tick) balance();
}

void RunQueues::balance() {
  for (std::size_t core = 0; core < queues_.size(); ++core) {
    const auto longest =
        std::ranges::max_element(queues_, {}, [](const auto& queue) { return queue.size(); });
    if (!queues_[core].empty() || longest->size() < 2) continue;
    const std::size_t worker = longest->back();
    longest->pop_back();
    core_of_[worker] = core;
    queues_[core].push_back(worker);
  }
}

}  // namespace pipedream
